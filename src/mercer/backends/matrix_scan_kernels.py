"""The matrix recurrence forward, in Numba: some slices of the value's columns of one head after another, 16 tokens at a
time (see `matrix_block_parts`), and a few tokens one by one with the state in the nearest cache.

With q' = q exp(g), or q where there is a bonus, every read is of the state before the token,
out = q'^T S + (q . k) v + (q . a) r: k times the bonus in that product where there is one.
"""

from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types

from mercer.backends import (
    calls,
    matrix_block_layout,
    matrix_block_pairs,
    matrix_block_parts,
    matrix_block_vectors,
    matrix_scan_backward,
    matrix_scan_parts,
    matrix_scan_table,
    matrix_scan_vectors,
    microkernels,
    polynomial_blocks,
)
from mercer.backends.calls import by_call
from mercer.backends.matrix_block_layout import BLOCK, READ_FROM, READ_PUSH, block_room, kind, ones, pairs_of
from mercer.backends.matrix_block_parts import (
    PITCH,
    advance,
    fill,
    multiply,
    multiply_onto,
    pack_columns,
    prepare,
    remove,
    replace,
    seek_and_take,
    unpack_columns,
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
    pack_sought,
    pack_taken,
    panel_step,
    pieces_of,
    read_panel,
    write_rows,
)
from mercer.backends.matrix_scan_table import (
    ADDRESS,
    BETA,
    BONUS,
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
)
from mercer.backends.matrix_scan_vectors import column, locate, number
from mercer.backends.microkernels import LANES, ROW, TILE, add, fma, get, load, splat, store, store_row
from mercer.backends.polynomial_blocks import padded

F = np.float32
FEW = 8
"""Up to so many tokens go one by one: a block would be mostly empty."""
WIDE = 4 * ROW


def room(dim: int, slices: int) -> int:
    """Bytes of scratch of a thread that has so many slices of the value's columns."""
    each = 4 * (-(-dim // LANES) * LANES)
    tokens = FEW * (5 * each + 8) + PITCH * each // 4 + 2 * each + 4 * WIDE
    blocks = block_room.py_func(each) + 4 * TILE + 3 * BLOCK * PITCH + slices * PITCH * each // 4
    return -(-max(tokens, blocks) // ROW) * ROW


@by_call
def by_blocks(
    tensors: int, sizes: int, count: int, scale: float, work: int, b: int, h: int, begin: int, end: int
) -> None:
    """16 tokens at a time."""
    dim, width = number(sizes, DIM), number(sizes, VALUE_DIM)
    deep = padded(dim)
    each, size = 4 * deep, deep * PITCH
    tiles = work + block_room(each)
    values = tiles + 4 * TILE
    out = values + 2 * BLOCK * PITCH
    states = out + BLOCK * PITCH
    seeks, takes = seek_and_take(tensors)
    source, final = locate(tensors, STATE, b, h, 0), locate(tensors, FINAL, b, h, 0)
    for piece in range(begin, end):
        first, columns, state = piece * SLICE, columns_of(width, piece), states + (piece - begin) * size
        at = source + 4 * first if source else 0
        copy_rows(at, column(tensors, STATE, TOKEN), dim, columns, state, PITCH, deep, lanes_of(columns))
    for t in range(0, count, BLOCK):
        tokens = min(BLOCK, count - t)
        prepare(tensors, sizes, scale, b, h, t, tokens, dim, deep, work, tiles, BLOCK)
        for piece in range(begin, end):
            first, columns, state = piece * SLICE, columns_of(width, piece), states + (piece - begin) * size
            vectors = lanes_of(columns)
            if column(tensors, KEPT, ADDRESS) != 0 and t % OUTER == 0:
                keep(tensors, b, h, t, first, dim, vectors, state, PITCH)
            pack_columns(tensors, VALUE, b, h, t, tokens, first, columns, values, BLOCK)
            if takes:
                remove(work, deep, vectors, state, values)
            elif seeks:
                replace(work, deep, vectors, state, values)
            if column(tensors, REMOVED, ADDRESS) != 0:
                removed = values + BLOCK * PITCH if takes else values
                unpack_columns(tensors, REMOVED, b, h, t, tokens, first, columns, removed, BLOCK)
            multiply(vectors, kind(work, each, READ_FROM), each, 4, BLOCK, state, PITCH, deep, out, PITCH)
            written, pairs = 2 * BLOCK if takes else BLOCK, pairs_of(work, each, READ_PUSH)
            multiply_onto(vectors, pairs, 4, ROW, BLOCK, values, PITCH, written, out, PITCH, out, ones(work, each))
            advance(takes, work, deep, vectors, state, state, values)
            unpack_columns(tensors, OUT, b, h, t, tokens, first, columns, out, BLOCK)
    for piece in range(begin, end):
        first, columns, state = piece * SLICE, columns_of(width, piece), states + (piece - begin) * size
        write_rows(state, PITCH, dim, columns, final + 4 * first, column(tensors, FINAL, TOKEN))


@by_call
def keep(tensors: int, b: int, h: int, t: int, first: int, dim: int, vectors: int, state: int, pitch: int) -> None:
    """A slice's state before a token, for the backward pass: no more rows than 4 wants."""
    rows = (dim + 3) // 4 * 4
    kept = locate(tensors, KEPT, b, h, t // OUTER) + 4 * first * rows
    for x in range(rows):
        for c in range(0, vectors * ROW, ROW):
            store(kept + x * vectors * ROW + c, load(state + x * pitch + c))


@by_call
def by_tokens(tensors: int, sizes: int, count: int, scale: float, work: int, b: int, h: int, piece: int) -> None:
    """Up to FEW tokens of a slice of a head: what a token reads is taken while its new state is written, and so is what
    the next one removes.
    """
    dim, width = number(sizes, DIM), number(sizes, VALUE_DIM)
    first, columns = piece * SLICE, columns_of(width, piece)
    lanes, deep = lanes_of(columns), padded(dim)
    rows = (dim + 3) // 4 * 4
    each = 4 * deep
    token = 5 * each
    state = work + FEW * token
    spare = state + SLICE * each
    outs = spare + 2 * each
    own = outs + 4 * WIDE
    fill(outs, 4 * WIDE, splat(F(0)))
    removes, _ = seek_and_take(tensors)
    half, size = column(tensors, VALUE, HALF), 2 if column(tensors, VALUE, HALF) else 4
    out_half, out_size = column(tensors, OUT, HALF), 2 if column(tensors, OUT, HALF) else 4
    pitch = lanes * ROW
    source, final = locate(tensors, STATE, b, h, 0), locate(tensors, FINAL, b, h, 0) + 4 * first
    # A single token goes from the old state to the new one, without a copy between.
    straight = (
        source != 0 and count == 1 and columns == lanes * LANES and rows == dim and column(tensors, KEPT, ADDRESS) == 0
    )
    old, before, new, after = state, pitch, state, pitch
    if straight:
        old, before, new, after = (
            source + 4 * first,
            column(tensors, STATE, TOKEN),
            final,
            column(tensors, FINAL, TOKEN),
        )
    else:
        copy_rows(
            source + 4 * first if source else 0, column(tensors, STATE, TOKEN), dim, columns, state, pitch, rows, lanes
        )
    if count and column(tensors, KEPT, ADDRESS) != 0:
        keep(tensors, b, h, 0, first, dim, lanes, state, pitch)
    if count and removes:
        pack_sought(tensors, sizes, b, h, 0, dim, spare, spare + each)
        read_panel(lanes, old, before, rows, spare, outs + 3 * WIDE)
    for t in range(count):
        at, mine = work + t * token, own + 8 * t
        pack_decay(tensors, sizes, b, h, t, dim, at)
        pack(tensors, QUERY, b, h, t, dim, at + each)
        pack(tensors, KEY, b, h, t, dim, at + 2 * each)
        if removes:
            pack_taken(tensors, b, h, t, dim, at + 2 * each, at + 3 * each)
            if t + 1 < count:
                pack_sought(tensors, sizes, b, h, t + 1, dim, at + 4 * each, spare)
        own_products(removes, locate(tensors, BONUS, 0, h, 0), dim, scale, at, each, mine, mine + 4)
        v, r = outs + 2 * WIDE, outs + 3 * WIDE
        pack_some(locate(tensors, VALUE, b, h, t) + first * size, half, columns, v, size)
        if removes and column(tensors, REMOVED, ADDRESS) != 0:
            to = locate(tensors, REMOVED, b, h, t) + 4 * first
            for c in range(0, columns, LANES):
                removed = load(r + 4 * c)
                if column(tensors, BETA, ADDRESS) != 0:
                    removed = add(removed, load(v + 4 * c))
                store_row(to + 4 * c, 0, columns - c, removed)
        panel_step(lanes, removes, old, before, new, after, rows, at, each, outs)
        pushed, taken = splat(get(mine)), splat(get(mine + 4))
        to = locate(tensors, OUT, b, h, t) + first * out_size
        for c in range(0, columns, LANES):
            x = fma(pushed, load(v + 4 * c), load(outs + 4 * c))
            if removes:
                x = fma(taken, load(r + 4 * c), x)
                store(r + 4 * c, load(outs + WIDE + 4 * c))
            store_row(to + c * out_size, out_half, columns - c, x)
    if not straight:
        write_rows(state, pitch, dim, columns, final, column(tensors, FINAL, TOKEN))


_CALL = types.void(types.int64, types.int64, types.int64, types.float64, types.int64, types.int64, types.int64)


@lru_cache
def _stamp() -> str:
    """Names the sources of the inlined parts: Numba's cache looks at this file alone."""
    parts = (matrix_scan_backward, matrix_scan_parts, matrix_scan_table, matrix_scan_vectors)
    blocks = (matrix_block_layout, matrix_block_pairs, matrix_block_parts, matrix_block_vectors)
    files = (Path(m.__file__) for m in (calls, microkernels, polynomial_blocks, *parts, *blocks))
    return sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


@lru_cache
def compiled_forward() -> Any:
    """Forward for a run of the parts of all heads, compiled for this machine or read from the cache on
    disk.
    """
    return _forward(_stamp())


@lru_cache
def compiled_backward() -> Any:
    """:func:`backward_item` for a run of the parts of all heads, likewise."""
    return _backward(_stamp())


def _forward(stamp: str) -> Any:
    @njit(_CALL, nogil=True, cache=True)
    def call(tensors: int, sizes: int, lengths: int, scale: float, work: int, start: int, stop: int) -> None:
        if len(stamp):  # a closure over it, so that the cache tells versions apart
            for i in range(start, stop):
                head, part = i // number(sizes, PARTS), i % number(sizes, PARTS)
                b, h = head // number(sizes, HEADS), head % number(sizes, HEADS)
                count, (first, end) = number(lengths, b), pieces_of(sizes, part)
                if count > FEW:
                    by_blocks(tensors, sizes, count, scale, work, b, h, first, end)
                else:
                    for piece in range(first, end):
                        by_tokens(tensors, sizes, count, scale, work, b, h, piece)

    return call


def _backward(stamp: str) -> Any:
    @njit(_CALL, nogil=True, cache=True)
    def call(tensors: int, sizes: int, lengths: int, scale: float, work: int, start: int, stop: int) -> None:
        if len(stamp):
            for i in range(start, stop):
                head, part = i // number(sizes, PARTS), i % number(sizes, PARTS)
                b, h = head // number(sizes, HEADS), head % number(sizes, HEADS)
                backward_item(tensors, sizes, lengths, scale, work, b, h, part)

    return call
