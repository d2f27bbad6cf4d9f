"""What both directions of the polynomial scan share: the table of tensors, states in panels, masses, block weights.

A state [F][Dv] stands in scratch as panels of 16 value columns, [panels][F][16], F and Dv padded with zeros.
"""

from typing import Any

import numpy as np
from numba import njit

from mercer.backends.microkernels import (
    LANES,
    ROW,
    add,
    fma,
    get,
    get_double,
    lane_sums,
    load,
    load_row,
    put,
    splat,
    store,
    store_row,
)
from mercer.backends.polynomial_parts import fill, put_weights, weigh
from mercer.backends.polynomial_table import (
    ADDRESS,
    BATCH,
    FEATURES,
    HEAD,
    LOG,
    TOKEN,
    VALUE_DIM,
    WEIGHT,
)

F = np.float32


@njit
def padded(x: int) -> int:
    """The next multiple of 16."""
    return (x + LANES - 1) // LANES * LANES


@njit
def locate(tensors: Any, which: int, batch: int, head: int, token: int) -> int:
    """Where a token's row stands; 0 if the tensor is not there."""
    t = tensors[which]
    if t[ADDRESS] == 0:
        return 0
    return t[ADDRESS] + batch * t[BATCH] + head * t[HEAD] + token * t[TOKEN]


@njit
def read_state(tensors: Any, which: int, mass: int, b: int, h: int, sizes: Any, state: int, panel: int, z: int) -> None:
    """A state [F][Dv] and its masses [F] into panels; zeros where there is none."""
    features, width = sizes[FEATURES], sizes[VALUE_DIM]
    source, stride = locate(tensors, which, b, h, 0), tensors[which, TOKEN]
    for c in range(padded(width) // LANES):
        fill(state + c * panel, panel // ROW, F(0))
        if source:
            for x in range(features):
                row = load_row(source + x * stride + c * ROW, 0, width - c * LANES)
                store(state + c * panel + x * ROW, row)
    fill(z, padded(features) // LANES, F(0))
    source = locate(tensors, mass, b, h, 0)
    if source:
        for x in range(features):
            put(z + 4 * x, get(source + 4 * x))


@njit
def write_state(
    tensors: Any, which: int, mass: int, b: int, h: int, sizes: Any, state: int, panel: int, z: int
) -> None:
    """Panels back to a state [F][Dv] and masses [F], where wanted."""
    features, width = sizes[FEATURES], sizes[VALUE_DIM]
    target, stride = locate(tensors, which, b, h, 0), tensors[which, TOKEN]
    if target:
        for c in range(padded(width) // LANES):
            for x in range(features):
                row = load(state + c * panel + x * ROW)
                store_row(target + x * stride + c * ROW, 0, width - c * LANES, row)
    target = locate(tensors, mass, b, h, 0)
    if target:
        for x in range(features):
            put(target + 4 * x, get(z + 4 * x))


@njit
def dot_rows(x: int, y: int, rows: int) -> Any:
    """In lane t: the sum over rows of x[row][t] y[row][t]."""
    s0 = s1 = s2 = s3 = splat(F(0))
    for r in range(0, rows * ROW, 4 * ROW):
        s0 = fma(load(x + r), load(y + r), s0)
        s1 = fma(load(x + r + ROW), load(y + r + ROW), s1)
        s2 = fma(load(x + r + 2 * ROW), load(y + r + 2 * ROW), s2)
        s3 = fma(load(x + r + 3 * ROW), load(y + r + 3 * ROW), s3)
    return add(add(s0, s1), add(s2, s3))


@njit
def add_mass(z: int, features: int, rows: int, weight: Any, keep: Any) -> None:
    """z[x] = keep z[x] + sum over t of features[x][t] weight[t]"""
    for x in range(0, rows, LANES):
        store(z + 4 * x, fma(load(z + 4 * x), splat(keep), lane_sums(features + x * ROW, weight)))


@njit
def read_mass(z: int, features: int, rows: int) -> Any:
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
def block_weights(tensors: Any, b: int, h: int, first: int, tokens: int, lanes: int) -> Any:
    """Weights and decays of a block; returns what remains of the state over it, and `lanes` or 0 if all keys count.

    `lanes` has vectors: w, w exp(G_e - G_j), exp(G_i - G_s), 1, and 16 doubles of scratch.
    """
    weight, until, since, logs = lanes, lanes + ROW, lanes + 2 * ROW, lanes + 4 * ROW
    there = put_weights(locate(tensors, WEIGHT, b, h, first), tensors[WEIGHT, TOKEN], tokens, weight)
    log, keep = locate(tensors, LOG, b, h, first), F(1)
    if log:
        before = 0.0
        if first:
            before = get_double(log - tensors[LOG, TOKEN])
        keep = weigh(log, tensors[LOG, TOKEN], before, tokens, weight, logs, since, until)
    else:
        store(until, load(weight))
        store(since, splat(F(1)))
    return keep, there


@njit
def is_linear(places: Any, factors: Any) -> bool:
    """Whether the mapped vectors themselves are the features."""
    return len(places) == 2 and places[0] < 0 and factors[1] == F(1)


@njit
def is_plain(tensors: Any, places: Any, factors: Any) -> bool:
    """Whether the mapped vectors themselves are the features, without decay."""
    return is_linear(places, factors) and tensors[LOG, ADDRESS] == 0
