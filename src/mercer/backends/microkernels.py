"""Vectors of 16 float32 for Numba, and the small matrix products made of them, as LLVM IR.

LLVM's own vectoriser does not keep 16 accumulators in registers, so the inner products are written out: a tile is 16
rows of 16 floats (64 bytes a row, one 512-bit register), and a product keeps a whole tile in registers while it walks
the inner dimension with fused multiply-adds. Where registers are narrower LLVM splits the vectors, and fewer rows go at
a time.

Addresses are plain integers, in bytes: one compiled version serves every dtype, stride and size. Nothing here checks
bounds; `mercer.backends.polynomial` lays out the memory and checks the tensors.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
ROW = 4 * LANES
"""Bytes of one vector."""
TILE = LANES * ROW
"""Bytes of 16 rows."""
TOGETHER = 16 if llvm.get_host_cpu_features().get("avx512f", False) else 4
"""Rows of a tile that are summed at a time: what the registers hold."""

I8, I16, I32, I64, F32, F64 = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.FloatType(),
    ir.DoubleType(),
)
VECTOR, WORDS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
HALVES, DOUBLES = ir.VectorType(I16, LANES), ir.VectorType(F64, LANES)


class Vector(types.Type):
    """Numba's name for <16 x float>."""

    def __init__(self) -> None:
        super().__init__(name="mercer_vector_of_16_float32")


vector = Vector()
address, number, whole = types.int64, types.float32, types.int64


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, VECTOR)


def _primitive(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a Numba intrinsic of a function (builder, *values) -> value; arguments are cast to the given types."""

    def wrap(emit: Callable[..., Any]) -> Any:
        def typed(_context: Any, *_given: Any) -> Any:
            def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
                out = emit(builder, *values)
                return context.get_dummy_value() if result is types.void else out

            return result(*arguments), generate

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = ["context", *(f"x{i}" for i in range(len(arguments)))]
        typed.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
        typed.__name__, typed.__doc__ = emit.__name__, emit.__doc__
        return intrinsic(typed)

    return wrap


# Pieces of IR


def _pointer(b: Any, at: Any, kind: Any, offset: int = 0) -> Any:
    return b.inttoptr(b.add(at, I64(offset)) if offset else at, kind.as_pointer())


def _load(b: Any, at: Any, offset: int = 0, kind: Any = VECTOR, align: int = 4) -> Any:
    return b.load(_pointer(b, at, kind, offset), align=align)


def _store(b: Any, x: Any, at: Any, offset: int = 0, align: int = 4) -> None:
    b.store(x, _pointer(b, at, x.type, offset), align=align)


def _splat(b: Any, x: Any) -> Any:
    kind = ir.VectorType(x.type, LANES)
    single = b.insert_element(ir.Constant(kind, ir.Undefined), x, I32(0))
    return b.shuffle_vector(single, ir.Constant(kind, ir.Undefined), ir.Constant(WORDS, [0] * LANES))


def _constant(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


def _words(value: int) -> Any:
    return ir.Constant(WORDS, [value] * LANES)


def _fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    return b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.fmuladd.v16f32"), [x, y, z])


def _shuffle(b: Any, x: Any, y: Any, lanes: list[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(WORDS, lanes))


def _broadcast(b: Any, at: Any, offset: int) -> Any:
    return _splat(b, _load(b, at, offset, F32))


def _prefetch(b: Any, at: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(function, [_pointer(b, at, I8), I32(0), I32(2), I32(1)])


def _loop(b: Any, count: Any, carried: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Run body(index, carried) count times, at least once, with the carried values in registers."""
    before, inside, after = b.block, b.append_basic_block("loop"), b.append_basic_block("done")
    b.branch(inside)
    b.position_at_end(inside)
    index, values = b.phi(I64), [b.phi(x.type) for x in carried]
    new = body(index, values)
    following = b.add(index, I64(1))
    end = b.block
    b.cbranch(b.icmp_signed("<", following, count), inside, after)
    index.add_incoming(I64(0), before)
    index.add_incoming(following, end)
    for phi, first, later in zip(values, carried, new, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, end)
    b.position_at_end(after)
    return new


# Single vectors


@_primitive(vector, address)
def load(b: Any, at: Any) -> Any:
    """16 floats."""
    return _load(b, at)


@_primitive(types.void, address, vector)
def store(b: Any, at: Any, x: Any) -> None:
    """16 floats."""
    _store(b, x, at)


@_primitive(vector, number)
def splat(b: Any, x: Any) -> Any:
    """One number in every lane."""
    return _splat(b, x)


@_primitive(vector, address)
def broadcast(b: Any, at: Any) -> Any:
    """One number from memory in every lane."""
    return _broadcast(b, at, 0)


@_primitive(vector, vector, vector)
def add(b: Any, x: Any, y: Any) -> Any:
    """x + y"""
    return b.fadd(x, y)


@_primitive(vector, vector, vector)
def mul(b: Any, x: Any, y: Any) -> Any:
    """x y"""
    return b.fmul(x, y)


@_primitive(vector, vector, vector, vector)
def fma(b: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z"""
    return _fma(b, x, y, z)


@_primitive(vector, vector)
def at_most_one(b: Any, x: Any) -> Any:
    """min(x, 1); NaN stays."""
    return b.select(b.fcmp_ordered(">", x, _constant(1.0)), _constant(1.0), x)


@_primitive(vector, vector)
def at_most_zero(b: Any, x: Any) -> Any:
    """min(x, 0); NaN stays."""
    return b.select(b.fcmp_ordered(">", x, _constant(0.0)), _constant(0.0), x)


@_primitive(vector, vector)
def at_least_zero(b: Any, x: Any) -> Any:
    """max(x, 0); NaN stays."""
    return b.select(b.fcmp_ordered("<", x, _constant(0.0)), _constant(0.0), x)


@_primitive(vector, vector)
def above_zero(b: Any, x: Any) -> Any:
    """1 where x > 0, else 0."""
    return b.select(b.fcmp_ordered(">", x, _constant(0.0)), _constant(1.0), _constant(0.0))


@_primitive(vector, vector)
def inverse(b: Any, x: Any) -> Any:
    """1 / x, and 0 where x is 0."""
    return b.select(b.fcmp_ordered("==", x, _constant(0.0)), _constant(0.0), b.fdiv(_constant(1.0), x))


@_primitive(vector, whole)
def from_lane(b: Any, first: Any) -> Any:
    """1 in the lanes from the first one on, 0 before."""
    numbers = ir.Constant(WORDS, list(range(LANES)))
    behind = b.icmp_signed(">=", numbers, _splat(b, b.trunc(first, I32)))
    return b.select(behind, _constant(1.0), _constant(0.0))


EXPONENTIAL = (
    1.0,
    0.999999706302822,
    0.49999147830850693,
    0.16667638158765163,
    0.04189816059888042,
    0.008290270139338784,
)
"""e^r for |r| <= ln(2) / 2 as a polynomial, fitted for the smallest relative error: 9.2e-8."""


@_primitive(vector, vector)
def exp(b: Any, x: Any) -> Any:
    """e^x for x of 0 or less, 0 below 2^-126: x = n ln 2 + r, n goes into the exponent's bits."""
    least = _constant(-126 * math.log(2))
    below = b.fcmp_ordered("<", x, least)
    x = b.select(below, least, x)  # in this order NaN stays NaN
    shift = _constant(1.5 * 2**23)  # adding it rounds to an integer, which stands in the low bits
    rounded = _fma(b, x, _constant(math.log2(math.e)), shift)
    n = b.fsub(rounded, shift)
    high = 0.693359375  # ten bits, so that n times it is exact
    r = _fma(b, n, _constant(high - math.log(2)), _fma(b, n, _constant(-high), x))
    p = _constant(EXPONENTIAL[-1])
    for c in EXPONENTIAL[-2::-1]:
        p = _fma(b, p, r, _constant(c))
    bits = b.add(b.shl(b.bitcast(rounded, WORDS), _words(23)), _words(127 << 23))
    return b.select(below, _constant(0.0), b.fmul(p, b.bitcast(bits, VECTOR)))


@_primitive(vector, address, types.float64)
def over(b: Any, at: Any, base: Any) -> Any:
    """x - base for 16 doubles x; the difference is rounded to float32."""
    return b.fptrunc(b.fsub(_load(b, at, 0, DOUBLES, 8), _splat(b, base)), VECTOR)


@_primitive(vector, types.float64, address)
def under(b: Any, base: Any, at: Any) -> Any:
    """base - x for 16 doubles x; the difference is rounded to float32."""
    return b.fptrunc(b.fsub(_splat(b, base), _load(b, at, 0, DOUBLES, 8)), VECTOR)


@_primitive(types.float32, address)
def get(b: Any, at: Any) -> Any:
    """One float."""
    return _load(b, at, 0, F32)


@_primitive(types.void, address, number)
def put(b: Any, at: Any, x: Any) -> None:
    """One float."""
    _store(b, x, at)


@_primitive(types.float64, address)
def get_double(b: Any, at: Any) -> Any:
    """One double."""
    return _load(b, at, 0, F64, 8)


@_primitive(types.void, address, types.float64)
def put_double(b: Any, at: Any, x: Any) -> None:
    """One double."""
    _store(b, x, at, 0, 8)


# Rows of tensors, float32 or bfloat16


def _widen(b: Any, bits: Any, words: Any, floats: Any) -> Any:
    return b.bitcast(b.shl(b.zext(bits, words), _words(16) if words is WORDS else I32(16)), floats)


@_primitive(vector, address, whole, whole)
def load_row(b: Any, at: Any, half: Any, count: Any) -> Any:
    """The first `count` numbers at an address, bfloat16 if `half`, else float32; 0 in the lanes beyond."""
    result, spare = cgutils.alloca_once(b, VECTOR), cgutils.alloca_once(b, VECTOR)
    is_half = b.icmp_signed("!=", half, I64(0))
    with b.if_else(b.icmp_signed(">=", count, I64(LANES)), likely=True) as (full, part):
        with full, b.if_else(is_half) as (narrow, wide):
            with narrow:
                b.store(_widen(b, _load(b, at, 0, HALVES, 2), WORDS, VECTOR), result)
            with wide:
                b.store(_load(b, at), result)
        with part:
            b.store(_constant(0.0), spare)
            base = b.ptrtoint(spare, I64)
            with cgutils.for_range(b, count) as loop:
                to = b.add(base, b.mul(loop.index, I64(4)))
                with b.if_else(is_half) as (narrow, wide):
                    with narrow:
                        one = _load(b, b.add(at, b.mul(loop.index, I64(2))), 0, I16, 2)
                        _store(b, _widen(b, one, I32, F32), to)
                    with wide:
                        _store(b, _load(b, b.add(at, b.mul(loop.index, I64(4))), 0, F32), to)
            b.store(b.load(spare), result)
    return b.load(result)


@_primitive(types.void, address, whole, whole, vector)
def store_row(b: Any, at: Any, half: Any, count: Any, x: Any) -> None:
    """Write the first `count` lanes, as bfloat16 (to the nearest, ties to even) if `half`, else as float32."""
    bits = b.bitcast(x, WORDS)
    odd = b.and_(b.lshr(bits, _words(16)), _words(1))
    rounded = b.lshr(b.add(bits, b.add(odd, _words(0x7FFF))), _words(16))
    narrowed = b.trunc(b.select(b.fcmp_unordered("uno", x, x), _words(0x7FC0), rounded), HALVES)
    is_half = b.icmp_signed("!=", half, I64(0))
    floats, halves = cgutils.alloca_once(b, VECTOR), cgutils.alloca_once(b, HALVES)
    with b.if_else(b.icmp_signed(">=", count, I64(LANES)), likely=True) as (full, part):
        with full, b.if_else(is_half) as (narrow, wide):
            with narrow:
                _store(b, narrowed, at, 0, 2)
            with wide:
                _store(b, x, at)
        with part:
            b.store(x, floats)
            b.store(narrowed, halves)
            from_floats, from_halves = b.ptrtoint(floats, I64), b.ptrtoint(halves, I64)
            with cgutils.for_range(b, count) as loop, b.if_else(is_half) as (narrow, wide):
                with narrow:
                    offset = b.mul(loop.index, I64(2))
                    _store(b, _load(b, b.add(from_halves, offset), 0, I16, 2), b.add(at, offset), 0, 2)
                with wide:
                    offset = b.mul(loop.index, I64(4))
                    _store(b, _load(b, b.add(from_floats, offset), 0, F32), b.add(at, offset))


# Tiles


def _turn(b: Any, rows: list[Any]) -> list[Any]:
    """16 rows of 16 lanes, transposed."""
    for s in (8, 4, 2, 1):
        upper = [lane if not lane & s else LANES + lane - s for lane in range(LANES)]
        lower = [lane + s if not lane & s else LANES + lane for lane in range(LANES)]
        for r in range(LANES):
            if not r & s:
                x, y = rows[r], rows[r + s]
                rows[r], rows[r + s] = _shuffle(b, x, y, upper), _shuffle(b, x, y, lower)
    return rows


@_primitive(types.void, address, address)
def transpose(b: Any, source: Any, target: Any) -> None:
    """target[c][r] = source[r][c], 16 by 16."""
    for r, x in enumerate(_turn(b, [_load(b, source, r * ROW) for r in range(LANES)])):
        _store(b, x, target, r * ROW)


@_primitive(types.void, address, whole, whole, whole, address)
def load_turned(b: Any, at: Any, half: Any, stride: Any, ahead: Any, target: Any) -> None:
    """16 numbers of 16 rows of a tensor, bfloat16 if `half`, transposed; asks for what stands `ahead` bytes further."""
    places = [at]
    for _ in range(LANES - 1):
        places.append(b.add(places[-1], stride))
    for x in places:
        _prefetch(b, b.add(x, ahead))
    narrow, wide, after = (b.append_basic_block(n) for n in ("narrow", "wide", "loaded"))
    b.cbranch(b.icmp_signed("!=", half, I64(0)), narrow, wide)
    both = []
    for block in (narrow, wide):
        b.position_at_end(block)
        if block is narrow:
            both.append([_widen(b, _load(b, x, 0, HALVES, 2), WORDS, VECTOR) for x in places])
        else:
            both.append([_load(b, x) for x in places])
        b.branch(after)
    b.position_at_end(after)
    rows = []
    for x, y in zip(*both, strict=True):
        phi = b.phi(VECTOR)
        phi.add_incoming(x, narrow)
        phi.add_incoming(y, wide)
        rows.append(phi)
    for r, x in enumerate(_turn(b, rows)):
        _store(b, x, target, r * ROW)


@_primitive(types.void, address)
def prefetch(b: Any, at: Any) -> None:
    """Ask for a line of memory in the second cache."""
    _prefetch(b, at)


@_primitive(vector, address, vector)
def lane_sums(b: Any, at: Any, weight: Any) -> Any:
    """In lane x: the sum over lanes t of tile[x][t] weight[t]."""
    rows = [b.fmul(_load(b, at, r * ROW), weight) for r in range(LANES)]
    for s in (8, 4, 2, 1):
        here = [lane if not lane & s else LANES + lane - s for lane in range(LANES)]
        there = [lane + s if not lane & s else LANES + lane for lane in range(LANES)]
        pairs = [(rows[r], rows[r + s]) for r in range(s)]
        rows = [b.fadd(_shuffle(b, x, y, here), _shuffle(b, x, y, there)) for x, y in pairs]
    return rows[0]


def _product(accumulate: bool) -> Callable[..., None]:
    def emit(b: Any, left: Any, right: Any, out: Any, count: Any) -> None:
        """out[r] (+)= sum over k < count of left[k][r] right[k]; all rows are 64 bytes."""
        for first in range(0, LANES, TOGETHER):
            rows = range(first, first + TOGETHER)

            def body(k: Any, sums: list[Any], rows: range = rows) -> list[Any]:
                offset = b.mul(k, I64(ROW))
                x, y = b.add(left, offset), _load(b, b.add(right, offset))
                return [_fma(b, _broadcast(b, x, 4 * r), y, s) for r, s in zip(rows, sums, strict=True)]

            start = [_load(b, out, r * ROW) if accumulate else _constant(0.0) for r in rows]
            for r, s in zip(rows, _loop(b, count, start, body), strict=True):
                _store(b, s, out, r * ROW)

    emit.__name__ = "add_product" if accumulate else "product"
    return emit


product, add_product = (_primitive(types.void, *[address] * 3, whole)(_product(a)) for a in (False, True))


def _mixture(accumulate: bool) -> Callable[..., None]:
    def emit(b: Any, left: Any, stride: Any, right: Any, out: Any, tiles: Any) -> None:
        """out[r] (+)= sum over tiles p and k < 16 of left[p][r][k] right[p][k]; left tiles are `stride` bytes apart."""
        for first in range(0, LANES, TOGETHER):
            rows = range(first, first + TOGETHER)

            def body(p: Any, sums: list[Any], rows: range = rows) -> list[Any]:
                x, y = b.add(left, b.mul(p, stride)), b.add(right, b.mul(p, I64(TILE)))
                for k in range(LANES):
                    v = _load(b, y, k * ROW)
                    sums = [_fma(b, _broadcast(b, x, r * ROW + 4 * k), v, s) for r, s in zip(rows, sums, strict=True)]
                return sums

            start = [_load(b, out, r * ROW) if accumulate else _constant(0.0) for r in rows]
            for r, s in zip(rows, _loop(b, tiles, start, body), strict=True):
                _store(b, s, out, r * ROW)

    emit.__name__ = "add_mixture" if accumulate else "mixture"
    return emit


mixture, add_mixture = (_primitive(types.void, *[address] * 4, whole)(_mixture(a)) for a in (False, True))


@_primitive(types.void, address, address, address, whole, number)
def update(b: Any, state: Any, left: Any, right: Any, count: Any, keep: Any) -> None:
    """state[x] = keep state[x] + sum over t < 16 of left[x][t] right[t], for count rows x (a multiple of 8)."""
    factor, step = _splat(b, keep), 8 if TOGETHER == LANES else 4
    values = [_load(b, right, t * ROW) for t in range(LANES)]

    def body(i: Any, _none: list[Any]) -> list[Any]:
        offset = b.mul(i, I64(step * ROW))
        x, s = b.add(left, offset), b.add(state, offset)
        sums = [b.fmul(_broadcast(b, x, r * ROW), values[0]) for r in range(step)]
        for t in range(1, LANES):
            sums = [_fma(b, _broadcast(b, x, r * ROW + 4 * t), values[t], sums[r]) for r in range(step)]
        for r in range(step):
            _store(b, _fma(b, _load(b, s, r * ROW), factor, sums[r]), s, r * ROW)
        return []

    _loop(b, b.sdiv(count, I64(step)), [], body)
