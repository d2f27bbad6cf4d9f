"""What a selective scan needs of 16 channels at a time besides sums and products: decays, softplus, sigmoid."""

import math
from typing import Any

from llvmlite import ir

from mercer.backends.microkernels import EXPONENTIAL, VECTOR, WORDS, _constant, _fma, _primitive, _words, vector

POWERS = tuple(c * math.log(2) ** i for i, c in enumerate(EXPONENTIAL))
"""2^f for |f| <= 1/2: exactly 1 at 0, so that decays near 1, which are multiplied a thousand times, do not drift."""
LOG = (2.000000007921023, 0.6666631468265946, 0.40024910251674545, 0.2796060319204374, 0.2817833293993816)
"""log(1 + e) = s P(s^2) for 0 <= e <= 1 and s = e / (2 + e), fitted for the smallest relative error: 4e-9."""


@_primitive(vector, vector, vector)
def decay(b: Any, step: Any, rate: Any) -> Any:
    """2^(step rate) for products of 0 or less, 0 below 2^-125, NaN for NaN."""
    shift = _constant(1.5 * 2**23)  # adding it rounds to an integer, which stands in the low bits
    rounded = _fma(b, step, rate, shift)
    n = b.fsub(rounded, shift)
    f = _fma(b, step, rate, b.fneg(n))
    p = _constant(POWERS[-1])
    for c in POWERS[-2::-1]:
        p = _fma(b, p, f, _constant(c))
    bits = b.add(b.shl(b.bitcast(rounded, WORDS), _words(23)), b.bitcast(p, WORDS))
    below = b.fcmp_ordered("<", n, _constant(-125.0))
    return b.select(below, _constant(0.0), b.bitcast(bits, VECTOR))


@_primitive(vector, vector)
def minus_size(b: Any, x: Any) -> Any:
    """-|x|"""
    return b.bitcast(b.or_(b.bitcast(x, WORDS), ir.Constant(WORDS, [-(2**31)] * 16)), VECTOR)


@_primitive(vector, vector, vector)
def softplus_from(b: Any, x: Any, e: Any) -> Any:
    """log(1 + e^x), given e = e^-|x|."""
    s = b.fdiv(e, b.fadd(e, _constant(2.0)))
    w = b.fmul(s, s)
    p = _constant(LOG[-1])
    for c in LOG[-2::-1]:
        p = _fma(b, p, w, _constant(c))
    positive = b.select(b.fcmp_ordered("<", x, _constant(0.0)), _constant(0.0), x)
    return _fma(b, s, p, positive)


@_primitive(vector, vector, vector)
def sigmoid_from(b: Any, x: Any, e: Any) -> Any:
    """1 / (1 + e^-x), given e = e^-|x|."""
    top = b.select(b.fcmp_ordered("<", x, _constant(0.0)), e, _constant(1.0))
    return b.fdiv(top, b.fadd(e, _constant(1.0)))


@_primitive(vector, vector)
def one_minus(b: Any, x: Any) -> Any:
    """1 - x"""
    return b.fsub(_constant(1.0), x)


LOG_2, LOG2_E = math.log(2), math.log2(math.e)
