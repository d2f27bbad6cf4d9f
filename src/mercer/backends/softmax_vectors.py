"""The inner loops of exact attention as LLVM IR: products of 16 rows by 16 lanes, exponentials, masks, packing.

Everything comes in two kinds, chosen by a flag at run time. Wide: an element is a float32, and a step of a product's
inner dimension is one element. Narrow: an element is a pair of bfloat16 in 32 bits, a step is two elements, and x86's
`vdpbf16ps` multiplies and adds both into float32. The code of the narrow kind is only there where the processor has
that instruction (`NARROW`).

Operands of a product are packed so that a step takes 64 bytes: on the right 16 lanes, on the left either 16 rows beside
each other, or rows that are `SPREAD` elements long. Sums stay in registers from the first step to the last.
"""

import math
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils, config

from mercer.backends.microkernels import (
    HALVES,
    I16,
    I32,
    I64,
    LANES,
    ROW,
    TOGETHER,
    VECTOR,
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
    number,
    vector,
    whole,
)


def _has_pairs() -> bool:
    if config.CPU_FEATURES is not None:  # Numba compiles for what its environment variables say
        return "+avx512bf16" in config.CPU_FEATURES.split(",")
    return config.CPU_NAME in (None, "host") and bool(llvm.get_host_cpu_features().get("avx512bf16", False))


def _has_tiles() -> bool:
    if config.CPU_FEATURES is not None:
        return "+amx-bf16" in config.CPU_FEATURES.split(",")
    return config.CPU_NAME in (None, "host") and bool(llvm.get_host_cpu_features().get("amx-bf16", False))


NARROW = _has_pairs()
"""Whether the processor multiplies pairs of bfloat16 into float32."""
TILES = NARROW and _has_tiles()
"""Whether it also multiplies tiles of them, where the system lets it."""
VECTORS = 4
"""Vectors of 16 queries that the backward pass takes together."""
SPREAD = VECTORS * LANES
"""Elements of a row of weights that is read as the left side of a product over queries."""
UNROLLED = 2
"""Steps in one turn of a product's loop; packed dimensions are multiples of 8 steps."""
EXP2 = {
    True: (0.9999992614448233, 0.693121814738437, 0.24024744830815806, 0.05591786031000737, 0.009570101791612535),
    False: (
        1.0000000716546766,
        0.6931469670645355,
        0.24022119723863763,
        0.05550713273865286,
        0.009675541333501724,
        0.001327647187378206,
    ),
}
"""2^f for |f| <= 1/2 as polynomials, fitted for the smallest relative error: 2.6e-6 where weights are rounded to
bfloat16 afterwards, 7.5e-8 otherwise."""


class _BFloat(ir.types.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


# LLVM took the operands as words before it had bfloat in x86's instructions.
_OLD = llvm.llvm_version_info[0] < 17
PAIRS = WORDS if _OLD else ir.VectorType(_BFloat(), 2 * LANES)
SHORTS, EIGHT = ir.VectorType(I16, 2 * LANES), ir.VectorType(I32, LANES // 2)


def _call(b: Any, name: str, result: Any, *arguments: Any) -> Any:
    kind = ir.FunctionType(result, [x.type for x in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), arguments)


def _dot(b: Any, x: Any, y: Any, total: Any) -> Any:
    """total + x[2 i] y[2 i] + x[2 i + 1] y[2 i + 1] in each of 16 lanes i."""
    pairs = b.bitcast(x, PAIRS), b.bitcast(y, PAIRS)
    return _call(b, "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, total, *pairs)


def _pair(b: Any, x: Any, y: Any) -> Any:
    """Two vectors rounded to bfloat16, the first in the lower halves of 16 words, the second in the upper ones."""
    kind = SHORTS if _OLD else PAIRS
    both = b.bitcast(_call(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", kind, y, x), SHORTS)
    lanes = [i // 2 + LANES * (i % 2) for i in range(2 * LANES)]
    mixed = b.shuffle_vector(both, ir.Constant(SHORTS, ir.Undefined), ir.Constant(ir.VectorType(I32, 2 * LANES), lanes))
    return b.bitcast(mixed, WORDS)


def _halves(b: Any, x: Any) -> Any:
    """A vector rounded to 16 bfloat16."""
    kind = HALVES if _OLD else ir.VectorType(_BFloat(), LANES)
    return b.bitcast(_call(b, "llvm.x86.avx512bf16.cvtneps2bf16.512", kind, x), HALVES)


def _exp2(b: Any, x: Any, narrow: bool) -> Any:
    """2^x for x of about 0 or less, 0 below 2^-125, NaN for NaN."""
    shift = _constant(1.5 * 2**23)  # adding it rounds to an integer, which stands in the low bits
    rounded = b.fadd(x, shift)
    f = b.fsub(x, b.fsub(rounded, shift))
    coefficients = EXP2[narrow]
    p = _constant(coefficients[-1])
    for c in coefficients[-2::-1]:
        p = _fma(b, p, f, _constant(c))
    bits = b.add(b.shl(b.bitcast(rounded, WORDS), _words(23)), b.bitcast(p, WORDS))
    below = b.fcmp_ordered("<", x, _constant(-125.0))
    return b.select(below, _constant(0.0), b.bitcast(bits, VECTOR))


def _largest(b: Any, x: Any, y: Any) -> Any:
    """max(x, y), where a NaN in x is left out."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _either(b: Any, narrow: Any, emit: Any, results: int = 0) -> list[Any]:
    """emit(b, True) or emit(b, False) by the flag; narrow code is left out where the processor has none."""
    if not NARROW:
        return emit(b, False)
    first, second, after = (b.append_basic_block(n) for n in ("narrow", "wide", "either"))
    b.cbranch(b.icmp_signed("!=", narrow, I64(0)), first, second)
    found = []
    for block, flag in ((first, True), (second, False)):
        b.position_at_end(block)
        values = emit(b, flag)
        found.append((b.block, values))
        b.branch(after)
    b.position_at_end(after)
    out = []
    for i in range(results):
        phi = b.phi(found[0][1][i].type)
        for block, values in found:
            phi.add_incoming(values[i], block)
        out.append(phi)
    return out


# Products


def _sums(
    b: Any, narrow: bool, left: Any, right: Any, count: Any, row: int, step: int, rows: range, start: list[Any]
) -> list[Any]:
    """start[r] + sum over k < count of left(r, k) right[k], left(r, k) being at r * row + k * step bytes."""

    def body(turn: Any, sums: list[Any]) -> list[Any]:
        sums, k = list(sums), b.mul(turn, I64(UNROLLED))
        x, y = b.add(left, b.mul(k, I64(step))), b.add(right, b.mul(k, I64(ROW)))
        for u in range(UNROLLED):
            lanes = _load(b, y, u * ROW, WORDS if narrow else VECTOR)
            for i, r in enumerate(rows):
                if narrow:
                    sums[i] = _dot(b, lanes, _splat(b, _load(b, x, u * step + r * row, I32)), sums[i])
                else:
                    sums[i] = _fma(b, _broadcast(b, x, u * step + r * row), lanes, sums[i])
        return sums

    return _loop(b, b.sdiv(count, I64(UNROLLED)), start, body)


def _blocks() -> list[range]:
    return [range(first, first + TOGETHER) for first in range(0, LANES, TOGETHER)]


@_primitive(vector, whole, address, address, address, whole, number, vector)
def scores(b: Any, narrow: Any, left: Any, right: Any, out: Any, count: Any, factor: Any, best: Any) -> Any:
    """out[r] = factor * sum over k < count of left[k][r] right[k]; gives the largest of best and all rows, by lane."""

    def emit(b: Any, flag: bool) -> list[Any]:
        top, scale = best, _splat(b, factor)
        for rows in _blocks():
            zero = [_constant(0.0)] * len(rows)
            for r, s in zip(rows, _sums(b, flag, left, right, count, 4, ROW, rows, zero), strict=True):
                scaled = b.fmul(s, scale)
                top = _largest(b, scaled, top)
                _store(b, scaled, out, r * ROW)
        return [top]

    return _either(b, narrow, emit, 1)[0]


@_primitive(types.void, whole, address, address, address, whole, address)
def mix(b: Any, narrow: Any, left: Any, right: Any, out: Any, count: Any, factors: Any) -> None:
    """out[r] = factors[r] out[r] + sum over k < count of left[k][r] right[k]"""

    def emit(b: Any, flag: bool) -> list[Any]:
        for rows in _blocks():
            start = [b.fmul(_load(b, out, r * ROW), _broadcast(b, factors, 4 * r)) for r in rows]
            for r, s in zip(rows, _sums(b, flag, left, right, count, 4, ROW, rows, start), strict=True):
                _store(b, s, out, r * ROW)
        return []

    _either(b, narrow, emit)


def _adding(spread: bool) -> Any:
    def emit(b: Any, narrow: Any, left: Any, right: Any, out: Any, count: Any) -> None:
        """out[r] += sum over k < count of left(k, r) right[k]"""

        def add(b: Any, flag: bool) -> list[Any]:
            row, step = (SPREAD * (2 if flag else 4), 4) if spread else (4, ROW)
            for rows in _blocks():
                start = [_load(b, out, r * ROW) for r in rows]
                for r, s in zip(rows, _sums(b, flag, left, right, count, row, step, rows, start), strict=True):
                    _store(b, s, out, r * ROW)
            return []

        _either(b, narrow, add)

    emit.__name__ = "add_spread" if spread else "add_mix"
    return emit


add_mix, add_spread = (
    _primitive(types.void, whole, *[address] * 3, whole)(_adding(spread)) for spread in (False, True)
)


# What happens between products


@_primitive(vector, whole, address, address, whole, vector)
def soften(b: Any, narrow: Any, scores: Any, weights: Any, keys: Any, largest: Any) -> Any:
    """weights[k] = 2^(scores[k] - largest) for an even number of keys, packed as steps; gives their sum by lane."""

    def emit(b: Any, flag: bool) -> list[Any]:
        def body(turn: Any, sums: list[Any]) -> list[Any]:
            new = []
            x = b.add(scores, b.mul(turn, I64(4 * ROW)))
            y = b.add(weights, b.mul(turn, I64((2 if flag else 4) * ROW)))
            p = [_exp2(b, b.fsub(_load(b, x, i * ROW), largest), flag) for i in range(4)]
            for i in (0, 2):
                new.append(b.fadd(sums[i // 2], b.fadd(p[i], p[i + 1])))
                if flag:
                    _store(b, _pair(b, p[i], p[i + 1]), y, i // 2 * ROW)
                else:
                    _store(b, p[i], y, i * ROW)
                    _store(b, p[i + 1], y, (i + 1) * ROW)
            return new

        first, second = _loop(b, b.sdiv(keys, I64(4)), [_constant(0.0)] * 2, body)
        return [b.fadd(first, second)]

    return _either(b, narrow, emit, 1)[0]


@_primitive(types.void, whole, address, address, address, address, address, vector, vector)
def grade(
    b: Any, narrow: Any, scores: Any, slopes: Any, weights: Any, rows: Any, steps: Any, log_sum: Any, along: Any
) -> None:
    """For 16 keys: weights = p = 2^(scores - log_sum) and rows = p (slopes - along), both by key with rows of SPREAD
    queries; steps is the latter packed as steps of keys.
    """

    def emit(b: Any, flag: bool) -> list[Any]:
        row = SPREAD * (2 if flag else 4)

        def body(turn: Any, _none: list[Any]) -> list[Any]:
            at, to = b.mul(turn, I64(2 * ROW)), b.mul(turn, I64(2 * row))
            s, d, w, g = b.add(scores, at), b.add(slopes, at), b.add(weights, to), b.add(rows, to)
            both = []
            for i in range(2):
                p = _exp2(b, b.fsub(_load(b, s, i * ROW), log_sum), flag)
                slope = b.fmul(p, b.fsub(_load(b, d, i * ROW), along))
                both.append(slope)
                if flag:
                    _store(b, _halves(b, p), w, i * row, 2)
                    _store(b, _halves(b, slope), g, i * row, 2)
                else:
                    _store(b, p, w, i * row)
                    _store(b, slope, g, i * row)
                    _store(b, slope, b.add(steps, at), i * ROW)
            if flag:
                _store(b, _pair(b, *both), b.add(steps, b.mul(turn, I64(ROW))))
            return []

        _loop(b, I64(LANES // 2), [], body)
        return []

    _either(b, narrow, emit)


@_primitive(types.void, whole, address)
def clear(b: Any, narrow: Any, rows: Any) -> None:
    """16 elements of 16 rows of SPREAD elements become 0."""

    def emit(b: Any, flag: bool) -> list[Any]:
        zero = ir.Constant(HALVES, [0] * LANES) if flag else _constant(0.0)
        for r in range(LANES):
            _store(b, zero, rows, r * SPREAD * (2 if flag else 4), 2)
        return []

    _either(b, narrow, emit)


@_primitive(vector, address, address, address, whole, whole, number, vector)
def veil(b: Any, scores: Any, keys: Any, queries: Any, left: Any, span: Any, slope: Any, best: Any) -> Any:
    """Lower the scores of 16 keys by slope * distance, and what is hidden to -infinity; gives the largest by lane.

    Keys and queries are positions, 32-bit integers; key j is visible to query i where 0 <= j - i + left <= span.
    """
    at = _load(b, queries, 0, WORDS)
    lefts, spans, factor = (_splat(b, x) for x in (b.trunc(left, I32), b.trunc(span, I32), slope))
    for r in range(LANES):
        apart = b.sub(_splat(b, _load(b, keys, 4 * r, I32)), at)
        far = b.select(b.icmp_signed("<", apart, _words(0)), b.sub(_words(0), apart), apart)
        s = b.fsub(_load(b, scores, r * ROW), b.fmul(b.sitofp(far, VECTOR), factor))
        hidden = b.icmp_unsigned(">", b.add(apart, lefts), spans)
        s = b.select(hidden, _constant(-math.inf), s)
        best = _largest(b, s, best)
        _store(b, s, scores, r * ROW)
    return best


@_primitive(vector, address, address, vector)
def veil_bits(b: Any, scores: Any, bits: Any, best: Any) -> Any:
    """The scores of 16 keys become -infinity where the key's 16 bits are 0; gives the largest by lane."""
    for r in range(LANES):
        seen = b.bitcast(_load(b, bits, 2 * r, I16, 2), ir.VectorType(ir.IntType(1), LANES))
        s = b.select(seen, _load(b, scores, r * ROW), _constant(-math.inf))
        best = _largest(b, s, best)
        _store(b, s, scores, r * ROW)
    return best


@_primitive(vector, address, address, vector)
def add_weights(b: Any, scores: Any, weights: Any, best: Any) -> Any:
    """Log-weights are added to the scores of 16 keys, which are hidden where these are -infinity; gives the largest."""
    for r in range(LANES):
        weight = _load(b, weights, r * ROW)
        hidden = b.fcmp_ordered("==", weight, _constant(-math.inf))
        s = b.select(hidden, weight, b.fadd(_load(b, scores, r * ROW), weight))
        best = _largest(b, s, best)
        _store(b, s, scores, r * ROW)
    return best


@_primitive(vector, vector, vector)
def largest(b: Any, x: Any, y: Any) -> Any:
    """max(x, y); a NaN in x is left out."""
    return _largest(b, x, y)


@_primitive(vector, vector, vector)
def subtract(b: Any, x: Any, y: Any) -> Any:
    """x - y"""
    return b.fsub(x, y)


@_primitive(vector, vector)
def exp2(b: Any, x: Any) -> Any:
    """2^x for x of about 0 or less."""
    return _exp2(b, x, False)


@_primitive(whole, address)
def get_whole(b: Any, at: Any) -> Any:
    """A 32-bit integer."""
    return b.sext(_load(b, at, 0, I32), I64)


# Packing


def _steps_across(b: Any, words: list[Any]) -> list[Any]:
    """16 rows of 8 words as 8 steps of 16: row r beside row r + 8, and each half turned."""
    rows = [_shuffle(b, words[r], words[r + 8], list(range(LANES))) for r in range(8)]
    for s in (4, 2, 1):
        upper = [lane if not lane & s else LANES + lane - s for lane in range(LANES)]
        lower = [lane + s if not lane & s else LANES + lane for lane in range(LANES)]
        for r in range(8):
            if not r & s:
                x, y = rows[r], rows[r + s]
                rows[r], rows[r + s] = _shuffle(b, x, y, upper), _shuffle(b, x, y, lower)
    return rows


@_primitive(types.void, whole, address, address)
def pack_across(b: Any, narrow: Any, tile: Any, out: Any) -> None:
    """16 rows of 16 floats as the steps of a product over the 16: out[step] has an element of each row."""
    rows = [_load(b, tile, r * ROW) for r in range(LANES)]

    def emit(b: Any, flag: bool) -> list[Any]:
        turned = _steps_across(b, [b.bitcast(_halves(b, x), EIGHT) for x in rows]) if flag else _turn(b, list(rows))
        for i, x in enumerate(turned):
            _store(b, x, out, i * ROW)
        return []

    _either(b, narrow, emit)


@_primitive(types.void, whole, address, address)
def pack_along(b: Any, narrow: Any, tile: Any, out: Any) -> None:
    """16 rows of 16 floats as the steps of a product over rows: out[step] has 16 elements of one row, or of a pair."""
    rows = [_load(b, tile, r * ROW) for r in range(LANES)]

    def emit(b: Any, flag: bool) -> list[Any]:
        steps = [_pair(b, rows[r], rows[r + 1]) for r in range(0, LANES, 2)] if flag else rows
        for i, x in enumerate(steps):
            _store(b, x, out, i * ROW)
        return []

    _either(b, narrow, emit)


@_primitive(types.void, address, whole, address, address)
def pack_halves(b: Any, at: Any, stride: Any, across: Any, along: Any) -> None:
    """16 bfloat16 of 16 rows of a tensor as narrow steps, as `pack_across` and `pack_along` make them; not where 0."""
    rows = []
    for _ in range(LANES):
        rows.append(_load(b, at, 0, HALVES, 2))
        at = b.add(at, stride)
    with b.if_then(b.icmp_signed("!=", across, I64(0))):
        for i, x in enumerate(_steps_across(b, [b.bitcast(x, EIGHT) for x in rows])):
            _store(b, x, across, i * ROW)
    with b.if_then(b.icmp_signed("!=", along, I64(0))):
        lanes = ir.Constant(ir.VectorType(I32, 2 * LANES), [i // 2 + LANES * (i % 2) for i in range(2 * LANES)])
        for r in range(0, LANES, 2):
            _store(b, b.shuffle_vector(rows[r], rows[r + 1], lanes), along, r // 2 * ROW, 2)
