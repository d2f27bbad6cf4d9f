"""Products with packed weights and the way back to plain ones, in Numba, over runs of tiles."""

from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from numba import njit, types

from mercer.backends import decode_vectors, microkernels, packed_vectors
from mercer.backends.microkernels import get, put
from mercer.backends.packed_vectors import COLUMNS, UNIT, get_long, tile_columns, tile_product

Whole = types.int64


@lru_cache
def stamp() -> str:
    """A name for the source of the inlined parts: Numba's cache looks at the file of a function alone."""
    sources = b"".join(Path(m.__file__).read_bytes() for m in (microkernels, decode_vectors, packed_vectors))
    return sha256(sources).hexdigest()


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
def columns(kind: int, half: int) -> Any:
    """run(weights, pitch, units, out, stride, count): the columns of `count` tiles, `pitch` bytes apart, as rows of a
    plain matrix [columns, 16 count], float32, or bfloat16 if `half`; its rows are `stride` bytes apart.
    """
    return _columns(stamp(), kind, half)


def _columns(name: str, kind: int, half: int) -> Any:
    width = 32 if half else 64

    @njit(types.void(*[Whole] * 6), nogil=True, cache=True)
    def run(weights: int, pitch: int, units: int, out: int, stride: int, count: int) -> None:
        if not len(name):
            return
        for tile in range(count):
            tile_columns(kind, half, weights + tile * pitch, units, out + tile * width, stride)

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
