"""Vectors for the decoding kernel, as LLVM IR: chunks of keys and values as float32, scores of 16 keys, mixtures.

A vector is 16 float32. bfloat16 comes 32 numbers at a time, as two vectors: of the even ones, shifted, and of the odd
ones, whose lower neighbours are masked out, so that nothing has to be moved between lanes. Queries are laid out in the
same order, and outputs are put back in theirs at the end. Nothing here checks bounds.
"""

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mercer.backends.microkernels import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    ROW,
    TOGETHER,
    VECTOR,
    WORDS,
    _constant,
    _fma,
    _load,
    _pointer,
    _prefetch,
    _primitive,
    _shuffle,
    _splat,
    _store,
    _words,
    address,
    number,
    vector,
    whole,
)

FLOAT32, BFLOAT16, FLOAT16 = range(3)
BLOCK = 64
"""Keys whose scores stand in scratch at a time."""

SIZE = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2}
VECTORS = {FLOAT32: 1, BFLOAT16: 2, FLOAT16: 1}
"""Vectors of a chunk: 16 numbers, but 32 of bfloat16."""
_WIDE = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 4}
"""Chunks of 64 columns."""


def chunk(kind: int) -> int:
    """Numbers that are read together."""
    return LANES * VECTORS[kind]


def lanes(count: int, kind: int) -> int:
    """The next multiple of a chunk."""
    return -(-count // chunk(kind)) * chunk(kind)


# Reading a chunk of a row as vectors of float32


def _mask(b: Any, count: Any, width: int = LANES) -> Any:
    kind = ir.VectorType(I32, width)
    single = b.insert_element(ir.Constant(kind, ir.Undefined), b.trunc(count, I32), I32(0))
    every = b.shuffle_vector(single, ir.Constant(kind, ir.Undefined), ir.Constant(kind, [0] * width))
    return b.icmp_signed("<", ir.Constant(kind, list(range(width))), every)


def _load_some(b: Any, at: Any, count: Any, kind: Any, name: str) -> Any:
    """The first `count` lanes of a vector in memory, 0 in those beyond, which are not read."""
    bits = ir.VectorType(ir.IntType(1), kind.count)
    signature = ir.FunctionType(kind, [kind.as_pointer(), I32, bits, kind])
    function = cgutils.get_or_insert_function(b.module, signature, f"llvm.masked.load.{name}.p0")
    align = 4 if kind.element in (F32, I32) else 2 if kind.element == I16 else 1
    zero = ir.Constant(kind, [0] * kind.count)
    return b.call(function, [_pointer(b, at, kind), I32(align), _mask(b, count, kind.count), zero])


_PAIRS, _SIXTEEN, _BYTES = ir.VectorType(I16, 2 * LANES), ir.VectorType(I16, LANES), ir.VectorType(I8, LANES)


def _chunk(b: Any, kind: int, at: Any, some: Any = None) -> list[Any]:
    """A chunk as vectors; its first `some` numbers, if given."""
    if kind == FLOAT32:
        return [_load(b, at) if some is None else _load_some(b, at, some, VECTOR, "v16f32")]
    if kind == FLOAT16:
        halves = _load(b, at, 0, _SIXTEEN, 2) if some is None else _load_some(b, at, some, _SIXTEEN, "v16i16")
        return [b.fpext(b.bitcast(halves, ir.VectorType(ir.HalfType(), LANES)), VECTOR)]
    if some is None:
        words = _load(b, at, 0, WORDS, 2)
    else:
        words = b.bitcast(_load_some(b, at, some, _PAIRS, "v32i16"), WORDS)
    return [b.bitcast(x, VECTOR) for x in (b.shl(words, _words(16)), b.and_(words, _words(-65536)))]


def _repeat(b: Any, count: Any, carried: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Run body(index, carried) count times, which may be none, with the carried values in registers."""
    before, inside, after = b.block, b.append_basic_block("again"), b.append_basic_block("enough")
    b.cbranch(b.icmp_signed(">", count, I64(0)), inside, after)
    b.position_at_end(inside)
    index, values = b.phi(I64), [b.phi(x.type) for x in carried]
    new = body(index, values)
    following, end = b.add(index, I64(1)), b.block
    b.cbranch(b.icmp_signed("<", following, count), inside, after)
    index.add_incoming(I64(0), before)
    index.add_incoming(following, end)
    b.position_at_end(after)
    out = [b.phi(x.type) for x in carried]
    for phi, last, first, later in zip(values, out, carried, new, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, end)
        last.add_incoming(first, before)
        last.add_incoming(later, end)
    return out


def _literal(*arguments: Any) -> Callable[[Callable[..., None]], Any]:
    """An intrinsic of (kind, rows, *values), one version of it for each kind and number of rows."""

    def wrap(emit: Callable[..., None]) -> Any:
        names = ", ".join(f"x{i}" for i in range(len(arguments)))

        def typed(_context: Any, kind: Any, rows: Any, *_given: Any) -> Any:
            chosen = kind.literal_value, rows.literal_value

            def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
                emit(builder, *chosen, *values[2:])
                return context.get_dummy_value()

            return types.void(kind, rows, *arguments), generate

        space: dict[str, Any] = {"typed": typed}
        exec(f"def made(context, kind, rows, {names}): return typed(context, kind, rows, {names})", space)  # noqa: S102
        return intrinsic(prefer_literal=True)(space["made"])

    return wrap


# Scores of 16 keys, and a mixture of values


def _sums(b: Any, vectors: list[Any]) -> Any:
    """In lane x the sum of the lanes of vector x, of 16 or fewer."""
    rows = vectors + [_constant(-0.0)] * (LANES - len(vectors))
    for s in (8, 4, 2, 1):
        own = [lane if not lane & s else LANES + lane - s for lane in range(LANES)]
        other = [lane + s if not lane & s else LANES + lane for lane in range(LANES)]
        pairs = [(rows[r], rows[r + s]) for r in range(s)]
        rows = [b.fadd(_shuffle(b, x, y, own), _shuffle(b, x, y, other)) for x, y in pairs]
    return rows[0]


@_literal(address, whole, whole, address, whole, whole, whole, address, whole)
def scores(
    b: Any, kind: int, rows: int, keys: Any, stride: Any, count: Any, query: Any, pitch: Any, chunks: Any, tail: Any,
    out: Any, ahead: Any,
) -> None:  # fmt: skip
    """out[r][k] = query[r] . keys[k] for `rows` queries and 16 keys, of which the first `count` are there.

    Queries are `pitch` bytes apart, rows of `out` one block. Behind the chunks there are `tail` numbers. Asks for the
    keys that stand `ahead` bytes further.
    """
    together, wide = TOGETHER // rows, _WIDE[kind]
    vectors, step = VECTORS[kind], chunk(kind) * SIZE[kind]
    newest = b.sub(count, I64(1))
    wides = b.sdiv(chunks, I64(wide))
    singles = b.mul(wides, I64(wide))
    for first in range(0, LANES, together):
        places = []
        for k in range(first, first + together):
            index = b.select(b.icmp_signed("<", newest, I64(k)), newest, I64(k))
            places.append(b.add(keys, b.mul(index, stride)))

        def body(
            i: Any, sums: list[Any], count: int = 1, some: Any = None, places: list[Any] = places
        ) -> list[Any]:  # fmt: skip
            """`count` chunks of each key, in the order of memory."""
            sums, offset, asked = list(sums), b.mul(i, I64(step)), b.add(query, b.mul(i, I64(vectors * ROW)))
            queries = [b.add(asked, b.mul(pitch, I64(r))) for r in range(rows)]
            for k, place in enumerate(places):
                for c in range(count):
                    at = b.add(b.add(place, offset), I64(c * step))
                    if some is None and (c * step) % 64 == 0:
                        _prefetch(b, b.add(at, ahead))
                    for v, x in enumerate(_chunk(b, kind, at, some)):
                        for r in range(rows):
                            s = r * together + k
                            sums[s] = _fma(b, x, _load(b, queries[r], (c * vectors + v) * ROW), sums[s])
            return sums

        zeros = [_constant(0.0)] * TOGETHER
        sums = _repeat(b, wides, zeros, lambda i, s, body=body: body(b.mul(i, I64(wide)), s, wide))
        sums = _repeat(b, b.sub(chunks, singles), sums, lambda i, s, body=body: body(b.add(i, singles), s))
        sums = _repeat(b, _there(b, tail), sums, lambda i, s, body=body: body(b.add(i, chunks), s, 1, tail))
        total = _sums(b, sums)
        for r in range(rows):
            part = _shuffle_to(b, total, list(range(r * together, (r + 1) * together)))
            _store(b, part, b.add(out, I64(4 * (r * BLOCK + first))))


def _there(b: Any, tail: Any) -> Any:
    """1 if a part of a chunk follows the whole ones, else 0."""
    return b.zext(b.icmp_signed(">", tail, I64(0)), I64)


def _shuffle_to(b: Any, x: Any, which: list[int]) -> Any:
    return b.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, len(which)), which))


def _mixing(wide: bool, part: bool) -> Any:
    @_literal(address, whole, whole, address, address, whole, whole, whole)
    def mix(
        b: Any, kind: int, rows: int, values: Any, stride: Any, count: Any, weights: Any, out: Any, pitch: Any,
        tail: Any, ahead: Any,
    ) -> None:  # fmt: skip
        """out[r] += sum over k < count of weights[r][k] values[k], for 64 columns, or a chunk or the start of one.

        Rows of `weights` are one block apart, rows of `out` `pitch` bytes.
        """
        chunks, sets = _WIDE[kind] if wide else 1, 2 if rows == 1 else 1
        step, width = chunk(kind) * SIZE[kind], chunks * VECTORS[kind]
        outs = [b.add(out, b.mul(pitch, I64(r))) for r in range(rows)]

        def one(k: Any, sums: list[Any], first: int = 0) -> list[Any]:
            at = b.add(values, b.mul(k, stride))
            given: list[Any] = []
            for c in range(chunks):
                if not part and (c * step) % 64 == 0:
                    _prefetch(b, b.add(b.add(at, ahead), I64(c * step)))
                given += _chunk(b, kind, b.add(at, I64(c * step)), tail if part else None)
            w = b.add(weights, b.mul(k, I64(4)))
            for r in range(rows):
                factor = _splat(b, _load(b, w, 4 * r * BLOCK, F32))
                for v, x in enumerate(given):
                    sums[first + r * width + v] = _fma(b, factor, x, sums[first + r * width + v])
            return sums

        def four(i: Any, sums: list[Any]) -> list[Any]:
            sums = list(sums)
            for j in range(4):
                sums = one(b.add(b.mul(i, I64(4)), I64(j)), sums, j % sets * rows * width)
            return sums

        fours = b.sdiv(count, I64(4))
        sums = [_load(b, place, v * ROW) for place in outs for v in range(width)]
        sums = _repeat(b, fours, sums + [_constant(0.0)] * (len(sums) * (sets - 1)), four)
        if sets == 2:  # so that a sum need not wait for the last one to be done
            sums = [b.fadd(x, y) for x, y in zip(sums[: rows * width], sums[rows * width :], strict=True)]
        rest = b.sub(count, b.mul(fours, I64(4)))
        sums = _repeat(b, rest, sums, lambda i, s: one(b.add(b.mul(fours, I64(4)), i), list(s)))
        for r, place in enumerate(outs):
            for v in range(width):
                _store(b, sums[r * width + v], place, v * ROW)

    return mix


mix_wide, mix_chunk, mix_part = _mixing(True, False), _mixing(False, False), _mixing(False, True)


# The weights of a row


@_primitive(vector, vector, vector)
def larger(b: Any, x: Any, y: Any) -> Any:
    """max(x, y); x where y is NaN."""
    return b.select(b.fcmp_ordered(">", y, x), y, x)


@_primitive(types.float32, vector)
def highest(b: Any, x: Any) -> Any:
    """The largest lane."""
    for s in (8, 4, 2, 1):
        y = _shuffle(b, x, x, [lane ^ s for lane in range(LANES)])
        x = b.select(b.fcmp_ordered(">", y, x), y, x)
    return b.extract_element(x, I32(0))


@_primitive(types.float32, vector)
def total(b: Any, x: Any) -> Any:
    """The sum of the lanes."""
    for s in (8, 4, 2, 1):
        x = b.fadd(x, _shuffle(b, x, x, [lane ^ s for lane in range(LANES)]))
    return b.extract_element(x, I32(0))


@_primitive(vector, vector, whole, whole)
def within(b: Any, x: Any, low: Any, high: Any) -> Any:
    """x in the lanes from `low` to `high` - 1, minus infinity elsewhere."""
    lane = ir.Constant(WORDS, list(range(LANES)))
    ends = [b.select(b.icmp_signed("<", e, I64(LANES)), e, I64(LANES)) for e in (low, high)]
    ends = [b.trunc(b.select(b.icmp_signed(">", e, I64(0)), e, I64(0)), I32) for e in ends]
    seen = b.and_(b.icmp_signed(">=", lane, _splat(b, ends[0])), b.icmp_signed("<", lane, _splat(b, ends[1])))
    return b.select(seen, x, _constant(-math.inf))


@_primitive(vector, vector, address, whole)
def where(b: Any, x: Any, at: Any, count: Any) -> Any:
    """x in lanes whose byte is not 0, minus infinity elsewhere and beyond `count`."""
    bits = _load_some(b, at, count, _BYTES, "v16i8")
    return b.select(b.icmp_signed("!=", bits, ir.Constant(_BYTES, [0] * LANES)), x, _constant(-math.inf))


@_primitive(vector, vector, number, whole)
def lean(b: Any, x: Any, slope: Any, distance: Any) -> Any:
    """x less the slope times the distance of each lane: `distance` for lane 0, one less for each further lane."""
    return _leaning(b, x, slope, b.sub(_splat(b, b.trunc(distance, I32)), ir.Constant(WORDS, list(range(LANES)))))


@_primitive(vector, vector, number, whole, address, whole)
def lean_from(b: Any, x: Any, slope: Any, here: Any, at: Any, count: Any) -> Any:
    """x less the slope times the distance from a position to those of the first `count` keys."""
    there = _load_some(b, at, count, WORDS, "v16i32")
    return _leaning(b, x, slope, b.sub(_splat(b, b.trunc(here, I32)), there))


def _leaning(b: Any, x: Any, slope: Any, distance: Any) -> Any:
    away = b.select(b.icmp_signed("<", distance, _words(0)), b.neg(distance), distance)
    return b.fsub(x, b.fmul(_splat(b, slope), b.sitofp(away, VECTOR)))


@_primitive(types.float32, address, whole)
def get_number(b: Any, at: Any, kind: Any) -> Any:
    """One number of any kind."""
    out = cgutils.alloca_once(b, F32)
    with b.if_else(b.icmp_signed("==", kind, I64(FLOAT32))) as (wide, narrow):
        with wide:
            b.store(_load(b, at, 0, F32), out)
        with narrow, b.if_else(b.icmp_signed("==", kind, I64(BFLOAT16))) as (brain, half):
            with brain:
                b.store(b.bitcast(b.shl(b.zext(_load(b, at, 0, I16, 2), I32), I32(16)), F32), out)
            with half:
                b.store(b.fpext(b.bitcast(_load(b, at, 0, I16, 2), ir.HalfType()), F32), out)
    return b.load(out)
