"""A few queries against a key/value cache in one pass, in Numba: keys and values are read once, in their own dtype.

An item is a range of the keys of one key head of one batch row. All queries that share the head (its group, times the
few tokens of the call) read 64 keys at a time: their scores, the online softmax, and what they take of the values,
while those are in the nearest cache. Sums are float32. Ranges are cut by sizes alone and put together in order, so the
digits do not depend on the number of threads.

A vector is 16 float32. bfloat16 comes 32 numbers at a time, as two vectors: of the even ones, shifted, and of the odd
ones, whose lower neighbours are masked out, so that nothing has to be moved between lanes. Queries are laid out in the
same order, and outputs are put back in theirs at the end.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from mercer.backends import microkernels
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
    add,
    address,
    exp,
    get,
    load,
    mul,
    number,
    put,
    splat,
    store,
    vector,
    whole,
)

F = np.float32
FLOAT32, BFLOAT16, FLOAT16 = range(3)
BLOCK = 64
"""Keys whose scores stand in scratch at a time."""
LOWEST = F(-3e38)
"""Where the running maximum begins; hidden keys have the score minus infinity, and weigh 0 against it."""
AHEAD = 16384
"""Bytes ahead of what is being read that are asked for."""

QUERY, KEY, VALUE = 0, 4, 8
"""Where a tensor stands in the table: its address, and its strides in bytes over batch rows, heads and tokens."""
VALID, POSITION = 12, 14
"""Bytes that say which keys are there, and positions of keys (int32): an address, 0 if they are not there, and a
stride in bytes over batch rows."""
BOUND_STEP, SLOPES, PARTS, OUT, LOG_SUM = range(16, 21)
"""How far the BOUNDS of batch rows are apart; addresses of slopes (0 if not there), of what items leave, of results."""
HEADS, GROUP, QUERIES, DIM, VALUE_DIM, FIRST, STOP, RANGE, RANGES, BOUNDS = range(21, 31)
"""Key heads, queries' heads to each, tokens, D, Dv, the keys from FIRST to STOP, keys of a range, ranges of a head;
then, for each query, the first key it sees, the first after them, and its position."""

_SIZE = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2}
_VECTORS = {FLOAT32: 1, BFLOAT16: 2, FLOAT16: 1}
"""Vectors of a chunk: 16 numbers, but 32 of bfloat16."""
_WIDE = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 4}
"""Chunks of 64 columns."""


def chunk(kind: int) -> int:
    """Numbers that are read together."""
    return LANES * _VECTORS[kind]


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
        own = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [not lane & s for lane in range(LANES)])
        other = [lane ^ s for lane in range(LANES)]
        pairs = [(rows[r], rows[r + s]) for r in range(s)]
        rows = []
        for x, y in pairs:  # blends, and shuffles of one vector: cheaper than those of two
            turned = b.select(own, y, x)
            rows.append(b.fadd(b.select(own, x, y), _shuffle(b, turned, turned, other)))
    return rows[0]


@_literal(address, whole, whole, address, whole, whole, whole, address, whole)
def _scores(
    b: Any, kind: int, rows: int, keys: Any, stride: Any, count: Any, query: Any, pitch: Any, chunks: Any, tail: Any,
    out: Any, ahead: Any,
) -> None:  # fmt: skip
    """out[r][k] = query[r] . keys[k] for `rows` queries and 16 keys, of which the first `count` are there.

    Queries are `pitch` bytes apart, rows of `out` one block. Behind the chunks there are `tail` numbers. Asks for the
    keys that stand `ahead` bytes further.
    """
    together, wide = TOGETHER // rows, _WIDE[kind]
    vectors, step = _VECTORS[kind], chunk(kind) * _SIZE[kind]
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
        step, width = chunk(kind) * _SIZE[kind], chunks * _VECTORS[kind]
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


_mix_wide, _mix_chunk, _mix_part = _mixing(True, False), _mixing(False, False), _mixing(False, True)


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


@njit
def _weigh(
    n: Any, b: int, h: int, row: int, key: int, count: int, scores: int, state: int, out: int, vectors: int
) -> None:
    """Scores of a block in place of its weights; what the row had is put on the scale of the new maximum.

    `state`: the row's maximum, and 16 sums of its weights, one a lane.
    """
    query, high = row % n[QUERIES], h * n[GROUP] + row // n[QUERIES]
    at = BOUNDS + b * n[BOUND_STEP] + 3 * query
    first, stop, here = n[at], n[at + 1], n[at + 2]
    slope = F(0)
    if n[SLOPES]:
        slope = get(n[SLOPES] + 4 * high)
    old = get(state)
    top = splat(old)
    for c in range(0, count, LANES):
        x, at, left = load(scores + 4 * c), key + c, count - c
        if left < LANES or at < first or at + LANES > stop:
            x = within(x, first - at, min(stop - at, left))
        if n[VALID]:
            x = where(x, n[VALID] + b * n[VALID + 1] + at, left)
        if n[SLOPES]:
            if n[POSITION]:
                x = lean_from(x, slope, here, n[POSITION] + b * n[POSITION + 1] + 4 * at, left)
            else:
                x = lean(x, slope, here - at)
        store(scores + 4 * c, x)
        top = larger(top, x)
    new = highest(top)
    sums = load(state + ROW)
    if new > old:
        put(state, new)
        keep = splat(F(math.exp(old - new)))
        sums = mul(sums, keep)
        for v in range(vectors):
            store(out + v * ROW, mul(load(out + v * ROW), keep))
    base = splat(-new)
    for c in range(0, count, LANES):
        w = exp(add(load(scores + 4 * c), base))
        store(scores + 4 * c, w)
        sums = add(sums, w)
    store(state + ROW, sums)


@_primitive(types.float32, address, whole)
def _get_number(b: Any, at: Any, kind: Any) -> Any:
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


@njit
def _place(d: int, kind: int) -> int:
    """Where number d of a row stands in the order of the vectors."""
    if kind == BFLOAT16:
        return d // 32 * 32 + d % 2 * 16 + d % 32 // 2
    return d


def room(rows: int, dim: int, kind: int) -> int:
    """Floats of scratch of a thread: queries and block of scores of each row."""
    return rows * (lanes(dim, kind) + BLOCK) + LANES


def pitch(width: int, kind: int) -> int:
    """Floats that a row of an item leaves: its maximum, 16 sums of weights, and its mixture of the values."""
    return 2 * LANES + lanes(width, kind)


@lru_cache
def compiled(kind: int, rows: int) -> tuple[Any, Any]:
    """The items of a run, and the outputs of a run of heads, for a dtype of keys and values and 1, 2 or a multiple of 4
    rows (queries that share a head), which go 1, 2 or 4 at a time. Compiled for this machine or read from the cache on
    disk.
    """
    # The source of the inlined parts is in the name: Numba's cache looks at this file alone.
    stamp = sha256(Path(microkernels.__file__).read_bytes()).hexdigest()
    return _items(stamp, kind, rows), _outputs(stamp, kind)


def _items(stamp: str, kind: int, rows: int) -> Any:
    numbers = types.Array(types.int64, 1, "C")
    size, numbers_of_chunk, wide = _SIZE[kind], chunk(kind), 64
    vectors_of_chunk = _VECTORS[kind]

    @njit(
        types.void(numbers, types.float64, types.int64, types.int64, types.int64, types.int64), nogil=True, cache=True
    )
    def call(n: Any, scale: float, every: int, work: int, start: int, stop: int) -> None:
        # `every`: rows, padded to a multiple of `rows`.
        asked = n[GROUP] * n[QUERIES]
        dim, width = n[DIM], n[VALUE_DIM]
        chunks, tail = dim // numbers_of_chunk, dim % numbers_of_chunk
        row_chunks = chunks + (1 if tail else 0)
        query_pitch = row_chunks * vectors_of_chunk * ROW
        columns = (width + numbers_of_chunk - 1) // numbers_of_chunk * vectors_of_chunk
        pitch = 2 * ROW + columns * ROW
        scores = work + every * query_pitch
        if not len(stamp):
            return
        for item in range(start, stop):
            run, head = item % n[RANGES], item // n[RANGES]
            b, h = head // n[HEADS], head % n[HEADS]
            first = n[FIRST] + run * n[RANGE]
            last = min(first + n[RANGE], n[STOP])
            out = n[PARTS] + item * every * pitch
            for c in range(0, every * query_pitch, ROW):
                store(work + c, splat(F(0)))
            for row in range(every):
                to = out + row * pitch
                put(to, LOWEST)
                for c in range(ROW, pitch, ROW):
                    store(to + c, splat(F(0)))
                if row < asked:
                    high, t = h * n[GROUP] + row // n[QUERIES], row % n[QUERIES]
                    at = n[QUERY] + b * n[QUERY + 1] + high * n[QUERY + 2] + t * n[QUERY + 3]
                    for d in range(dim):
                        x = F(_get_number(at + size * d, kind) * F(scale))
                        put(work + row * query_pitch + 4 * _place(d, kind), x)
            keys = n[KEY] + b * n[KEY + 1] + h * n[KEY + 2]
            values = n[VALUE] + b * n[VALUE + 1] + h * n[VALUE + 2]
            key_stride, value_stride = n[KEY + 3], n[VALUE + 3]
            keys_ahead, values_ahead = key_stride * (AHEAD // (dim * size)), value_stride * (AHEAD // (width * size))
            for key in range(first, last, BLOCK):
                count = min(BLOCK, last - key)
                for row in range(0, every, rows):
                    block = scores + 4 * row * BLOCK
                    for c in range(0, count, LANES):
                        _scores(
                            kind, rows, keys + (key + c) * key_stride, key_stride, min(count - c, LANES),
                            work + row * query_pitch, query_pitch, chunks, tail, block + 4 * c,
                            keys_ahead,
                        )  # fmt: skip
                for row in range(asked):
                    to = out + row * pitch
                    _weigh(n, b, h, row, key, count, scores + 4 * row * BLOCK, to, to + 2 * ROW, columns)
                base = values + key * value_stride
                for row in range(0, every, rows):
                    block, to, c = scores + 4 * row * BLOCK, out + row * pitch + 2 * ROW, 0
                    while c < width:
                        left, here = width - c, base + size * c
                        if left >= wide:
                            _mix_wide(kind, rows, here, value_stride, count, block, to, pitch, 0, values_ahead)
                            c += wide
                            to += wide * 4
                        elif left >= numbers_of_chunk:
                            _mix_chunk(kind, rows, here, value_stride, count, block, to, pitch, 0, values_ahead)
                            c += numbers_of_chunk
                            to += numbers_of_chunk * 4
                        else:
                            _mix_part(kind, rows, here, value_stride, count, block, to, pitch, left, 0)
                            c = width

    return call


def _outputs(stamp: str, kind: int) -> Any:
    numbers = types.Array(types.int64, 1, "C")
    numbers_of_chunk = chunk(kind)

    @njit(types.void(numbers, types.int64, types.int64, types.int64), nogil=True, cache=True)
    def call(n: Any, every: int, start: int, stop: int) -> None:
        # Each row's ranges, in order: put on the scale of the largest maximum, added, divided.
        asked, width = n[GROUP] * n[QUERIES], n[VALUE_DIM]
        columns = (width + numbers_of_chunk - 1) // numbers_of_chunk * numbers_of_chunk
        pitch = 2 * ROW + columns * 4
        if not len(stamp):
            return
        for head in range(start, stop):
            first = n[PARTS] + head * n[RANGES] * every * pitch
            for row in range(asked):
                at = first + row * pitch
                top = LOWEST
                for run in range(n[RANGES]):
                    top = max(top, get(at + run * every * pitch))
                sum_of_weights = F(0)
                for run in range(n[RANGES]):
                    part = at + run * every * pitch
                    scale = F(math.exp(get(part) - top))
                    sum_of_weights += total(load(part + ROW)) * scale
                    for c in range(2 * ROW, pitch, ROW):
                        x = mul(load(part + c), splat(scale))
                        store(at + c, x if run == 0 else add(load(at + c), x))
                factor = F(0) if sum_of_weights == F(0) else F(1) / sum_of_weights
                query = head * asked + row
                for d in range(width):
                    put(n[OUT] + 4 * (query * width + d), get(at + 2 * ROW + 4 * _place(d, kind)) * factor)
                log = F(-np.inf) if sum_of_weights == F(0) else top + F(math.log(sum_of_weights))
                put(n[LOG_SUM] + 4 * query, log)

    return call
