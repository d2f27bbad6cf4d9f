"""Exact attention under sparse patterns in Numba, forward: the tiles of a program, softmax online.

The products are those of `mercer.backends.softmax_kernels`. What differs is where their sides come from: the queries of
a tile and blocks of its keys, which need not be neighbours, are gathered into the nearest caches as they are packed,
and a code says for 16 queries and 16 keys what is visible. A block is packed once for all query heads that share it.
"""

import math
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types

from mercer.backends import (
    microkernels,
    softmax_parts,
    softmax_vectors,
    sparse_backward,
    sparse_parts,
    sparse_program,
    sparse_table,
)
from mercer.backends.microkernels import (
    LANES,
    ROW,
    TILE,
    broadcast,
    fma,
    get,
    inverse,
    load,
    load_row,
    mul,
    put,
    splat,
    store,
    store_row,
)
from mercer.backends.polynomial_blocks import locate, padded
from mercer.backends.polynomial_parts import fill
from mercer.backends.polynomial_table import ADDRESS, HALF, TOKEN
from mercer.backends.softmax_parts import BLOCK
from mercer.backends.softmax_vectors import exp2, mix, scores, soften, subtract
from mercer.backends.sparse_backward import retrace_tiles
from mercer.backends.sparse_parts import TOGETHER, any_seen, blind, pack_chosen, veil_code
from mercer.backends.sparse_program import CODE, FIRST_KEYS, KEY_TILES, LATER, NONE, ROWS, VECTOR, VECTORS
from mercer.backends.sparse_table import (
    CHUNK,
    DIM,
    ENTRY,
    GROUP,
    KEY,
    KEY_HEAD,
    KEY_HEADS,
    KEY_LIMIT,
    LOG_SUM,
    MEMBER,
    MEMBERS,
    NARROW,
    OUT,
    QUERY,
    QUERY_LIMIT,
    SHIFT,
    SLOPES,
    START,
    STOP,
    VALUE,
    WIDTH,
)

F = np.float32
LOG2E = math.log2(math.e)
LEAST = F(-1e38)
"""The largest score of a row that has seen none."""


@njit
def attend_tiles(
    tensors: Any, sizes: Any, tiles: Any, queries: Any, keys: Any, codes: Any, masks: Any, weights: Any, rows: Any,
    _cuts: Any, scale: float, work: int, item: int,
) -> None:  # fmt: skip
    """Up to CHUNK tiles of a pass for one key head, of rows * KEY_HEADS * chunks: rows and log-sums are filled."""
    chunks = (sizes[STOP] - sizes[START] + sizes[CHUNK] - 1) // sizes[CHUNK]
    row, kv = item // chunks // sizes[KEY_HEADS], sizes[KEY_HEAD] + item // chunks % sizes[KEY_HEADS]
    begin = sizes[START] + item % chunks * sizes[CHUNK]
    for s in range(begin, min(begin + sizes[CHUNK], sizes[STOP])):
        abreast = max(1, TOGETHER // tiles[s, VECTORS])
        last = sizes[MEMBER] + sizes[MEMBERS]
        for member in range(sizes[MEMBER], last, abreast):
            attend_tile(
                tensors, sizes, tiles[s], queries, keys, codes, masks, weights, rows[row], scale, work, kv,
                kv * sizes[GROUP] + member, min(abreast, last - member),
            )  # fmt: skip


@njit
def attend_tile(
    tensors: Any, sizes: Any, tile: Any, queries: Any, keys: Any, codes: Any, masks: Any, weights: Any, row: Any,
    scale: float, work: int, kv: int, h0: int, heads: int,
) -> None:  # fmt: skip
    """One tile for some query heads that share a key head."""
    narrow, dim, width = sizes[NARROW], sizes[DIM], sizes[WIDTH]
    per = LANES // 2 if narrow else LANES
    steps, panels = padded(dim) // LANES * per, padded(width) // LANES
    b, here, there = row[ENTRY], row[QUERY_LIMIT], row[KEY_LIMIT]
    vectors, count, code = tile[VECTORS], tile[KEY_TILES], tile[CODE]
    many = heads * vectors
    block, soft = work, work + BLOCK * TILE
    factors = soft + BLOCK * TILE
    best, total = factors + ROW, factors + ROW + many * ROW
    sums = total + many * ROW
    packed = sums + many * panels * TILE
    packed_keys = packed + many * steps * ROW
    packed_values = packed_keys + BLOCK * steps * ROW
    bits = np.empty(LANES, np.uint16)
    spots = np.empty(LANES, np.int32)
    x, out = tensors[QUERY], tensors[OUT]
    fill(total, many, F(0))
    fill(sums, many * panels * LANES, F(0))
    for u in range(many):
        v, h = tile[VECTOR] + u % vectors, h0 + u // vectors
        pack_chosen(
            narrow, locate(tensors, QUERY, b, h, 0), x[HALF], x[TOKEN], queries, v, dim, block,
            packed + u * steps * ROW, 0, 0,
        )  # fmt: skip
        store(best + u * ROW, splat(LEAST))
        if tile[LATER]:  # what an earlier pass has left: rows divided by their sums, and the logarithms of these
            for r in range(queries[v, ROWS]):
                i = queries[v, r]
                log = get(locate(tensors, LOG_SUM, b, h, i))
                if log == F(-np.inf):
                    continue
                put(best + u * ROW + 4 * r, F(log * F(LOG2E)))
                put(total + u * ROW + 4 * r, F(1))
                at = locate(tensors, OUT, b, h, i)
                for p in range(panels):
                    store(sums + (u * panels + p) * TILE + r * ROW, load_row(at + p * ROW, 0, width - p * LANES))
    factor = F(scale * LOG2E)
    for first in range(0, count, BLOCK):
        last = min(first + BLOCK, count)
        if blind(codes, keys, code, tile[FIRST_KEYS], vectors, count, first, last, there):
            continue
        for t in range(first, last):
            k = tile[FIRST_KEYS] + t
            y = tensors[KEY]
            pack_chosen(
                narrow, locate(tensors, KEY, b, kv, 0), y[HALF], y[TOKEN], keys, k, dim, block,
                packed_keys + (t - first) * steps * ROW, 0, 0,
            )  # fmt: skip
            y = tensors[VALUE]
            pack_chosen(
                narrow, locate(tensors, VALUE, b, kv, 0), y[HALF], y[TOKEN], keys, k, width, block,
                0, packed_values + (t - first) * per * ROW, BLOCK * per * ROW,
            )  # fmt: skip
        for u in range(many):
            v, h = u % vectors, h0 + u // vectors
            slope = F(0)
            if tensors[SLOPES, ADDRESS] != 0:
                slope = F(get(tensors[SLOPES, ADDRESS] + 4 * h) * F(LOG2E))
                for r in range(LANES):
                    spots[r] = queries[tile[VECTOR] + v, r] + sizes[SHIFT]
            own = code + v * count
            start, stop = last, first
            for t in range(first, last):
                if codes[own + t] != NONE:
                    start, stop = min(start, t), t + 1
            if start >= stop:
                continue
            before = load(best + u * ROW)
            top = before
            for t in range(start, stop):
                to, at = block + (t - start) * TILE, packed_keys + (t - first) * steps * ROW
                if codes[own + t] == NONE:
                    fill(to, LANES, F(-np.inf))
                    continue
                largest = scores(narrow, at, packed + u * steps * ROW, to, steps, factor, top)
                k = tile[FIRST_KEYS] + t
                top = veil_code(to, codes[own + t], masks, weights, keys, k, there, slope, spots, bits, top, largest)
            keep = exp2(subtract(before, top))
            store(factors, keep)
            store(best + u * ROW, top)
            more = soften(narrow, block, soft, (stop - start) * LANES, top)
            store(total + u * ROW, fma(load(total + u * ROW), keep, more))
            for p in range(panels):
                at = packed_values + (p * BLOCK + start - first) * per * ROW
                mix(narrow, soft, at, sums + (u * panels + p) * TILE, (stop - start) * per, factors)
    size = 2 if out[HALF] else 4
    for u in range(many):
        v, h = u % vectors, h0 + u // vectors
        store(factors, inverse(load(total + u * ROW)))
        for r in range(queries[tile[VECTOR] + v, ROWS]):
            i = queries[tile[VECTOR] + v, r]
            if i >= here:
                continue
            mass, log = get(total + u * ROW + 4 * r), F(-np.inf)
            if mass != F(0):
                log = F((get(best + u * ROW + 4 * r) + math.log2(mass)) / LOG2E)
            elif any_seen(codes, masks, weights, keys, code + v * count, tile[FIRST_KEYS], count, r, there):
                log = F(np.nan)  # scores of -infinity only: not the same as none
                put(factors + 4 * r, log)
            put(locate(tensors, LOG_SUM, b, h, i), log)
            at = locate(tensors, OUT, b, h, i)
            for p in range(panels):
                line = mul(load(sums + (u * panels + p) * TILE + r * ROW), broadcast(factors + 4 * r))
                store_row(at + p * LANES * size, out[HALF], width - p * LANES, line)


def room(dim: int, width: int, most: int, members: int) -> int:
    """Bytes of scratch that one thread of the forward pass needs."""
    wide, many = padded.py_func, max(most, min(TOGETHER, most * members))
    sides = wide(dim) + wide(width)
    return 2 * BLOCK * TILE + ROW + (many * (2 + sides) + BLOCK * sides) * ROW


_WHOLE, _PLACES = types.Array(types.int64, 2, "C"), types.Array(types.int32, 2, "C")
_TAKES = (
    _WHOLE, types.Array(types.int64, 1, "C"), _WHOLE, _PLACES, _PLACES, types.Array(types.int32, 1, "C"),
    types.Array(types.uint16, 2, "C"), types.Array(types.float32, 2, "C"), _WHOLE, types.Array(types.int64, 1, "C"),
    types.float64, types.int64, types.int64,
)  # fmt: skip


@lru_cache
def compiled() -> tuple[Any, Any]:
    """`attend_tiles` and `retrace_tiles`, compiled for this machine or read from the cache on disk."""
    modules = (
        microkernels,
        softmax_vectors,
        softmax_parts,
        sparse_parts,
        sparse_program,
        sparse_table,
        sparse_backward,
    )
    return _compiled(sha256(b"".join(Path(m.__file__).read_bytes() for m in modules)).hexdigest())


def _compiled(stamp: str) -> tuple[Any, Any]:
    """The stamp is looked at by the compiled code, so that Numba's cache tells versions of the other files apart."""

    @njit(types.void(*_TAKES), nogil=True, cache=True)
    def first(
        tensors: Any, sizes: Any, tiles: Any, queries: Any, keys: Any, codes: Any, masks: Any, weights: Any, rows: Any,
        cuts: Any, scale: float, work: int, item: int,
    ) -> None:  # fmt: skip
        if len(stamp):
            attend_tiles(
                tensors, sizes, tiles, queries, keys, codes, masks, weights, rows, cuts, scale, work, item
            )  # fmt: skip

    @njit(types.void(*_TAKES), nogil=True, cache=True)
    def second(
        tensors: Any, sizes: Any, tiles: Any, queries: Any, keys: Any, codes: Any, masks: Any, weights: Any, rows: Any,
        cuts: Any, scale: float, work: int, item: int,
    ) -> None:  # fmt: skip
        if len(stamp):
            retrace_tiles(
                tensors, sizes, tiles, queries, keys, codes, masks, weights, rows, cuts, scale, work, item
            )  # fmt: skip

    return first, second
