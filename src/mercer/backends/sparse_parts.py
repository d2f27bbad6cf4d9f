"""What both passes of sparse attention share: packing chosen tokens, and hiding what a code says is not visible."""

from typing import Any

import numpy as np
from numba import njit

from mercer.backends.microkernels import LANES, ROW, load_row, splat, store
from mercer.backends.softmax_parts import pack
from mercer.backends.softmax_table import UNLIMITED
from mercer.backends.softmax_vectors import add_weights, pack_across, pack_along, veil, veil_bits
from mercer.backends.sparse_program import ALL, HIGHEST, LOWEST, MASK, NONE, ROWS, STEP, WEIGHTS

F = np.float32
TOGETHER = 32
"""Vectors of 16 queries that are packed and pass all keys of a tile together, over the heads that share these: they fit
the second cache."""


@njit
def pack_chosen(
    narrow: int, base: int, half: int, stride: int, chosen: Any, which: int, width: int, tile: int, across: int,
    along: int, panel: int,
) -> None:  # fmt: skip
    """As `pack`, of the 16 tokens that a row of `chosen` numbers; `base` is token 0."""
    rows, step = chosen[which, ROWS], chosen[which, STEP]
    if step:
        at = base + chosen[which, 0] * stride
        pack(narrow, at, half, step * stride, rows, width, tile, across, along, panel)
        return
    size, per = 2 if half else 4, LANES // 2 if narrow else LANES
    for first in range(0, width, LANES):
        for r in range(LANES):
            x = splat(F(0))
            if r < rows:
                x = load_row(base + chosen[which, r] * stride + first * size, half, width - first)
            store(tile + r * ROW, x)
        if across:
            pack_across(narrow, tile, across + first // LANES * per * ROW)
        if along:
            pack_along(narrow, tile, along + first // LANES * panel)


@njit
def blind(
    codes: Any, keys: Any, code: int, first_keys: int, vectors: int, count: int, first: int, last: int, limit: int
) -> bool:
    """Whether no query of a tile sees any of its tiles of keys from `first` to `last`."""
    for t in range(first, last):
        if keys[first_keys + t, LOWEST] < limit:
            for v in range(vectors):
                if codes[code + v * count + t] != NONE:
                    return False
    return True


@njit
def veil_code(
    scores: int, code: int, masks: Any, weights: Any, keys: Any, which: int, limit: int, slope: float, spots: Any,
    bits: Any, best: Any, found: Any,
) -> Any:  # fmt: skip
    """Scores of 16 keys with their log-weights, -infinity where hidden; gives the largest of them and `best`.

    `found` is the same of the scores as they are; `spots` are the queries' positions, `bits` is scratch.
    """
    inside = keys[which, HIGHEST] < limit
    if code == ALL and inside and slope == F(0):
        return found
    top = best
    if slope != F(0):
        last = veil(scores, keys[which].ctypes.data, spots.ctypes.data, UNLIMITED, 2 * UNLIMITED, slope, best)
        if code == ALL and inside:
            return last
    if code >= WEIGHTS and code % 2 == WEIGHTS % 2:
        last = add_weights(scores, weights[(code - WEIGHTS) // 2].ctypes.data, best)
        if inside:
            return last
    elif code >= MASK and inside:
        return veil_bits(scores, masks[(code - MASK) // 2].ctypes.data, best)
    for r in range(LANES):
        bits[r] = 0
        if 0 <= keys[which, r] < limit:
            bits[r] = masks[(code - MASK) // 2, r] if code >= MASK and code % 2 == MASK % 2 else np.uint16(0xFFFF)
    return veil_bits(scores, bits.ctypes.data, top)


@njit
def any_seen(
    codes: Any, masks: Any, weights: Any, keys: Any, own: int, first_keys: int, count: int, lane: int, limit: int
) -> bool:
    """Whether the query in a lane sees any key at all."""
    for t in range(count):
        code = codes[own + t]
        if code == NONE:
            continue
        for r in range(LANES):
            if not 0 <= keys[first_keys + t, r] < limit:
                continue
            if code == ALL:
                return True
            if code % 2 == MASK % 2:
                if masks[(code - MASK) // 2, r] >> np.uint16(lane) & np.uint16(1):
                    return True
            elif weights[(code - WEIGHTS) // 2, r * LANES + lane] > F(-np.inf):
                return True
    return False
