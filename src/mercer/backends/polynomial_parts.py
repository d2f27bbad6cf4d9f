"""What happens to a block of 16 tokens between memory and the products: packing, features, weights, pairs.

A block lives in scratch as rows of 16 floats. `[D][16]` has a row per dimension and a lane per token, so that monomials
of all 16 tokens are single multiplications; `tiles` has a row per token, 16 dimensions wide, one tile after another.
"""

from typing import Any

import numpy as np
from numba import njit

from mercer.backends.microkernels import (
    LANES,
    ROW,
    TILE,
    above_zero,
    add,
    at_least_zero,
    at_most_one,
    at_most_zero,
    broadcast,
    exp,
    fma,
    from_lane,
    get,
    get_double,
    load,
    load_row,
    load_turned,
    mul,
    over,
    prefetch,
    put,
    put_double,
    splat,
    store,
    store_row,
    transpose,
    under,
)
from mercer.backends.polynomial_table import ELU, RELU

F = np.float32


@njit(inline="always")
def slope(x: Any, kind: int) -> Any:
    """The feature map's derivative, from its value."""
    if kind == ELU:
        x = at_most_one(x)
    elif kind == RELU:
        x = above_zero(x)
    else:
        x = splat(F(1))
    return x


@njit
def pack(
    at: int,
    half: int,
    stride: int,
    tokens: int,
    width: int,
    there: int,
    factors: int,
    ahead: int,
    tiles: int,
    step: int,
) -> None:
    """Tokens of a tensor as tiles `step` bytes apart, each row times its factor.

    Rows of tokens that are not there (`there` is 0) become 0, whatever stands in memory. What stands `ahead` bytes
    further is asked for.
    """
    size, zero = 2 if half else 4, splat(F(0))
    for t in range(LANES):
        present = t < tokens and get(there + 4 * t) != F(0)
        row, to, factor = at + t * stride, tiles + t * ROW, broadcast(factors + 4 * t)
        for first in range(0, width, LANES):
            x = zero
            prefetch(row + ahead + first * size)
            if present:
                x = mul(load_row(row + first * size, half, width - first), factor)
            store(to, x)
            to += step


@njit
def pack_turned(
    at: int,
    half: int,
    stride: int,
    tokens: int,
    width: int,
    there: int,
    kind: int,
    factors: int,
    ahead: int,
    target: int,
) -> None:
    """Tokens of a tensor as `[D][16]`, mapped, each token times its factor; 0 where a token is not there, as in `pack`.

    `there` is 0 where all 16 are. The rows beyond D, up to a multiple of 16, become 0.
    """
    size, factor = 2 if half else 4, load(factors)
    for first in range(0, width, LANES):
        to, count = target + first * ROW, min(LANES, width - first)
        if there == 0 and count == LANES:
            load_turned(at + first * size, half, stride, ahead, to)
        else:
            for t in range(LANES):
                x = splat(F(0))
                if t < tokens and (there == 0 or get(there + 4 * t) != F(0)):
                    x = load_row(at + t * stride + first * size, half, count)
                store(to + t * ROW, x)
            transpose(to, to)
        if kind == ELU:
            for r in range(0, count * ROW, ROW):
                x = load(to + r)
                store(to + r, mul(add(exp(at_most_zero(x)), at_least_zero(x)), factor))
        elif kind == RELU:
            for r in range(0, count * ROW, ROW):
                store(to + r, mul(at_least_zero(load(to + r)), factor))
        else:
            for r in range(0, count * ROW, ROW):
                store(to + r, mul(load(to + r), factor))


@njit
def unpack(tile: int, factors: int, at: int, half: int, stride: int, tokens: int, width: int) -> None:
    """16 numbers of each token, its row times its factor, to a tensor; fewer numbers where `width` is less."""
    for t in range(tokens):
        store_row(at + t * stride, half, width, mul(load(tile + t * ROW), broadcast(factors + 4 * t)))


@njit
def unpack_turned(rows: int, factors: int, at: int, half: int, stride: int, tokens: int, width: int) -> None:
    """`[D][16]` to a tensor, each token's row times its factor; the rows are turned in place."""
    size = 2 if half else 4
    for first in range(0, width, LANES):
        transpose(rows + first * ROW, rows + first * ROW)
        unpack(rows + first * ROW, factors, at + first * size, half, stride, tokens, width - first)


@njit
def turn(source: int, target: int, tiles: int) -> None:
    """Each tile transposed: tiles to [D][16], or back."""
    for i in range(tiles):
        transpose(source + i * TILE, target + i * TILE)


@njit
def scale_rows(source: int, lanes: int, target: int, rows: int) -> None:
    """target[x] = source[x] lanes"""
    factor = load(lanes)
    for x in range(rows):
        store(target + x * ROW, mul(load(source + x * ROW), factor))


@njit
def fill(at: int, rows: int, value: Any) -> None:
    """Every number of some rows."""
    x = splat(value)
    for r in range(rows):
        store(at + r * ROW, x)


@njit
def expand(
    raw: int, blocks: int, features: int, lanes: int, begins: Any, places: Any, starts: Any, raised: Any, factors: Any
) -> None:
    """Features [F][16] of 16 tokens [D][16], each token's times its lane; `blocks` keeps the plain monomials below the
    highest degree.

    Args:
        begins: where the monomials of each degree from 1 on begin, `blocks` rows.
        places: the row of each degree's features, -1 where the kernel has none of that degree.
        starts: for each degree and dimension i, where the monomials one degree lower with smallest index i begin.
        raised: for each monomial from degree 2 on, what multiplying by x_i brings besides x_i.
        factors: for each degree, sqrt(c_n n!).
    """
    degree, dim = len(places) - 1, starts.shape[1]
    lane = load(lanes)
    if places[0] >= 0:
        store(features + places[0] * ROW, mul(lane, splat(factors[0])))
    if degree > 1:
        for i in range(dim):
            store(blocks + i * ROW, load(raw + i * ROW))
    if degree > 0 and places[1] >= 0:
        factor, to = mul(lane, splat(factors[1])), features + places[1] * ROW
        for i in range(dim):
            store(to + i * ROW, mul(load(raw + i * ROW), factor))
    for n in range(2, degree + 1):
        below, count = blocks + begins[n - 1] * ROW, begins[n] - begins[n - 1]
        plain, to = blocks + begins[n] * ROW, features + places[n] * ROW
        weight = begins[n] - dim
        factor, keep, kept = mul(lane, splat(factors[n])), n < degree, places[n] >= 0
        for i in range(dim):
            x = load(raw + i * ROW)
            scaled = mul(x, factor)
            first = starts[n, i]
            if kept:
                for r in range(count - first):
                    y = mul(load(below + (first + r) * ROW), splat(raised[weight + r]))
                    store(to + r * ROW, mul(scaled, y))
                to += (count - first) * ROW
            if keep:
                for r in range(count - first):
                    y = mul(load(below + (first + r) * ROW), splat(raised[weight + r]))
                    store(plain + r * ROW, mul(x, y))
                plain += (count - first) * ROW
            weight += count - first


@njit
def pull(
    raw: int,
    blocks: int,
    slopes: int,
    spare: int,
    out: int,
    begins: Any,
    places: Any,
    starts: Any,
    raised: Any,
    factors: Any,
) -> None:
    """out [D][16]: the gradient of 16 tokens from that of their features (`slopes`); `spare` is as long as `blocks`."""
    degree, dim = len(places) - 1, starts.shape[1]
    if degree == 0 or (degree == 1 and places[1] < 0):
        fill(out, dim, F(0))
        return
    if degree > 1:
        for n in range(1, degree):
            to, count = spare + begins[n] * ROW, begins[n + 1] - begins[n]
            if places[n] >= 0:
                factor, source = splat(factors[n]), slopes + places[n] * ROW
                for r in range(count):
                    store(to + r * ROW, mul(load(source + r * ROW), factor))
            else:
                fill(to, count, F(0))
        fill(out, dim, F(0))
    else:
        factor, source = splat(factors[1]), slopes + places[1] * ROW
        for r in range(dim):
            store(out + r * ROW, mul(load(source + r * ROW), factor))
    for n in range(degree, 1, -1):
        top = n == degree
        source = slopes + places[n] * ROW if top else spare + begins[n] * ROW
        factor = factors[n] if top else F(1)
        below, to, count = blocks + begins[n - 1] * ROW, spare + begins[n - 1] * ROW, begins[n] - begins[n - 1]
        weight = begins[n] - dim
        for i in range(dim):
            x, total, first = load(raw + i * ROW), splat(F(0)), starts[n, i]
            for r in range(count - first):
                g = mul(load(source + r * ROW), splat(raised[weight + r] * factor))
                at = (first + r) * ROW
                total = fma(g, load(below + at), total)
                store(to + at, fma(g, x, load(to + at)))
            source += (count - first) * ROW
            weight += count - first
            store(out + i * ROW, add(load(out + i * ROW), total))
    if degree > 1:
        for i in range(dim):
            store(out + i * ROW, add(load(out + i * ROW), load(spare + i * ROW)))


@njit
def weigh(log: int, stride: int, before: float, tokens: int, weight: int, logs: int, since: int, until: int) -> Any:
    """Decays of a block: since[i] = exp(G_i - G_s), until[j] = w_j exp(G_e - G_j), lanes; returns exp(G_e - G_s).

    G of the block is left in `logs` (doubles); tokens beyond the end have the last one's.
    """
    last = before
    for t in range(LANES):
        if t < tokens:
            last = get_double(log + t * stride)
        put_double(logs + 8 * t, last)
    store(since, exp(at_most_zero(over(logs, before))))
    store(until, mul(load(weight), exp(at_most_zero(under(last, logs)))))
    return get(since + 4 * (LANES - 1))


@njit
def pair_weights(logs: int, weight: int, decays: int, tile: int) -> None:
    """w_j exp(G_i - G_j) where j <= i, else 0: rows are keys j and lanes queries i."""
    for r in range(LANES):
        x = mul(from_lane(r), splat(get(weight + 4 * r)))
        if decays:
            x = mul(x, exp(at_most_zero(over(logs, get_double(logs + 8 * r)))))
        store(tile + r * ROW, x)


@njit(inline="always")
def polynomial(s: Any, coefficients: Any) -> Any:
    """sum over n of coefficients[n] s^n"""
    y = splat(coefficients[-1])
    for n in range(len(coefficients) - 2, -1, -1):
        y = fma(y, s, splat(coefficients[n]))
    return y


@njit(inline="always")
def derivative(s: Any, coefficients: Any) -> Any:
    """sum over n of n coefficients[n] s^(n-1)"""
    y = splat(F(0))
    for n in range(len(coefficients) - 1, 0, -1):
        y = fma(y, s, splat(F(n) * coefficients[n]))
    return y


@njit
def put_weights(weight: int, stride: int, tokens: int, lanes: int) -> int:
    """w of a block as lanes, 1 where there are none; 0 beyond the end. Returns `lanes`, or 0 if no weight is 0."""
    result = 0
    for t in range(LANES):
        w = F(0)
        if t < tokens:
            w = get(weight + t * stride) if weight else F(1)
        put(lanes + 4 * t, w)
        if w == F(0):
            result = lanes
    return result
