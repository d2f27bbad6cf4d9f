"""The matrix recurrence forward, in Numba: one slice of the value's columns of one head after another.

The state of a slice, [K][up to 64], stays in the nearest cache; what a token reads is taken while its new state is
written, and so is what the next one removes. With q' = q exp(g), or q where there is a bonus, every read is of the
state before the token, out = q'^T S + (q . k) v + (q . a) r: k times the bonus in that product where there is one.
"""

from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types

from mercer.backends import (
    matrix_scan_backward,
    matrix_scan_parts,
    matrix_scan_table,
    matrix_scan_vectors,
    microkernels,
    polynomial_blocks,
)
from mercer.backends.matrix_scan_backward import backward_item
from mercer.backends.matrix_scan_parts import (
    columns_of,
    copy_rows,
    lanes_of,
    own_products,
    pack,
    pack_decay,
    pack_some,
    panel_step,
    read_panel,
    slices_of,
)
from mercer.backends.matrix_scan_table import (
    ADDRESS,
    DIM,
    FINAL,
    HALF,
    HEADS,
    KEPT,
    KEY,
    OUT,
    OUTER,
    PARTS,
    QUERY,
    REMOVED,
    SLICE,
    STATE,
    TOKEN,
    VALUE,
    VALUE_DIM,
    A,
    B,
)
from mercer.backends.microkernels import LANES, ROW, fma, get, load, splat, store, store_row
from mercer.backends.polynomial_blocks import locate, padded

F = np.float32
TOGETHER = 16
"""Tokens whose rows are made ready at a time."""
WIDE = 4 * ROW


def room(dim: int) -> int:
    """Bytes of scratch of a thread."""
    deep = -(-dim // LANES) * LANES
    return 4 * (5 * TOGETHER * deep + deep * SLICE + deep) + 4 * WIDE + 8 * TOGETHER


@njit
def forward_item(tensors: Any, sizes: Any, lengths: Any, scale: float, work: int, b: int, h: int, piece: int) -> None:
    """All tokens of a slice of a head."""
    dim, width, count = sizes[DIM], sizes[VALUE_DIM], lengths[b]
    first, columns = piece * SLICE, columns_of(width, piece)
    lanes, deep = lanes_of(columns), padded(dim)
    rows = (dim + 3) // 4 * 4
    each = 4 * deep
    token = 5 * each
    state = work + TOGETHER * token
    spare = state + SLICE * each
    outs = spare + each
    own = outs + 4 * WIDE
    for c in range(0, 4 * WIDE, ROW):
        store(outs + c, splat(F(0)))
    removes = tensors[A, ADDRESS] != 0
    half, size = tensors[VALUE, HALF], 2 if tensors[VALUE, HALF] else 4
    out_half, out_size = tensors[OUT, HALF], 2 if tensors[OUT, HALF] else 4
    pitch = lanes * ROW
    source, final = locate(tensors, STATE, b, h, 0), locate(tensors, FINAL, b, h, 0) + 4 * first
    # A single token goes from the old state to the new one, without a copy between.
    straight = source != 0 and count == 1 and columns == lanes * LANES and rows == dim and tensors[KEPT, ADDRESS] == 0
    old, before, new, after = state, pitch, state, pitch
    if straight:
        old, before, new, after = source + 4 * first, tensors[STATE, TOKEN], final, tensors[FINAL, TOKEN]
    else:
        copy_rows(source + 4 * first if source else 0, tensors[STATE, TOKEN], dim, columns, state, pitch, rows, lanes)
    for t in range(count):
        slot = t % TOGETHER
        if slot == 0:
            for i in range(min(TOGETHER, count - t)):
                at = work + i * token
                pack_decay(tensors, sizes, b, h, t + i, dim, at)
                pack(tensors, QUERY, b, h, t + i, dim, at + each)
                pack(tensors, KEY, b, h, t + i, dim, at + 2 * each)
                if removes:
                    pack(tensors, A, b, h, t + i, dim, at + 3 * each)
                    if t + i + 1 < count:
                        pack(tensors, B, b, h, t + i + 1, dim, at + 4 * each)
                own_products(tensors, h, dim, scale, at, each, own + 8 * i)
        if t == 0 and removes:
            pack(tensors, B, b, h, 0, dim, spare)
            read_panel(lanes, old, before, rows, spare, outs + 3 * WIDE)
        if tensors[KEPT, ADDRESS] != 0 and t % OUTER == 0:
            kept = locate(tensors, KEPT, b, h, t // OUTER) + 4 * first * rows
            for x in range(0, rows * pitch, ROW):
                store(kept + x, load(state + x))
        v, r = outs + 2 * WIDE, outs + 3 * WIDE
        pack_some(locate(tensors, VALUE, b, h, t) + first * size, half, columns, v, size)
        if removes and tensors[REMOVED, ADDRESS] != 0:
            to = locate(tensors, REMOVED, b, h, t) + 4 * first
            for c in range(0, columns, LANES):
                store_row(to + 4 * c, 0, columns - c, load(r + 4 * c))
        panel_step(lanes, removes, old, before, new, after, rows, work + slot * token, each, outs)
        mine, taken = splat(get(own + 8 * slot)), splat(get(own + 8 * slot + 4))
        to = locate(tensors, OUT, b, h, t) + first * out_size
        for c in range(0, columns, LANES):
            x = fma(mine, load(v + 4 * c), load(outs + 4 * c))
            if removes:
                x = fma(taken, load(r + 4 * c), x)
                store(r + 4 * c, load(outs + WIDE + 4 * c))
            store_row(to + c * out_size, out_half, columns - c, x)
    if not straight:
        for x in range(dim):
            for c in range(0, columns, LANES):
                store_row(final + x * tensors[FINAL, TOKEN] + 4 * c, 0, columns - c, load(state + x * pitch + 4 * c))


_CALL = types.void(
    types.Array(types.int64, 2, "C"),
    types.Array(types.int64, 1, "C"),
    types.Array(types.int64, 1, "C"),
    types.float64,
    types.int64,
    types.int64,
    types.int64,
)


@lru_cache
def _stamp() -> str:
    """Names the sources of the inlined parts: Numba's cache looks at this file alone."""
    parts = (matrix_scan_backward, matrix_scan_parts, matrix_scan_table, matrix_scan_vectors)
    files = (Path(m.__file__) for m in (microkernels, polynomial_blocks, *parts))
    return sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


@lru_cache
def compiled_forward() -> Any:
    """:func:`forward_item` for a run of the slices of all heads, compiled for this machine or read from the cache on
    disk.
    """
    return _forward(_stamp())


@lru_cache
def compiled_backward() -> Any:
    """:func:`backward_item` for a run of the parts of all heads, likewise."""
    return _backward(_stamp())


def _forward(stamp: str) -> Any:
    @njit(_CALL, nogil=True, cache=True)
    def call(tensors: Any, sizes: Any, lengths: Any, scale: float, work: int, start: int, stop: int) -> None:
        if len(stamp):  # a closure over it, so that the cache tells versions apart
            pieces = slices_of(sizes[VALUE_DIM])
            for i in range(start, stop):
                head, piece = i // pieces, i % pieces
                b, h = head // sizes[HEADS], head % sizes[HEADS]
                forward_item(tensors, sizes, lengths, scale, work, b, h, piece)

    return call


def _backward(stamp: str) -> Any:
    @njit(_CALL, nogil=True, cache=True)
    def call(tensors: Any, sizes: Any, lengths: Any, scale: float, work: int, start: int, stop: int) -> None:
        if len(stamp):
            for i in range(start, stop):
                head, part = i // sizes[PARTS], i % sizes[PARTS]
                b, h = head // sizes[HEADS], head % sizes[HEADS]
                backward_item(tensors, sizes, lengths, scale, work, b, h, part)

    return call
