"""Products with packed weights and the way back to plain ones, in Numba, over runs of tiles."""

from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba import njit, types

from mercer.backends import (
    decode_vectors,
    microkernels,
    packed_blocks,
    packed_vectors,
    softmax_vectors,
    tile_vectors,
)
from mercer.backends.microkernels import TILE, get, put
from mercer.backends.packed_blocks import ABREAST, ACROSS, ASKED, DEEP, PAIR, block_product, tile_block
from mercer.backends.packed_vectors import BFLOAT16, COLUMNS, FLOAT32, UNIT, get_long, tile_columns, tile_product
from mercer.backends.tile_vectors import end_tiles, start_tiles

Whole = types.int64
CACHED = 1 << 20
"""Bytes of inputs that stay in a cache while all tiles are multiplied with them."""


@lru_cache
def stamp(*more: Any) -> str:
    """A name for the source of the inlined parts: Numba's cache looks at the file of a function alone."""
    parts = (microkernels, decode_vectors, packed_vectors, *more)
    return sha256(b"".join(Path(m.__file__).read_bytes() for m in parts)).hexdigest()


@lru_cache
def products(kind: int, rows: int) -> Any:
    """run(weights, units, x, pitch, groups, group_pitch, out, out_pitch, count, start, stop): rows start..stop - 1 of
    tiles times `count` inputs, a multiple of `rows`. Addresses and pitches are in bytes.
    """
    return _products(stamp(), kind, rows, UNIT[kind])


def _products(name: str, kind: int, rows: int, unit: int) -> Any:
    @njit(types.void(*[Whole] * 11), nogil=True, cache=True)
    def run(
        weights: int, units: int, x: int, pitch: int, groups: int, group_pitch: int, out: int, out_pitch: int,
        count: int, start: int, stop: int,
    ) -> None:  # fmt: skip
        if not len(name):
            return
        for tile in range(start, stop):
            at = weights + tile * units * unit
            for r in range(0, count, rows):  # from the second on the tile is in a cache
                tile_product(
                    kind, rows, at, x + r * pitch, pitch, units, groups + r * group_pitch, group_pitch,
                    out + r * out_pitch + 64 * tile, out_pitch,
                )  # fmt: skip

    return run


@lru_cache
def blocks(kind: int) -> Any:
    """run(weights, apart, units, tiles, x, pitch, out, out_pitch, count, start, stop, scratch): `tiles` tiles, `apart`
    bytes apart, ACROSS or more of them, times `count` inputs, a multiple of ABREAST: of their runs of ACROSS, the last
    of which ends with the last tile, start..stop - 1. scratch: room for such a run as float32, unless it is.
    """
    return _blocks(stamp(packed_blocks), kind, UNIT[FLOAT32], COLUMNS[kind])


def _blocks(name: str, kind: int, unit: int, columns: int) -> Any:
    plain, each = kind == FLOAT32, COLUMNS[FLOAT32]

    @njit(types.void(*[Whole] * 12), nogil=True, cache=True)
    def run(
        weights: int, apart: int, units: int, tiles: int, x: int, pitch: int, out: int, out_pitch: int, count: int,
        start: int, stop: int, scratch: int,
    ) -> None:  # fmt: skip
        if not len(name):
            return
        for block in range(start, stop):
            tile = min(block * ACROSS, tiles - ACROSS)
            at, step, steps = weights + tile * apart, apart, units
            if not plain:
                steps = units * columns // each
                step = steps * unit
                for i in range(ACROSS):
                    tile_columns(kind, 0, at + i * apart, units, scratch + i * step, 64)
                at = scratch
            near = plain and ACROSS * units * unit <= CACHED // 2  # two runs and the inputs stay in a cache
            for r in range(0, count, ABREAST):
                turn, ahead = r // ABREAST, at
                if near and turn < 2 * ACROSS:
                    ahead += (ACROSS + turn // 2) * apart + turn % 2 * units * ASKED
                block_product(
                    ACROSS, ABREAST, at, step, x + r * pitch, pitch, steps, out + r * out_pitch + 64 * tile, out_pitch,
                    ahead,
                )  # fmt: skip

    return run


@lru_cache
def tile_blocks(kind: int) -> Any:
    """run(weights, apart, units, tiles, x, out, out_pitch, count, start, stop, kept, scratch): the same in tile
    registers, PAIR tiles by DEEP inputs at a time. x: bfloat16, left sides of 16 inputs one behind the other; kept:
    what `start_tiles` keeps; scratch: room for a run of PAIR tiles as bfloat16, unless they are.
    """
    name = stamp(packed_blocks, softmax_vectors, tile_vectors)
    return _tile_blocks(name, kind, COLUMNS[kind])


def _tile_blocks(name: str, kind: int, columns: int) -> Any:
    plain = kind == BFLOAT16

    @njit(types.void(*[Whole] * 12), nogil=True, cache=True)
    def run(
        weights: int, apart: int, units: int, tiles: int, x: int, out: int, out_pitch: int, count: int, start: int,
        stop: int, kept: int, scratch: int,
    ) -> None:  # fmt: skip
        if not len(name):
            return
        steps = units * columns // DEEP
        size = steps * TILE
        most = max(CACHED // (2 * size), 1) * DEEP
        start_tiles(kept)
        for first in range(0, count, most):
            for block in range(start, stop):
                tile = min(block * PAIR, tiles - PAIR)
                at, step = weights + tile * apart, apart
                if not plain:
                    for i in range(PAIR):
                        tile_columns(kind, 1, at + i * apart, units, scratch + i * size, 64)
                    at, step = scratch, size
                for r in range(first, min(first + most, count), DEEP):
                    tile_block(x + r * steps * 64, at, step, steps, out + r * out_pitch + 64 * tile, out_pitch)
        end_tiles(kept)

    return run


@lru_cache
def columns(kind: int) -> Any:
    """run(weights, pitch, units, out, stride, count): the columns of `count` tiles, `pitch` bytes apart, as rows of a
    plain matrix [columns, 16 count] of float32; its rows are `stride` bytes apart.
    """
    return _columns(stamp(), kind)


def _columns(name: str, kind: int) -> Any:
    @njit(types.void(*[Whole] * 6), nogil=True, cache=True)
    def run(weights: int, pitch: int, units: int, out: int, stride: int, count: int) -> None:
        if not len(name):
            return
        for tile in range(count):
            tile_columns(kind, 0, weights + tile * pitch, units, out + tile * 64, stride)

    return run


@lru_cache
def lookup(kind: int) -> Any:
    """run(weights, units, rows, count, panel, out, stride): rows by number (int64) as float32, `stride` bytes apart;
    panel: room for the columns of a tile.
    """
    return _lookup(stamp(), kind, UNIT[kind], COLUMNS[kind])


def _lookup(name: str, kind: int, unit: int, columns: int) -> Any:
    @njit(types.void(*[Whole] * 7), nogil=True, cache=True)
    def run(weights: int, units: int, rows: int, count: int, panel: int, out: int, stride: int) -> None:
        if not len(name):
            return
        for i in range(count):
            row = get_long(rows + 8 * i)
            tile_columns(kind, 0, weights + row // 16 * units * unit, units, panel, 64)
            for k in range(units * columns):
                put(out + i * stride + 4 * k, get(panel + 64 * k + 4 * (row % 16)))

    return run
