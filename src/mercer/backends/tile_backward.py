"""Exact attention in the tile registers of AMX, backward: as `softmax_backward`, with products of 16 by 16 by 32.

Weights and their slopes are made with a row per key and a lane per query. Beside each other in rows they are left sides
of the products over queries, which give the gradients of keys and values; in pairs of keys they are right sides of the
product over keys, which gives those of queries with a row per entry.
"""

import math
from typing import Any

import numpy as np
from numba import njit

from mercer.backends.microkernels import LANES, ROW, TILE, get, load, mul, splat, transpose
from mercer.backends.polynomial_blocks import locate, padded
from mercer.backends.polynomial_parts import fill
from mercer.backends.polynomial_table import ADDRESS, HALF, TOKEN
from mercer.backends.softmax_backward import row_terms, write
from mercer.backends.softmax_parts import kind, lowest_and_highest
from mercer.backends.softmax_table import (
    DIM,
    GRAD_KEY,
    GRAD_QUERY,
    GRAD_STRIDE,
    GRAD_VALUE,
    GROUP,
    HEADS,
    KEY,
    KEY_AT,
    KEY_HIGH,
    KEY_LOW,
    KEYS,
    LEFT,
    QUERIES,
    QUERY,
    QUERY_AT,
    QUERY_HIGH,
    QUERY_LOW,
    RIGHT,
    SLOPES,
    SPLIT,
    SPLITS,
    UPSTREAM,
    VALUE,
    WIDTH,
)
from mercer.backends.softmax_vectors import get_whole, veil
from mercer.backends.tile_parts import GROUP_TILES, deep, pack_left, pack_pairs, pack_right
from mercer.backends.tile_vectors import SHAPES, clear_half, end_tiles, grade_pairs, multiply, rescale, start_tiles

F = np.float32
LOG2E = math.log2(math.e)
BLOCK = 8
"""Tiles of 16 keys that are taken together, an even number."""
VECTORS = 8
"""Tiles of 16 queries that meet them together, an even number."""
TOGETHER = 32
"""Tiles of queries that are packed and pass all keys of the run before the next ones: they fit the second cache."""


@njit
def retrace(tensors: Any, sizes: Any, scale: float, work: int, item: int) -> None:
    """One run of keys of a head, of B * Hk * SPLITS: the gradients of its keys and values are filled, and its part of
    those of the queries.
    """
    heads, group, dim, width = sizes[HEADS], sizes[GROUP], sizes[DIM], sizes[WIDTH]
    left, right = sizes[LEFT], sizes[RIGHT]
    panels, value_panels = padded(dim) // LANES, padded(width) // LANES
    steps, value_steps = deep(dim), deep(width)
    all_queries, all_keys = 2 * deep(sizes[QUERIES]), 2 * deep(sizes[KEYS])
    b, h0, split = item // sizes[SPLITS] // heads, item // sizes[SPLITS] % heads, item % sizes[SPLITS]
    begin = split * sizes[SPLIT]
    count = min(sizes[SPLIT], all_keys - begin)
    many = min(TOGETHER, all_queries)
    key_at = locate(tensors, KEY_AT, b, 0, begin * LANES)
    key_low, key_high = locate(tensors, KEY_LOW, b, 0, begin), locate(tensors, KEY_HIGH, b, 0, begin)
    least_key, most_key = lowest_and_highest(key_low, key_high, count)

    kept, tile = work, work + 2 * SHAPES
    scores = tile + TILE
    others = scores + 2 * BLOCK * TILE
    weights = others + 2 * BLOCK * TILE
    slopes = weights + BLOCK * VECTORS // 2 * TILE
    turned = slopes + BLOCK * VECTORS // 2 * TILE
    spare = turned + BLOCK // 2 * TILE
    keys = spare + max(panels, value_panels) * TILE
    turned_keys = keys + count * steps * TILE
    values = turned_keys + panels * (count // 2) * TILE
    grad_keys = values + count * value_steps * TILE
    grad_values = grad_keys + count * panels * TILE
    queries = grad_values + count * value_panels * TILE
    query_rows = queries + many * steps * TILE
    ups = query_rows + panels * (many // 2) * TILE
    up_rows = ups + many * value_steps * TILE
    grad_queries = up_rows + value_panels * (many // 2) * TILE
    logs = grad_queries + many * panels * TILE
    along = logs + many * ROW
    seen = np.empty((3, VECTORS), np.int64)

    for t in range(count):
        first = (begin + t) * LANES
        rows = min(LANES, sizes[KEYS] - first)
        x, at = tensors[KEY], locate(tensors, KEY, b, h0, first)
        pack_left(at, x[HALF], x[TOKEN], rows, dim, keys + t * steps * TILE)
        if t % 2 == 0:
            pack_pairs(at, x[HALF], x[TOKEN], sizes[KEYS] - first, dim, tile, spare, TILE)
            for p in range(panels):
                transpose(spare + p * TILE, turned_keys + (p * (count // 2) + t // 2) * TILE)
        x, at = tensors[VALUE], locate(tensors, VALUE, b, h0, first)
        pack_left(at, x[HALF], x[TOKEN], rows, width, values + t * value_steps * TILE)
    fill(grad_keys, count * panels * LANES, F(0))
    fill(grad_values, count * value_panels * LANES, F(0))
    factor = F(scale * LOG2E)
    start_tiles(kept)
    for h in range(h0 * group, (h0 + 1) * group):
        slope = F(0)
        if tensors[SLOPES, ADDRESS] != 0:
            slope = F(get(tensors[SLOPES, ADDRESS] + 4 * h) * F(LOG2E))
        plain = slope == F(0) and factor > F(0)
        inner, outer = (F(1), factor) if plain else (factor, F(1))
        for base in range(0, all_queries, TOGETHER):
            now = min(TOGETHER, all_queries - base)
            query_at = locate(tensors, QUERY_AT, b, 0, base * LANES)
            query_low, query_high = locate(tensors, QUERY_LOW, b, 0, base), locate(tensors, QUERY_HIGH, b, 0, base)
            low, high = lowest_and_highest(query_low, query_high, now)
            fill(grad_queries, now * panels * LANES, F(0))
            if kind(low, high, least_key, most_key, left, right):
                for v in range(now):
                    first = (base + v) * LANES
                    left_over = sizes[QUERIES] - first
                    rows = min(LANES, left_over)
                    x, at = tensors[QUERY], locate(tensors, QUERY, b, h, first)
                    pack_right(at, x[HALF], x[TOKEN], rows, dim, tile, queries + v * steps * TILE)
                    if v % 2 == 0:
                        to = query_rows + v // 2 * TILE
                        pack_pairs(at, x[HALF], x[TOKEN], left_over, dim, tile, to, many // 2 * TILE)
                    x, at = tensors[UPSTREAM], locate(tensors, UPSTREAM, b, h, first)
                    pack_right(at, x[HALF], x[TOKEN], rows, width, tile, ups + v * value_steps * TILE)
                    if v % 2 == 0:
                        to = up_rows + v // 2 * TILE
                        pack_pairs(at, x[HALF], x[TOKEN], left_over, width, tile, to, many // 2 * TILE)
                    row_terms(tensors, sizes, b, h, first, rows, tile, logs + v * ROW, along + v * ROW)
                for k0 in range(0, count, BLOCK):
                    k1 = min(k0 + BLOCK, count)
                    least, most = lowest_and_highest(key_low + 4 * k0, key_high + 4 * k0, k1 - k0)
                    if kind(low, high, least, most, left, right) == 0:
                        continue
                    for v0 in range(0, now, VECTORS):
                        v1 = min(v0 + VECTORS, now)
                        some = 0
                        for v in range(v0, v1):
                            lower, upper = get_whole(query_low + 4 * v), get_whole(query_high + 4 * v)
                            start, stop = k1, k0
                            for t in range(k0, k1):
                                if kind(
                                    lower, upper, get_whole(key_low + 4 * t), get_whole(key_high + 4 * t), left, right
                                ):
                                    start, stop = min(start, t), t + 1
                            if start < stop:
                                start, stop = start // 2 * 2, (stop + 1) // 2 * 2
                                seen[0, some], seen[1, some], seen[2, some] = v, start, stop
                                some += 1
                            for t in range(k0, k1):
                                if t < start or t >= stop:
                                    row = ((t - k0) * (VECTORS // 2) + (v - v0) // 2) * TILE + (v - v0) % 2 * (ROW // 2)
                                    clear_half(weights + row)
                                    clear_half(slopes + row)
                        if some == 0:
                            continue
                        for i in range(-1, some):
                            # The products of the next queries run beside the exponentials of these.
                            here, there = i % 2 * BLOCK * TILE, (i + 1) % 2 * BLOCK * TILE
                            for t in range(k0, k1, GROUP_TILES):
                                if i + 1 < some:
                                    v = seen[0, i + 1]
                                    begun, ended = max(t, seen[1, i + 1]), min(t + GROUP_TILES, seen[2, i + 1])
                                    if begun < ended:
                                        to, at = there + (begun - k0) * TILE, keys + begun * steps * TILE
                                        side = queries + v * steps * TILE
                                        multiply(1, at, side, steps * TILE, scores + to, ended - begun, steps)
                                        at, side = values + begun * value_steps * TILE, ups + v * value_steps * TILE
                                        multiply(
                                            1, at, side, value_steps * TILE, others + to, ended - begun, value_steps
                                        )
                                if i < 0:
                                    continue
                                v = seen[0, i]
                                begun, ended = max(t, seen[1, i]), min(t + GROUP_TILES, seen[2, i])
                                lower, upper = get_whole(query_low + 4 * v), get_whole(query_high + 4 * v)
                                shift = mul(load(logs + v * ROW), splat(F(-1)))
                                for tt in range(begun, ended):
                                    at = scores + here + (tt - k0) * TILE
                                    if inner != F(1):
                                        rescale(at, LANES, inner)
                                    sight = kind(
                                        lower, upper, get_whole(key_low + 4 * tt), get_whole(key_high + 4 * tt), left,
                                        right,
                                    )  # fmt: skip
                                    if sight != 2 or slope != F(0):
                                        spots = query_at + 4 * v * LANES
                                        veil(at, key_at + 4 * tt * LANES, spots, left, left + right, slope, shift)
                                    row = ((tt - k0) * (VECTORS // 2) + (v - v0) // 2) * TILE
                                    row += (v - v0) % 2 * (ROW // 2)
                                    grade_pairs(
                                        at, others + here + (tt - k0) * TILE, weights + row, slopes + row,
                                        turned + (tt - k0) * (TILE // 2), outer, shift, load(along + v * ROW),
                                    )  # fmt: skip
                                if begun < ended:
                                    for p in range(0, panels, 4):
                                        at = turned_keys + (p * (count // 2) + begun // 2) * TILE
                                        to = grad_queries + (v * panels + p) * TILE
                                        side = turned + (begun - k0) * (TILE // 2)
                                        multiply(
                                            0, at, side, count // 2 * TILE, to, min(4, panels - p), (ended - begun) // 2
                                        )
                        start, stop = seen[0, 0] // 2 * 2, (seen[0, some - 1] + 2) // 2 * 2
                        steps_here, row = (stop - start) // 2, (start - v0) // 2 * TILE
                        for t in range(k0, k1, 4):
                            at, few = row + (t - k0) * (VECTORS // 2) * TILE, min(4, k1 - t)
                            for p in range(value_panels):
                                side, to = (
                                    up_rows + (p * many + start) // 2 * TILE,
                                    grad_values + (p * count + t) * TILE,
                                )
                                multiply(0, weights + at, side, VECTORS // 2 * TILE, to, few, steps_here)
                            for p in range(panels):
                                side, to = (
                                    query_rows + (p * many + start) // 2 * TILE,
                                    grad_keys + (p * count + t) * TILE,
                                )
                                multiply(0, slopes + at, side, VECTORS // 2 * TILE, to, few, steps_here)
            for v in range(now):
                first = (base + v) * LANES
                at = grad_queries + v * panels * TILE
                for p in range(panels):
                    transpose(at + p * TILE, at + p * TILE)
                to = locate(tensors, GRAD_QUERY, b, h, first) + split * sizes[GRAD_STRIDE]
                write(tensors, GRAD_QUERY, to, at, TILE, min(LANES, sizes[QUERIES] - first), dim, scale)
    end_tiles(kept)
    for t in range(count):
        first = (begin + t) * LANES
        rows = min(LANES, sizes[KEYS] - first)
        to = locate(tensors, GRAD_KEY, b, h0, first)
        write(tensors, GRAD_KEY, to, grad_keys + t * TILE, count * TILE, rows, dim, scale)
        to = locate(tensors, GRAD_VALUE, b, h0, first)
        write(tensors, GRAD_VALUE, to, grad_values + t * TILE, count * TILE, rows, width, 1.0)


def room(dim: int, width: int, queries: int, split: int) -> int:
    """Bytes of scratch that one thread of the backward pass needs, for the tiles of queries and of a run of keys."""
    many = min(TOGETHER, queries)
    panels, value_panels = (padded.py_func(n) // LANES for n in (dim, width))
    steps, value_steps = deep.py_func(dim), deep.py_func(width)
    fixed = 1 + 4 * BLOCK + BLOCK * VECTORS + BLOCK // 2 + max(panels, value_panels)
    by_key = steps + panels + value_steps + panels + value_panels  # half of the first panels would do
    by_query = steps + value_steps + panels + value_panels + panels
    return 2 * SHAPES + TILE * (fixed + split * by_key + many * by_query) + 2 * many * ROW
