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

from mercer.backends import microkernels, polynomial_backward, polynomial_blocks, polynomial_parts, polynomial_table
from mercer.backends.microkernels import (
    LANES,
    ROW,
    TILE,
    add,
    inverse,
    load,
    mul,
    product,
    splat,
    store,
    store_row,
    update,
)
from mercer.backends.polynomial_backward import read_gradients, write_gradients
from mercer.backends.polynomial_blocks import (
    add_mass,
    block_weights,
    is_plain,
    locate,
    padded,
    read_mass,
    read_state,
    write_state,
)
from mercer.backends.polynomial_parts import (
    expand,
    fill,
    pack,
    pack_turned,
    pair_weights,
    polynomial,
    unpack,
)
from mercer.backends.polynomial_table import (
    ABREAST,
    ADDRESS,
    DENOMINATOR,
    DIM,
    DIVIDES,
    FEATURES,
    FINAL,
    FINAL_MASS,
    GROUP,
    HALF,
    HEADS,
    KEY,
    LENGTH,
    LOG,
    MAP,
    MASS,
    MONOMIALS,
    OUT,
    QUERY,
    STATE,
    SUMS,
    TOKEN,
    VALUE,
    VALUE_DIM,
    WEIGHT,
)

F = np.float32


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
    high, panels = padded(sizes[FEATURES]), padded(width) // LANES
    tail, panel = high * ROW, (high + LANES) * ROW
    lanes, ones, scales, inverses, pairs = work, work + 3 * ROW, work + 6 * ROW, work + 7 * ROW, work + 8 * ROW
    tile = pairs + TILE
    query = tile + TILE
    key = query + padded(dim) * ROW
    blocks = key + padded(dim) * ROW
    read = blocks + sizes[MONOMIALS] * ROW
    write = read + panel
    states = write + tail
    each = panels * panel + high * 4
    plain = is_plain(tensors, places, factors)
    if plain:  # the mapped vectors are the features
        query, key = read, write
    fill(read, high, F(0))
    fill(write, high, F(0))
    fill(ones, 1, F(1))
    key_factors = lanes if plain else ones
    fill(scales, 1, F(scale))
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
                    pair_weights(lanes + 4 * ROW, ones if plain else lanes, tensors[LOG, ADDRESS], pairs)
                    ready = tokens
                queries_there = 0 if tokens == LANES else ones
                t = tensors[KEY]
                at = locate(tensors, KEY, b, h, first)
                pack_turned(at, t[HALF], t[TOKEN], tokens, dim, there, kind, key_factors, LANES * t[TOKEN], key)
                if not plain:
                    expand(key, blocks, write, lanes + ROW, begins, places, starts, raised, factors)
                t = tensors[VALUE]
                at = locate(tensors, VALUE, b, h, first)
                pack(at, t[HALF], t[TOKEN], tokens, width, lanes, ones, LANES * t[TOKEN], state + tail, panel)
                for g in range(h * group, (h + 1) * group):
                    t = tensors[QUERY]
                    at = locate(tensors, QUERY, b, g, first)
                    pack_turned(
                        at, t[HALF], t[TOKEN], tokens, dim, queries_there, kind, scales, LANES * t[TOKEN], query
                    )
                    if not plain:
                        expand(query, blocks, read, lanes + 2 * ROW, begins, places, starts, raised, factors)
                    product(key, query, read + tail, dim)
                    total = splat(F(0))
                    for r in range(0, TILE, ROW):
                        w = mul(polynomial(load(read + tail + r), coefficients), load(pairs + r))
                        total = add(total, w)
                        store(read + tail + r, w)
                    if sums:
                        total = add(total, read_mass(z, read, high))
                        at = locate(tensors, DENOMINATOR, b, g, first)
                        if at:
                            store_row(at, 0, tokens, total)
                        store(inverses, inverse(total) if divides else splat(F(1)))
                    else:
                        store(inverses, splat(F(1)))
                    last, t = g == (h + 1) * group - 1, tensors[OUT]
                    at, size = locate(tensors, OUT, b, g, first), 2 if t[HALF] else 4
                    for c in range(panels):
                        product(read, state + c * panel, tile, high + LANES)
                        if last:  # while the panel is in the nearest cache
                            update(state + c * panel, write, state + c * panel + tail, high, keep)
                        done = c * LANES
                        unpack(tile, inverses, at + done * size, t[HALF], t[TOKEN], tokens, width - done)
                if sums:
                    add_mass(z, write, high, load(ones), keep)
        for i in range(many):
            state = states + i * each
            write_state(tensors, FINAL, FINAL_MASS, b, h0 + i, sizes, state, panel, state + panels * panel)
        item += many


def workspace(dim: int, width: int, features: int, monomials: int, abreast: int) -> int:
    """Bytes of scratch that one thread needs."""
    d, v, f = (-(-n // LANES) * LANES for n in (dim, width, features))
    rows = 9 + 3 * LANES + 3 * (d + monomials + f) + LANES + 5 * v
    return (rows + abreast * (v // LANES * (f + LANES) + f // LANES)) * ROW


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
    files = (
        Path(m.__file__)
        for m in (microkernels, polynomial_parts, polynomial_blocks, polynomial_backward, polynomial_table)
    )
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
            tables = (begins, places, starts, raised, factors)
            read_gradients(tensors, sizes, scale, coefficients, *tables, work, start, stop)
            write_gradients(tensors, sizes, scale, *tables, work, start, stop)

    return call
