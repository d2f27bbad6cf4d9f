"""Products of 16 by 16 in the tile registers of AMX, and what stands between them, as LLVM IR.

A product is C[r][c] += sum over k < 32 of A[r][k] B[k][c] with 16 rows r and 16 columns c. C is 16 rows of 16 float32,
A, a left side, 16 rows of 32 bfloat16, and B, a right side, 16 rows of which the i-th has B[2 i][c] and B[2 i + 1][c]
beside each other: each of them 1 KiB, and A the words of a B turned. One instruction does all of it in 16 cycles; eight
registers hold such tiles. They are named by number here and hold nothing between primitives, so that the compiler has
nothing to assign (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18).

Before any of it a thread sets the registers' shapes (`start_tiles`), and gives them back as they were afterwards
(`end_tiles`): another library in the same thread, such as torch's, has shapes of its own.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from mercer.backends.microkernels import (
    HALVES,
    I8,
    I32,
    I64,
    LANES,
    ROW,
    TILE,
    VECTOR,
    WORDS,
    _constant,
    _fma,
    _load,
    _loop,
    _pointer,
    _primitive,
    _splat,
    _store,
    _words,
    address,
    number,
    vector,
    whole,
)
from mercer.backends.softmax_vectors import _call, _halves, _largest

SHAPES = 64
"""Bytes of the shapes of all tile registers."""


POWER = (1.0000025876, 0.6930038447, 0.2414427409, 0.0520114826, 0.0135341647)
"""2^f for 0 <= f < 1 as a polynomial, fitted for the smallest relative error, 2.6e-6; its results are rounded."""
_AVX = "llvm.x86.avx512.mask"
_FLOOR, _CURRENT = 9, 4
"""What is left of a number above the integer below it, without an exception; and rounding as it is set."""


def _do(b: Any, name: str, *arguments: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [x.type for x in arguments])
    b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.{name}"), arguments)


def _get_tile(b: Any, tile: int, at: Any, stride: Any) -> None:
    _do(b, "tileloadd64", I8(tile), _pointer(b, at, I8), stride)


def _put_tile(b: Any, tile: int, at: Any, stride: Any) -> None:
    _do(b, "tilestored64", I8(tile), _pointer(b, at, I8), stride)


@_primitive(types.void, address)
def start_tiles(b: Any, kept: Any) -> None:
    """Every tile register has 16 rows of 64 bytes from here on; `kept` (128 bytes) takes the shapes they had."""
    _do(b, "sttilecfg", _pointer(b, kept, I8))
    shapes = b.add(kept, I64(SHAPES))
    for i in range(0, SHAPES, 8):
        _store(b, I64(0), shapes, i, 8)
    _store(b, I8(1), shapes, 0, 1)
    for tile in range(8):
        _store(b, ir.IntType(16)(ROW), shapes, 16 + 2 * tile, 2)
        _store(b, I8(LANES), shapes, 48 + tile, 1)
    _do(b, "ldtilecfg", _pointer(b, shapes, I8))


@_primitive(types.void, address)
def end_tiles(b: Any, kept: Any) -> None:
    """The shapes that `start_tiles` kept, or none where there were none."""
    _do(b, "ldtilecfg", _pointer(b, kept, I8))


@_primitive(types.void, whole, address, address, whole, address, whole, whole)
def multiply(b: Any, fresh: Any, left: Any, right: Any, apart: Any, out: Any, rows: Any, steps: Any) -> None:
    """out[t] (+)= sum over k < steps of left[t][k] right[k] for 1 to 4 tiles t; added to what is there unless `fresh`.

    left[t][k] is at left + t * apart + k * 1 KiB, right[k] at right + k * 1 KiB, out[t] at out + t * 1 KiB.
    """
    after = b.append_basic_block("multiplied")
    blocks = [b.append_basic_block("rows") for _ in range(4)]
    switch = b.switch(rows, blocks[3])
    for count, block in enumerate(blocks, 1):
        if count < 4:
            switch.add_case(I64(count), block)
        b.position_at_end(block)
        with b.if_else(b.icmp_signed("!=", fresh, I64(0))) as (new, old):
            with new:
                for t in range(count):
                    _do(b, "tilezero", I8(t))
            with old:
                for t in range(count):
                    _get_tile(b, t, b.add(out, I64(t * TILE)), I64(ROW))

        def body(k: Any, _none: list[Any], count: int = count) -> list[Any]:
            offset = b.mul(k, I64(TILE))
            x = b.add(left, offset)
            _get_tile(b, 7, b.add(right, offset), I64(ROW))
            for t in range(count):
                a = 4 + t % 3
                _get_tile(b, a, b.add(x, b.mul(apart, I64(t))) if t else x, I64(ROW))
                _do(b, "tdpbf16ps", I8(t), I8(a), I8(7))
            return []

        _loop(b, steps, [], body)
        for t in range(count):
            _put_tile(b, t, b.add(out, I64(t * TILE)), I64(ROW))
        b.branch(after)
    b.position_at_end(after)


@_primitive(vector, address, whole, vector)
def peak(b: Any, scores: Any, rows: Any, best: Any) -> Any:
    """The largest of best and of some rows (a multiple of 16), by lane."""

    def body(turn: Any, tops: list[Any]) -> list[Any]:
        x = b.add(scores, b.mul(turn, I64(TILE)))
        tops = list(tops)
        for r in range(LANES):
            tops[r % 4] = _largest(b, _load(b, x, r * ROW), tops[r % 4])
        return tops

    a, c, d, e = _loop(b, b.sdiv(rows, I64(LANES)), [best] * 4, body)
    return _largest(b, _largest(b, a, c), _largest(b, d, e))


@_primitive(types.void, address, whole, number)
def rescale(b: Any, rows: Any, count: Any, factor: Any) -> None:
    """Some rows (a multiple of 16) times a factor."""
    scale = _splat(b, factor)

    def body(turn: Any, _none: list[Any]) -> list[Any]:
        x = b.add(rows, b.mul(turn, I64(TILE)))
        for r in range(LANES):
            _store(b, b.fmul(_load(b, x, r * ROW), scale), x, r * ROW)
        return []

    _loop(b, b.sdiv(count, I64(LANES)), [], body)


@_primitive(types.void, address, whole, vector)
def reduce_lanes(b: Any, rows: Any, count: Any, factors: Any) -> None:
    """Some rows (a multiple of 16) times a factor for each lane."""

    def body(turn: Any, _none: list[Any]) -> list[Any]:
        x = b.add(rows, b.mul(turn, I64(TILE)))
        for r in range(LANES):
            _store(b, b.fmul(_load(b, x, r * ROW), factors), x, r * ROW)
        return []

    _loop(b, b.sdiv(count, I64(LANES)), [], body)


@_primitive(whole, vector, vector)
def alike(b: Any, x: Any, y: Any) -> Any:
    """1 if all lanes of x and y are equal, else 0."""
    same = b.bitcast(b.fcmp_ordered("==", x, y), ir.IntType(LANES))
    return b.zext(b.icmp_unsigned("==", same, ir.IntType(LANES)(-1)), I64)


def _power(b: Any, x: Any) -> Any:
    """2^x for x of about 0 or less, 0 below 2^-126, NaN for NaN."""
    every = ir.IntType(LANES)(-1)
    fraction = _call(b, f"{_AVX}.reduce.ps.512", VECTOR, x, I32(_FLOOR), _constant(0.0), every, I32(_CURRENT))
    p = _constant(POWER[-1])
    for c in POWER[-2::-1]:
        p = _fma(b, p, fraction, _constant(c))
    # Numbers below the normal ones take the processor a hundred times as long.
    there = b.bitcast(b.fcmp_unordered(">=", x, _constant(-126.0)), ir.IntType(LANES))
    return _call(b, f"{_AVX}.scalef.ps.512", VECTOR, p, x, _constant(0.0), there, I32(_CURRENT))


def _rounded(b: Any, x: Any, y: Any) -> Any:
    """Two vectors rounded to bfloat16, the first in the lower halves of 16 words, the second in the upper ones; what is
    in the middle goes up. Cheaper than `_pair`, whose instruction has to be followed by one that mixes lanes.
    """
    x, y = (b.add(b.bitcast(v, WORDS), _words(1 << 15)) for v in (x, y))
    return b.or_(b.lshr(x, _words(16)), b.and_(y, _words(-1 << 16)))


@_primitive(vector, address, address, whole, number, vector)
def soften_pairs(b: Any, scores: Any, weights: Any, keys: Any, factor: Any, shift: Any) -> Any:
    """weights = 2^(factor * scores + shift) of some keys (a multiple of 16), as right sides; gives sums by lane."""
    scale = _splat(b, factor)

    def body(turn: Any, sums: list[Any]) -> list[Any]:
        x, y = b.add(scores, b.mul(turn, I64(TILE))), b.add(weights, b.mul(turn, I64(TILE // 2)))
        sums = list(sums)
        for i in range(0, LANES, 2):
            first, second = (_power(b, _fma(b, _load(b, x, r * ROW), scale, shift)) for r in (i, i + 1))
            at = i // 2 % 4
            sums[at] = b.fadd(sums[at], b.fadd(first, second))
            _store(b, _rounded(b, first, second), y, i // 2 * ROW)
        return sums

    a, c, d, e = _loop(b, b.sdiv(keys, I64(LANES)), [_constant(0.0)] * 4, body)
    return b.fadd(b.fadd(a, c), b.fadd(d, e))


@_primitive(types.void, address, address, address, address, address, number, vector, vector)
def grade_pairs(
    b: Any, scores: Any, slopes: Any, weights: Any, rows: Any, steps: Any, factor: Any, shift: Any, along: Any
) -> None:
    """For 16 keys by 16 queries: weights = p = 2^(factor * scores + shift) and rows = p (slopes - along), both as half
    of a left side, 16 keys by 32 queries; steps is the latter as half of a right side, pairs of keys by 16 queries.
    """
    scale = _splat(b, factor)

    def body(turn: Any, _none: list[Any]) -> list[Any]:
        at = b.mul(turn, I64(4 * ROW))
        s, d, w, g = (b.add(x, at) for x in (scores, slopes, weights, rows))
        both = []
        for i in range(4):
            p = _power(b, _fma(b, _load(b, s, i * ROW), scale, shift))
            slope = b.fmul(p, b.fsub(_load(b, d, i * ROW), along))
            both.append(slope)
            _store(b, _halves(b, p), w, i * ROW, 2)
            _store(b, _halves(b, slope), g, i * ROW, 2)
        for i in (0, 2):
            _store(b, _rounded(b, both[i], both[i + 1]), b.add(steps, b.mul(turn, I64(2 * ROW))), i // 2 * ROW)
        return []

    _loop(b, I64(LANES // 4), [], body)


@_primitive(types.void, address)
def clear_half(b: Any, at: Any) -> None:
    """16 rows of 16 of the 32 entries of a left side become 0."""
    for r in range(LANES):
        _store(b, ir.Constant(HALVES, [0] * LANES), at, r * ROW, 2)
