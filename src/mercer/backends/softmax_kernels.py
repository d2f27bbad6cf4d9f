"""Exact attention in Numba, forward: queries 16 at a time in the lanes, keys in blocks, softmax online.

For 16 queries and a block of keys: scores with a row per key and a lane per query, so that the largest score, the sum
of weights and the factor that earlier sums are reduced by are plain vector operations; their exponentials, packed at
once as the left side of the second product; and the second product, added to sums that stay in the nearest caches while
a few hundred queries pass the block. Packed keys and values of a head are shared by all its queries and threads.

Operations: a pair of a query and a key takes 2 D multiplications and additions for its score and 2 Dv for its value,
and about 10 vector instructions for 16 pairs beside the (D + Dv) of the products, half as many with pairs of bfloat16.
"""

import math
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types

from mercer.backends import microkernels, softmax_backward, softmax_parts, softmax_table, softmax_vectors
from mercer.backends.microkernels import (
    LANES,
    ROW,
    TILE,
    broadcast,
    fma,
    get,
    inverse,
    load,
    mul,
    put,
    splat,
    store,
    store_row,
)
from mercer.backends.polynomial_blocks import locate, padded
from mercer.backends.polynomial_parts import fill
from mercer.backends.polynomial_table import ADDRESS, HALF, TOKEN
from mercer.backends.softmax_backward import retrace
from mercer.backends.softmax_parts import BLOCK, kind, lowest_and_highest, pack, sees
from mercer.backends.softmax_table import (
    CHUNK,
    DIM,
    GROUP,
    HEADS,
    KEY,
    KEY_AT,
    KEY_HIGH,
    KEY_LOW,
    KEYS,
    LEFT,
    LOG_SUM,
    NARROW,
    OUT,
    PACKED_KEYS,
    PACKED_VALUES,
    QUERIES,
    QUERY,
    QUERY_AT,
    QUERY_HIGH,
    QUERY_LOW,
    RIGHT,
    SLOPES,
    VALUE,
    WIDTH,
)
from mercer.backends.softmax_vectors import exp2, get_whole, mix, scores, soften, subtract, veil

F = np.float32
LOG2E = math.log2(math.e)
LEAST = F(-1e38)
"""The largest score of a row that has seen none."""


@njit
def pack_keys(tensors: Any, sizes: Any, work: int, start: int, stop: int) -> None:
    """Tiles start..stop-1 of B * Hk * tiles: keys for the first product, values for the second."""
    narrow, heads, dim, width, length = sizes[NARROW], sizes[HEADS], sizes[DIM], sizes[WIDTH], sizes[KEYS]
    per = LANES // 2 if narrow else LANES
    tiles, steps, panels = padded(length) // LANES, padded(dim) // LANES * per, padded(width) // LANES
    for item in range(start, stop):
        head, t = item // tiles, item % tiles
        b, h, rows = head // heads, head % heads, min(LANES, length - t * LANES)
        x, to = tensors[KEY], sizes[PACKED_KEYS] + item * steps * ROW
        at = locate(tensors, KEY, b, h, t * LANES)
        pack(narrow, at, x[HALF], x[TOKEN], rows, dim, work, to, 0, 0)
        x, to = tensors[VALUE], sizes[PACKED_VALUES] + (head * panels * tiles + t) * per * ROW
        at = locate(tensors, VALUE, b, h, t * LANES)
        pack(narrow, at, x[HALF], x[TOKEN], rows, width, work, 0, to, tiles * per * ROW)


@njit
def attend(tensors: Any, sizes: Any, scale: float, work: int, item: int) -> None:
    """One run of up to CHUNK tiles of queries of one head: its rows and their log-sums are filled."""
    narrow, heads, dim, width = sizes[NARROW], sizes[HEADS] * sizes[GROUP], sizes[DIM], sizes[WIDTH]
    left, right = sizes[LEFT], sizes[RIGHT]
    per = LANES // 2 if narrow else LANES
    steps, panels = padded(dim) // LANES * per, padded(width) // LANES
    all_queries, all_keys = padded(sizes[QUERIES]) // LANES, padded(sizes[KEYS]) // LANES
    runs = (all_queries + sizes[CHUNK] - 1) // sizes[CHUNK]
    b, h = item // runs // heads, item // runs % heads
    begin = (runs - 1 - item % runs) * sizes[CHUNK]  # the longest first where earlier queries see less
    count = min(sizes[CHUNK], all_queries - begin)
    head = b * sizes[HEADS] + h // sizes[GROUP]
    keys = sizes[PACKED_KEYS] + head * all_keys * steps * ROW
    values = sizes[PACKED_VALUES] + head * panels * all_keys * per * ROW
    query_at, key_at = locate(tensors, QUERY_AT, b, 0, begin * LANES), locate(tensors, KEY_AT, b, 0, 0)
    query_low, query_high = locate(tensors, QUERY_LOW, b, 0, begin), locate(tensors, QUERY_HIGH, b, 0, begin)
    key_low, key_high = locate(tensors, KEY_LOW, b, 0, 0), locate(tensors, KEY_HIGH, b, 0, 0)
    slope = F(0)
    if tensors[SLOPES, ADDRESS] != 0:
        slope = F(get(tensors[SLOPES, ADDRESS] + 4 * h) * F(LOG2E))
    factor = F(scale * LOG2E)

    block, weights = work, work + BLOCK * TILE
    factors = weights + BLOCK * TILE
    best, total = factors + ROW, factors + ROW + count * ROW
    sums = total + count * ROW
    queries = sums + count * panels * TILE
    x = tensors[QUERY]
    for v in range(count):
        first = (begin + v) * LANES
        rows = min(LANES, sizes[QUERIES] - first)
        at = locate(tensors, QUERY, b, h, first)
        pack(narrow, at, x[HALF], x[TOKEN], rows, dim, block, queries + v * steps * ROW, 0, 0)
        store(best + v * ROW, splat(LEAST))
    fill(total, count, F(0))
    fill(sums, count * panels * LANES, F(0))
    low, high = lowest_and_highest(query_low, query_high, count)
    for first in range(0, all_keys, BLOCK):
        last = min(first + BLOCK, all_keys)
        least, most = lowest_and_highest(key_low + 4 * first, key_high + 4 * first, last - first)
        if kind(low, high, least, most, left, right) == 0:
            continue
        for v in range(count):
            lower, upper = get_whole(query_low + 4 * v), get_whole(query_high + 4 * v)
            start, stop = last, first
            for t in range(first, last):
                if kind(lower, upper, get_whole(key_low + 4 * t), get_whole(key_high + 4 * t), left, right):
                    start, stop = min(start, t), t + 1
            if start >= stop:
                continue
            before = load(best + v * ROW)
            top = before
            for t in range(start, stop):
                to, at = block + (t - start) * TILE, keys + t * steps * ROW
                seen = kind(lower, upper, get_whole(key_low + 4 * t), get_whole(key_high + 4 * t), left, right)
                if seen == 2 and slope == F(0):
                    top = scores(narrow, at, queries + v * steps * ROW, to, steps, factor, top)
                else:
                    scores(narrow, at, queries + v * steps * ROW, to, steps, factor, top)
                    spots = query_at + 4 * v * LANES
                    top = veil(to, key_at + 4 * t * LANES, spots, left, left + right, slope, top)
            keep = exp2(subtract(before, top))
            store(factors, keep)
            store(best + v * ROW, top)
            more = soften(narrow, block, weights, (stop - start) * LANES, top)
            store(total + v * ROW, fma(load(total + v * ROW), keep, more))
            for p in range(panels):
                at = values + (p * all_keys + start) * per * ROW
                mix(narrow, weights, at, sums + (v * panels + p) * TILE, (stop - start) * per, factors)
    x = tensors[OUT]
    size = 2 if x[HALF] else 4
    for v in range(count):
        first = (begin + v) * LANES
        store(factors, inverse(load(total + v * ROW)))
        for r in range(min(LANES, sizes[QUERIES] - first)):
            mass, log = get(total + v * ROW + 4 * r), F(-np.inf)
            if mass != F(0):
                log = F((get(best + v * ROW + 4 * r) + math.log2(mass)) / LOG2E)
            elif sees(get_whole(query_at + 4 * (v * LANES + r)), key_at, key_low, key_high, all_keys, left, right):
                log = F(np.nan)  # scores of -infinity only: not the same as none
                put(factors + 4 * r, log)
            put(locate(tensors, LOG_SUM, b, h, first + r), log)
            at = locate(tensors, OUT, b, h, first + r)
            for p in range(panels):
                row = mul(load(sums + (v * panels + p) * TILE + r * ROW), broadcast(factors + 4 * r))
                store_row(at + p * LANES * size, x[HALF], width - p * LANES, row)


def room(dim: int, width: int, chunk: int) -> int:
    """Bytes of scratch that one thread of the forward pass needs."""
    wide = padded.py_func
    return 2 * BLOCK * TILE + ROW + chunk * (2 * ROW + wide(width) * ROW + wide(dim) * ROW)


_TABLE, _SIZES = types.Array(types.int64, 2, "C"), types.Array(types.int64, 1, "C")


@lru_cache
def compiled() -> tuple[Any, Any, Any]:
    """`pack_keys`, `attend` and `retrace`, compiled for this machine or read from the cache on disk."""
    modules = (microkernels, softmax_vectors, softmax_parts, softmax_table, softmax_backward)
    return _compiled(sha256(b"".join(Path(m.__file__).read_bytes() for m in modules)).hexdigest())


def _compiled(stamp: str) -> tuple[Any, Any, Any]:
    """The stamp is looked at by the compiled code, so that Numba's cache tells versions of the other files apart."""

    @njit(types.void(_TABLE, _SIZES, types.int64, types.int64, types.int64), nogil=True, cache=True)
    def first(tensors: Any, sizes: Any, work: int, start: int, stop: int) -> None:
        if len(stamp):
            pack_keys(tensors, sizes, work, start, stop)

    @njit(types.void(_TABLE, _SIZES, types.float64, types.int64, types.int64), nogil=True, cache=True)
    def second(tensors: Any, sizes: Any, scale: float, work: int, item: int) -> None:
        if len(stamp):
            attend(tensors, sizes, scale, work, item)

    @njit(types.void(_TABLE, _SIZES, types.float64, types.int64, types.int64), nogil=True, cache=True)
    def third(tensors: Any, sizes: Any, scale: float, work: int, item: int) -> None:
        if len(stamp):
            retrace(tensors, sizes, scale, work, item)

    return first, second, third
