"""What a program of a decoding step needs beside products: counters that threads share, and smooth functions."""

import os
import platform
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from mercer.backends.decode_vectors import _load_some
from mercer.backends.microkernels import (
    I32,
    I64,
    LANES,
    WORDS,
    _constant,
    _pointer,
    _primitive,
    _splat,
    add,
    address,
    exp,
    fma,
    inverse,
    mul,
    splat,
    vector,
    whole,
)

SPINS = 1000
"""Looks at a counter, some microseconds in all, before a waiting thread offers its processor to others."""

_PAUSES = platform.machine().lower() in ("x86_64", "amd64")
_YIELDS = os.name == "posix"


def _nothing(b: Any, name: str, result: Any) -> Any:
    return b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(result, []), name), [])


@_primitive(whole, address)
def take(b: Any, counter: Any) -> Any:
    """The number that a counter shows, which goes up by one: each number is taken once. What was written before is
    seen by who sees the counter.
    """
    return b.atomic_rmw("add", _pointer(b, counter, I64), I64(1), "seq_cst")


@_primitive(types.void, address, whole)
def await_count(b: Any, counter: Any, target: Any) -> None:
    """Wait until a counter has reached the target; what others wrote before they counted is seen afterwards."""
    at = _pointer(b, counter, I64)
    look, again, rest, after = (b.append_basic_block(n) for n in ("look", "again", "rest", "reached"))
    before = b.block
    b.branch(look)
    b.position_at_end(look)
    spins = b.phi(I64)
    seen = b.load_atomic(at, "acquire", 8)
    b.cbranch(b.icmp_signed(">=", seen, target), after, again)
    b.position_at_end(again)
    if _PAUSES:
        _nothing(b, "llvm.x86.sse2.pause", ir.VoidType())
    more = b.add(spins, I64(1))
    b.cbranch(b.icmp_signed("<", more, I64(SPINS)), look, rest)
    b.position_at_end(rest)
    if _YIELDS:
        _nothing(b, "sched_yield", I32)
    b.branch(look)
    spins.add_incoming(I64(0), before)
    spins.add_incoming(more, again)
    spins.add_incoming(I64(SPINS), rest)  # from now on at every look
    b.position_at_end(after)


@_primitive(vector, vector)
def less_size(b: Any, x: Any) -> Any:
    """-|x|"""
    return b.select(b.fcmp_ordered(">", x, _constant(0.0)), b.fneg(x), x)


@_primitive(vector, vector, vector, vector)
def by_sign(b: Any, x: Any, y: Any, z: Any) -> Any:
    """y where x is 0 or more, else z."""
    return b.select(b.fcmp_ordered(">=", x, _constant(0.0)), y, z)


@_primitive(vector, vector, vector)
def sub(b: Any, x: Any, y: Any) -> Any:
    """x - y"""
    return b.fsub(x, y)


@_primitive(vector, vector, whole, whole, address, whole)
def seen_from(b: Any, x: Any, here: Any, window: Any, at: Any, count: Any) -> Any:
    """x for the first `count` lanes whose positions lie within `window` tokens up to `here`, else minus infinity."""
    there = _load_some(b, at, count, WORDS, "v16i32")
    away = b.sub(_splat(b, b.trunc(here, I32)), there)
    near = b.icmp_unsigned("<", away, _splat(b, b.trunc(window, I32)))
    inside = b.icmp_signed("<", ir.Constant(WORDS, list(range(LANES))), _splat(b, b.trunc(count, I32)))
    return b.select(b.and_(near, inside), x, _constant(float("-inf")))


@_primitive(types.float32, vector)
def first_lane(b: Any, x: Any) -> Any:
    """The number in lane 0."""
    return b.extract_element(x, I32(0))


NONE, RELU, SILU, GELU, GELU_TANH = range(5)
ACTIVATIONS = {"relu": RELU, "silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH}

_P = 0.3275911
_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
"""erf(z) = 1 - (a1 t + .. + a5 t^5) exp(-z^2) with t = 1 / (1 + p z), to 1.5e-7 (Abramowitz & Stegun 7.1.26)."""


@njit
def tanh(x: Any) -> Any:
    """(1 - e) / (1 + e) with e = exp(-2 |x|), and the sign of x."""
    e = exp(mul(less_size(x), splat(2.0)))
    size = mul(sub(splat(1.0), e), inverse(add(splat(1.0), e)))
    return by_sign(x, size, sub(splat(0.0), size))


@njit
def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x))"""
    e = exp(less_size(x))
    part = inverse(add(splat(1.0), e))
    return by_sign(x, part, mul(e, part))


@njit
def _gelu(x: Any) -> Any:
    z = mul(less_size(x), splat(-(0.5**0.5)))
    t = inverse(fma(z, splat(_P), splat(1.0)))
    p = splat(_ERF[4])
    p = fma(p, t, splat(_ERF[3]))
    p = fma(p, t, splat(_ERF[2]))
    p = fma(p, t, splat(_ERF[1]))
    p = fma(p, t, splat(_ERF[0]))
    tail = mul(mul(mul(p, t), exp(sub(splat(0.0), mul(z, z)))), mul(x, splat(0.5)))
    return by_sign(x, sub(x, tail), tail)


@njit
def activate(x: Any, kind: int) -> Any:
    """An activation by number."""
    if kind == SILU:
        return mul(x, sigmoid(x))
    if kind == RELU:
        return by_sign(x, x, splat(0.0))
    if kind == GELU:
        return _gelu(x)
    if kind == GELU_TANH:
        inner = mul(mul(x, splat(0.7978845608028654)), fma(mul(x, x), splat(0.044715), splat(1.0)))
        return mul(mul(x, splat(0.5)), add(splat(1.0), tanh(inner)))
    return x
