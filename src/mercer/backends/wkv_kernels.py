"""Weighted averages under a decaying exponential, forward and backward, in Numba: 16 channels in the lanes of a vector.

A channel knows nothing of the others, so a thread takes a run of channels of a batch row and walks its tokens, with
the sums of the whole run in the nearest cache. The digits do not depend on the number of threads.
"""

from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from mercer.backends import microkernels
from mercer.backends.microkernels import (
    I32,
    LANES,
    ROW,
    VECTOR,
    _constant,
    _primitive,
    add,
    exp,
    fma,
    load,
    load_row,
    mul,
    splat,
    store,
    store_row,
    vector,
)

F = np.float32
(
    RUN, LENGTH, CHANNELS, HALF_KEY, HALF_VALUE, HALF_OUT, DECAY, BONUS, KEY, VALUE, LENGTHS, NUM, DEN, PEAK, OUT,
    NEW_NUM, NEW_DEN, NEW_PEAK,
) = range(18)  # fmt: skip
"""The table of the forward pass: sizes, whether tensors are bfloat16, and addresses (0: not there). Tensors are
contiguous, [B, L, C], [B, C], [C] or, the lengths, int64 [B]. RUN: channels that a thread walks together, a multiple
of 16."""
(GRAD_OUT, GRAD_NUM, GRAD_DEN, GRAD_KEY, GRAD_VALUE, GRAD_DECAY, GRAD_BONUS, GRAD_OLD_NUM, GRAD_OLD_DEN, BORN) = range(
    18, 28
)
"""What the table of the backward pass has besides, all float32. GRAD_NUM and GRAD_DEN: of the new state. GRAD_DECAY and
GRAD_BONUS: [B, C], to be summed over the batch. BORN: [B, C], which token's key is the new peak, -1 for none."""
TABLE = 28
NOTHING = F(-1e30)
"""The peak of a state that has absorbed nothing, while tokens are walked."""
KEPT = 3
"""Vectors that the backward pass keeps of every token."""


@_primitive(vector, vector, vector)
def larger(b: Any, x: Any, y: Any) -> Any:
    """max(x, y); a NaN in x stays."""
    return b.select(b.fcmp_unordered(">=", x, y), x, y)


@_primitive(vector, vector, vector)
def divide(b: Any, x: Any, y: Any) -> Any:
    """x / y"""
    return b.fdiv(x, y)


@_primitive(vector, vector, vector)
def minus(b: Any, x: Any, y: Any) -> Any:
    """x - y"""
    return b.fsub(x, y)


@_primitive(vector, vector)
def below(b: Any, x: Any) -> Any:
    """-|x|"""
    sign = ir.Constant(ir.VectorType(I32, LANES), [1 << 31] * LANES)
    return b.bitcast(b.or_(b.bitcast(x, sign.type), sign), VECTOR)


@_primitive(vector, vector, vector, vector)
def where_below(b: Any, d: Any, x: Any, y: Any) -> Any:
    """x where d < 0 or NaN, y elsewhere."""
    return b.select(b.fcmp_unordered("<", d, _constant(0.0)), x, y)


@njit
def fade(peak: Any, decay: Any, low: int) -> Any:
    """p + w as float32 has it, and what it lost, which is carried to the next sum (`low`, an address): thousands of
    small decays would else all be rounded one way."""
    change = add(decay, load(low))
    faded = add(peak, change)
    return faded, minus(change, minus(faded, peak))


@njit
def _at(n: Any, which: int, offset: int) -> int:
    """An address within a tensor of float32; 0 if the tensor is not there."""
    return n[which] + 4 * offset if n[which] else 0


@njit
def _fill(to: int, at: int, count: int, otherwise: Any) -> None:
    """Some numbers in whole vectors; the lanes beyond get 0."""
    for c in range(0, count, LANES):
        store(to + 4 * c, load_row(at + 4 * c, 0, count - c) if at else splat(otherwise))


@njit
def _pour(at: int, source: int, count: int) -> None:
    for c in range(0, count, LANES):
        store_row(at + 4 * c, 0, count - c, load(source + 4 * c))


@njit
def _settle(num: int, den: int, low: int, count: int) -> None:
    """Put what the peak lost into the sums."""
    for c in range(0, count, LANES):
        lost = load(low + 4 * c)
        store(num + 4 * c, fma(lost, load(num + 4 * c), load(num + 4 * c)))
        store(den + 4 * c, fma(lost, load(den + 4 * c), load(den + 4 * c)))


@njit
def _length(n: Any, lengths: Any, row: int) -> int:
    return lengths[row] if n[LENGTHS] else n[LENGTH]


@njit
def forward(n: Any, lengths: Any, work: int, row: int, first: int, count: int) -> None:
    """The tokens of some channels of a batch row."""
    run = n[RUN] * 4
    num, den, peak, decay, bonus = work, work + run, work + 2 * run, work + 3 * run, work + 4 * run
    low = work + 5 * run
    place = row * n[CHANNELS] + first
    _fill(num, _at(n, NUM, place), count, F(0))
    _fill(den, _at(n, DEN, place), count, F(0))
    _fill(peak, _at(n, PEAK, place), count, NOTHING)
    _fill(decay, _at(n, DECAY, first), count, F(0))
    _fill(bonus, _at(n, BONUS, first), count, F(0))
    for c in range(0, count, LANES):  # of infinity nothing can be taken away
        store(peak + 4 * c, larger(load(peak + 4 * c), splat(NOTHING)))
    _fill(low, 0, count, F(0))
    one, zero, half_key, half_value, half_out = splat(F(1)), splat(F(0)), n[HALF_KEY], n[HALF_VALUE], n[HALF_OUT]
    real = _length(n, lengths, row)
    for t in range(n[LENGTH]):
        token = (row * n[LENGTH] + t) * n[CHANNELS] + first
        for c in range(0, count, LANES):
            out, at = n[OUT] + (2 if half_out else 4) * (token + c), 4 * c
            if t >= real:
                store_row(out, half_out, count - c, splat(F(0)))
                continue
            k = load_row(n[KEY] + (2 if half_key else 4) * (token + c), half_key, count - c)
            v = load_row(n[VALUE] + (2 if half_value else 4) * (token + c), half_value, count - c)
            a, d, p = load(num + at), load(den + at), load(peak + at)
            gap = minus(p, add(k, load(bonus + at)))  # of two weights the larger is 1, so one exponential makes both
            less = exp(below(gap))
            old, new = where_below(gap, less, one), where_below(gap, one, less)
            store_row(out, half_out, count - c, divide(fma(old, a, mul(new, v)), fma(old, d, new)))
            faded, lost = fade(p, load(decay + at), low + at)
            gap = minus(faded, k)
            less = exp(below(gap))
            old, new = where_below(gap, less, one), where_below(gap, one, less)
            store(low + at, where_below(gap, zero, lost))
            store(num + at, fma(old, a, mul(new, v)))
            store(den + at, fma(old, d, new))
            store(peak + at, larger(faded, k))
    _settle(num, den, low, count)
    _pour(n[NEW_NUM] + 4 * place, num, count)
    _pour(n[NEW_DEN] + 4 * place, den, count)
    if real == 0:
        _fill(peak, _at(n, PEAK, place), count, F(-np.inf))
    _pour(n[NEW_PEAK] + 4 * place, peak, count)


@njit
def backward(n: Any, lengths: Any, work: int, row: int, first: int, count: int) -> None:
    """The gradients of some channels of a batch row.

    With N_t and D_t the sums that token t divides, kept relative to exp(q_t), and A_t, B_t those after it,

        dL/dN_t = g_t / D_t,   dL/dD_t = -y_t g_t / D_t,   dL/dA_{t-1} = e^w dL/dA_t + dL/dN_t   (B likewise)

    go backwards relative to exp(s), s the largest of the -q behind; then every exponent is 0 or less again. What A
    gains by w goes forwards with it: dA_t/dw = e^w (A_{t-1} + dA_{t-1}/dw).
    """
    run = n[RUN] * 4
    num, den, peak, decay, bonus = work, work + run, work + 2 * run, work + 3 * run, work + 4 * run
    num_w, den_w, grad_w, grad_u, born, low = (
        work + 5 * run, work + 6 * run, work + 7 * run, work + 8 * run, work + 9 * run, work + 10 * run
    )  # fmt: skip
    kept = work + 11 * run
    place, real = row * n[CHANNELS] + first, _length(n, lengths, row)
    _fill(num, _at(n, NUM, place), count, F(0))
    _fill(den, _at(n, DEN, place), count, F(0))
    _fill(peak, _at(n, PEAK, place), count, NOTHING)
    _fill(decay, _at(n, DECAY, first), count, F(0))
    _fill(bonus, _at(n, BONUS, first), count, F(0))
    for at in (num_w, den_w, grad_w, grad_u, low):
        _fill(at, 0, count, F(0))
    _fill(born, 0, count, F(-1))
    for c in range(0, count, LANES):
        store(peak + 4 * c, larger(load(peak + 4 * c), splat(NOTHING)))
    one, zero, half_key, half_value = splat(F(1)), splat(F(0)), n[HALF_KEY], n[HALF_VALUE]
    for t in range(real):
        token = (row * n[LENGTH] + t) * n[CHANNELS] + first
        for c in range(0, count, LANES):
            at, keep = 4 * c, kept + KEPT * (t * run + 4 * c)
            k = load_row(n[KEY] + (2 if half_key else 4) * (token + c), half_key, count - c)
            v = load_row(n[VALUE] + (2 if half_value else 4) * (token + c), half_value, count - c)
            g = load_row(n[GRAD_OUT] + 4 * (token + c), 0, count - c)
            a, d, p = load(num + at), load(den + at), load(peak + at)
            a_w, d_w = load(num_w + at), load(den_w + at)
            boosted = add(k, load(bonus + at))
            gap = minus(p, boosted)
            less = exp(below(gap))
            old, new = where_below(gap, less, one), where_below(gap, one, less)
            total = fma(old, d, new)
            y, share = divide(fma(old, a, mul(new, v)), total), divide(g, total)
            store(keep, share)
            store(keep + ROW, mul(minus(zero, y), share))
            store(keep + 2 * ROW, minus(zero, larger(p, boosted)))
            gain = fma(minus(zero, y), d_w, a_w)
            store(grad_w + at, fma(mul(share, old), gain, load(grad_w + at)))
            store(grad_u + at, fma(mul(share, new), minus(v, y), load(grad_u + at)))
            faded, lost = fade(p, load(decay + at), low + at)
            gap = minus(faded, k)
            less = exp(below(gap))
            old, new = where_below(gap, less, one), where_below(gap, one, less)
            store(low + at, where_below(gap, zero, lost))
            store(num + at, fma(old, a, mul(new, v)))
            store(den + at, fma(old, d, new))
            store(num_w + at, mul(old, add(a, a_w)))
            store(den_w + at, mul(old, add(d, d_w)))
            store(peak + at, larger(faded, k))
            store(born + at, where_below(gap, splat(F(t)), load(born + at)))
    _settle(num_w, den_w, low, count)
    _fill(low, 0, count, F(0))
    # from the last token to the first: num, den and peak now hold dL/dA, dL/dB and s
    for c in range(0, count, LANES):
        at = 4 * c
        a, d = zero, zero
        if n[GRAD_NUM]:
            a = load_row(n[GRAD_NUM] + 4 * (place + c), 0, count - c)
            d = load_row(n[GRAD_DEN] + 4 * (place + c), 0, count - c)
        gain = fma(a, load(num_w + at), mul(d, load(den_w + at)))
        store(grad_w + at, add(gain, load(grad_w + at)))
        store(num + at, a)
        store(den + at, d)
        store(peak + at, minus(zero, load(peak + at)))
    for back in range(n[LENGTH]):
        t = n[LENGTH] - 1 - back
        token = (row * n[LENGTH] + t) * n[CHANNELS] + first
        for c in range(0, count, LANES):
            at, keep = 4 * c, kept + KEPT * (t * run + 4 * c)
            to_key, to_value = n[GRAD_KEY] + 4 * (token + c), n[GRAD_VALUE] + 4 * (token + c)
            if t >= real:
                store_row(to_key, 0, count - c, zero)
                store_row(to_value, 0, count - c, zero)
                continue
            k = load_row(n[KEY] + (2 if half_key else 4) * (token + c), half_key, count - c)
            v = load_row(n[VALUE] + (2 if half_value else 4) * (token + c), half_value, count - c)
            a, d, s = load(num + at), load(den + at), load(peak + at)
            by_num, by_den, level = load(keep), load(keep + ROW), load(keep + 2 * ROW)
            direct = exp(add(level, add(k, load(bonus + at))))
            later = exp(add(s, k))
            store_row(to_value, 0, count - c, fma(direct, by_num, mul(later, a)))
            toll = mul(later, fma(a, v, d))
            store_row(to_key, 0, count - c, fma(direct, fma(by_num, v, by_den), toll))
            faded, lost = fade(s, load(decay + at), low + at)
            gap = minus(faded, level)
            less = exp(below(gap))
            old, new = where_below(gap, less, one), where_below(gap, one, less)
            store(low + at, where_below(gap, zero, lost))
            store(num + at, fma(old, a, mul(new, by_num)))
            store(den + at, fma(old, d, mul(new, by_den)))
            store(peak + at, larger(faded, level))
    _settle(num, den, low, count)
    _pour(n[GRAD_DECAY] + 4 * place, grad_w, count)
    _pour(n[GRAD_BONUS] + 4 * place, grad_u, count)
    _pour(n[BORN] + 4 * place, born, count)
    if n[GRAD_OLD_NUM]:
        for c in range(0, count, LANES):
            old = load_row(n[PEAK] + 4 * (place + c), 0, count - c)
            weight = exp(add(old, load(peak + 4 * c))) if real else one
            store_row(n[GRAD_OLD_NUM] + 4 * (place + c), 0, count - c, mul(weight, load(num + 4 * c)))
            store_row(n[GRAD_OLD_DEN] + 4 * (place + c), 0, count - c, mul(weight, load(den + 4 * c)))


def room(length: int, backwards: bool) -> int:
    """Floats of scratch that a thread needs for each channel of its run."""
    return 11 + KEPT * length if backwards else 6


@lru_cache
def compiled(backwards: bool) -> Any:
    """:func:`forward` or :func:`backward` for runs of channels from start to stop, counted over the batch's rows,
    compiled for this machine or read from the cache on disk.
    """
    # The source of the inlined parts is in the name: Numba's cache looks at this file alone.
    stamp = sha256(Path(microkernels.__file__).read_bytes()).hexdigest()
    return _backward(stamp) if backwards else _forward(stamp)


_TABLE = types.Array(types.int64, 1, "C")
_CALL = types.void(_TABLE, _TABLE, types.int64, types.int64, types.int64)


def _forward(stamp: str) -> Any:
    @njit(_CALL, nogil=True, cache=True)
    def call(n: Any, lengths: Any, work: int, start: int, stop: int) -> None:
        if len(stamp):
            runs = (n[CHANNELS] + n[RUN] - 1) // n[RUN]
            for i in range(start, stop):
                first = i % runs * n[RUN]
                forward(n, lengths, work, i // runs, first, min(n[RUN], n[CHANNELS] - first))

    return call


def _backward(stamp: str) -> Any:
    @njit(_CALL, nogil=True, cache=True)
    def call(n: Any, lengths: Any, work: int, start: int, stop: int) -> None:
        if len(stamp):
            runs = (n[CHANNELS] + n[RUN] - 1) // n[RUN]
            for i in range(start, stop):
                first = i % runs * n[RUN]
                backward(n, lengths, work, i // runs, first, min(n[RUN], n[CHANNELS] - first))

    return call
