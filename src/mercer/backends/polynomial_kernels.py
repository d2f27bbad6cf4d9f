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
    fma,
    get,
    inverse,
    lane_sums,
    load,
    load_row,
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
    TOKEN,
    expand,
    fill,
    pack,
    pair_weights,
    polynomial,
    put_weights,
    turn,
    unpack,
    weigh,
)

F = np.float32
QUERY, KEY, VALUE, OUT, DENOMINATOR, LOG, WEIGHT, STATE, MASS, FINAL, FINAL_MASS, UPSTREAM, SLOPE = range(13)
GRAD_QUERY, GRAD_KEY, GRAD_VALUE, GRAD_STATE, GRAD_MASS = range(13, 18)
"""Rows of the table of tensors."""
TENSORS = 18
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
def _block_weights(tensors: Any, b: int, h: int, first: int, tokens: int, by_key: int, lanes: int, pairs: int) -> Any:
    """Weights and decays of a block; returns what remains of the state over it.

    `lanes` has vectors: w, w exp(G_e - G_j), exp(G_i - G_s), 1, and 16 doubles of scratch.
    """
    weight, until, since, logs = lanes, lanes + ROW, lanes + 2 * ROW, lanes + 4 * ROW
    put_weights(_at(tensors, WEIGHT, b, h, first), tensors[WEIGHT, TOKEN], tokens, weight)
    log, keep = _at(tensors, LOG, b, h, first), F(1)
    if log:
        before = 0.0
        if first:
            before = microkernels.get_double(log - tensors[LOG, TOKEN])
        keep = weigh(log, tensors[LOG, TOKEN], before, tokens, weight, logs, since, until)
    else:
        store(until, load(weight))
        store(since, splat(F(1)))
    pair_weights(logs, weight, log, by_key, pairs)
    return keep


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
    packed = pairs + TILE
    query = packed + max(_up(dim), _up(width)) * ROW
    key = query + _up(dim) * ROW
    blocks = key + _up(dim) * ROW
    read = blocks + sizes[MONOMIALS] * ROW
    write = read + panel
    z = write + tail
    state = z + high * 4
    fill(read, high, F(0))
    fill(write, high, F(0))
    fill(ones, 1, F(1))
    fill(scales, 1, F(scale))
    for item in range(start, stop):
        b, h = item // heads, item % heads
        _read_state(tensors, STATE, MASS, b, h, sizes, state, panel, z)
        for first in range(0, length, LANES):
            tokens = min(LANES, length - first)
            keep = _block_weights(tensors, b, h, first, tokens, 1, lanes, pairs)
            t = tensors[KEY]
            at = _at(tensors, KEY, b, h, first)
            pack(at, t[HALF], t[TOKEN], tokens, dim, kind, ones, lanes, packed, TILE)
            turn(packed, key, _up(dim) // LANES)
            expand(key, blocks, write, lanes + ROW, begins, places, starts, raised, factors)
            t = tensors[VALUE]
            at = _at(tensors, VALUE, b, h, first)
            pack(at, t[HALF], t[TOKEN], tokens, width, 0, ones, lanes, state + tail, panel)
            for g in range(h * group, (h + 1) * group):
                t = tensors[QUERY]
                at = _at(tensors, QUERY, b, g, first)
                pack(at, t[HALF], t[TOKEN], tokens, dim, kind, scales, ones, packed, TILE)
                turn(packed, query, _up(dim) // LANES)
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
                for c in range(panels):
                    product(read, state + c * panel, packed + c * TILE, high + LANES)
                t = tensors[OUT]
                unpack(packed, inverses, _at(tensors, OUT, b, g, first), t[HALF], t[TOKEN], tokens, width)
            for c in range(panels):
                update(state + c * panel, write, state + c * panel + tail, high, keep)
            if sums:
                _add_mass(z, write, high, load(ones), keep)
        _write_state(tensors, FINAL, FINAL_MASS, b, h, sizes, state, panel, z)


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
