"""Exact attention under sparse patterns in Numba, backward: the tiles of a program, each with blocks of its keys.

The formulas and products are those of `mercer.backends.softmax_backward`. Gradients of a block's keys and values are
made in the nearest caches and added to those of all keys, in memory that no other thread writes: one part for each run
of tiles. How many runs there are depends on sizes only, and a pass ends before the next begins, so that the digits do
not depend on threads.
"""

import math
from typing import Any

import numpy as np
from numba import njit

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
from mercer.backends.polynomial_parts import fill
from mercer.backends.polynomial_table import ADDRESS, HALF, TOKEN
from mercer.backends.softmax_parts import BLOCK
from mercer.backends.softmax_vectors import (
    SPREAD,
    VECTORS,
    add_mix,
    add_spread,
    clear,
    grade,
    scores,
    subtract,
)
from mercer.backends.sparse_parts import TOGETHER, blind, pack_chosen, veil_code
from mercer.backends.sparse_program import CODE, FIRST_KEYS, KEY_TILES, LATER, NONE, ROWS, VECTOR
from mercer.backends.sparse_program import VECTORS as TILE_VECTORS
from mercer.backends.sparse_table import (
    DIM,
    ENTRY,
    GRAD_KEY,
    GRAD_QUERY,
    GRAD_VALUE,
    GROUP,
    KEY,
    KEY_HEAD,
    KEY_HEADS,
    KEY_LIMIT,
    KEY_STRIDE,
    LOG_SUM,
    LOG_UPSTREAM,
    MEMBER,
    MEMBERS,
    NARROW,
    OUT,
    QUERY,
    QUERY_LIMIT,
    SHIFT,
    SLOPES,
    SPLIT,
    SPLITS,
    UPSTREAM,
    VALUE,
    VALUE_STRIDE,
    WIDTH,
)

F = np.float32
LOG2E = math.log2(math.e)
FAR = F(1e38)
"""The log-sum of a row that sees nothing: no score reaches it, so that all of its weights are 0."""


@njit
def chosen_terms(
    tensors: Any, width: int, b: int, h: int, queries: Any, v: int, limit: int, tile: int, logs: int, along: int
) -> None:
    """Of 16 queries: their log-sums in powers of 2, and u . o less the gradient of the log-sum."""
    fill(tile, LANES, F(0))
    fill(logs, 1, FAR)
    fill(along, 1, F(0))
    out, up = tensors[OUT], tensors[UPSTREAM]
    for r in range(queries[v, ROWS]):
        i = queries[v, r]
        log = get(locate(tensors, LOG_SUM, b, h, i))
        if i >= limit or log == F(-np.inf):
            continue
        put(logs + 4 * r, F(log * F(LOG2E)))
        if tensors[LOG_UPSTREAM, ADDRESS] != 0:
            put(along + 4 * r, get(locate(tensors, LOG_UPSTREAM, b, h, i)))
        total = splat(F(0))
        x, y = locate(tensors, OUT, b, h, i), locate(tensors, UPSTREAM, b, h, i)
        for c in range(0, width, LANES):
            o = load_row(x + c * (2 if out[HALF] else 4), out[HALF], width - c)
            u = load_row(y + c * (2 if up[HALF] else 4), up[HALF], width - c)
            total = fma(o, u, total)
        store(tile + r * ROW, total)
    store(along, subtract(lane_sums(tile, splat(F(1))), load(along)))


@njit
def scatter(
    base: int, stride: int, half: int, chosen: Any, which: int, limit: int, source: int, panel: int, width: int,
    scale: float, adds: int,
) -> None:  # fmt: skip
    """Rows from panels of 16 columns, `panel` bytes apart, times the scale, to the tokens that a row of `chosen`
    numbers; `adds` to what is there.
    """
    size, factor = 2 if half else 4, splat(F(scale))
    for r in range(chosen[which, ROWS]):
        i = chosen[which, r]
        if i >= limit:
            continue
        for p in range(padded(width) // LANES):
            at = base + i * stride + p * LANES * size
            x = mul(load(source + p * panel + r * ROW), factor)
            if adds:
                x = add(x, load_row(at, half, width - p * LANES))
            store_row(at, half, width - p * LANES, x)


@njit
def retrace_tiles(
    tensors: Any, sizes: Any, tiles: Any, queries: Any, keys: Any, codes: Any, masks: Any, weights: Any, rows: Any,
    cuts: Any, scale: float, work: int, item: int,
) -> None:  # fmt: skip
    """A run of tiles of a pass for one key head, of rows * KEY_HEADS * SPLITS: the gradients of their queries are
    filled, and what they add to those of keys and values is added to this run's part of these.
    """
    split = item % sizes[SPLITS]
    row = item // sizes[SPLITS] // sizes[KEY_HEADS]
    kv = sizes[KEY_HEAD] + item // sizes[SPLITS] % sizes[KEY_HEADS]
    for s in range(cuts[sizes[SPLIT] + split], cuts[sizes[SPLIT] + split + 1]):
        abreast = max(1, TOGETHER // tiles[s, TILE_VECTORS])
        last = sizes[MEMBER] + sizes[MEMBERS]
        for member in range(sizes[MEMBER], last, abreast):
            retrace_tile(
                tensors, sizes, tiles[s], queries, keys, codes, masks, weights, rows[row], scale, work, kv,
                kv * sizes[GROUP] + member, min(abreast, last - member), split,
            )  # fmt: skip


@njit
def retrace_tile(
    tensors: Any, sizes: Any, tile: Any, queries: Any, keys: Any, codes: Any, masks: Any, weights: Any, row: Any,
    scale: float, work: int, kv: int, h0: int, heads: int, split: int,
) -> None:  # fmt: skip
    """One tile for some query heads that share a key head."""
    narrow, dim, width = sizes[NARROW], sizes[DIM], sizes[WIDTH]
    per, element = (LANES // 2, 2) if narrow else (LANES, 4)
    panels, value_panels = padded(dim) // LANES, padded(width) // LANES
    steps, value_steps, part = panels * per * ROW, value_panels * per * ROW, per * ROW
    b, here, there = row[ENTRY], row[QUERY_LIMIT], row[KEY_LIMIT]
    vectors, count, code = tile[TILE_VECTORS], tile[KEY_TILES], tile[CODE]
    many = heads * vectors
    flat, other = work, work + TILE
    soft = other + TILE
    slopes = soft + BLOCK * LANES * SPREAD * 4
    turned = slopes + BLOCK * LANES * SPREAD * 4
    packed_keys = turned + VECTORS * BLOCK * TILE
    key_rows = packed_keys + BLOCK * steps
    values = key_rows + BLOCK * steps
    grad_keys = values + BLOCK * value_steps
    grad_values = grad_keys + BLOCK * panels * TILE
    packed = grad_values + BLOCK * value_panels * TILE
    query_rows = packed + many * steps
    ups = query_rows + many * steps
    up_rows = ups + many * value_steps
    grad_queries = up_rows + many * value_steps
    logs = grad_queries + many * panels * TILE
    along = logs + many * ROW
    notes = np.empty((2, VECTORS), np.int64)
    bits = np.empty(LANES, np.uint16)
    spots = np.empty(LANES, np.int32)

    for u in range(many):
        v, h = tile[VECTOR] + u % vectors, h0 + u // vectors
        x = tensors[QUERY]
        pack_chosen(
            narrow, locate(tensors, QUERY, b, h, 0), x[HALF], x[TOKEN], queries, v, dim, flat, packed + u * steps,
            query_rows + u * part, many * part,
        )  # fmt: skip
        x = tensors[UPSTREAM]
        pack_chosen(
            narrow, locate(tensors, UPSTREAM, b, h, 0), x[HALF], x[TOKEN], queries, v, width, flat,
            ups + u * value_steps, up_rows + u * part, many * part,
        )  # fmt: skip
        chosen_terms(tensors, width, b, h, queries, v, here, flat, logs + u * ROW, along + u * ROW)
    fill(grad_queries, many * panels * LANES, F(0))
    factor, zero = F(scale * LOG2E), splat(F(0))
    for k0 in range(0, count, BLOCK):
        k1 = min(k0 + BLOCK, count)
        if blind(codes, keys, code, tile[FIRST_KEYS], vectors, count, k0, k1, there):
            continue
        for t in range(k0, k1):
            k = tile[FIRST_KEYS] + t
            x = tensors[KEY]
            pack_chosen(
                narrow, locate(tensors, KEY, b, kv, 0), x[HALF], x[TOKEN], keys, k, dim, flat,
                packed_keys + (t - k0) * steps, key_rows + (t - k0) * part, BLOCK * part,
            )  # fmt: skip
            x = tensors[VALUE]
            pack_chosen(
                narrow, locate(tensors, VALUE, b, kv, 0), x[HALF], x[TOKEN], keys, k, width, flat,
                values + (t - k0) * value_steps, 0, 0,
            )  # fmt: skip
        fill(grad_keys, BLOCK * panels * LANES, F(0))
        fill(grad_values, BLOCK * value_panels * LANES, F(0))
        for u0 in range(0, many, VECTORS):
            u1 = min(u0 + VECTORS, many)
            for u in range(u0, u1):
                v, h = u % vectors, h0 + u // vectors
                slope = F(0)
                if tensors[SLOPES, ADDRESS] != 0:
                    slope = F(get(tensors[SLOPES, ADDRESS] + 4 * h) * F(LOG2E))
                    for r in range(LANES):
                        spots[r] = queries[tile[VECTOR] + v, r] + sizes[SHIFT]
                own = code + v * count
                start, stop = k1, k0
                for t in range(k0, k1):
                    if codes[own + t] != NONE:
                        start, stop = min(start, t), t + 1
                notes[0, u - u0], notes[1, u - u0] = start, stop
                for t in range(k0, k1):
                    line = (t - k0) * LANES * SPREAD * element + (u - u0) * LANES * element
                    to = turned + ((u - u0) * BLOCK + t - k0) * part
                    if codes[own + t] == NONE:
                        clear(narrow, soft + line)
                        clear(narrow, slopes + line)
                        fill(to, per, F(0))
                        continue
                    found = scores(
                        narrow, packed_keys + (t - k0) * steps, packed + u * steps, flat, steps // ROW, factor, zero
                    )
                    k = tile[FIRST_KEYS] + t
                    veil_code(flat, codes[own + t], masks, weights, keys, k, there, slope, spots, bits, zero, found)
                    at = ups + u * value_steps
                    scores(narrow, values + (t - k0) * value_steps, at, other, value_steps // ROW, F(1), zero)
                    grade(
                        narrow, flat, other, soft + line, slopes + line, to, load(logs + u * ROW),
                        load(along + u * ROW),
                    )  # fmt: skip
            for t in range(k0, k1):
                start, stop = VECTORS, 0
                for u in range(u1 - u0):
                    if codes[code + (u0 + u) % vectors * count + t] != NONE:
                        start, stop = min(start, u), u + 1
                if start >= stop:
                    continue
                steps_here = (stop - start) * per
                line = (t - k0) * LANES * SPREAD * element + start * LANES * element
                for p in range(value_panels):
                    at = up_rows + (p * many + u0 + start) * part
                    add_spread(narrow, soft + line, at, grad_values + (p * BLOCK + t - k0) * TILE, steps_here)
                for p in range(panels):
                    at = query_rows + (p * many + u0 + start) * part
                    add_spread(narrow, slopes + line, at, grad_keys + (p * BLOCK + t - k0) * TILE, steps_here)
            for u in range(u0, u1):
                start, stop = notes[0, u - u0], notes[1, u - u0]
                if start >= stop:
                    continue
                at = turned + ((u - u0) * BLOCK + start - k0) * part
                for p in range(panels):
                    to = grad_queries + (u * panels + p) * TILE
                    add_mix(narrow, at, key_rows + (p * BLOCK + start - k0) * part, to, (stop - start) * per)
        for t in range(k0, k1):
            k = tile[FIRST_KEYS] + t
            x, at = tensors[GRAD_KEY], locate(tensors, GRAD_KEY, b, kv, 0) + split * sizes[KEY_STRIDE]
            scatter(at, x[TOKEN], 0, keys, k, there, grad_keys + (t - k0) * TILE, BLOCK * TILE, dim, scale, 1)
            x, at = tensors[GRAD_VALUE], locate(tensors, GRAD_VALUE, b, kv, 0) + split * sizes[VALUE_STRIDE]
            scatter(at, x[TOKEN], 0, keys, k, there, grad_values + (t - k0) * TILE, BLOCK * TILE, width, 1.0, 1)
    for u in range(many):
        v, h = tile[VECTOR] + u % vectors, h0 + u // vectors
        x, at = tensors[GRAD_QUERY], locate(tensors, GRAD_QUERY, b, h, 0)
        scatter(
            at, x[TOKEN], x[HALF], queries, v, here, grad_queries + u * panels * TILE, TILE, dim, scale, tile[LATER]
        )


def room(dim: int, width: int, most: int, members: int) -> int:
    """Bytes of scratch that one thread of the backward pass needs."""
    wide, many = padded.py_func, max(most, min(TOGETHER, most * members))
    sides = wide(dim) + wide(width)
    fixed = 2 * TILE + BLOCK * (2 * LANES * SPREAD * 4 + VECTORS * TILE)
    return fixed + BLOCK * ROW * (2 * sides + wide(dim)) + many * ROW * (2 * sides + wide(dim) + 2)
