"""The products of a block of the matrix recurrence as LLVM IR: register tiles with any strides, pairs of tokens under a
decay of every channel, and the triangular systems of a block.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from mercer.backends.matrix_scan_vectors import WIDTHS
from mercer.backends.microkernels import (
    I32,
    I64,
    LANES,
    ROW,
    TILE,
    TOGETHER,
    WORDS,
    _broadcast,
    _constant,
    _fma,
    _load,
    _loop,
    _primitive,
    _shuffle,
    _splat,
    _store,
    _turn,
    _words,
    address,
    vector,
    whole,
)


def rows_of(wide: int) -> int:
    """Rows of a product of so many vectors that go at a time: their sums fill the registers."""
    return max(1, min(8, TOGETHER // wide))


def _product(wide: int, onto: bool) -> Callable[..., None]:
    def emit(
        b: Any, left: Any, row: Any, inner: Any, right: Any, step: Any, count: Any, out: Any, pitch: Any, *more: Any
    ) -> None:  # fmt: skip
        """out[r] = sum_i left[r][i] right[i] for some rows r of `wide` vectors: left's numbers are r row + i inner
        bytes from the first, right's rows `step`, out's `pitch`. Onto another: source[r] scale[r] is added, its rows
        `pitch` apart as well.
        """
        rows = rows_of(wide)
        lefts = [left if r == 0 else b.add(left, b.mul(row, I64(r))) for r in range(rows)]
        place = [b.mul(pitch, I64(r)) for r in range(rows)]
        sums = [_constant(0.0)] * (rows * wide)
        if onto:
            source, scale = more
            sums = []
            for r in range(rows):
                at, factor = b.add(source, place[r]), _broadcast(b, scale, 4 * r)
                sums += [b.fmul(factor, _load(b, at, v * ROW)) for v in range(wide)]

        def body(i: Any, sums: list[Any]) -> list[Any]:
            at, offset = b.add(right, b.mul(i, step)), b.mul(i, inner)
            y = [_load(b, at, v * ROW) for v in range(wide)]
            new = []
            for r in range(rows):
                x = _broadcast(b, b.add(lefts[r], offset), 0)
                new += [_fma(b, x, y[v], sums[r * wide + v]) for v in range(wide)]
            return new

        sums = _loop(b, count, sums, body)
        for r in range(rows):
            for v in range(wide):
                _store(b, sums[r * wide + v], b.add(out, place[r]), v * ROW)

    emit.__name__ = f"product{wide}{'_onto' * onto}"
    return emit


def _pairs(wide: int, seeks: bool, takes: bool) -> Callable[..., None]:
    def emit(
        b: Any, rows: Any, apart: Any, each: Any, count: Any, own: Any, end: Any, tile: Any, gap: Any, add: Any
    ) -> None:  # fmt: skip
        """A token's key before those after it: with p = k, for each of `count` tokens t

            tile[t] (+)= q_t p,    p <- w_t p

        in lanes, not yet summed over them; and where tokens seek b_t p too, and where they take the same of a. rows: w,
        q, k, a, b of the first t, `apart` bytes from one to the next, tokens `each` apart; own: k of the token, a
        `apart` further; end: where the last p goes, likewise. Rows of a tile are `gap` apart, and of several the n-th
        begins n TILE further. It adds if `add` is not 0.
        """
        starts = [own, b.add(own, apart)][: 1 + takes]
        first = [_load(b, at, i * ROW) for at in starts for i in range(wide)]
        kinds = [rows, b.add(rows, apart), b.add(rows, b.mul(apart, I64(4)))]
        adding = b.icmp_signed("!=", add, I64(0))

        def body(t: Any, carried: list[Any]) -> list[Any]:
            step = b.mul(t, each)
            w = [_load(b, b.add(kinds[0], step), i * ROW) for i in range(wide)]
            reads = [[_load(b, b.add(at, step), i * ROW) for i in range(wide)] for at in kinds[1 : 2 + seeks]]
            for n in range((1 + seeks) * (1 + takes)):
                place = b.add(tile, b.mul(t, gap))
                x = b.select(adding, _load(b, place, n * TILE), _constant(0.0))
                which = n // (1 + seeks)
                p = carried[which * wide : (which + 1) * wide]
                for i in range(wide):
                    x = _fma(b, reads[n % (1 + seeks)][i], p[i], x)
                _store(b, x, place, n * TILE)
            return [b.fmul(p, w[i % wide]) for i, p in enumerate(carried)]

        last = _loop(b, count, first, body)
        for n in range(1 + takes):
            for i in range(wide):
                _store(b, last[n * wide + i], end if n == 0 else b.add(end, apart), i * ROW)

    emit.__name__ = f"pairs{wide}{'_seeking' * seeks}{'_taking' * takes}"
    return emit


@_primitive(types.void, address, whole, address, whole)
def turn_tile(b: Any, source: Any, stride: Any, target: Any, line: Any) -> None:
    """target[c][t] = source[t][c] for 16 rows of 16 numbers; rows are `stride` and `line` bytes apart."""
    rows = _turn(b, [_load(b, b.add(source, b.mul(stride, I64(t)))) for t in range(LANES)])
    for c, row in enumerate(rows):
        _store(b, row, b.add(target, b.mul(line, I64(c))))


def _after(turned: bool) -> Callable[..., None]:
    def emit(b: Any, at: Any, sums: Any, token: Any) -> None:
        """Of what a tile holds of a token's pairs the row of all 16: 0 for those that are not after it."""
        lanes = [LANES - 1 - t if turned else t - 1 for t in range(LANES)]
        moved = _shuffle(b, sums, sums, [max(lane, 0) for lane in lanes])
        index = b.sub(ir.Constant(WORDS, list(range(LANES))), _splat(b, b.trunc(token, I32)))
        _store(b, b.select(b.icmp_signed(">", index, _words(0)), moved, _constant(0.0)), at)

    emit.__name__ = f"after{'_turned' * turned}"
    return emit


after, after_turned = (_primitive(types.void, address, vector, whole)(_after(turned)) for turned in (False, True))


@_primitive(types.void, address, whole, address)
def solve(b: Any, at: Any, stride: Any, pairs: Any) -> None:
    """x[t] += sum_{j<t} pairs[j][t] x[j], one after another: 16 rows of a vector, `stride` bytes apart."""
    places = [at if t == 0 else b.add(at, b.mul(stride, I64(t))) for t in range(LANES)]
    x = [_load(b, place) for place in places]
    for j in range(LANES):
        for t in range(j + 1, LANES):
            x[t] = _fma(b, _broadcast(b, pairs, j * ROW + 4 * t), x[j], x[t])
    for place, row in zip(places, x, strict=True):
        _store(b, row, place)


@_primitive(types.void, address, whole, address)
def solve_back(b: Any, at: Any, stride: Any, pairs: Any) -> None:
    """x[j] += sum_{t>j} pairs[j][t] x[t], from the last on."""
    places = [at if t == 0 else b.add(at, b.mul(stride, I64(t))) for t in range(LANES)]
    x = [_load(b, place) for place in places]
    for t in reversed(range(LANES)):
        for j in range(t):
            x[j] = _fma(b, _broadcast(b, pairs, j * ROW + 4 * t), x[t], x[j])
    for place, row in zip(places, x, strict=True):
        _store(b, row, place)


_PRODUCT = (address, whole, whole, address, whole, whole, address, whole)
product1, product2, product4 = (_primitive(types.void, *_PRODUCT)(_product(n, False)) for n in WIDTHS)
product1_onto, product2_onto, product4_onto = (
    _primitive(types.void, *_PRODUCT, address, address)(_product(n, True)) for n in WIDTHS
)
_PAIRS = (address, whole, whole, whole, address, address, address, whole, whole)
pairs1, pairs2, pairs4 = (_primitive(types.void, *_PAIRS)(_pairs(n, False, False)) for n in WIDTHS)
pairs1_seeking, pairs2_seeking, pairs4_seeking = (
    _primitive(types.void, *_PAIRS)(_pairs(n, True, False)) for n in WIDTHS
)
pairs1_taking, pairs2_taking, pairs4_taking = (_primitive(types.void, *_PAIRS)(_pairs(n, True, True)) for n in WIDTHS)
