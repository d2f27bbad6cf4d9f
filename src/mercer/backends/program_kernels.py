"""A decoding step of a whole model as one call, in Numba: a list of operations that all threads walk through.

Products are cut by tiles of outputs and attention by ranges of keys, and a thread takes one piece after another; what
has only as many numbers as a token has channels (norms, sums) every thread does for itself, in memory of its own, which
is quicker than to wait for another. A `WAIT` stands where a thread needs all pieces of an operation. It does not wait
for threads: one that is held up elsewhere finds no pieces left and follows, since nothing that a step has written is
written again in the same step. Pieces are computed alike whoever takes them, so the digits do not depend on threads.

Everything is float32 but weights, keys and values. A place in an operation is an address, or, below `LIMIT`, a distance
from the start of the thread's own memory. Rows of a batch are `PITCH` apart, as bytes, in each buffer.
"""

import math
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types

from mercer.backends import decode_vectors, program_vectors
from mercer.backends.decode_vectors import (
    BFLOAT16,
    BLOCK,
    SIZE,
    VECTORS,
    chunk,
    highest,
    larger,
    lean,
    lean_from,
    mix_chunk,
    mix_part,
    mix_wide,
    scores,
    total,
    within,
)
from mercer.backends.microkernels import LANES, ROW, add, exp, fma, get, load, mul, put, splat, store
from mercer.backends.packed_kernels import stamp
from mercer.backends.packed_vectors import GROUP as SHARED
from mercer.backends.packed_vectors import INT4, UNIT, get_long, put_half, store_halves, tile_product
from mercer.backends.program_vectors import activate, await_count, seen_from, sub, take, tanh

F = np.float32
LOWEST = F(-3e38)
AHEAD = 16384
LIMIT = 1 << 24
"""Addresses below are distances in the memory of a thread."""

LOAD, NORM, PRODUCT, GATED, SCORE, ATTEND, COMBINE, ADD, WAIT = range(9)
"""LOAD: out = src. NORM: out = normed src. PRODUCT: out = f(weights src + bias). GATED: the same of a pair of matrices,
f of the first times the second. SCORE: PRODUCT with weights of the kind that scores have. ATTEND: the ranges of
attention over a layer's cache, with the new token put into it. COMBINE: out = what the ranges leave. ADD: out += src.
WAIT: until all pieces of an operation, SRC by number, are done.
"""
CODE, SRC, SRC_PITCH, OUT, OUT_PITCH, SIZE_OF = range(6)
"""What all operations have: a code, two places with their pitches, channels."""
WEIGHT, BIAS, CENTRED = 6, 7, 8
"""NORM: addresses (0: no bias), whether the mean is taken off; EPS in the other table."""
UNITS, TILES, FUNCTION = 8, 9, 10
"""PRODUCT, GATED and SCORE, behind WEIGHT and BIAS; CAP in the other table, 0 for none."""
LAYER, KEY_HEADS, QUERIES, DIM, WINDOW, SLOPES, STEP, LEFT = range(6, 14)
"""ATTEND and COMBINE: the layer of the cache, key heads, queries to each, channels of a head, tokens seen (0: all),
address of slopes (0: none), how far rotary pairs are apart (0: nothing is turned), the address of what ranges leave;
SCALE and CAP in the other table."""
FIELDS = 14
EPS, SCALE, CAP = range(3)
NUMBERS = 3

(
    BATCH, ROWS, CACHE, LAYER_STRIDE, VALUES, ROW_STRIDE, HEAD_STRIDE, FIRST, STOP, RANGES, POSITIONS, POSITION_STRIDE,
    HERE, COS, SIN_AHEAD, SIN_BEHIND, COUNTERS, OWN, OWN_SIZE, GROUPS, GROUPS_PITCH, SCRATCH,
) = range(22)  # fmt: skip
"""What changes from step to step: rows of the batch, and with those that pad it to a multiple of what is taken
together; the cache's address, its strides in bytes over layers, from keys to values, over rows and heads; the keys from
FIRST to STOP, the last of which is new; ranges of a head; positions of keys (int32, 0: the keys stand in a row) and
their stride; the rows' own positions; the tables of rotary positions; counters, COUNTER bytes for each operation: of
pieces taken and of pieces done; where the memory of threads begins, and its size for each; in it the sums of inputs,
and room for attention."""
COUNTER, DONE = 128, 64
PIECES = 4
"""Pieces of a product for each thread."""
STEP_FIELDS = 22


@njit(error_model="numpy")
def _place(at: int, own: int) -> int:
    return own + at if at < LIMIT else at


@njit(error_model="numpy")
def _pieces(n: Any, s: Any, threads: int) -> int:
    """How many pieces an operation is cut in."""
    if n[CODE] == ATTEND:
        return s[BATCH] * n[KEY_HEADS] * s[RANGES]
    return min(n[TILES], PIECES * threads)


@njit(error_model="numpy")
def _norm(src: int, out: int, size: int, weight: int, bias: int, centred: int, eps: float) -> None:
    """Rows are 0 beyond `size`, up to a multiple of 16, and so are weight and bias."""
    stop, middle = 4 * size, F(0)
    if centred:
        sums = splat(F(0))
        for c in range(0, stop, ROW):
            sums = add(sums, load(src + c))
        middle = total(sums) / F(size)
    sums = splat(F(0))
    for c in range(0, stop, ROW):
        x = sub(load(src + c), splat(middle))
        sums = fma(x, x, sums)
    spare = F(-size % LANES)
    variance = max((total(sums) - spare * middle * middle) / F(size), F(0))
    factor = splat(F(1) / F(math.sqrt(variance + F(eps))))
    for c in range(0, stop, ROW):
        x = mul(mul(sub(load(src + c), splat(middle)), factor), load(weight + c))
        if bias:
            x = add(x, load(bias + c))
        store(out + c, x)


@njit(error_model="numpy")
def _sums_of_groups(src: int, out: int, groups: int) -> None:
    for g in range(groups):
        put(out + 4 * g, total(add(load(src + 4 * SHARED * g), load(src + 4 * SHARED * g + ROW))))


@njit(error_model="numpy")
def _turned(src: int, out: int, dim: int, step: int, cos: int, ahead: int, behind: int, scale: float) -> None:
    """A head turned by its position and scaled; the factors are 0 where a shift leaves the head."""
    d = 0
    while d + LANES <= dim:
        x, at = load(src + 4 * d), 4 * d
        if step:
            x = mul(x, load(cos + at))
            if d + step < dim:
                x = fma(load(src + at + 4 * step), load(ahead + at), x)
            if d + LANES > step:
                x = fma(load(src + at - 4 * step), load(behind + at), x)
        store(out + at, mul(x, splat(scale)))
        d += LANES
    while d < dim:
        at = 4 * d
        y = get(src + at)
        if step:
            y *= get(cos + at)
            if d + step < dim:
                y += get(src + at + 4 * step) * get(ahead + at)
            if d >= step:
                y += get(src + at - 4 * step) * get(behind + at)
        put(out + at, y * F(scale))
        d += 1


@njit(error_model="numpy")
def _keep(src: int, out: int, dim: int, half: int) -> None:
    """A head's key or value into the cache."""
    d = 0
    while d + LANES <= dim:
        if half:
            store_halves(out + 2 * d, load(src + 4 * d))
        else:
            store(out + 4 * d, load(src + 4 * d))
        d += LANES
    while d < dim:
        if half:
            put_half(out + 2 * d, get(src + 4 * d))
        else:
            put(out + 4 * d, get(src + 4 * d))
        d += 1


@njit(error_model="numpy")
def _weigh(
    n: Any, s: Any, cap: float, b: int, high: int, key: int, count: int, table: int, state: int, vectors: int
) -> None:
    """Scores of a block in place of its weights; what the row had is put on the scale of the new maximum."""
    slope, here = F(0), s[STOP] - 1
    if s[POSITIONS]:
        here = get_long(s[HERE] + 8 * b)
    if n[SLOPES]:
        slope = get(n[SLOPES] + 4 * high)
    old = get(state)
    top = splat(old)
    window = n[WINDOW] if n[WINDOW] else 1 << 30
    for c in range(0, count, LANES):
        x, at, left = load(table + 4 * c), key + c, count - c
        if cap != 0:
            x = mul(tanh(mul(x, splat(1 / cap))), splat(cap))
        if s[POSITIONS]:
            there = s[POSITIONS] + b * s[POSITION_STRIDE] + 4 * at
            if n[SLOPES]:
                x = lean_from(x, slope, here, there, left)
            x = seen_from(x, here, window, there, min(left, LANES))
        else:
            if n[SLOPES]:
                x = lean(x, slope, here - at)
            if left < LANES:
                x = within(x, 0, left)
        store(table + 4 * c, x)
        top = larger(top, x)
    new = highest(top)
    sums = load(state + ROW)
    if new > old:
        put(state, new)
        keep = splat(F(math.exp(old - new)))
        sums = mul(sums, keep)
        for v in range(vectors):
            at = state + (2 + v) * ROW
            store(at, mul(load(at), keep))
    base = splat(-max(new, old))
    for c in range(0, count, LANES):
        w = exp(add(load(table + 4 * c), base))
        store(table + 4 * c, w)
        sums = add(sums, w)
    store(state + ROW, sums)


@njit(error_model="numpy")
def _order(d: int, kind: int) -> int:
    """Where number d of a row stands in the order of the vectors."""
    if kind == BFLOAT16:
        return d // 32 * 32 + d % 2 * 16 + d % 32 // 2
    return d


def pitch(dim: int, kind: int) -> int:
    """Floats that a query of a range leaves: its maximum, 16 sums of weights, and its mixture of the values."""
    return 2 * LANES + -(-dim // chunk(kind)) * chunk(kind)


def room(queries: int, dim: int, kind: int) -> int:
    """Floats that attention needs of a thread's memory."""
    return queries * (pitch(dim, kind) + BLOCK) + 2 * -(-dim // LANES) * LANES + 4 * LANES


@lru_cache
def compiled(kind: int, scored: int, rows: int, cached: int, together: int) -> Any:
    """run(operations, numbers, step, thread, threads) for a kind of weights and one of those that score tokens, rows of
    a batch taken together (1, 2 or 4), a dtype of keys and values and queries of a head taken together (1, 2 or 4).
    Compiled for this machine or read from the cache on disk.
    """
    sources = b"".join(Path(module.__file__).read_bytes() for module in (program_vectors, decode_vectors))
    return _compiled(stamp() + sha256(sources).hexdigest(), kind, scored, rows, cached, together)


def _compiled(name: str, kind: int, scored: int, rows: int, cached: int, together: int) -> Any:
    unit, size, numbers_of_chunk, vectors_of_chunk = UNIT[kind], SIZE[cached], chunk(cached), VECTORS[cached]
    half, summed, scored_unit = int(cached == BFLOAT16), kind == INT4, UNIT[scored]
    longs, doubles = types.Array(types.int64, 2, "C"), types.Array(types.float64, 2, "C")
    steps = types.Array(types.int64, 1, "C")

    @njit(types.void(longs, doubles, steps, types.int64, types.int64), nogil=True, cache=True, error_model="numpy")
    def run(operations: Any, numbers: Any, s: Any, thread: int, threads: int) -> None:
        if not len(name):
            return
        own = s[OWN] + thread * s[OWN_SIZE]
        batch = s[BATCH]
        for number in range(len(operations)):
            n, f = operations[number], numbers[number]
            code = n[CODE]
            src, out = _place(n[SRC], own), _place(n[OUT], own)
            src_pitch, out_pitch = n[SRC_PITCH], n[OUT_PITCH]
            counter = s[COUNTERS] + number * COUNTER
            if code == WAIT:
                await_count(s[COUNTERS] + n[SRC] * COUNTER + DONE, _pieces(operations[n[SRC]], s, threads))
            elif code == LOAD:
                for b in range(batch):
                    for c in range(0, 4 * n[SIZE_OF], ROW):
                        store(out + b * out_pitch + c, load(src + b * src_pitch + c))
            elif code == ADD:
                for b in range(batch):
                    for c in range(0, 4 * n[SIZE_OF], ROW):
                        at = out + b * out_pitch + c
                        store(at, add(load(at), load(src + b * src_pitch + c)))
            elif code == NORM:
                for b in range(batch):
                    _norm(src + b * src_pitch, out + b * out_pitch, n[SIZE_OF], n[WEIGHT], n[BIAS], n[CENTRED], f[EPS])
            elif code in (PRODUCT, GATED, SCORE):
                tiles, units = n[TILES], n[UNITS]
                pieces = _pieces(n, s, threads)
                groups, gap = own + s[GROUPS], s[GROUPS_PITCH]
                if summed and code != SCORE:
                    for b in range(batch):
                        _sums_of_groups(src + b * src_pitch, groups + b * gap, 2 * units)
                cap, function, bias = F(f[CAP]), n[FUNCTION], n[BIAS]
                pair = own + s[SCRATCH]
                piece = take(counter)
                while piece < pieces:
                    for tile in range(tiles * piece // pieces, tiles * (piece + 1) // pieces):
                        for r in range(0, s[ROWS], rows):
                            x, g = src + r * src_pitch, groups + r * gap
                            to = out + r * out_pitch + ROW * tile
                            if code != GATED:
                                if code == PRODUCT:
                                    at = n[WEIGHT] + tile * units * unit
                                    tile_product(kind, rows, at, x, src_pitch, units, g, gap, to, out_pitch)
                                else:
                                    at = n[WEIGHT] + tile * units * scored_unit
                                    tile_product(scored, rows, at, x, src_pitch, units, g, gap, to, out_pitch)
                                if bias or function or cap != 0:
                                    for i in range(rows):
                                        y = load(to + i * out_pitch)
                                        if bias:
                                            y = add(y, load(bias + ROW * tile))
                                        if cap != 0:
                                            y = mul(tanh(mul(y, splat(1 / cap))), splat(cap))
                                        store(to + i * out_pitch, activate(y, function))
                            else:
                                for side in range(2):
                                    at = n[WEIGHT] + (2 * tile + side) * units * unit
                                    tile_product(
                                        kind,
                                        rows,
                                        at,
                                        x,
                                        src_pitch,
                                        units,
                                        g,
                                        gap,
                                        pair + side * ROW,
                                        2 * ROW,
                                    )
                                for i in range(rows):
                                    y, z = load(pair + 2 * i * ROW), load(pair + (2 * i + 1) * ROW)
                                    if bias:
                                        y = add(y, load(bias + 2 * ROW * tile))
                                        z = add(z, load(bias + 2 * ROW * tile + ROW))
                                    store(to + i * out_pitch, mul(activate(y, function), z))
                    take(counter + DONE)
                    piece = take(counter)
            elif code == ATTEND:
                heads, asked, dim, turned = n[KEY_HEADS], n[QUERIES], n[DIM], n[STEP]
                every = (asked + together - 1) // together * together
                chunks, tail = dim // numbers_of_chunk, dim % numbers_of_chunk
                query_pitch = (chunks + (1 if tail else 0)) * vectors_of_chunk * ROW
                columns = query_pitch // ROW
                part_pitch = 2 * ROW + query_pitch
                stop, begin, ranges = s[STOP], s[FIRST], s[RANGES]
                if n[WINDOW] and not s[POSITIONS]:
                    begin = max(begin, stop - n[WINDOW])
                span = (stop - begin + ranges - 1) // ranges
                span = (span + LANES - 1) // LANES * LANES
                work = own + s[SCRATCH]
                table = work + every * query_pitch
                head_room = table + 4 * every * BLOCK + ROW
                items = _pieces(n, s, threads)
                stride = dim * size
                far = stride * (AHEAD // stride)
                wide = 64
                piece = take(counter)
                while piece < items:
                    for item in range(piece, piece + 1):
                        part, head = item % ranges, item // ranges
                        b, h = head // heads, head % heads
                        start = begin + part * span
                        end = min(start + span, stop)
                        to = n[LEFT] + item * every * part_pitch
                        for row in range(every):
                            at = to + row * part_pitch
                            put(at, LOWEST)
                            for c in range(ROW, part_pitch, ROW):
                                store(at + c, splat(F(0)))
                        if start >= end:
                            continue
                        keys = s[CACHE] + n[LAYER] * s[LAYER_STRIDE] + b * s[ROW_STRIDE] + h * s[HEAD_STRIDE]
                        values = keys + s[VALUES]
                        row_at = src + b * src_pitch
                        angle = 4 * dim * get_long(s[HERE] + 8 * b)
                        cos, ahead, behind = s[COS] + angle, s[SIN_AHEAD] + angle, s[SIN_BEHIND] + angle
                        for c in range(0, every * query_pitch, ROW):
                            store(work + c, splat(F(0)))
                        for row in range(asked):
                            at = row_at + 4 * dim * (h * asked + row)
                            _turned(at, head_room, dim, turned, cos, ahead, behind, f[SCALE])
                            for d in range(dim):
                                put(work + row * query_pitch + 4 * _order(d, cached), get(head_room + 4 * d))
                        if end == stop:
                            at = row_at + 4 * dim * (heads * asked + h)
                            _turned(at, head_room, dim, turned, cos, ahead, behind, 1.0)
                            _keep(head_room, keys + (stop - 1) * stride, dim, half)
                            _keep(at + 4 * dim * heads, values + (stop - 1) * stride, dim, half)
                        for key in range(start, end, BLOCK):
                            count = min(BLOCK, end - key)
                            for row in range(0, every, together):
                                block = table + 4 * row * BLOCK
                                for c in range(0, count, LANES):
                                    scores(
                                        cached, together, keys + (key + c) * stride, stride, min(count - c, LANES),
                                        work + row * query_pitch, query_pitch, chunks, tail, block + 4 * c, far,
                                    )  # fmt: skip
                            for row in range(asked):
                                at = to + row * part_pitch
                                _weigh(
                                    n, s, f[CAP], b, h * asked + row, key, count, table + 4 * row * BLOCK, at, columns
                                )
                            base = values + key * stride
                            for row in range(0, every, together):
                                block, at, c = table + 4 * row * BLOCK, to + row * part_pitch + 2 * ROW, 0
                                while c < dim:
                                    left, place = dim - c, base + size * c
                                    if left >= wide:
                                        mix_wide(cached, together, place, stride, count, block, at, part_pitch, 0, far)
                                        c += wide
                                        at += wide * 4
                                    elif left >= numbers_of_chunk:
                                        mix_chunk(cached, together, place, stride, count, block, at, part_pitch, 0, far)
                                        c += numbers_of_chunk
                                        at += numbers_of_chunk * 4
                                    else:
                                        mix_part(cached, together, place, stride, count, block, at, part_pitch, left, 0)
                                        c = dim
                    take(counter + DONE)
                    piece = take(counter)
            elif code == COMBINE:
                heads, asked, dim, ranges = n[KEY_HEADS], n[QUERIES], n[DIM], s[RANGES]
                every = (asked + together - 1) // together * together
                width = (dim + numbers_of_chunk - 1) // numbers_of_chunk * vectors_of_chunk * ROW
                part_pitch = 2 * ROW + width
                mixed = own + s[SCRATCH]
                for head in range(batch * heads):
                    b, h = head // heads, head % heads
                    for row in range(asked):
                        at = n[LEFT] + (head * ranges * every + row) * part_pitch
                        top = LOWEST
                        for part in range(ranges):
                            top = max(top, get(at + part * every * part_pitch))
                        weights = F(0)
                        for part in range(ranges):
                            there = at + part * every * part_pitch
                            scale = F(math.exp(get(there) - top))
                            weights += total(load(there + ROW)) * scale
                            for c in range(0, width, ROW):
                                x = mul(load(there + 2 * ROW + c), splat(scale))
                                store(mixed + c, x if part == 0 else add(load(mixed + c), x))
                        factor = F(0) if weights == F(0) else F(1) / weights
                        to = out + b * out_pitch + 4 * dim * (h * asked + row)
                        for d in range(dim):
                            put(to + 4 * d, get(mixed + 4 * _order(d, cached)) * factor)

    return run
