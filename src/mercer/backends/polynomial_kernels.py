"""The causal scan of polynomial kernels in Numba: states in panels of 16 value columns, blocks of 16 tokens.

In scratch the state is [panels][F][16] with the block's values behind each panel, and the features of the queries
[F][16] have the block's pair weights behind them, so that reading the state and adding the pairs inside the block are
one product. Nothing but the inputs is read from main memory and nothing but the outputs written to it. One thread does
a key head from its first token to its last, in one order: the digits do not depend on the number of threads.
"""

from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types

from mercer.backends import microkernels, polynomial_parts
from mercer.backends.microkernels import (
    LANES,
    ROW,
    TILE,
    add,
    add_mixture,
    add_product,
    fma,
    get,
    inverse,
    lane_sums,
    load,
    load_row,
    mixture,
    mul,
    product,
    put,
    splat,
    store,
    store_row,
    update,
)
from mercer.backends.polynomial_parts import (
    ADDRESS,
    BATCH,
    HALF,
    HEAD,
    IDENTITY,
    TOKEN,
    derivative,
    expand,
    fill,
    pack,
    pack_turned,
    pair_weights,
    polynomial,
    pull,
    put_weights,
    scale_rows,
    slope,
    turn,
    unpack,
    unpack_turned,
    weigh,
)

F = np.float32
QUERY, KEY, VALUE, OUT, DENOMINATOR, LOG, WEIGHT, STATE, MASS, FINAL, FINAL_MASS, UPSTREAM, SLOPE = range(13)
GRAD_QUERY, GRAD_KEY, GRAD_VALUE, GRAD_STATE, GRAD_MASS, GRAD_FINAL, GRAD_FINAL_MASS = range(13, 20)
"""Rows of the table of tensors."""
TENSORS = 20
HEADS, GROUP, LENGTH, DIM, VALUE_DIM, FEATURES, MONOMIALS, MAP, SUMS, DIVIDES = range(10)
"""Sizes and switches: key heads, queries a key head, tokens, D, Dv, features, monomials below the highest degree, map,
whether there are denominators, whether to divide by them."""


def up(x: int) -> int:
    """The next multiple of 16."""
    return (x + LANES - 1) // LANES * LANES


_up = njit(up)


@njit
def _at(tensors: Any, which: int, batch: int, head: int, token: int) -> int:
    """Where a token's row stands; 0 if the tensor is not there."""
    t = tensors[which]
    if t[ADDRESS] == 0:
        return 0
    return t[ADDRESS] + batch * t[BATCH] + head * t[HEAD] + token * t[TOKEN]


@njit
def _read_state(
    tensors: Any, which: int, mass: int, b: int, h: int, sizes: Any, state: int, panel: int, z: int
) -> None:
    """A state [F][Dv] and its masses [F] into panels; zeros where there is none."""
    features, width = sizes[FEATURES], sizes[VALUE_DIM]
    source, stride = _at(tensors, which, b, h, 0), tensors[which, TOKEN]
    for c in range(_up(width) // LANES):
        fill(state + c * panel, panel // ROW, F(0))
        if source:
            for x in range(features):
                row = load_row(source + x * stride + c * ROW, 0, width - c * LANES)
                store(state + c * panel + x * ROW, row)
    fill(z, _up(features) // LANES, F(0))
    source = _at(tensors, mass, b, h, 0)
    if source:
        for x in range(features):
            put(z + 4 * x, get(source + 4 * x))


@njit
def _write_state(
    tensors: Any, which: int, mass: int, b: int, h: int, sizes: Any, state: int, panel: int, z: int
) -> None:
    """Panels back to a state [F][Dv] and masses [F], where wanted."""
    features, width = sizes[FEATURES], sizes[VALUE_DIM]
    target, stride = _at(tensors, which, b, h, 0), tensors[which, TOKEN]
    if target:
        for c in range(_up(width) // LANES):
            for x in range(features):
                row = load(state + c * panel + x * ROW)
                store_row(target + x * stride + c * ROW, 0, width - c * LANES, row)
    target = _at(tensors, mass, b, h, 0)
    if target:
        for x in range(features):
            put(target + 4 * x, get(z + 4 * x))


@njit
def _dot_rows(x: int, y: int, rows: int) -> Any:
    """In lane t: the sum over rows of x[row][t] y[row][t]."""
    s0 = s1 = s2 = s3 = splat(F(0))
    for r in range(0, rows * ROW, 4 * ROW):
        s0 = fma(load(x + r), load(y + r), s0)
        s1 = fma(load(x + r + ROW), load(y + r + ROW), s1)
        s2 = fma(load(x + r + 2 * ROW), load(y + r + 2 * ROW), s2)
        s3 = fma(load(x + r + 3 * ROW), load(y + r + 3 * ROW), s3)
    return add(add(s0, s1), add(s2, s3))


@njit
def _add_mass(z: int, features: int, rows: int, weight: Any, keep: Any) -> None:
    """z[x] = keep z[x] + sum over t of features[x][t] weight[t]"""
    for x in range(0, rows, LANES):
        store(z + 4 * x, fma(load(z + 4 * x), splat(keep), lane_sums(features + x * ROW, weight)))


@njit
def _read_mass(z: int, features: int, rows: int) -> Any:
    """In lane t: the sum over x of features[x][t] z[x]."""
    s0 = s1 = s2 = s3 = splat(F(0))
    for x in range(0, rows, 4):
        f = features + x * ROW
        s0 = fma(load(f), splat(get(z + 4 * x)), s0)
        s1 = fma(load(f + ROW), splat(get(z + 4 * x + 4)), s1)
        s2 = fma(load(f + 2 * ROW), splat(get(z + 4 * x + 8)), s2)
        s3 = fma(load(f + 3 * ROW), splat(get(z + 4 * x + 12)), s3)
    return add(add(s0, s1), add(s2, s3))


@njit
def _block_weights(
    tensors: Any, b: int, h: int, first: int, tokens: int, by_key: int, plain: int, lanes: int, pairs: int
) -> Any:
    """Weights and decays of a block; returns what remains of the state over it, and `lanes` or 0 if all keys count.

    Where `plain`, the weights of pairs leave out those of the keys.

    `lanes` has vectors: w, w exp(G_e - G_j), exp(G_i - G_s), 1, and 16 doubles of scratch.
    """
    weight, until, since, logs = lanes, lanes + ROW, lanes + 2 * ROW, lanes + 4 * ROW
    there = put_weights(_at(tensors, WEIGHT, b, h, first), tensors[WEIGHT, TOKEN], tokens, weight)
    log, keep = _at(tensors, LOG, b, h, first), F(1)
    if log:
        before = 0.0
        if first:
            before = microkernels.get_double(log - tensors[LOG, TOKEN])
        keep = weigh(log, tensors[LOG, TOKEN], before, tokens, weight, logs, since, until)
    else:
        store(until, load(weight))
        store(since, splat(F(1)))
    pair_weights(logs, lanes + 3 * ROW if plain else weight, log, by_key, pairs)
    return keep, there


@njit
def _is_linear(places: Any, factors: Any) -> bool:
    """Whether the mapped vectors themselves are the features."""
    return len(places) == 2 and places[0] < 0 and factors[1] == F(1)


@njit
def _is_plain(tensors: Any, places: Any, factors: Any) -> bool:
    """Whether the mapped vectors themselves are the features, without decay."""
    return _is_linear(places, factors) and tensors[LOG, ADDRESS] == 0


@njit
def forward(
    tensors: Any,
    sizes: Any,
    scale: float,
    coefficients: Any,
    begins: Any,
    places: Any,
    starts: Any,
    raised: Any,
    factors: Any,
    work: int,
    start: int,
    stop: int,
) -> None:
    """Key heads start..stop-1 of B * Hk: out, denominators and final states are filled."""
    heads, group, length, dim, width = sizes[HEADS], sizes[GROUP], sizes[LENGTH], sizes[DIM], sizes[VALUE_DIM]
    kind, sums, divides = sizes[MAP], sizes[SUMS], sizes[DIVIDES]
    high, panels = _up(sizes[FEATURES]), _up(width) // LANES
    tail, panel = high * ROW, (high + LANES) * ROW
    lanes, ones, scales, inverses, pairs = work, work + 3 * ROW, work + 6 * ROW, work + 7 * ROW, work + 8 * ROW
    tile = pairs + TILE
    query = tile + TILE
    key = query + _up(dim) * ROW
    blocks = key + _up(dim) * ROW
    read = blocks + sizes[MONOMIALS] * ROW
    write = read + panel
    z = write + tail
    state = z + high * 4
    plain = _is_plain(tensors, places, factors)
    if plain:  # the mapped vectors are the features
        query, key = read, write
    fill(read, high, F(0))
    fill(write, high, F(0))
    fill(ones, 1, F(1))
    key_factors = lanes if plain else ones
    fill(scales, 1, F(scale))
    varying = tensors[LOG, ADDRESS] != 0 or tensors[WEIGHT, ADDRESS] != 0
    ready, there, keep = 0, 0, F(1)
    for item in range(start, stop):
        b, h = item // heads, item % heads
        _read_state(tensors, STATE, MASS, b, h, sizes, state, panel, z)
        for first in range(0, length, LANES):
            tokens = min(LANES, length - first)
            if varying or tokens != ready:
                keep, there = _block_weights(tensors, b, h, first, tokens, 1, plain, lanes, pairs)
                ready = tokens
            queries_there = 0 if tokens == LANES else ones
            t = tensors[KEY]
            at = _at(tensors, KEY, b, h, first)
            pack_turned(at, t[HALF], t[TOKEN], tokens, dim, there, kind, key_factors, LANES * t[TOKEN], key)
            if not plain:
                expand(key, blocks, write, lanes + ROW, begins, places, starts, raised, factors)
            t = tensors[VALUE]
            at = _at(tensors, VALUE, b, h, first)
            pack(at, t[HALF], t[TOKEN], tokens, width, lanes, ones, LANES * t[TOKEN], state + tail, panel)
            for g in range(h * group, (h + 1) * group):
                t = tensors[QUERY]
                at = _at(tensors, QUERY, b, g, first)
                pack_turned(at, t[HALF], t[TOKEN], tokens, dim, queries_there, kind, scales, LANES * t[TOKEN], query)
                if not plain:
                    expand(query, blocks, read, lanes + 2 * ROW, begins, places, starts, raised, factors)
                product(key, query, read + tail, dim)
                total = splat(F(0))
                for r in range(0, TILE, ROW):
                    w = mul(polynomial(load(read + tail + r), coefficients), load(pairs + r))
                    total = add(total, w)
                    store(read + tail + r, w)
                if sums:
                    total = add(total, _read_mass(z, read, high))
                    at = _at(tensors, DENOMINATOR, b, g, first)
                    if at:
                        store_row(at, 0, tokens, total)
                    store(inverses, inverse(total) if divides else splat(F(1)))
                else:
                    store(inverses, splat(F(1)))
                last, t = g == (h + 1) * group - 1, tensors[OUT]
                at, size = _at(tensors, OUT, b, g, first), 2 if t[HALF] else 4
                for c in range(panels):
                    product(read, state + c * panel, tile, high + LANES)
                    if last:  # while the panel is in the nearest cache
                        update(state + c * panel, write, state + c * panel + tail, high, keep)
                    done = c * LANES
                    unpack(tile, inverses, at + done * size, t[HALF], t[TOKEN], tokens, width - done)
            if sums:
                _add_mass(z, write, high, load(ones), keep)
        _write_state(tensors, FINAL, FINAL_MASS, b, h, sizes, state, panel, z)


@njit
def _inverses(tensors: Any, b: int, g: int, first: int, tokens: int, divides: int, lanes: int) -> None:
    """By what the gradient of the outputs is multiplied to be that of the numerators, as lanes."""
    if divides:
        store(lanes, inverse(load_row(_at(tensors, DENOMINATOR, b, g, first), 0, tokens)))
    else:
        store(lanes, splat(F(1)))


@njit
def read_gradients(
    tensors: Any,
    sizes: Any,
    scale: float,
    coefficients: Any,
    begins: Any,
    places: Any,
    starts: Any,
    raised: Any,
    factors: Any,
    work: int,
    start: int,
    stop: int,
) -> None:
    """First tokens first: the states again, and from them the gradients of the queries, and of the denominators."""
    heads, group, length, dim, width = sizes[HEADS], sizes[GROUP], sizes[LENGTH], sizes[DIM], sizes[VALUE_DIM]
    kind, sums, divides = sizes[MAP], sizes[SUMS], sizes[DIVIDES]
    high, deep, wide = _up(sizes[FEATURES]), _up(dim), _up(width)
    panels, panel = wide // LANES, high * ROW
    lanes, ones, scales, back, inverses = work, work + 3 * ROW, work + 6 * ROW, work + 7 * ROW, work + 8 * ROW
    pairs = work + 9 * ROW
    scores = pairs + TILE
    slopes = scores + TILE
    query = slopes + TILE
    key = query + deep * ROW
    grad = key + deep * ROW
    key_blocks = grad + deep * ROW
    blocks = key_blocks + sizes[MONOMIALS] * ROW
    spare = blocks + sizes[MONOMIALS] * ROW
    read = spare + sizes[MONOMIALS] * ROW
    write = read + panel
    change = write + panel
    values = change + panel
    turned = values + wide * ROW
    above = turned + wide * ROW
    sent = above + wide * ROW
    z = sent + wide * ROW
    state = z + high * 4
    decays = tensors[LOG, ADDRESS] != 0
    linear = _is_linear(places, factors)
    plain = linear and not decays and tensors[WEIGHT, ADDRESS] == 0
    if linear:
        query, grad = read, change
    if plain:
        key = write
    if not decays:
        sent = above
    fill(read, high, F(0))
    fill(write, high, F(0))
    fill(ones, 1, F(1))
    fill(scales, 1, F(scale))
    fill(back, 1, F(1.0 / scale if scale != 0.0 else 0.0))
    varying = tensors[LOG, ADDRESS] != 0 or tensors[WEIGHT, ADDRESS] != 0
    ready, there, keep = 0, 0, F(1)
    for item in range(start, stop):
        b, h = item // heads, item % heads
        _read_state(tensors, STATE, MASS, b, h, sizes, state, panel, z)
        for first in range(0, length, LANES):
            tokens = min(LANES, length - first)
            if varying or tokens != ready:
                keep, there = _block_weights(tensors, b, h, first, tokens, 1, 0, lanes, pairs)
                ready = tokens
            queries_there = 0 if tokens == LANES else ones
            t = tensors[KEY]
            at = _at(tensors, KEY, b, h, first)
            pack_turned(at, t[HALF], t[TOKEN], tokens, dim, there, kind, ones, LANES * t[TOKEN], key)
            if not plain:
                expand(key, key_blocks, write, lanes + ROW, begins, places, starts, raised, factors)
            t = tensors[VALUE]
            at = _at(tensors, VALUE, b, h, first)
            pack(at, t[HALF], t[TOKEN], tokens, width, lanes, ones, LANES * t[TOKEN], values, TILE)
            turn(values, turned, panels)
            for g in range(h * group, (h + 1) * group):
                t = tensors[QUERY]
                at = _at(tensors, QUERY, b, g, first)
                pack_turned(at, t[HALF], t[TOKEN], tokens, dim, queries_there, kind, scales, LANES * t[TOKEN], query)
                if not linear:
                    expand(query, blocks, read, ones, begins, places, starts, raised, factors)
                _inverses(tensors, b, g, first, tokens, divides, inverses)
                t = tensors[UPSTREAM]
                at = _at(tensors, UPSTREAM, b, g, first)
                pack_turned(
                    at, t[HALF], t[TOKEN], tokens, width, queries_there, IDENTITY, inverses, LANES * t[TOKEN], above
                )
                if decays:
                    scale_rows(above, lanes + 2 * ROW, sent, wide)
                last = g == (h + 1) * group - 1
                for x in range(0, panel, TILE):
                    mixture(state + x, panel, sent, change + x, panels)
                    if last:  # while these rows are in the nearest cache
                        for c in range(panels):
                            update(state + c * panel + x, write + x, values + c * TILE, LANES, keep)
                product(key, query, scores, dim)
                product(turned, above, slopes, wide)
                if sums:
                    at = _at(tensors, SLOPE, b, g, first)
                    if divides:  # dL/d denominator = -<dL/d numerator, numerator> / denominator
                        total = _dot_rows(read, change, high)
                        for r in range(0, TILE, ROW):
                            w = mul(polynomial(load(scores + r), coefficients), load(pairs + r))
                            total = fma(w, load(slopes + r), total)
                        below = mul(mul(total, splat(F(-1))), load(inverses))
                        store_row(at, 0, tokens, below)
                    else:
                        below = load_row(at, 0, tokens)
                    for r in range(0, TILE, ROW):
                        store(slopes + r, add(load(slopes + r), below))
                    below = mul(below, load(lanes + 2 * ROW))
                    for x in range(high):
                        store(change + x * ROW, fma(splat(get(z + 4 * x)), below, load(change + x * ROW)))
                for r in range(0, TILE, ROW):
                    slope_here = mul(derivative(load(scores + r), coefficients), load(pairs + r))
                    store(slopes + r, mul(slope_here, load(slopes + r)))
                if not linear:
                    pull(query, blocks, change, spare, grad, begins, places, starts, raised, factors)
                for x in range(0, deep * ROW, TILE):
                    add_mixture(key + x, 0, slopes, grad + x, 1)
                if kind:
                    for x in range(0, deep * ROW, ROW):
                        store(grad + x, mul(load(grad + x), slope(mul(load(query + x), load(back)), kind)))
                t = tensors[GRAD_QUERY]
                unpack_turned(grad, scales, _at(tensors, GRAD_QUERY, b, g, first), t[HALF], t[TOKEN], tokens, dim)
            if sums:
                _add_mass(z, write, high, load(ones), keep)


@njit
def write_gradients(
    tensors: Any,
    sizes: Any,
    scale: float,
    coefficients: Any,
    begins: Any,
    places: Any,
    starts: Any,
    raised: Any,
    factors: Any,
    work: int,
    start: int,
    stop: int,
) -> None:
    """Last tokens first: the state's gradient, and from it those of keys, values and the initial state."""
    heads, group, length, dim, width = sizes[HEADS], sizes[GROUP], sizes[LENGTH], sizes[DIM], sizes[VALUE_DIM]
    kind, sums, divides = sizes[MAP], sizes[SUMS], sizes[DIVIDES]
    high, deep, wide = _up(sizes[FEATURES]), _up(dim), _up(width)
    panels, panel = wide // LANES, high * ROW
    lanes, ones, scales, below, inverses = work, work + 3 * ROW, work + 6 * ROW, work + 7 * ROW, work + 8 * ROW
    pairs = work + 9 * ROW
    scores = pairs + TILE
    slopes = scores + TILE
    query = slopes + TILE
    key = query + deep * ROW
    grad = key + deep * ROW
    key_blocks = grad + deep * ROW
    blocks = key_blocks + sizes[MONOMIALS] * ROW
    spare = blocks + sizes[MONOMIALS] * ROW
    read = spare + sizes[MONOMIALS] * ROW
    write = read + panel
    change = write + panel
    values = change + panel
    turned = values + wide * ROW
    above = turned + wide * ROW
    sent = above + wide * ROW
    rows = sent + wide * ROW
    z = rows + wide * ROW
    state = z + high * 4
    decays = tensors[LOG, ADDRESS] != 0
    linear = _is_linear(places, factors)
    plain = linear and not decays and tensors[WEIGHT, ADDRESS] == 0
    if linear:
        grad = change
        if not decays:
            query = read
    if plain:
        key, sent = write, turned
    fill(read, high, F(0))
    fill(write, high, F(0))
    fill(ones, 1, F(1))
    fill(scales, 1, F(scale))
    varying = tensors[LOG, ADDRESS] != 0 or tensors[WEIGHT, ADDRESS] != 0
    ready, there, keep = 0, 0, F(1)
    for item in range(start, stop):
        b, h = item // heads, item % heads
        _read_state(tensors, GRAD_FINAL, GRAD_FINAL_MASS, b, h, sizes, state, panel, z)
        for first in range((length - 1) // LANES * LANES, -1, -LANES):
            tokens = min(LANES, length - first)
            if varying or tokens != ready:
                keep, there = _block_weights(tensors, b, h, first, tokens, 0, 0, lanes, pairs)
                ready = tokens
            queries_there = 0 if tokens == LANES else ones
            t = tensors[KEY]
            at = _at(tensors, KEY, b, h, first)
            pack_turned(at, t[HALF], t[TOKEN], tokens, dim, there, kind, ones, -LANES * t[TOKEN], key)
            if not plain:
                expand(key, key_blocks, write, lanes + ROW, begins, places, starts, raised, factors)
            t = tensors[VALUE]
            at = _at(tensors, VALUE, b, h, first)
            pack_turned(at, t[HALF], t[TOKEN], tokens, width, there, IDENTITY, ones, -LANES * t[TOKEN], turned)
            if not plain:
                scale_rows(turned, lanes + ROW, sent, wide)
            for x in range(0, panel, TILE):
                mixture(state + x, panel, sent, change + x, panels)
            if sums:
                until = load(lanes + ROW)
                for x in range(high):
                    store(change + x * ROW, fma(splat(get(z + 4 * x)), until, load(change + x * ROW)))
            if not linear:
                pull(key, key_blocks, change, spare, grad, begins, places, starts, raised, factors)
            for g in range(h * group, (h + 1) * group):
                t = tensors[QUERY]
                at = _at(tensors, QUERY, b, g, first)
                pack_turned(at, t[HALF], t[TOKEN], tokens, dim, queries_there, kind, scales, -LANES * t[TOKEN], query)
                if not linear or decays:
                    expand(query, blocks, read, lanes + 2 * ROW, begins, places, starts, raised, factors)
                _inverses(tensors, b, g, first, tokens, divides, inverses)
                t = tensors[UPSTREAM]
                at = _at(tensors, UPSTREAM, b, g, first)
                pack(at, t[HALF], t[TOKEN], tokens, width, ones, inverses, -LANES * t[TOKEN], rows, TILE)
                turn(rows, above, panels)
                product(query, key, scores, dim)
                product(above, turned, slopes, wide)
                if sums:
                    store(below, load_row(_at(tensors, SLOPE, b, g, first), 0, tokens))
                    for r in range(LANES):
                        x = slopes + r * ROW
                        store(x, add(load(x), splat(get(below + 4 * r))))
                for r in range(0, TILE, ROW):
                    s, weight = load(scores + r), load(pairs + r)
                    store(scores + r, mul(polynomial(s, coefficients), weight))
                    store(slopes + r, mul(mul(derivative(s, coefficients), weight), load(slopes + r)))
                for x in range(0, deep * ROW, TILE):
                    add_mixture(query + x, 0, slopes, grad + x, 1)
                once = keep if g == h * group else F(1)
                for c in range(panels):
                    if g == h * group:
                        product(write, state + c * panel, values + c * TILE, high)
                    add_product(scores, rows + c * TILE, values + c * TILE, LANES)
                    update(state + c * panel, read, rows + c * TILE, high, once)
                if sums:
                    _add_mass(z, read, high, load(below), once)
            if kind:
                for x in range(0, deep * ROW, ROW):
                    store(grad + x, mul(load(grad + x), slope(load(key + x), kind)))
            t = tensors[GRAD_KEY]
            unpack_turned(grad, ones, _at(tensors, GRAD_KEY, b, h, first), t[HALF], t[TOKEN], tokens, dim)
            t = tensors[GRAD_VALUE]
            at, size = _at(tensors, GRAD_VALUE, b, h, first), 2 if t[HALF] else 4
            for c in range(0, width, LANES):
                unpack(values + c * ROW, ones, at + c * size, t[HALF], t[TOKEN], tokens, width - c)
        _write_state(tensors, GRAD_STATE, GRAD_MASS, b, h, sizes, state, panel, z)


def workspace(dim: int, width: int, features: int, monomials: int) -> int:
    """Bytes of scratch that one thread needs."""
    d, v, f = up(dim), up(width), up(features)
    rows = 8 + 8 * LANES + 6 * d + 8 * v + 4 * monomials + 4 * f + 2 * LANES + v // LANES * (f + LANES)
    return rows * ROW


_TABLES = (
    types.Array(types.int64, 2, "C"),
    types.Array(types.int64, 1, "C"),
    types.float64,
    types.Array(types.float32, 1, "C"),
    types.Array(types.int64, 1, "C"),
    types.Array(types.int64, 1, "C"),
    types.Array(types.int64, 2, "C"),
    types.Array(types.float32, 1, "C"),
    types.Array(types.float32, 1, "C"),
)
_CALL = types.void(*_TABLES, types.int64, types.int64, types.int64)


@lru_cache
def _stamp() -> str:
    """Names the sources of the inlined parts: Numba's cache looks at this file alone."""
    files = (Path(m.__file__) for m in (microkernels, polynomial_parts))
    return sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


@lru_cache
def compiled_forward() -> Any:
    """`forward`, compiled for this machine or read from the cache on disk."""
    return _forward(_stamp())


@lru_cache
def compiled_backward() -> Any:
    """`read_gradients` and then `write_gradients`, likewise."""
    return _backward(_stamp())


def _forward(stamp: str) -> Any:
    @njit(_CALL, nogil=True, cache=True)
    def call(
        tensors: Any,
        sizes: Any,
        scale: float,
        coefficients: Any,
        begins: Any,
        places: Any,
        starts: Any,
        raised: Any,
        factors: Any,
        work: int,
        start: int,
        stop: int,
    ) -> None:
        if len(stamp):  # a closure over it, so that the cache tells versions apart
            forward(tensors, sizes, scale, coefficients, begins, places, starts, raised, factors, work, start, stop)

    return call


def _backward(stamp: str) -> Any:
    @njit(_CALL, nogil=True, cache=True)
    def call(
        tensors: Any,
        sizes: Any,
        scale: float,
        coefficients: Any,
        begins: Any,
        places: Any,
        starts: Any,
        raised: Any,
        factors: Any,
        work: int,
        start: int,
        stop: int,
    ) -> None:
        if len(stamp):
            tables = (coefficients, begins, places, starts, raised, factors)
            read_gradients(tensors, sizes, scale, *tables, work, start, stop)
            write_gradients(tensors, sizes, scale, *tables, work, start, stop)

    return call
