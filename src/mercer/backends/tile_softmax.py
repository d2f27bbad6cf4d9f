"""Exact attention in the tile registers of AMX, forward: as `softmax_kernels`, with products of 16 by 16 by 32.

Scores have a row per key and a lane per query, and sums of values a row per entry of a value and a lane per query, so
that everything a query has one of stands in a lane. Keys are packed as left sides, 16 rows of 32 entries, values as
left sides of the second product, 16 entries of a value by 32 keys; queries and weights are the right sides. Sums are
only reduced where the largest score of a query has changed.

Operations: for 16 queries and 16 keys the products take (D + Dv) cycles of a unit of their own, which is less than the
vector instructions between them.
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
    softmax_backward,
    softmax_parts,
    softmax_table,
    softmax_vectors,
    tile_backward,
    tile_parts,
    tile_vectors,
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
    mul,
    put,
    splat,
    store,
    store_row,
    transpose,
)
from mercer.backends.polynomial_blocks import locate, padded
from mercer.backends.polynomial_parts import fill
from mercer.backends.polynomial_table import ADDRESS, HALF, TOKEN
from mercer.backends.softmax_parts import kind, lowest_and_highest, sees
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
from mercer.backends.softmax_vectors import exp2, get_whole, subtract, veil
from mercer.backends.tile_backward import retrace
from mercer.backends.tile_parts import BLOCK, DEEP, GROUP_TILES, deep, pack_left, pack_pairs, pack_right
from mercer.backends.tile_vectors import (
    SHAPES,
    alike,
    end_tiles,
    multiply,
    peak,
    reduce_lanes,
    rescale,
    soften_pairs,
    start_tiles,
)

F = np.float32
LOG2E = math.log2(math.e)
LEAST = F(-1e38)


@njit
def pack_keys(tensors: Any, sizes: Any, work: int, start: int, stop: int) -> None:
    """Pairs of tiles start..stop-1 of B * Hk * pairs: keys and values as left sides."""
    heads, dim, width, length = sizes[HEADS], sizes[DIM], sizes[WIDTH], sizes[KEYS]
    pairs, steps, panels = deep(length), deep(dim), padded(width) // LANES
    for item in range(start, stop):
        head, t = item // pairs, item % pairs
        b, h, rows = head // heads, head % heads, min(DEEP, length - t * DEEP)
        x = tensors[KEY]
        for half in range(2):
            at = locate(tensors, KEY, b, h, t * DEEP + half * LANES)
            to = sizes[PACKED_KEYS] + (item * 2 + half) * steps * TILE
            pack_left(at, x[HALF], x[TOKEN], min(rows - half * LANES, LANES), dim, to)
        x, at = tensors[VALUE], locate(tensors, VALUE, b, h, t * DEEP)
        pack_pairs(at, x[HALF], x[TOKEN], rows, width, work, work + TILE, TILE)
        for p in range(panels):
            transpose(work + (1 + p) * TILE, sizes[PACKED_VALUES] + ((head * panels + p) * pairs + t) * TILE)


@njit
def attend(tensors: Any, sizes: Any, scale: float, work: int, item: int) -> None:
    """One run of up to CHUNK tiles of queries of one head: its rows and their log-sums are filled."""
    heads, dim, width = sizes[HEADS] * sizes[GROUP], sizes[DIM], sizes[WIDTH]
    left, right = sizes[LEFT], sizes[RIGHT]
    steps, panels = deep(dim), padded(width) // LANES
    all_queries, pairs = 2 * deep(sizes[QUERIES]), deep(sizes[KEYS])
    all_keys = 2 * pairs
    runs = (all_queries + sizes[CHUNK] - 1) // sizes[CHUNK]
    b, h = item // runs // heads, item // runs % heads
    begin = (runs - 1 - item % runs) * sizes[CHUNK]  # the longest first where earlier queries see less
    count = min(sizes[CHUNK], all_queries - begin)
    head = b * sizes[HEADS] + h // sizes[GROUP]
    keys = sizes[PACKED_KEYS] + head * all_keys * steps * TILE
    values = sizes[PACKED_VALUES] + head * panels * pairs * TILE
    query_at, key_at = locate(tensors, QUERY_AT, b, 0, begin * LANES), locate(tensors, KEY_AT, b, 0, 0)
    query_low, query_high = locate(tensors, QUERY_LOW, b, 0, begin), locate(tensors, QUERY_HIGH, b, 0, begin)
    key_low, key_high = locate(tensors, KEY_LOW, b, 0, 0), locate(tensors, KEY_HIGH, b, 0, 0)
    slope = F(0)
    if tensors[SLOPES, ADDRESS] != 0:
        slope = F(get(tensors[SLOPES, ADDRESS] + 4 * h) * F(LOG2E))
    factor = F(scale * LOG2E)
    # Scores are kept as they are and scaled inside the exponential, where the largest stays the largest by that.
    plain = slope == F(0) and factor > F(0)
    inner, outer = (F(1), factor) if plain else (factor, F(1))

    kept, block = work, work + 2 * SHAPES
    weights = block + 2 * BLOCK * TILE
    factors = weights + BLOCK * TILE // 2
    best, total = factors + ROW, factors + ROW + count * ROW
    sums = total + count * ROW
    queries = sums + count * panels * TILE
    x = tensors[QUERY]
    for v in range(count):
        first = (begin + v) * LANES
        at = locate(tensors, QUERY, b, h, first)
        rows = min(LANES, sizes[QUERIES] - first)
        pack_right(at, x[HALF], x[TOKEN], rows, dim, block, queries + v * steps * TILE)
        store(best + v * ROW, splat(LEAST))
    fill(total, count, F(0))
    fill(sums, count * panels * LANES, F(0))
    low, high = lowest_and_highest(query_low, query_high, count)
    start_tiles(kept)
    seen = np.empty((3, count), np.int64)
    for first in range(0, all_keys, BLOCK):
        last = min(first + BLOCK, all_keys)
        least, most = lowest_and_highest(key_low + 4 * first, key_high + 4 * first, last - first)
        if kind(low, high, least, most, left, right) == 0:
            continue
        some = 0
        for v in range(count):
            lower, upper = get_whole(query_low + 4 * v), get_whole(query_high + 4 * v)
            start, stop = last, first
            for t in range(first, last):
                if kind(lower, upper, get_whole(key_low + 4 * t), get_whole(key_high + 4 * t), left, right):
                    start, stop = min(start, t), t + 1
            if start < stop:
                seen[0, some], seen[1, some], seen[2, some] = v, start // 2 * 2, (stop + 1) // 2 * 2
                some += 1
        if some == 0:
            continue
        for t in range(seen[1, 0], seen[2, 0], GROUP_TILES):
            at = queries + seen[0, 0] * steps * TILE
            many = min(GROUP_TILES, seen[2, 0] - t)
            multiply(1, keys + t * steps * TILE, at, steps * TILE, block + (t - first) * TILE, many, steps)
        for i in range(some):
            v, start, stop = seen[0, i], seen[1, i], seen[2, i]
            here, there = block + i % 2 * BLOCK * TILE, block + (i + 1) % 2 * BLOCK * TILE
            if inner != F(1):
                rescale(here + (start - first) * TILE, (stop - start) * LANES, inner)
            lower, upper = get_whole(query_low + 4 * v), get_whole(query_high + 4 * v)
            before = load(best + v * ROW)
            top = before
            t = start
            while t < stop:
                after = t
                while (
                    slope == F(0)
                    and after < stop
                    and (
                        kind(lower, upper, get_whole(key_low + 4 * after), get_whole(key_high + 4 * after), left, right)
                        == 2
                    )
                ):
                    after += 1
                if after > t:
                    top = peak(here + (t - first) * TILE, (after - t) * LANES, top)
                    t = after
                else:
                    spots = query_at + 4 * v * LANES
                    to = here + (t - first) * TILE
                    top = veil(to, key_at + 4 * t * LANES, spots, left, left + right, slope, top)
                    t += 1
            mass = load(total + v * ROW)
            if not alike(before, top):
                keep = exp2(mul(subtract(before, top), splat(outer)))
                store(best + v * ROW, top)
                mass = mul(mass, keep)
                reduce_lanes(sums + v * panels * TILE, panels * LANES, keep)
            shift = mul(top, splat(-outer))
            # The products of the next queries' scores and of these weights run beside the exponentials between them.
            for t in range(first, last, GROUP_TILES):
                if i + 1 < some and t + GROUP_TILES > seen[1, i + 1] and t < seen[2, i + 1]:
                    begun, ended = max(t, seen[1, i + 1]), min(t + GROUP_TILES, seen[2, i + 1])
                    at = queries + seen[0, i + 1] * steps * TILE
                    to = there + (begun - first) * TILE
                    multiply(1, keys + begun * steps * TILE, at, steps * TILE, to, ended - begun, steps)
                begun, ended = max(t, start), min(t + GROUP_TILES, stop)
                if begun < ended:
                    spot = weights + (begun - first) * (TILE // 2)
                    more = soften_pairs(here + (begun - first) * TILE, spot, (ended - begun) * LANES, outer, shift)
                    mass = fma(more, splat(F(1)), mass)
                    for p in range(0, panels, 4):
                        at = values + (p * pairs + begun // 2) * TILE
                        to = sums + (v * panels + p) * TILE
                        multiply(0, at, spot, pairs * TILE, to, min(4, panels - p), (ended - begun) // 2)
            store(total + v * ROW, mass)
    end_tiles(kept)
    x = tensors[OUT]
    size = 2 if x[HALF] else 4
    for v in range(count):
        first = (begin + v) * LANES
        store(factors, inverse(load(total + v * ROW)))
        for p in range(panels):
            transpose(sums + (v * panels + p) * TILE, sums + (v * panels + p) * TILE)
        for r in range(min(LANES, sizes[QUERIES] - first)):
            mass, log = get(total + v * ROW + 4 * r), F(-np.inf)
            if mass != F(0):
                log = F((get(best + v * ROW + 4 * r) * outer + math.log2(mass)) / LOG2E)
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
    panels = padded.py_func(width) // LANES
    fixed = 2 * SHAPES + 2 * BLOCK * TILE + BLOCK * TILE // 2 + ROW
    return max(fixed + chunk * (2 * ROW + panels * TILE + deep.py_func(dim) * TILE), (1 + panels) * TILE)


_TABLE, _SIZES = types.Array(types.int64, 2, "C"), types.Array(types.int64, 1, "C")


@lru_cache
def compiled() -> tuple[Any, Any, Any]:
    """`pack_keys`, `attend` and `retrace`, compiled for this machine or read from the cache on disk."""
    modules = (
        microkernels, softmax_vectors, softmax_parts, softmax_table, softmax_backward, tile_vectors, tile_parts,
        tile_backward,
    )  # fmt: skip
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
