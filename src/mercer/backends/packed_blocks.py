"""Products of packed weights with many inputs, as LLVM IR: several tiles of weights by several inputs at a time.

With few inputs the weights are read once and each serves a few products; with many the products are what a call costs,
and what is in a register has to serve several of them. In vectors of float32 that is three tiles by eight inputs: 24
sums, for which a column takes 11 loads. In tile registers (`tile_vectors`) it is two tiles by 32 inputs: packed
bfloat16 lies in memory as the right sides of such products, and fewer bits are made bfloat16 in a cache. Nothing here
checks bounds.
"""

from typing import Any

from numba import types

from mercer.backends.decode_vectors import _literal, _repeat
from mercer.backends.microkernels import (
    I8,
    I64,
    LANES,
    ROW,
    TILE,
    TOGETHER,
    _broadcast,
    _constant,
    _fma,
    _load,
    _loop,
    _prefetch,
    _primitive,
    _store,
    address,
    whole,
)
from mercer.backends.packed_vectors import COLUMNS, FLOAT32, UNIT
from mercer.backends.tile_vectors import _do, _get_tile, _put_tile

ACROSS, ABREAST = (3, 8) if TOGETHER == LANES else (1, 6)
"""Tiles and inputs whose sums the vector registers hold."""
ASKED = UNIT[FLOAT32] // 2
"""Bytes that are asked for while a unit is multiplied."""
PAIR, DEEP = 2, 32
"""Tiles that the tile registers multiply at a time, and both the inputs and the columns that they take."""


@_literal(address, whole, address, whole, whole, address, whole, address)
def block_product(
    b: Any, tiles: int, rows: int, weights: Any, apart: Any, x: Any, pitch: Any, units: Any, out: Any, out_pitch: Any,
    ahead: Any,
) -> None:  # fmt: skip
    """out[r][t] = 16 sums over all columns of a tile t of float32 times x[r], for tiles `apart` bytes apart and rows x
    `pitch` bytes apart. Asks for ASKED bytes a unit from `ahead` on.
    """
    inputs = [b.add(x, b.mul(pitch, I64(r))) for r in range(rows)]
    places = [b.add(weights, b.mul(apart, I64(t))) for t in range(tiles)]

    def body(i: Any, sums: list[Any]) -> list[Any]:
        sums = list(sums)
        at = [b.add(place, b.mul(i, I64(UNIT[FLOAT32]))) for place in places]
        here = [b.add(y, b.mul(i, I64(4 * COLUMNS[FLOAT32]))) for y in inputs]
        for line in range(0, ASKED, 64):
            _prefetch(b, b.add(ahead, b.add(b.mul(i, I64(ASKED)), I64(line))))
        for k in range(COLUMNS[FLOAT32]):
            column = [_load(b, place, k * ROW, align=64) for place in at]
            for r in range(rows):
                number = _broadcast(b, here[r], 4 * k)
                for t in range(tiles):
                    s = r * tiles + t
                    sums[s] = _fma(b, column[t], number, sums[s])
        return sums

    sums = _repeat(b, units, [_constant(0.0)] * (rows * tiles), body)
    for r in range(rows):
        for t in range(tiles):
            _store(b, sums[r * tiles + t], b.add(out, b.mul(out_pitch, I64(r))), t * ROW)


@_primitive(types.void, address, address, whole, whole, address, whole)
def tile_block(b: Any, left: Any, right: Any, apart: Any, steps: Any, out: Any, out_pitch: Any) -> None:
    """32 inputs times two tiles of weights: out[r][t] as above.

    left: inputs as 2 x steps left sides; right: tiles as right sides, `steps` of each, `apart` bytes apart.
    """
    lefts = [left, b.add(left, b.mul(steps, I64(TILE)))]
    rights = [right, b.add(right, apart)]
    for s in range(4):
        _do(b, "tilezero", I8(s))

    def body(k: Any, _none: list[Any]) -> list[Any]:
        offset = b.mul(k, I64(TILE))
        for i, place in enumerate(lefts + rights):
            _get_tile(b, 4 + i, b.add(place, offset), I64(ROW))
        for s in range(4):
            _do(b, "tdpbf16ps", I8(s), I8(4 + s // 2), I8(6 + s % 2))
        return []

    _loop(b, steps, [], body)
    for s in range(4):
        _put_tile(b, s, b.add(out, b.add(b.mul(out_pitch, I64(LANES * (s // 2))), I64(ROW * (s % 2)))), out_pitch)
