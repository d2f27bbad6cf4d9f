"""What both directions of the matrix recurrence share: rows of tokens in float32, states between memory and scratch."""

from typing import Any

import numpy as np
from numba import njit

from mercer.backends.calls import by_call
from mercer.backends.matrix_scan_table import (
    ADDRESS,
    BETA,
    CHANNELS,
    GROWS,
    HALF,
    KEY,
    LOG,
    PARTS,
    SLICE,
    VALUE_DIM,
    A,
    B,
)
from mercer.backends.matrix_scan_vectors import (
    column,
    locate,
    number,
    read1,
    read2,
    read4,
    step1,
    step1_removing,
    step2,
    step2_removing,
    step4,
    step4_removing,
    total,
)
from mercer.backends.microkernels import (
    LANES,
    ROW,
    above_zero,
    exp,
    fma,
    load,
    load_row,
    mul,
    put,
    splat,
    store,
    store_row,
)
from mercer.backends.polynomial_blocks import padded

F = np.float32


@njit
def slices_of(width: int) -> int:
    """How many slices the value's columns are."""
    return (width + SLICE - 1) // SLICE


@njit
def pieces_of(sizes: int, part: int) -> tuple[int, int]:
    """The slices of a part: one, or all of a head."""
    return (part, part + 1) if number(sizes, PARTS) > 1 else (0, slices_of(number(sizes, VALUE_DIM)))


@njit
def columns_of(width: int, piece: int) -> int:
    """Columns of a slice."""
    return min(SLICE, width - piece * SLICE)


@njit
def lanes_of(columns: int) -> int:
    """Vectors that a row of a slice takes: 1, 2 or 4."""
    vectors = (columns + LANES - 1) // LANES
    return 4 if vectors == 3 else vectors


@njit
def widest(vectors: int) -> int:
    """How many vectors of channels go together."""
    return 4 if vectors >= 4 else min(vectors, 2)


# Rows of tokens


@by_call
def pack_some(at: int, half: int, count: int, to: int, size: int) -> None:
    """`count` numbers in float32; whole vectors are written, zeros beyond the end."""
    c = 0
    if not half:
        while c + LANES <= count:
            store(to + 4 * c, load(at + 4 * c))
            c += LANES
    while c < count:
        store(to + 4 * c, load_row(at + c * size, half, count - c))
        c += LANES


@by_call
def unpack_some(at: int, to: int, half: int, count: int, size: int) -> None:
    """The way back, without what stands beyond the end."""
    c = 0
    if not half:
        while c + LANES <= count:
            store(to + 4 * c, load(at + 4 * c))
            c += LANES
    while c < count:
        store_row(to + c * size, half, count - c, load(at + 4 * c))
        c += LANES


@by_call
def pack(tensors: int, which: int, b: int, h: int, t: int, count: int, to: int) -> None:
    """A token's row of a tensor."""
    half = column(tensors, which, HALF)
    pack_some(locate(tensors, which, b, h, t), half, count, to, 2 if half else 4)


@njit
def note_growth(sizes: int, above: Any) -> None:
    """Say so if a lane is above 0."""
    if total(above) > F(0):
        put(sizes + 8 * GROWS, F(1))


@by_call
def pack_decay(tensors: int, sizes: int, b: int, h: int, t: int, dim: int, to: int) -> None:
    """exp(g) of a token for every channel."""
    at, half = locate(tensors, LOG, b, h, t), column(tensors, LOG, HALF)
    for c in range(0, dim, LANES):
        x = splat(F(0))
        if at != 0 and number(sizes, CHANNELS):
            x = load_row(at + c * (2 if half else 4), half, dim - c)
        elif at != 0:
            x = splat(total(load_row(at, half, 1)))
        note_growth(sizes, above_zero(x))
        store(to + 4 * c, exp(x))


@by_call
def pack_sought(tensors: int, sizes: int, b: int, h: int, t: int, dim: int, to: int, spare: int) -> None:
    """b of a token: with the delta rule -w k."""
    if column(tensors, B, ADDRESS) != 0:
        pack(tensors, B, b, h, t, dim, to)
    else:
        pack(tensors, KEY, b, h, t, dim, to)
        pack_decay(tensors, sizes, b, h, t, dim, spare)
        for c in range(0, 4 * padded(dim), ROW):
            store(to + c, mul(mul(splat(F(-1)), load(spare + c)), load(to + c)))


@by_call
def pack_taken(tensors: int, b: int, h: int, t: int, dim: int, key: int, to: int) -> None:
    """a of a token: with the delta rule beta k, and so is k then."""
    if column(tensors, A, ADDRESS) != 0:
        pack(tensors, A, b, h, t, dim, to)
    else:
        beta = splat(total(load_row(locate(tensors, BETA, b, h, t), column(tensors, BETA, HALF), 1)))
        for c in range(0, 4 * padded(dim), ROW):
            x = mul(beta, load(key + c))
            store(key + c, x)
            store(to + c, x)


@by_call
def own_products(removes: bool, bonus: int, dim: int, scale: float, at: int, each: int, own: int, removed: int) -> None:
    """Makes q' of q in the rows w, q, k, a of a token, `each` apart, and of itself scale q . k (or q . u k), to `own`,
    and scale q . a, to `removed`."""
    mine = taken = splat(F(0))
    for c in range(0, 4 * padded(dim), ROW):
        q = mul(load(at + each + c), splat(F(scale)))
        k = load(at + 2 * each + c)
        if bonus:
            k = mul(k, load_row(bonus + c, 0, dim - c // 4))
        mine = fma(q, k, mine)
        if not bonus:
            if removes:
                taken = fma(q, load(at + 3 * each + c), taken)
            q = mul(q, load(at + c))
        store(at + each + c, q)
    put(own, total(mine))
    put(removed, total(taken))


# Passes over a state, by width


@by_call
def read_panel(lanes: int, state: int, stride: int, rows: int, per: int, out: int) -> None:
    """What b reads of a state."""
    if lanes == 4:
        read4(state, stride, rows, per, out)
    elif lanes == 2:
        read2(state, stride, rows, per, out)
    else:
        read1(state, stride, rows, per, out)


@by_call
def panel_step(
    lanes: int, removes: bool, old: int, before: int, new: int, after: int, rows: int, per: int, each: int, out: int
) -> None:
    """One token of a slice."""
    if removes:
        if lanes == 4:
            step4_removing(old, before, new, after, rows, per, each, out)
        elif lanes == 2:
            step2_removing(old, before, new, after, rows, per, each, out)
        else:
            step1_removing(old, before, new, after, rows, per, each, out)
    elif lanes == 4:
        step4(old, before, new, after, rows, per, each, out)
    elif lanes == 2:
        step2(old, before, new, after, rows, per, each, out)
    else:
        step1(old, before, new, after, rows, per, each, out)


# States


@by_call
def copy_rows(source: int, stride: int, dim: int, columns: int, state: int, pitch: int, rows: int, lanes: int) -> None:
    """Some columns of a state, padded with zeros; zeros where there is none."""
    for x in range(rows):
        for c in range(0, lanes * LANES, LANES):
            row = splat(F(0))
            if source != 0 and x < dim and c < columns:
                row = load_row(source + x * stride + 4 * c, 0, columns - c)
            store(state + x * pitch + 4 * c, row)


@by_call
def write_rows(state: int, pitch: int, dim: int, columns: int, target: int, stride: int) -> None:
    """Some columns of a state to where it is wanted."""
    for x in range(dim):
        for c in range(0, columns, LANES):
            store_row(target + x * stride + 4 * c, 0, columns - c, load(state + x * pitch + 4 * c))
