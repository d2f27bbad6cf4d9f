"""One pass over the feature states of all heads, in Numba: every entry is read once, written once, and read out.

A state [F][Dv] stays in its layout. Rows go in blocks that fit the nearest cache, columns in groups of 64 numbers and
then of 16, the last group under a mask; each query of a group reads the rows while they are there. One thread does a
head, in one order: the digits do not depend on the number of threads.
"""

import math
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from mercer.backends import microkernels
from mercer.backends.microkernels import (
    I32,
    LANES,
    ROW,
    VECTOR,
    WORDS,
    _pointer,
    _primitive,
    add,
    address,
    at_least_zero,
    at_most_zero,
    broadcast,
    exp,
    fma,
    get,
    get_double,
    load,
    load_row,
    mul,
    put,
    splat,
    store,
    vector,
    whole,
)

F = np.float32
QUERY, KEY, VALUE, LOG, WEIGHT, STATE, MASS, FINAL, FINAL_MASS, OUT, DENOMINATOR = range(0, 55, 5)
"""Where a tensor stands in the table: its address, whether it is bfloat16, and its strides in bytes over batch rows,
heads and tokens. An address of 0: not there."""
HALF, BATCH, HEAD, TOKEN = range(1, 5)
HEADS, GROUP, LENGTH, DIM, VALUE_DIM, FEATURES, SLOT, MAP, DIVIDES = range(55, 64)
"""Key heads, queries a key head, tokens, D, Dv, features, floats that a vector's features take in scratch, what is done
to queries and keys first, whether rows are divided by their denominators."""
NUMBERS = 64
ELU, RELU = 1, 2
BLOCK = 64
"""Rows of the state at a time: with 64 columns, 16 KiB."""
WIDE = 4 * LANES


# The last columns, fewer than 16 or all of them


def _mask(b: Any, count: Any) -> Any:
    lanes = ir.Constant(WORDS, list(range(LANES)))
    kind = ir.VectorType(I32, LANES)
    single = b.insert_element(ir.Constant(kind, ir.Undefined), b.trunc(count, I32), I32(0))
    every = b.shuffle_vector(single, ir.Constant(kind, ir.Undefined), ir.Constant(WORDS, [0] * LANES))
    return b.icmp_signed("<", lanes, every)


BITS = ir.VectorType(ir.IntType(1), LANES)


@_primitive(vector, address, whole)
def load_some(b: Any, at: Any, count: Any) -> Any:
    """The first `count` float32 (at most 16) at an address, 0 in the lanes beyond."""
    kind = ir.FunctionType(VECTOR, [VECTOR.as_pointer(), I32, BITS, VECTOR])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.masked.load.v16f32.p0")
    return b.call(function, [_pointer(b, at, VECTOR), I32(4), _mask(b, count), ir.Constant(VECTOR, [0.0] * LANES)])


@_primitive(types.void, address, whole, vector)
def store_some(b: Any, at: Any, count: Any, x: Any) -> None:
    """Write the first `count` lanes."""
    kind = ir.FunctionType(ir.VoidType(), [VECTOR, VECTOR.as_pointer(), I32, BITS])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.masked.store.v16f32.p0")
    b.call(function, [x, _pointer(b, at, VECTOR), I32(4), _mask(b, count)])


# Rows of a state: write new = keep old + x_f v, and read sum_f y_f new_f


@njit
def _write_read_wide(
    old: int, new: int, stride: int, rows: int, keep: float, x: int, value: int, y: int, out: int
) -> None:
    """64 columns of some rows, and what a query reads of them while they are in registers."""
    k = splat(keep)
    v0, v1, v2, v3 = load(value), load(value + ROW), load(value + 2 * ROW), load(value + 3 * ROW)
    a0 = a1 = a2 = a3 = splat(F(0))
    for r in range(rows):
        f, q = broadcast(x + 4 * r), broadcast(y + 4 * r)
        s0 = fma(f, v0, mul(k, load(old)))
        s1 = fma(f, v1, mul(k, load(old + ROW)))
        s2 = fma(f, v2, mul(k, load(old + 2 * ROW)))
        s3 = fma(f, v3, mul(k, load(old + 3 * ROW)))
        store(new, s0)
        store(new + ROW, s1)
        store(new + 2 * ROW, s2)
        store(new + 3 * ROW, s3)
        a0, a1, a2, a3 = fma(q, s0, a0), fma(q, s1, a1), fma(q, s2, a2), fma(q, s3, a3)
        old += stride
        new += stride
    store(out, add(load(out), a0))
    store(out + ROW, add(load(out + ROW), a1))
    store(out + 2 * ROW, add(load(out + 2 * ROW), a2))
    store(out + 3 * ROW, add(load(out + 3 * ROW), a3))


@njit
def _read_wide(new: int, stride: int, rows: int, y: int, out: int) -> None:
    a0 = a1 = a2 = a3 = splat(F(0))
    for r in range(rows):
        q = broadcast(y + 4 * r)
        a0 = fma(q, load(new), a0)
        a1 = fma(q, load(new + ROW), a1)
        a2 = fma(q, load(new + 2 * ROW), a2)
        a3 = fma(q, load(new + 3 * ROW), a3)
        new += stride
    store(out, add(load(out), a0))
    store(out + ROW, add(load(out + ROW), a1))
    store(out + 2 * ROW, add(load(out + 2 * ROW), a2))
    store(out + 3 * ROW, add(load(out + 3 * ROW), a3))


@njit
def _write_read(
    old: int, new: int, stride: int, rows: int, columns: int, keep: float, x: int, value: int, y: int, out: int
) -> None:
    """As `_write_read_wide` for at most 16 columns; sums in four parts, so that one does not wait for the other."""
    k, v = splat(keep), load(value)
    a0 = a1 = a2 = a3 = splat(F(0))
    whole_rows = rows // 4 * 4
    for r in range(0, whole_rows, 4):
        s0 = fma(broadcast(x + 4 * r), v, mul(k, load_some(old, columns)))
        s1 = fma(broadcast(x + 4 * r + 4), v, mul(k, load_some(old + stride, columns)))
        s2 = fma(broadcast(x + 4 * r + 8), v, mul(k, load_some(old + 2 * stride, columns)))
        s3 = fma(broadcast(x + 4 * r + 12), v, mul(k, load_some(old + 3 * stride, columns)))
        store_some(new, columns, s0)
        store_some(new + stride, columns, s1)
        store_some(new + 2 * stride, columns, s2)
        store_some(new + 3 * stride, columns, s3)
        a0, a1 = fma(broadcast(y + 4 * r), s0, a0), fma(broadcast(y + 4 * r + 4), s1, a1)
        a2, a3 = fma(broadcast(y + 4 * r + 8), s2, a2), fma(broadcast(y + 4 * r + 12), s3, a3)
        old += 4 * stride
        new += 4 * stride
    for r in range(whole_rows, rows):
        s0 = fma(broadcast(x + 4 * r), v, mul(k, load_some(old, columns)))
        store_some(new, columns, s0)
        a0 = fma(broadcast(y + 4 * r), s0, a0)
        old += stride
        new += stride
    store(out, add(load(out), add(add(a0, a1), add(a2, a3))))


@njit
def _read(new: int, stride: int, rows: int, columns: int, y: int, out: int) -> None:
    a0 = a1 = a2 = a3 = splat(F(0))
    whole_rows = rows // 4 * 4
    for r in range(0, whole_rows, 4):
        a0 = fma(broadcast(y + 4 * r), load_some(new, columns), a0)
        a1 = fma(broadcast(y + 4 * r + 4), load_some(new + stride, columns), a1)
        a2 = fma(broadcast(y + 4 * r + 8), load_some(new + 2 * stride, columns), a2)
        a3 = fma(broadcast(y + 4 * r + 12), load_some(new + 3 * stride, columns), a3)
        new += 4 * stride
    for r in range(whole_rows, rows):
        a0 = fma(broadcast(y + 4 * r), load_some(new, columns), a0)
        new += stride
    store(out, add(load(out), add(add(a0, a1), add(a2, a3))))


@njit
def _copy(old: int, new: int, count: int) -> None:
    """`count` float32, unless they stand there already."""
    if old == new:
        return
    for c in range(0, count // LANES * LANES, LANES):
        store(new + 4 * c, load(old + 4 * c))
    rest = count // LANES * LANES
    store_some(new + 4 * rest, count - rest, load_some(old + 4 * rest, count - rest))


# Features of one token


@njit
def _mapped(at: int, half: int, dim: int, kind: int, scale: float, to: int) -> None:
    """scale map(x) in float32; whole vectors are written."""
    factor = splat(scale)
    for c in range(0, dim, LANES):
        x = load_row(at + c * (2 if half else 4), half, dim - c)
        if kind == ELU:
            x = add(exp(at_most_zero(x)), at_least_zero(x))
        elif kind == RELU:
            x = at_least_zero(x)
        store(to + 4 * c, mul(x, factor))


@njit
def _expand(work: int, dim: int, begins: Any, places: Any, starts: Any, raised: Any, factors: Any) -> int:
    """Features of x, which stands one number behind `work`: all monomials are made there; returns where features begin.

    Whole vectors are written, so each run leaves something beyond its end, which the next one writes over.
    """
    top = len(places) - 1
    weight = 0
    put(work, F(1))  # of degree 0
    for n in range(2, top + 1):
        below, to = work + 4 * begins[n - 1], work + 4 * begins[n]
        count = begins[n] - begins[n - 1]
        for i in range(dim):
            x, first = broadcast(work + 4 + 4 * i), starts[n, i]
            for r in range(0, count - first, LANES):
                y = mul(load(below + 4 * (first + r)), load(raised + 4 * (weight + r)))
                store(to + 4 * r, mul(x, y))
            to += 4 * (count - first)
            weight += count - first
    lowest = 0
    while places[lowest] < 0:
        lowest += 1
    base = work + 4 * begins[lowest]
    for n in range(lowest, top + 1):
        if places[n] < 0:
            continue
        source, to = work + 4 * begins[n], base + 4 * places[n]
        if source == to and factors[n] == F(1):
            continue
        for r in range(begins[n + 1] - begins[n]):  # never to a higher address
            put(to + 4 * r, get(source + 4 * r) * factors[n])
    return base


@njit
def _write_mass(old: int, new: int, count: int, keep: float, x: int) -> None:
    """z = keep z + x."""
    k = splat(keep)
    for c in range(0, count, LANES):
        here = count - c
        store_some(new + 4 * c, here, add(load_some(x + 4 * c, here), mul(k, load_some(old + 4 * c, here))))


@njit
def _dot(x: int, y: int, count: int, spare: int) -> float:
    """sum_f x_f y_f."""
    total = splat(F(0))
    for c in range(0, count, LANES):
        total = fma(load_some(x + 4 * c, count - c), load_some(y + 4 * c, count - c), total)
    store(spare, total)
    out = F(0)
    for lane in range(LANES):
        out += get(spare + 4 * lane)
    return out


# A head


@njit
def _at(n: Any, which: int, batch: int, head: int, token: int) -> int:
    """Where a token's row of a tensor stands; 0 if the tensor is not there."""
    if n[which] == 0:
        return 0
    return n[which] + batch * n[which + BATCH] + head * n[which + HEAD] + token * n[which + TOKEN]


def slot(dim: int, monomials: int) -> int:
    """Floats of scratch for the features of one vector, with what whole vectors write beyond them."""
    return _lanes(max(monomials, 1 + dim) + LANES)


def room(width: int, slot: int, group: int) -> int:
    """Floats of scratch of a thread: features of a key and its queries, a value, and what the queries read."""
    return (1 + group) * (slot + _lanes(width)) + LANES


def _lanes(count: int) -> int:
    """The next multiple of 16."""
    return (count + LANES - 1) // LANES * LANES


@njit
def _key(
    n: Any, begins: Any, places: Any, starts: Any, raised: int, factors: Any, weight: float, phi: int, value: int,
    b: int, h: int, t: int,
) -> int:  # fmt: skip
    """What a token adds: its features times its weight, and its value. Of weight 0 nothing is looked at."""
    dim, width, features = n[DIM], n[VALUE_DIM], n[FEATURES]
    if weight == F(0):
        for c in range(0, features, LANES):
            store(phi + 4 * c, splat(F(0)))
        for c in range(0, width, LANES):
            store(value + 4 * c, splat(F(0)))
        return phi
    _mapped(_at(n, KEY, b, h, t), n[KEY + HALF], dim, n[MAP], F(1), phi + 4)
    phi = _expand(phi, dim, begins, places, starts, raised, factors)
    if weight != F(1):
        for c in range(0, features, LANES):
            store(phi + 4 * c, mul(splat(weight), load(phi + 4 * c)))
    half = n[VALUE + HALF]
    for c in range(0, width, LANES):
        at = _at(n, VALUE, b, h, t) + c * (2 if half else 4)
        store(value + 4 * c, load_row(at, half, width - c))
    return phi


@njit
def head(
    n: Any, scale: float, begins: Any, places: Any, starts: Any, raised: int, factors: Any, work: int, b: int, h: int
) -> None:
    """All tokens of a key head, one after the other."""
    group, width, features, slot = n[GROUP], n[VALUE_DIM], n[FEATURES], 4 * n[SLOT]
    lanes = (width + LANES - 1) // LANES * ROW
    value = work + (1 + group) * slot
    outs = value + lanes
    spare = outs + group * lanes
    new, mass = _at(n, FINAL, b, h, 0), _at(n, FINAL_MASS, b, h, 0)
    old, old_mass = _at(n, STATE, b, h, 0), _at(n, MASS, b, h, 0)
    stride, before = 4 * width, 0.0
    for t in range(n[LENGTH]):
        keep, weight = F(1), F(1)
        if n[LOG]:
            log = get_double(_at(n, LOG, b, h, t))
            keep, before = F(math.exp(log - before)), log
        if n[WEIGHT]:
            weight = get(_at(n, WEIGHT, b, h, t))
        x = _key(n, begins, places, starts, raised, factors, weight, work, value, b, h, t)
        still = weight == F(0) and keep == F(1)  # then every bit stays, the sign of a zero too
        y = work + slot
        for g in range(group):
            at = _at(n, QUERY, b, h * group + g, t)
            _mapped(at, n[QUERY + HALF], n[DIM], n[MAP], F(scale), work + (1 + g) * slot + 4)
            begin = _expand(work + (1 + g) * slot, n[DIM], begins, places, starts, raised, factors)
            y = begin if g == 0 else y
        for c in range(0, group * lanes, ROW):
            store(outs + c, splat(F(0)))
        for first in range(0, features, BLOCK):
            rows, here, there = min(BLOCK, features - first), old + first * stride, new + first * stride
            if still:
                _copy(here, there, rows * width)
            _rows(
                here, there, stride, rows, width, keep, x + 4 * first, value, y + 4 * first, slot, outs, lanes, group,
                still,
            )  # fmt: skip
        if mass:
            if still:
                _copy(old_mass, mass, features)
            else:
                _write_mass(old_mass, mass, features, keep, x)
        for g in range(group):
            total = F(1)
            if mass:
                total = _dot(y + g * slot, mass, features, spare)
                if n[DENOMINATOR]:
                    put(_at(n, DENOMINATOR, b, h * group + g, t), total)
            _write_out(outs + g * lanes, _at(n, OUT, b, h * group + g, t), width, total, n[DIVIDES])
        old, old_mass = new, mass


@njit
def _rows(
    old: int, new: int, stride: int, rows: int, width: int, keep: float, x: int, value: int, y: int, slot: int,
    outs: int, lanes: int, group: int, still: bool,
) -> None:  # fmt: skip
    """Some rows of the state: written with the first query, read again by the others while they are near."""
    c = 0
    while c < width:
        at, wide, columns = 4 * c, width - c >= WIDE, min(width - c, LANES)
        for g in range(group):
            query, out = y + g * slot, outs + g * lanes + at
            if g == 0 and not still:
                if wide:
                    _write_read_wide(old + at, new + at, stride, rows, keep, x, value + at, query, out)
                else:
                    _write_read(old + at, new + at, stride, rows, columns, keep, x, value + at, query, out)
            elif wide:
                _read_wide(new + at, stride, rows, query, out)
            else:
                _read(new + at, stride, rows, columns, query, out)
        c += WIDE if wide else LANES


@njit
def _write_out(source: int, to: int, width: int, total: float, divides: int) -> None:
    for d in range(width):
        x = get(source + 4 * d)
        if divides:
            x = F(0) if total == F(0) else x / total
        put(to + 4 * d, x)


@lru_cache
def compiled() -> Any:
    """:func:`head` for a run of the heads of all batch rows, compiled for this machine or read from the cache on
    disk.
    """
    # The source of the inlined parts is in the name: Numba's cache looks at this file alone.
    return _compiled(sha256(Path(microkernels.__file__).read_bytes()).hexdigest())


def _compiled(stamp: str) -> Any:
    whole_numbers, numbers = types.Array(types.int64, 1, "C"), types.Array(types.float32, 1, "C")
    table = types.Array(types.int64, 2, "C")
    tables = (whole_numbers, whole_numbers, table, types.int64, numbers)

    @njit(
        types.void(whole_numbers, types.float64, *tables, types.int64, types.int64, types.int64), nogil=True, cache=True
    )
    def call(
        n: Any, scale: float, begins: Any, places: Any, starts: Any, raised: int, factors: Any, work: int, start: int,
        stop: int,
    ) -> None:  # fmt: skip
        if len(stamp):
            for i in range(start, stop):
                batch, h = i // n[HEADS], i % n[HEADS]
                head(n, scale, begins, places, starts, raised, factors, work, batch, h)

    return call
