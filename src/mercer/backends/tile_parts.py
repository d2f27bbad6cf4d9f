"""What both passes of exact attention in tile registers share: packing rows as the sides of products."""

import numpy as np
from numba import njit

from mercer.backends.microkernels import LANES, ROW, TILE, load_row, splat, store_row
from mercer.backends.polynomial_parts import fill
from mercer.backends.softmax_parts import pack

F = np.float32
DEEP = 32
"""Entries of the inner dimension of a product."""
BLOCK = 16
"""Tiles of 16 keys that are taken together in the forward pass."""
GROUP_TILES = 4
"""Tiles of keys whose products run beside the exponentials of as many."""


@njit
def deep(x: int) -> int:
    """How many times 32 entries hold x of them."""
    return (x + DEEP - 1) // DEEP


@njit
def pack_left(at: int, half: int, stride: int, rows: int, width: int, to: int) -> None:
    """16 rows of a tensor, those beyond `rows` as 0, as left sides of products over their entries."""
    size = 2 if half else 4
    for first in range(0, deep(width) * DEEP, LANES):
        start = to + first // DEEP * TILE + first % DEEP * 2
        for r in range(LANES):
            x = splat(F(0))
            if r < rows and first < width:
                x = load_row(at + r * stride + first * size, half, width - first)
            store_row(start + r * ROW, 1, LANES, x)


@njit
def pack_right(at: int, half: int, stride: int, rows: int, width: int, tile: int, to: int) -> None:
    """The same as right sides; `tile` is scratch."""
    if width % DEEP and width % DEEP <= LANES:
        fill(to + (deep(width) - 1) * TILE, LANES, F(0))
    pack(1, at, half, stride, rows, width, tile, to, 0, 0)


@njit
def pack_pairs(at: int, half: int, stride: int, rows: int, width: int, tile: int, to: int, panel: int) -> None:
    """32 rows as right sides of products over them, in panels of 16 entries that are `panel` bytes apart."""
    pack(1, at, half, stride, min(rows, LANES), width, tile, 0, to, panel)
    pack(1, at + LANES * stride, half, stride, min(max(rows - LANES, 0), LANES), width, tile, 0, to + TILE // 2, panel)
