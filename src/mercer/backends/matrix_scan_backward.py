"""The matrix recurrence backward, in Numba: last tokens first, from states that are made again.

D is the gradient of the state after a token. With out = q'^T S + m v + n r, r = S^T b and S the state before the token
(see `matrix_scan_kernels`),

    dv = D^T k + m do                       dm = v . do
    dr = D^T a + n do                       dn = r . do
    dq' = S do    dk = D v + dm q    da = D r + dn q    db = S dr    dw = <D, S> by rows
    D <- w D + q' do^T + b dr^T

States stand turned, [columns][channels]. The forward pass kept one every 64 tokens; from it come those of every 8, and
from these, one after another, those of single tokens.
"""

from typing import Any

import numpy as np
from numba import njit

from mercer.backends.matrix_scan_parts import (
    back,
    columns_of,
    lanes_of,
    own_products,
    pack,
    pack_decay,
    pack_some,
    project,
    replay,
    slices_of,
    turn_in,
    turn_out,
)
from mercer.backends.matrix_scan_table import (
    ADDRESS,
    BONUS,
    CHANNELS,
    DIM,
    GRAD_A,
    GRAD_B,
    GRAD_BONUS,
    GRAD_FINAL,
    GRAD_KEY,
    GRAD_LOG,
    GRAD_QUERY,
    GRAD_STATE,
    GRAD_VALUE,
    HALF,
    INNER,
    KEPT,
    KEY,
    OUTER,
    PART,
    PARTS,
    QUERY,
    REMOVED,
    SLICE,
    TOKEN,
    UPSTREAM,
    VALUE,
    VALUE_DIM,
    A,
    B,
)
from mercer.backends.matrix_scan_vectors import total
from mercer.backends.microkernels import (
    LANES,
    ROW,
    TILE,
    add,
    fma,
    get,
    lane_sums,
    load,
    load_row,
    mul,
    put,
    splat,
    store,
    store_row,
)
from mercer.backends.polynomial_blocks import locate, padded

F = np.float32
KINDS = 6
"""Rows of channels that a token has: w, q', k, a, b and scale q."""


def room(dim: int) -> int:
    """Bytes of scratch of a thread."""
    deep = -(-dim // LANES) * LANES
    rows = KINDS * OUTER * deep + 5 * INNER * deep + deep
    columns = 4 * OUTER * (SLICE + LANES) + 2 * LANES * LANES
    states = (1 + OUTER // INNER) * SLICE * deep + INNER * LANES * deep
    return 4 * (rows + columns + states + 4 * OUTER) + TILE


@njit
def backward_item(tensors: Any, sizes: Any, lengths: Any, scale: float, work: int, b: int, h: int, part: int) -> None:
    """All slices of a part of a head, one after the other; what several have a share in is added up."""
    pieces, parts = slices_of(sizes[VALUE_DIM]), sizes[PARTS]
    first, stop = (part, part + 1) if parts > 1 else (0, pieces)
    for piece in range(first, stop):
        _slice(tensors, sizes, lengths[b], scale, work, b, h, piece, part, piece > first)


@njit
def _slice(
    tensors: Any, sizes: Any, count: int, scale: float, work: int, b: int, h: int, piece: int, part: int, more: bool
) -> None:
    dim, first, columns = sizes[DIM], piece * SLICE, columns_of(sizes[VALUE_DIM], piece)
    deep, high, rows, pitch = padded(dim), padded(columns), (dim + 3) // 4 * 4, lanes_of(columns) * ROW
    each, apart = 4 * deep, 4 * (SLICE + LANES)
    token, line, sum_of = KINDS * each, 4 * apart, 5 * each
    sums = work + OUTER * token
    bonus_sum = sums + INNER * sum_of
    numbers = bonus_sum + each
    keys = numbers + OUTER * line
    taken = keys + TILE
    grad = taken + TILE
    block = SLICE * each
    marks = grad + block
    states = marks + OUTER // INNER * block
    few = LANES if deep <= 4 * LANES else LANES // 2  # columns together: their states of `INNER` tokens stay near
    small = few * each
    own = states + INNER * LANES * each
    tile = own + 16 * OUTER
    removes = tensors[A, ADDRESS] != 0
    for c in range(0, each, ROW):
        store(bonus_sum + c, splat(F(0)))
    for c in range(0, TILE, ROW):
        store(keys + c, splat(F(0)))
        store(taken + c, splat(F(0)))
    source = locate(tensors, GRAD_FINAL, b, h, 0)
    turn_in(source + 4 * first if source else 0, tensors[GRAD_FINAL, TOKEN], dim, columns, grad, deep, tile)
    for begin in range((count - 1) // OUTER * OUTER, -1, -OUTER):
        tokens = min(OUTER, count - begin)
        for t in range(tokens):
            at, to = work + t * token, numbers + t * line
            _pack(tensors, sizes, scale, b, h, begin + t, first, columns, at, each, to, apart, own + 16 * t)
        kept = locate(tensors, KEPT, b, h, begin // OUTER) + 4 * first * rows
        turn_in(kept, pitch, rows, high, marks, deep, tile)
        for j in range(0, high, few):
            for x in range(INNER, tokens, INNER):
                to = marks + x // INNER * block + j * each
                for t in range(x - INNER, x):
                    old, v = to - block if t == x - INNER else to, numbers + t * line + 4 * j
                    replay(removes, old, to, deep, few, work + t * token, each, v, v + 2 * apart)
        for x in range((tokens - 1) // INNER * INNER, -1, -INNER):
            last = min(INNER, tokens - x) - 1
            for j in range(0, high, few):
                mark, here = marks + x // INNER * block + j * each, grad + j * each
                for i in range(last):
                    t, old = x + i, mark if i == 0 else states + i * small
                    v = numbers + t * line + 4 * j
                    replay(removes, old, states + (i + 1) * small, deep, few, work + t * token, each, v, v + 2 * apart)
                for i in range(last, -1, -1):
                    t, state = x + i, mark if i == 0 else states + i * small
                    per, at = work + t * token, numbers + t * line + 4 * j
                    do = load(at + apart)
                    if removes:
                        project(here, deep, few, per, each, keys, taken)
                        read = lane_sums(taken, splat(F(1)))
                        store(at + 3 * apart, fma(splat(get(own + 16 * t + 4)), do, read))
                    back(removes, state, here, deep, few, per, each, at, apart, sums + i * sum_of, keys, j > 0)
                    if j < columns:
                        half = tensors[GRAD_VALUE, HALF]
                        to = locate(tensors, GRAD_VALUE, b, h, begin + t) + (first + j) * (2 if half else 4)
                        grad_value = fma(splat(get(own + 16 * t)), do, lane_sums(keys, splat(F(1))))
                        store_row(to, half, min(few, columns - j), grad_value)
            for i in range(last, -1, -1):
                t = x + i
                per, into, mine = work + t * token, sums + i * sum_of, own + 16 * t
                _give(tensors, sizes, scale, b, h, begin + t, part, more, dim, per, each, into, mine, bonus_sum)
    target = locate(tensors, GRAD_STATE, b, h, 0)
    if target:
        turn_out(grad, deep, dim, columns, target + 4 * first, tensors[GRAD_STATE, TOKEN], tile)
    target = locate(tensors, GRAD_BONUS, b, h, 0)
    if target:
        for c in range(0, dim, LANES):
            _write(target + part * tensors[GRAD_BONUS, PART] + 4 * c, 0, dim - c, load(bonus_sum + 4 * c), more)


@njit
def _pack(
    tensors: Any, sizes: Any, scale: float, b: int, h: int, t: int, first: int, columns: int, at: int, each: int,
    line: int, apart: int, own: int,
) -> None:  # fmt: skip
    """All rows of a token in float32, and its own products: m, n, dm, dn."""
    dim = sizes[DIM]
    removes = tensors[A, ADDRESS] != 0
    pack_decay(tensors, sizes, b, h, t, dim, at)
    pack(tensors, QUERY, b, h, t, dim, at + each)
    pack(tensors, KEY, b, h, t, dim, at + 2 * each)
    if removes:
        pack(tensors, A, b, h, t, dim, at + 3 * each)
        pack(tensors, B, b, h, t, dim, at + 4 * each)
    for c in range(0, each, ROW):
        store(at + 5 * each + c, mul(splat(F(scale)), load(at + each + c)))
    own_products(tensors, h, dim, scale, at, each, own)
    for which, to in ((VALUE, line), (UPSTREAM, line + apart), (REMOVED, line + 2 * apart)):
        half = tensors[which, HALF]
        size = 2 if half else 4
        if tensors[which, ADDRESS] != 0:
            pack_some(locate(tensors, which, b, h, t) + first * size, half, columns, to, size)
    mine = taken = splat(F(0))
    for c in range(0, 4 * columns, ROW):
        do = load(line + apart + c)
        mine = fma(do, load(line + c), mine)
        if removes:
            taken = fma(do, load(line + 2 * apart + c), taken)
    put(own + 8, total(mine))
    put(own + 12, total(taken))


@njit
def _write(at: int, half: int, count: int, x: Any, more: bool) -> None:
    """A vector of a gradient, or more of it."""
    if more:
        x = add(x, load_row(at, half, count))
    store_row(at, half, count, x)


@njit
def _give(
    tensors: Any, sizes: Any, scale: float, b: int, h: int, t: int, part: int, more: bool, dim: int,
    per: int, each: int, sums: int, own: int, bonus_sum: int,
) -> None:  # fmt: skip
    """The gradients of a token's channels, from sums over the columns: S do, <D, S>, D v, D r, S dr."""
    bonus, removes = locate(tensors, BONUS, 0, h, 0), tensors[A, ADDRESS] != 0
    mine, taken, back_scale = splat(get(own + 8)), splat(get(own + 12)), splat(F(scale))
    decay = splat(F(0))
    whole = locate(tensors, GRAD_LOG, b, h, t)
    for c in range(0, dim, LANES):
        x, n = 4 * c, dim - c
        w, k, q = load(per + x), load(per + 2 * each + x), load(per + 5 * each + x)
        dq, dw, dk = load(sums + x), load(sums + each + x), load(sums + 2 * each + x)
        weighed_key, weighed_query = k, q
        if bonus:
            u = load_row(bonus + x, 0, n)
            store(bonus_sum + x, fma(mine, mul(q, k), load(bonus_sum + x)))
            weighed_key, weighed_query = mul(u, k), mul(u, q)
        else:
            dw = fma(q, dq, dw)
            dq = mul(w, dq)
        dq = fma(mine, weighed_key, dq)
        dk = fma(mine, weighed_query, dk)
        dw = mul(w, dw)
        if removes:
            da = load(sums + 3 * each + x)
            if not bonus:
                dq = fma(taken, load(per + 3 * each + x), dq)
                da = fma(taken, q, da)
            _put(tensors, GRAD_A, part, b, h, t, c, n, da, more)
            _put(tensors, GRAD_B, part, b, h, t, c, n, load(sums + 4 * each + x), more)
        _put(tensors, GRAD_QUERY, part, b, h, t, c, n, mul(back_scale, dq), more)
        _put(tensors, GRAD_KEY, part, b, h, t, c, n, dk, more)
        if whole != 0 and sizes[CHANNELS]:
            _put(tensors, GRAD_LOG, part, b, h, t, c, n, dw, more)
        elif whole:
            store(sums, dw)
            decay = add(decay, load_row(sums, 0, n))  # no lanes beyond the channels
    if whole != 0 and not sizes[CHANNELS]:
        half = tensors[GRAD_LOG, HALF]
        _write(whole + part * tensors[GRAD_LOG, PART], half, 1, splat(total(decay)), more)


@njit
def _put(tensors: Any, which: int, part: int, b: int, h: int, t: int, c: int, count: int, x: Any, more: bool) -> None:
    half = tensors[which, HALF]
    at = locate(tensors, which, b, h, t) + part * tensors[which, PART] + c * (2 if half else 4)
    _write(at, half, count, x, more)
