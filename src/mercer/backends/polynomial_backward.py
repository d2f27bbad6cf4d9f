"""The backward sweeps of the polynomial scan, made again from the inputs.

With numerators N, denominators d, dN = dO / d and P the gradient of the state,

    forwards:   S += phi(k_j) v_j^T,    dphi(q)_i = S dN_i + z dd_i,    dd_i = -<dN_i, N_i> / d_i
    backwards:  P += phi(q_i) dN_i^T,   dphi(k)_j = P v_j + p,          dv_j = P^T phi(k_j)

<dN, N> needs no outputs: it is <phi(q), S dN> and the pairs inside the block. Gradients of features are pulled back to
queries and keys inside the block.
"""

from typing import Any

import numpy as np
from numba import njit

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
    load,
    load_row,
    mixture,
    mul,
    prefetch,
    product,
    splat,
    store,
    store_row,
    transpose,
    update,
)
from mercer.backends.polynomial_blocks import (
    add_mass,
    block_weights,
    dot_rows,
    is_linear,
    locate,
    padded,
    read_state,
    write_state,
)
from mercer.backends.polynomial_parts import (
    derivative,
    expand,
    fill,
    pack,
    pack_turned,
    pair_weights,
    polynomial,
    pull,
    scale_rows,
    slope,
    turn,
    unpack,
    unpack_turned,
)
from mercer.backends.polynomial_table import (
    ABREAST,
    ADDRESS,
    DENOMINATOR,
    DIM,
    DIVIDES,
    FEATURES,
    GRAD_FINAL,
    GRAD_FINAL_MASS,
    GRAD_KEY,
    GRAD_MASS,
    GRAD_QUERY,
    GRAD_STATE,
    GRAD_VALUE,
    GROUP,
    HALF,
    HEADS,
    IDENTITY,
    KEY,
    LENGTH,
    LOG,
    MAP,
    MASS,
    MONOMIALS,
    QUERY,
    SLOPE,
    STATE,
    SUMS,
    TILES,
    TOKEN,
    UPSTREAM,
    VALUE,
    VALUE_DIM,
    WEIGHT,
)

F = np.float32


@njit
def inverses_of(tensors: Any, b: int, g: int, first: int, tokens: int, divides: int, lanes: int) -> None:
    """By what the gradient of the outputs is multiplied to be that of the numerators, as lanes."""
    if divides:
        store(lanes, inverse(load_row(locate(tensors, DENOMINATOR, b, g, first), 0, tokens)))
    else:
        store(lanes, splat(F(1)))


@njit
def spaces(work: int, sizes: Any) -> Any:
    """Where each part of the scratch of a sweep begins, after nine vectors."""
    deep, wide, blocks = padded(sizes[DIM]) * ROW, padded(sizes[VALUE_DIM]) * ROW, sizes[MONOMIALS] * ROW
    panel = padded(sizes[FEATURES]) * ROW
    pairs = work + 9 * ROW
    scores = pairs + TILE
    slopes = scores + TILE
    query = slopes + TILE
    key = query + deep
    grad = key + deep
    key_blocks = grad + deep
    query_blocks = key_blocks + blocks
    spare = query_blocks + blocks
    read = spare + blocks
    write = read + panel
    change = write + panel
    values = change + panel
    turned = values + wide
    above = turned + wide
    sent = above + wide
    rows = sent + wide
    states = rows + wide
    tiles = pairs, scores, slopes
    vectors = query, key, grad, key_blocks, query_blocks, spare
    return tiles, vectors, (read, write, change), (values, turned, above, sent, rows), states


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
    high, deep, wide = padded(sizes[FEATURES]), padded(dim), padded(width)
    panels, panel = wide // LANES, high * ROW
    lanes, ones, scales, back, inverses = work, work + 3 * ROW, work + 6 * ROW, work + 7 * ROW, work + 8 * ROW
    tiles, vectors, by_feature, by_value, states = spaces(work, sizes)
    each = panels * panel + high * 4
    pairs, scores, slopes = tiles
    query, key, grad, key_blocks, blocks, spare = vectors
    read, write, change = by_feature
    values, turned, above, sent, _ = by_value
    decays = tensors[LOG, ADDRESS] != 0
    linear = is_linear(places, factors)
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
    item = start
    while item < stop:
        b, h0 = item // heads, item % heads
        many = min(sizes[ABREAST], stop - item, heads - h0)
        for i in range(many):
            state = states + i * each
            read_state(tensors, STATE, MASS, b, h0 + i, sizes, state, panel, state + panels * panel)
        for first in range(0, length, LANES):
            for h in range(h0, h0 + many):  # side by side in memory
                state = states + (h - h0) * each
                z = state + panels * panel
                tokens = min(LANES, length - first)
                if varying or tokens != ready:
                    keep, there = block_weights(tensors, b, h, first, tokens, lanes)
                    pair_weights(lanes + 4 * ROW, lanes, decays, pairs)
                    ready = tokens
                queries_there = 0 if tokens == LANES else ones
                t = tensors[KEY]
                at = locate(tensors, KEY, b, h, first)
                pack_turned(at, t[HALF], t[TOKEN], tokens, dim, there, kind, ones, LANES * t[TOKEN], key)
                if not plain:
                    expand(key, key_blocks, write, lanes + ROW, begins, places, starts, raised, factors)
                t = tensors[VALUE]
                at = locate(tensors, VALUE, b, h, first)
                pack(at, t[HALF], t[TOKEN], tokens, width, lanes, ones, LANES * t[TOKEN], values, TILE)
                turn(values, turned, panels)
                for g in range(h * group, (h + 1) * group):
                    t = tensors[QUERY]
                    at = locate(tensors, QUERY, b, g, first)
                    pack_turned(
                        at, t[HALF], t[TOKEN], tokens, dim, queries_there, kind, scales, LANES * t[TOKEN], query
                    )
                    if not linear:
                        expand(query, blocks, read, ones, begins, places, starts, raised, factors)
                    inverses_of(tensors, b, g, first, tokens, divides, inverses)
                    t = tensors[UPSTREAM]
                    at = locate(tensors, UPSTREAM, b, g, first)
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
                        at = locate(tensors, SLOPE, b, g, first)
                        if divides:  # dL/d denominator = -<dL/d numerator, numerator> / denominator
                            total = dot_rows(read, change, high)
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
                        s, weight = load(scores + r), load(pairs + r)
                        store(scores + r, mul(polynomial(s, coefficients), weight))
                        store(slopes + r, mul(mul(derivative(s, coefficients), weight), load(slopes + r)))
                    at = locate(tensors, TILES, b, g, first // LANES)  # for the other sweep, queries in rows
                    transpose(scores, at)
                    transpose(slopes, at + TILE)
                    if not linear:
                        pull(query, blocks, change, spare, grad, begins, places, starts, raised, factors)
                    for x in range(0, deep * ROW, TILE):
                        add_mixture(key + x, 0, slopes, grad + x, 1)
                    if kind:
                        for x in range(0, deep * ROW, ROW):
                            store(grad + x, mul(load(grad + x), slope(mul(load(query + x), load(back)), kind)))
                    t = tensors[GRAD_QUERY]
                    unpack_turned(
                        grad, scales, locate(tensors, GRAD_QUERY, b, g, first), t[HALF], t[TOKEN], tokens, dim
                    )
                if sums:
                    add_mass(z, write, high, load(ones), keep)
        item += many


@njit
def write_gradients(
    tensors: Any,
    sizes: Any,
    scale: float,
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
    high, deep, wide = padded(sizes[FEATURES]), padded(dim), padded(width)
    panels, panel = wide // LANES, high * ROW
    lanes, ones, scales, inverses = work, work + 3 * ROW, work + 6 * ROW, work + 8 * ROW
    _, vectors, by_feature, by_value, states = spaces(work, sizes)
    each = panels * panel + high * 4
    query, key, grad, key_blocks, blocks, spare = vectors
    read, write, change = by_feature
    values, turned, _, sent, rows = by_value
    decays = tensors[LOG, ADDRESS] != 0
    linear = is_linear(places, factors)
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
    item = start
    while item < stop:
        b, h0 = item // heads, item % heads
        many = min(sizes[ABREAST], stop - item, heads - h0)
        for i in range(many):
            state = states + i * each
            read_state(tensors, GRAD_FINAL, GRAD_FINAL_MASS, b, h0 + i, sizes, state, panel, state + panels * panel)
        for first in range((length - 1) // LANES * LANES, -1, -LANES):
            for h in range(h0, h0 + many):  # side by side in memory
                state = states + (h - h0) * each
                z = state + panels * panel
                tokens = min(LANES, length - first)
                if varying or tokens != ready:
                    keep, there = block_weights(tensors, b, h, first, tokens, lanes)
                    ready = tokens
                queries_there = 0 if tokens == LANES else ones
                t = tensors[KEY]
                at = locate(tensors, KEY, b, h, first)
                pack_turned(at, t[HALF], t[TOKEN], tokens, dim, there, kind, ones, -LANES * t[TOKEN], key)
                if not plain:
                    expand(key, key_blocks, write, lanes + ROW, begins, places, starts, raised, factors)
                t = tensors[VALUE]
                at = locate(tensors, VALUE, b, h, first)
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
                    at = locate(tensors, QUERY, b, g, first)
                    pack_turned(
                        at, t[HALF], t[TOKEN], tokens, dim, queries_there, kind, scales, -LANES * t[TOKEN], query
                    )
                    if not linear or decays:
                        expand(query, blocks, read, lanes + 2 * ROW, begins, places, starts, raised, factors)
                    inverses_of(tensors, b, g, first, tokens, divides, inverses)
                    t = tensors[UPSTREAM]
                    at = locate(tensors, UPSTREAM, b, g, first)
                    pack(at, t[HALF], t[TOKEN], tokens, width, ones, inverses, -LANES * t[TOKEN], rows, TILE)
                    scores = locate(tensors, TILES, b, g, first // LANES)
                    slopes = scores + TILE
                    for x in range(0, 2 * TILE, ROW):
                        prefetch(scores - 2 * TILE + x)
                    for x in range(0, deep * ROW, TILE):
                        add_mixture(query + x, 0, slopes, grad + x, 1)
                    once = keep if g == h * group else F(1)
                    for c in range(panels):
                        if g == h * group:
                            product(write, state + c * panel, values + c * TILE, high)
                        add_product(scores, rows + c * TILE, values + c * TILE, LANES)
                        update(state + c * panel, read, rows + c * TILE, high, once)
                    if sums:
                        below = load_row(locate(tensors, SLOPE, b, g, first), 0, tokens)
                        add_mass(z, read, high, below, once)
                if kind:
                    for x in range(0, deep * ROW, ROW):
                        store(grad + x, mul(load(grad + x), slope(load(key + x), kind)))
                t = tensors[GRAD_KEY]
                unpack_turned(grad, ones, locate(tensors, GRAD_KEY, b, h, first), t[HALF], t[TOKEN], tokens, dim)
                t = tensors[GRAD_VALUE]
                at, size = locate(tensors, GRAD_VALUE, b, h, first), 2 if t[HALF] else 4
                for c in range(0, width, LANES):
                    unpack(values + c * ROW, ones, at + c * size, t[HALF], t[TOKEN], tokens, width - c)
        for i in range(many):
            state = states + i * each
            write_state(tensors, GRAD_STATE, GRAD_MASS, b, h0 + i, sizes, state, panel, state + panels * panel)
        item += many
