"""Numba kernels for causal softmax attention in float32, forward and backward: eight queries against packed keys.

For each head the keys are packed once into tiles of 16, channel by channel, so that a score is a chain of fused
multiply-adds over vectors of 16 keys. Eight queries at a time then make their scores, their softmax and their output
while everything is in the nearest cache; nothing of size n^2 exists, and the backward pass makes the scores again from
the saved log-sum. exp is 2^x, x split into an integer, which goes into the exponent bits, and a polynomial of degree 6.

The unrolled statements look repetitive on purpose: LLVM turns exactly this form into full-width vectors, and the slices
in front of the inner loops tell it that no index is negative. Numba keeps each compiled head dimension on the disk.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import literally, njit, types
from numba.extending import intrinsic

F = np.float32
ROWS = 8
TILE = 16
BLOCK = ROWS * TILE
HIDDEN = F(-1e30)  # score of a key behind the query; its weight is set to 0 after the exponential
LOG2E = F(math.log2(math.e))
FAST = {"contract", "reassoc", "nsz", "arcp"}  # NaN and infinity must stay visible
C1, C2, C3, C4, C5, C6 = (F(math.log(2) ** n / math.factorial(n)) for n in range(1, 7))


@intrinsic
def _as_float(_context: Any, _bits: Any) -> Any:
    """The float32 with the given 32 bits."""

    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@njit(inline="always", fastmath=FAST)
def _exp2(x: Any) -> Any:
    """2^x for x <= 0 (a little above is fine); at least 2^-125."""
    x = F(-125) if x < F(-125) else x  # in this order NaN stays NaN
    whole = np.int32(x - F(0.5))
    f = x - F(whole)
    p = ((((((C6 * f + C5) * f + C4) * f + C3) * f + C2) * f + C1) * f) + F(1)
    return p * _as_float(np.int32((whole + np.int32(127)) << np.int32(23)))


@njit(fastmath=FAST, nogil=True, cache=True)
def _scores(x: Any, keys: Any, out: Any, tiles: int, dim: int) -> None:
    """out[t, r, j] = x[r] . keys[t, :, j]"""
    literally(dim)
    for t in range(tiles):
        for r in range(0, ROWS, 4):
            for c in range(0, dim, 16):
                k = keys[(t * dim + c) * TILE : (t * dim + c + 16) * TILE]
                o = out[t * BLOCK + r * TILE : t * BLOCK + (r + 4) * TILE]
                y = x[r * dim + c :]
                for j in range(TILE):
                    s0 = s1 = s2 = s3 = F(0)
                    if c > 0:
                        s0, s1, s2, s3 = o[j], o[TILE + j], o[2 * TILE + j], o[3 * TILE + j]
                    for d in range(16):
                        key = k[d * TILE + j]
                        s0 += y[d] * key
                        s1 += y[dim + d] * key
                        s2 += y[2 * dim + d] * key
                        s3 += y[3 * dim + d] * key
                    o[j], o[TILE + j], o[2 * TILE + j], o[3 * TILE + j] = s0, s1, s2, s3


@njit(fastmath=FAST, nogil=True, cache=True)
def _mix(weights: Any, values: Any, out: Any, tiles: int, dim: int) -> None:
    """out[r] = sum over t, j of weights[t, r, j] values[t, j]"""
    literally(dim)
    out[:] = F(0)
    for t in range(tiles):
        w = weights[t * BLOCK : (t + 1) * BLOCK]
        v = values[t * TILE * dim : (t + 1) * TILE * dim]
        for j in range(0, TILE, 4):
            v4, w4 = v[j * dim : (j + 4) * dim], w[j:]
            w00, w01, w02, w03 = w4[0], w4[1], w4[2], w4[3]
            w10, w11, w12, w13 = w4[16], w4[17], w4[18], w4[19]
            w20, w21, w22, w23 = w4[32], w4[33], w4[34], w4[35]
            w30, w31, w32, w33 = w4[48], w4[49], w4[50], w4[51]
            w40, w41, w42, w43 = w4[64], w4[65], w4[66], w4[67]
            w50, w51, w52, w53 = w4[80], w4[81], w4[82], w4[83]
            w60, w61, w62, w63 = w4[96], w4[97], w4[98], w4[99]
            w70, w71, w72, w73 = w4[112], w4[113], w4[114], w4[115]
            for d in range(dim):
                a, b, c, e = v4[d], v4[dim + d], v4[2 * dim + d], v4[3 * dim + d]
                out[0 * dim + d] += w00 * a + w01 * b + w02 * c + w03 * e
                out[1 * dim + d] += w10 * a + w11 * b + w12 * c + w13 * e
                out[2 * dim + d] += w20 * a + w21 * b + w22 * c + w23 * e
                out[3 * dim + d] += w30 * a + w31 * b + w32 * c + w33 * e
                out[4 * dim + d] += w40 * a + w41 * b + w42 * c + w43 * e
                out[5 * dim + d] += w50 * a + w51 * b + w52 * c + w53 * e
                out[6 * dim + d] += w60 * a + w61 * b + w62 * c + w63 * e
                out[7 * dim + d] += w70 * a + w71 * b + w72 * c + w73 * e


@njit(fastmath=FAST, nogil=True, cache=True)
def _spread(weights: Any, x: Any, out: Any, tiles: int, dim: int) -> None:
    """out[t, :, j] += sum over r of weights[t, r, j] x[r]"""
    literally(dim)
    for t in range(tiles):
        w = weights[t * BLOCK : (t + 1) * BLOCK]
        for d in range(0, dim, 4):
            o, y = out[(t * dim + d) * TILE : (t * dim + d + 4) * TILE], x[d:]
            for j in range(TILE):
                w0 = w[0 * TILE + j]
                w1 = w[1 * TILE + j]
                w2 = w[2 * TILE + j]
                w3 = w[3 * TILE + j]
                w4 = w[4 * TILE + j]
                w5 = w[5 * TILE + j]
                w6 = w[6 * TILE + j]
                w7 = w[7 * TILE + j]
                o[0 * TILE + j] += (
                    y[0 * dim + 0] * w0
                    + y[1 * dim + 0] * w1
                    + y[2 * dim + 0] * w2
                    + y[3 * dim + 0] * w3
                    + y[4 * dim + 0] * w4
                    + y[5 * dim + 0] * w5
                    + y[6 * dim + 0] * w6
                    + y[7 * dim + 0] * w7
                )
                o[1 * TILE + j] += (
                    y[0 * dim + 1] * w0
                    + y[1 * dim + 1] * w1
                    + y[2 * dim + 1] * w2
                    + y[3 * dim + 1] * w3
                    + y[4 * dim + 1] * w4
                    + y[5 * dim + 1] * w5
                    + y[6 * dim + 1] * w6
                    + y[7 * dim + 1] * w7
                )
                o[2 * TILE + j] += (
                    y[0 * dim + 2] * w0
                    + y[1 * dim + 2] * w1
                    + y[2 * dim + 2] * w2
                    + y[3 * dim + 2] * w3
                    + y[4 * dim + 2] * w4
                    + y[5 * dim + 2] * w5
                    + y[6 * dim + 2] * w6
                    + y[7 * dim + 2] * w7
                )
                o[3 * TILE + j] += (
                    y[0 * dim + 3] * w0
                    + y[1 * dim + 3] * w1
                    + y[2 * dim + 3] * w2
                    + y[3 * dim + 3] * w3
                    + y[4 * dim + 3] * w4
                    + y[5 * dim + 3] * w5
                    + y[6 * dim + 3] * w6
                    + y[7 * dim + 3] * w7
                )


@njit(fastmath=FAST, nogil=True, cache=True)
def _hide(scores: Any, first: int, tiles: int, value: Any) -> None:
    """Set what lies behind each query to value; query r stands at position first + r."""
    for r in range(ROWS):
        last = first + r
        for t in range(last // TILE, tiles):
            for j in range(max(last + 1 - t * TILE, 0), TILE):
                scores[t * BLOCK + r * TILE + j] = value


@njit(fastmath=FAST, nogil=True, cache=True)
def _softmax(scores: Any, largest: Any, total: Any, lanes: Any, first: int, tiles: int) -> None:
    """Scores become 2^(score - largest); largest and total [ROWS] are left behind."""
    _hide(scores, first, tiles, HIDDEN)
    lanes[:] = HIDDEN
    for t in range(tiles):
        s = scores[t * BLOCK : (t + 1) * BLOCK]
        for j in range(TILE):
            lanes[0 * TILE + j] = s[0 * TILE + j] if s[0 * TILE + j] > lanes[0 * TILE + j] else lanes[0 * TILE + j]
            lanes[1 * TILE + j] = s[1 * TILE + j] if s[1 * TILE + j] > lanes[1 * TILE + j] else lanes[1 * TILE + j]
            lanes[2 * TILE + j] = s[2 * TILE + j] if s[2 * TILE + j] > lanes[2 * TILE + j] else lanes[2 * TILE + j]
            lanes[3 * TILE + j] = s[3 * TILE + j] if s[3 * TILE + j] > lanes[3 * TILE + j] else lanes[3 * TILE + j]
            lanes[4 * TILE + j] = s[4 * TILE + j] if s[4 * TILE + j] > lanes[4 * TILE + j] else lanes[4 * TILE + j]
            lanes[5 * TILE + j] = s[5 * TILE + j] if s[5 * TILE + j] > lanes[5 * TILE + j] else lanes[5 * TILE + j]
            lanes[6 * TILE + j] = s[6 * TILE + j] if s[6 * TILE + j] > lanes[6 * TILE + j] else lanes[6 * TILE + j]
            lanes[7 * TILE + j] = s[7 * TILE + j] if s[7 * TILE + j] > lanes[7 * TILE + j] else lanes[7 * TILE + j]
    for r in range(ROWS):
        m = lanes[r * TILE]
        for j in range(1, TILE):
            m = max(m, lanes[r * TILE + j])
        largest[r] = m
    lanes[:] = F(0)
    m0, m1, m2, m3, m4, m5, m6, m7 = (
        largest[0],
        largest[1],
        largest[2],
        largest[3],
        largest[4],
        largest[5],
        largest[6],
        largest[7],
    )
    for t in range(tiles):
        s = scores[t * BLOCK : (t + 1) * BLOCK]
        for j in range(TILE):
            e = _exp2(s[0 * TILE + j] - m0)
            s[0 * TILE + j] = e
            lanes[0 * TILE + j] += e
            e = _exp2(s[1 * TILE + j] - m1)
            s[1 * TILE + j] = e
            lanes[1 * TILE + j] += e
            e = _exp2(s[2 * TILE + j] - m2)
            s[2 * TILE + j] = e
            lanes[2 * TILE + j] += e
            e = _exp2(s[3 * TILE + j] - m3)
            s[3 * TILE + j] = e
            lanes[3 * TILE + j] += e
            e = _exp2(s[4 * TILE + j] - m4)
            s[4 * TILE + j] = e
            lanes[4 * TILE + j] += e
            e = _exp2(s[5 * TILE + j] - m5)
            s[5 * TILE + j] = e
            lanes[5 * TILE + j] += e
            e = _exp2(s[6 * TILE + j] - m6)
            s[6 * TILE + j] = e
            lanes[6 * TILE + j] += e
            e = _exp2(s[7 * TILE + j] - m7)
            s[7 * TILE + j] = e
            lanes[7 * TILE + j] += e
    for r in range(ROWS):
        t_sum = F(0)
        for j in range(TILE):
            t_sum += lanes[r * TILE + j]
        total[r] = t_sum
    _hide(scores, first, tiles, F(0))


@njit(fastmath=FAST, nogil=True, cache=True)
def _slopes(scores: Any, slopes: Any, log_sum: Any, along: Any, first: int, tiles: int) -> None:
    """Scores become the gradient of the scores, and slopes (dL/dp) become the probabilities p."""
    for r in range(ROWS):
        m, a = log_sum[r], along[r]
        for t in range((first + r) // TILE + 1):
            s = scores[t * BLOCK + r * TILE : t * BLOCK + (r + 1) * TILE]
            p = slopes[t * BLOCK + r * TILE : t * BLOCK + (r + 1) * TILE]
            for j in range(TILE):
                e = _exp2(s[j] - m)
                s[j] = e * (p[j] - a)
                p[j] = e
    _hide(scores, first, tiles, F(0))
    _hide(slopes, first, tiles, F(0))


@njit(fastmath=FAST, nogil=True, cache=True)
def _pack(x: Any, tiles_out: Any, rows_out: Any, dim: int) -> None:
    """x [L, dim] channel by channel in tiles of 16 tokens, and plainly row by row; the rest of the last tile is 0."""
    literally(dim)
    length = x.shape[0]
    tiles_out[length // TILE * TILE * dim :] = F(0)
    rows_out[length * dim :] = F(0)
    for i in range(length):
        t, j = i // TILE, i % TILE
        o = tiles_out[t * TILE * dim + j :]
        for d in range(dim):
            o[d * TILE] = x[i, d]
            rows_out[i * dim + d] = x[i, d]


@njit(fastmath=FAST, nogil=True, cache=True)
def forward(
    query: Any, key: Any, value: Any, out: Any, log_sum: Any, work: Any, start: int, stop: int, scale: Any, dim: int
) -> None:
    """Key heads start..stop-1 (of B * Hk): out [B, Hq, L, dim] and log_sum [B, Hq, L] (base 2) are filled."""
    literally(dim)
    length, heads = query.shape[2], key.shape[1]
    group = query.shape[1] // heads
    tiles = -(-length // TILE)
    size = tiles * TILE * dim
    keys, values, spare = work[:size], work[size : 2 * size], work[2 * size : 3 * size]
    at = 3 * size
    scores, at = work[at : at + tiles * BLOCK], at + tiles * BLOCK
    q, at = work[at : at + ROWS * dim], at + ROWS * dim
    o, at = work[at : at + ROWS * dim], at + ROWS * dim
    largest, total, lanes = (
        work[at : at + TILE],
        work[at + TILE : at + 2 * TILE],
        work[at + 2 * TILE : at + 2 * TILE + BLOCK],
    )
    factor = F(scale) * LOG2E
    for item in range(start, stop):
        b, h = item // heads, item % heads
        _pack(value[b, h], spare, values, dim)
        _pack(key[b, h], keys, spare, dim)
        for g in range(h * group, (h + 1) * group):
            for first in range(0, length, ROWS):
                rows = min(ROWS, length - first)
                for r in range(rows):
                    for d in range(dim):
                        q[r * dim + d] = query[b, g, first + r, d] * factor
                seen = min(tiles, -(-(first + ROWS) // TILE))
                _scores(q, keys, scores, seen, dim)
                _softmax(scores, largest, total, lanes, first, seen)
                _mix(scores, values, o, seen, dim)
                for r in range(rows):
                    inverse = F(1) / total[r]
                    log_sum[b, g, first + r] = largest[r] + F(math.log2(total[r]))
                    for d in range(dim):
                        out[b, g, first + r, d] = o[r * dim + d] * inverse


@njit(fastmath=FAST, nogil=True, cache=True)
def backward(
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    log_sum: Any,
    upstream: Any,
    grad_query: Any,
    grad_key: Any,
    grad_value: Any,
    work: Any,
    start: int,
    stop: int,
    scale: Any,
    dim: int,
) -> None:
    """Key heads start..stop-1: the three gradients are filled."""
    literally(dim)
    length, heads = query.shape[2], key.shape[1]
    group = query.shape[1] // heads
    tiles = -(-length // TILE)
    size = tiles * TILE * dim
    keys, key_rows, values = work[:size], work[size : 2 * size], work[2 * size : 3 * size]
    grad_keys, grad_values = work[3 * size : 4 * size], work[4 * size : 5 * size]
    at = 5 * size
    scores, at = work[at : at + tiles * BLOCK], at + tiles * BLOCK
    slopes, at = work[at : at + tiles * BLOCK], at + tiles * BLOCK
    q, at = work[at : at + ROWS * dim], at + ROWS * dim
    u, at = work[at : at + ROWS * dim], at + ROWS * dim
    o, at = work[at : at + ROWS * dim], at + ROWS * dim
    logs, along = work[at : at + TILE], work[at + TILE : at + 2 * TILE]
    factor = F(scale) * LOG2E
    for item in range(start, stop):
        b, h = item // heads, item % heads
        _pack(value[b, h], values, key_rows, dim)
        _pack(key[b, h], keys, key_rows, dim)
        grad_keys[:] = F(0)
        grad_values[:] = F(0)
        for g in range(h * group, (h + 1) * group):
            for first in range(0, length, ROWS):
                rows = min(ROWS, length - first)
                if rows < ROWS:  # the rows beyond the end must add nothing
                    q[:] = F(0)
                    u[:] = F(0)
                    logs[:] = F(0)
                    along[:] = F(0)
                for r in range(rows):
                    a = F(0)
                    for d in range(dim):
                        q[r * dim + d] = query[b, g, first + r, d] * factor
                        u[r * dim + d] = upstream[b, g, first + r, d]
                        a += upstream[b, g, first + r, d] * out[b, g, first + r, d]
                    along[r] = a
                    logs[r] = log_sum[b, g, first + r]
                seen = min(tiles, -(-(first + ROWS) // TILE))
                _scores(q, keys, scores, seen, dim)
                _scores(u, values, slopes, seen, dim)
                _slopes(scores, slopes, logs, along, first, seen)
                _spread(slopes, u, grad_values, seen, dim)
                _spread(scores, q, grad_keys, seen, dim)
                _mix(scores, key_rows, o, seen, dim)
                for r in range(rows):
                    for d in range(dim):
                        grad_query[b, g, first + r, d] = o[r * dim + d] * F(scale)
        back = F(1) / LOG2E
        for i in range(length):
            at = i // TILE * TILE * dim + i % TILE
            for d in range(dim):
                grad_key[b, h, i, d] = grad_keys[at + d * TILE] * back
                grad_value[b, h, i, d] = grad_values[at + d * TILE]


_ARRAY = types.Array(types.float32, 4, "A")
_LOGS = types.Array(types.float32, 3, "C")
_WORK = types.Array(types.float32, 1, "C")
_ITEMS = (types.int64, types.int64, types.float64)


@lru_cache
def forward_for(dim: int) -> Any:
    """`forward` with dim fixed: passing it at run time would choose the compiled version anew at every call."""

    @njit(types.void(*[_ARRAY] * 4, _LOGS, _WORK, *_ITEMS), nogil=True, cache=True)
    def call(q: Any, k: Any, v: Any, out: Any, log_sum: Any, work: Any, start: int, stop: int, scale: float) -> None:
        forward(q, k, v, out, log_sum, work, start, stop, scale, dim)

    return call


@lru_cache
def backward_for(dim: int) -> Any:
    """`backward` with dim fixed; u is dL/do, and gq, gk, gv are filled."""

    @njit(types.void(*[_ARRAY] * 4, _LOGS, *[_ARRAY] * 4, _WORK, *_ITEMS), nogil=True, cache=True)
    def call(
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        logs: Any,
        u: Any,
        gq: Any,
        gk: Any,
        gv: Any,
        work: Any,
        start: int,
        stop: int,
        scale: float,
    ) -> None:
        backward(q, k, v, o, logs, u, gq, gk, gv, work, start, stop, scale, dim)

    return call


def workspace(length: int, dim: int) -> int:
    """Numbers of scratch that one thread needs."""
    tiles = -(-length // TILE)
    return tiles * (5 * TILE * dim + 2 * BLOCK) + 3 * ROWS * dim + 2 * TILE + BLOCK
