"""Exact attention in Numba, backward: a run of keys of one head against all queries that see them.

Weights are made again from the saved log-sums: with s the scores and p = exp(s - log-sum),

    ds_ij = p_ij (u_i . v_j - u_i . o_i + dlog_i)
    dv_j = sum_i p_ij u_i,   dk_j = sum_i ds_ij q_i,   dq_i = sum_j ds_ij k_j

which are five products of the size of the forward pass's two: 6 D + 4 Dv multiplications and additions for a pair, and
about 15 vector instructions for 16 pairs beside them.
A block of keys meets 64 queries at a time: their weights and slopes pass through the nearest caches, by key for the
products over queries and by pairs of keys for the product over keys.

The gradients of the keys and values of a run are made by one thread in one order. Those of the queries are summed over
the runs of a head afterwards; how many there are depends on sizes only, so that the digits do not depend on threads.
"""

import math
from typing import Any

import numpy as np
from numba import njit

from mercer.backends.microkernels import (
    LANES,
    ROW,
    TILE,
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
from mercer.backends.polynomial_parts import fill
from mercer.backends.polynomial_table import ADDRESS, HALF, TOKEN
from mercer.backends.softmax_parts import BLOCK, kind, lowest_and_highest, pack
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
    LOG_SUM,
    LOG_UPSTREAM,
    NARROW,
    OUT,
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
from mercer.backends.softmax_vectors import (
    SPREAD,
    VECTORS,
    add_mix,
    add_spread,
    clear,
    get_whole,
    grade,
    scores,
    subtract,
    veil,
)

F = np.float32
LOG2E = math.log2(math.e)
TOGETHER = 32
"""Tiles of 16 queries that are packed and pass all keys of the run before the next ones: they fit the second cache."""


@njit
def write(tensors: Any, which: int, at: int, source: int, panel: int, rows: int, width: int, scale: float) -> None:
    """Rows of gradients from panels of 16 columns, `panel` bytes apart, to a tensor, times the scale."""
    x = tensors[which]
    size = 2 if x[HALF] else 4
    for r in range(rows):
        for p in range(padded(width) // LANES):
            row = mul(load(source + p * panel + r * ROW), splat(F(scale)))
            store_row(at + r * x[TOKEN] + p * LANES * size, x[HALF], width - p * LANES, row)


@njit
def row_terms(
    tensors: Any, sizes: Any, b: int, h: int, first: int, rows: int, tile: int, logs: int, along: int
) -> None:
    """Of 16 queries: their log-sums in powers of 2, and u . o less the gradient of the log-sum."""
    fill(tile, LANES, F(0))
    fill(logs, 1, F(0))
    fill(along, 1, F(0))
    out, up = tensors[OUT], tensors[UPSTREAM]
    for r in range(rows):
        log = get(locate(tensors, LOG_SUM, b, h, first + r))
        put(logs + 4 * r, F(0) if log == F(-np.inf) else F(log * F(LOG2E)))
        if tensors[LOG_UPSTREAM, ADDRESS] != 0 and log != F(-np.inf):
            put(along + 4 * r, get(locate(tensors, LOG_UPSTREAM, b, h, first + r)))
        total = splat(F(0))
        x, y = locate(tensors, OUT, b, h, first + r), locate(tensors, UPSTREAM, b, h, first + r)
        for c in range(0, sizes[WIDTH], LANES):
            o = load_row(x + c * (2 if out[HALF] else 4), out[HALF], sizes[WIDTH] - c)
            u = load_row(y + c * (2 if up[HALF] else 4), up[HALF], sizes[WIDTH] - c)
            total = fma(o, u, total)
        store(tile + r * ROW, total)
    store(along, subtract(lane_sums(tile, splat(F(1))), load(along)))


@njit
def retrace(tensors: Any, sizes: Any, scale: float, work: int, item: int) -> None:
    """One run of keys of a head, of B * Hk * SPLITS: the gradients of its keys and values are filled, and its part of
    those of the queries.
    """
    narrow, heads, group, dim, width = sizes[NARROW], sizes[HEADS], sizes[GROUP], sizes[DIM], sizes[WIDTH]
    left, right = sizes[LEFT], sizes[RIGHT]
    per, element = (LANES // 2, 2) if narrow else (LANES, 4)
    panels, value_panels = padded(dim) // LANES, padded(width) // LANES
    steps, value_steps, part = panels * per * ROW, value_panels * per * ROW, per * ROW
    all_queries, all_keys = padded(sizes[QUERIES]) // LANES, padded(sizes[KEYS]) // LANES
    b, h0, split = item // sizes[SPLITS] // heads, item // sizes[SPLITS] % heads, item % sizes[SPLITS]
    begin = split * sizes[SPLIT]
    count = min(sizes[SPLIT], all_keys - begin)
    many = min(TOGETHER, all_queries)
    key_at = locate(tensors, KEY_AT, b, 0, begin * LANES)
    key_low, key_high = locate(tensors, KEY_LOW, b, 0, begin), locate(tensors, KEY_HIGH, b, 0, begin)
    least_key, most_key = lowest_and_highest(key_low, key_high, count)

    tile, other = work, work + TILE
    weights = other + TILE
    slopes = weights + BLOCK * LANES * SPREAD * 4
    turned = slopes + BLOCK * LANES * SPREAD * 4
    keys = turned + VECTORS * BLOCK * TILE
    key_rows = keys + count * steps
    values = key_rows + count * steps
    grad_keys = values + count * value_steps
    grad_values = grad_keys + count * panels * TILE
    queries = grad_values + count * value_panels * TILE
    query_rows = queries + many * steps
    ups = query_rows + many * steps
    up_rows = ups + many * value_steps
    grad_queries = up_rows + many * value_steps
    logs = grad_queries + many * panels * TILE
    along = logs + many * ROW
    notes = np.empty((2, VECTORS), np.int64)

    for t in range(count):
        first = (begin + t) * LANES
        rows = min(LANES, sizes[KEYS] - first)
        x, at = tensors[KEY], locate(tensors, KEY, b, h0, first)
        pack(narrow, at, x[HALF], x[TOKEN], rows, dim, tile, keys + t * steps, key_rows + t * part, count * part)
        x, at = tensors[VALUE], locate(tensors, VALUE, b, h0, first)
        pack(narrow, at, x[HALF], x[TOKEN], rows, width, tile, values + t * value_steps, 0, 0)
    fill(grad_keys, count * panels * LANES, F(0))
    fill(grad_values, count * value_panels * LANES, F(0))
    factor = F(scale * LOG2E)
    for h in range(h0 * group, (h0 + 1) * group):
        slope = F(0)
        if tensors[SLOPES, ADDRESS] != 0:
            slope = F(get(tensors[SLOPES, ADDRESS] + 4 * h) * F(LOG2E))
        for base in range(0, all_queries, TOGETHER):
            now = min(TOGETHER, all_queries - base)
            query_at = locate(tensors, QUERY_AT, b, 0, base * LANES)
            query_low, query_high = locate(tensors, QUERY_LOW, b, 0, base), locate(tensors, QUERY_HIGH, b, 0, base)
            low, high = lowest_and_highest(query_low, query_high, now)
            fill(grad_queries, now * panels * LANES, F(0))
            if kind(low, high, least_key, most_key, left, right):
                for v in range(now):
                    first = (base + v) * LANES
                    rows = min(LANES, sizes[QUERIES] - first)
                    x, at = tensors[QUERY], locate(tensors, QUERY, b, h, first)
                    pack(
                        narrow, at, x[HALF], x[TOKEN], rows, dim, tile, queries + v * steps, query_rows + v * part,
                        many * part,
                    )  # fmt: skip
                    x, at = tensors[UPSTREAM], locate(tensors, UPSTREAM, b, h, first)
                    pack(
                        narrow, at, x[HALF], x[TOKEN], rows, width, tile, ups + v * value_steps, up_rows + v * part,
                        many * part,
                    )  # fmt: skip
                    row_terms(tensors, sizes, b, h, first, rows, tile, logs + v * ROW, along + v * ROW)
                for k0 in range(0, count, BLOCK):
                    k1 = min(k0 + BLOCK, count)
                    least, most = lowest_and_highest(key_low + 4 * k0, key_high + 4 * k0, k1 - k0)
                    if kind(low, high, least, most, left, right) == 0:
                        continue
                    for v0 in range(0, now, VECTORS):
                        v1 = min(v0 + VECTORS, now)
                        lower, upper = lowest_and_highest(query_low + 4 * v0, query_high + 4 * v0, v1 - v0)
                        if kind(lower, upper, least, most, left, right) == 0:
                            continue
                        for v in range(v0, v1):
                            lower, upper = get_whole(query_low + 4 * v), get_whole(query_high + 4 * v)
                            start, stop = k1, k0
                            for t in range(k0, k1):
                                if kind(
                                    lower, upper, get_whole(key_low + 4 * t), get_whole(key_high + 4 * t), left, right
                                ):
                                    start, stop = min(start, t), t + 1
                            notes[0, v - v0], notes[1, v - v0] = start, stop
                            for t in range(k0, k1):
                                row = (t - k0) * LANES * SPREAD * element + (v - v0) * LANES * element
                                if t < start or t >= stop:
                                    clear(narrow, weights + row)
                                    clear(narrow, slopes + row)
                                    continue
                                x = splat(F(0))
                                at = queries + v * steps
                                scores(narrow, keys + t * steps, at, tile, steps // ROW, factor, x)
                                seen = kind(
                                    lower, upper, get_whole(key_low + 4 * t), get_whole(key_high + 4 * t), left, right
                                )
                                if seen != 2 or slope != F(0):
                                    spots = query_at + 4 * v * LANES
                                    veil(tile, key_at + 4 * t * LANES, spots, left, left + right, slope, x)
                                at = ups + v * value_steps
                                scores(narrow, values + t * value_steps, at, other, value_steps // ROW, F(1), x)
                                to = turned + ((v - v0) * BLOCK + t - k0) * part
                                grade(
                                    narrow, tile, other, weights + row, slopes + row, to, load(logs + v * ROW),
                                    load(along + v * ROW),
                                )  # fmt: skip
                        for t in range(k0, k1):
                            start, stop = VECTORS, 0
                            for v in range(v1 - v0):
                                if notes[0, v] <= t < notes[1, v]:
                                    start, stop = min(start, v), v + 1
                            if start >= stop:
                                continue
                            steps_here = (stop - start) * per
                            row = (t - k0) * LANES * SPREAD * element + start * LANES * element
                            for p in range(value_panels):
                                at = up_rows + (p * many + v0 + start) * part
                                add_spread(narrow, weights + row, at, grad_values + (p * count + t) * TILE, steps_here)
                            for p in range(panels):
                                at = query_rows + (p * many + v0 + start) * part
                                add_spread(narrow, slopes + row, at, grad_keys + (p * count + t) * TILE, steps_here)
                        for v in range(v0, v1):
                            start, stop = notes[0, v - v0], notes[1, v - v0]
                            if start >= stop:
                                continue
                            at = turned + ((v - v0) * BLOCK + start - k0) * part
                            for p in range(panels):
                                to = grad_queries + (v * panels + p) * TILE
                                add_mix(narrow, at, key_rows + (p * count + start) * part, to, (stop - start) * per)
            for v in range(now):
                first = (base + v) * LANES
                rows = min(LANES, sizes[QUERIES] - first)
                to = locate(tensors, GRAD_QUERY, b, h, first) + split * sizes[GRAD_STRIDE]
                write(tensors, GRAD_QUERY, to, grad_queries + v * panels * TILE, TILE, rows, dim, scale)
    for t in range(count):
        first = (begin + t) * LANES
        rows = min(LANES, sizes[KEYS] - first)
        to = locate(tensors, GRAD_KEY, b, h0, first)
        write(tensors, GRAD_KEY, to, grad_keys + t * TILE, count * TILE, rows, dim, scale)
        to = locate(tensors, GRAD_VALUE, b, h0, first)
        write(tensors, GRAD_VALUE, to, grad_values + t * TILE, count * TILE, rows, width, 1.0)


def room(dim: int, width: int, queries: int, split: int) -> int:
    """Bytes of scratch that one thread of the backward pass needs, for the tiles of queries and of a run of keys."""
    wide, many = padded.py_func, min(TOGETHER, queries)
    sides = wide(dim) + wide(width)
    fixed = 2 * TILE + BLOCK * (2 * LANES * SPREAD * 4 + VECTORS * TILE)
    return fixed + split * ROW * (2 * wide(dim) + wide(width) + sides) + many * ROW * (2 * sides + wide(dim) + 2)
