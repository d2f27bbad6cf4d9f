"""What both passes of exact attention share: packing rows, and which tiles of queries and keys see each other."""

from typing import Any

import numpy as np
from numba import njit

from mercer.backends.microkernels import LANES, ROW, load_row, splat, store
from mercer.backends.softmax_vectors import get_whole, pack_across, pack_along, pack_halves

F = np.float32
BLOCK = 8
"""Tiles of 16 keys that are taken together: with their values, weights and sums they fill the nearest caches."""


@njit
def pack(
    narrow: int, at: int, half: int, stride: int, rows: int, width: int, tile: int, across: int, along: int, panel: int
) -> None:
    """16 rows of a tensor, those beyond `rows` as 0: side by side in steps of their entries (`across`), and in panels
    of 16 entries, `panel` bytes apart, with steps of rows (`along`); where one is 0 it is left out. `tile` is scratch.
    """
    size, per = 2 if half else 4, LANES // 2 if narrow else LANES
    for first in range(0, width, LANES):
        if narrow and half and rows == LANES and width - first >= LANES:
            to = across + first // LANES * per * ROW if across else 0
            pack_halves(at + first * size, stride, to, along + first // LANES * panel if along else 0)
            continue
        for r in range(LANES):
            x = splat(F(0))
            if r < rows:
                x = load_row(at + r * stride + first * size, half, width - first)
            store(tile + r * ROW, x)
        if across:
            pack_across(narrow, tile, across + first // LANES * per * ROW)
        if along:
            pack_along(narrow, tile, along + first // LANES * panel)


@njit(inline="always")
def kind(query_low: int, query_high: int, key_low: int, key_high: int, left: int, right: int) -> int:
    """Of queries and keys between these positions: 0 if none sees any, 2 if all see all, 1 if it must be looked at."""
    if key_low - query_high > right or query_low - key_high > left:
        return 0
    if key_high - query_low <= right and query_high - key_low <= left:
        return 2
    return 1


@njit
def lowest_and_highest(low: Any, high: Any, count: int) -> tuple[int, int]:
    """Over the bounds of some tiles."""
    least, most = get_whole(low), get_whole(high)
    for i in range(1, count):
        least, most = min(least, get_whole(low + 4 * i)), max(most, get_whole(high + 4 * i))
    return least, most


@njit
def sees(query: int, key_at: int, key_low: int, key_high: int, tiles: int, left: int, right: int) -> bool:
    """Whether a query at this position sees any key at all."""
    for t in range(tiles):
        if kind(query, query, get_whole(key_low + 4 * t), get_whole(key_high + 4 * t), left, right):
            for j in range(LANES):
                key = get_whole(key_at + 4 * (t * LANES + j))
                if kind(query, query, key, key, left, right):
                    return True
    return False
