"""A few queries against a key/value cache in one pass, in Numba: keys and values are read once, in their own dtype.

An item is a range of the keys of one key head of one batch row. All queries that share the head (its group, times the
few tokens of the call) read 64 keys at a time: their scores, the online softmax, and what they take of the values,
while those are in the nearest cache. Sums are float32. Ranges are cut by sizes alone and put together in order, so the
digits do not depend on the number of threads.
"""

import math
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types

from mercer.backends import decode_vectors, microkernels
from mercer.backends.decode_vectors import (
    BFLOAT16,
    BLOCK,
    SIZE,
    VECTORS,
    chunk,
    get_number,
    highest,
    lanes,
    larger,
    lean,
    lean_from,
    mix_chunk,
    mix_part,
    mix_wide,
    scores,
    total,
    where,
    within,
)
from mercer.backends.microkernels import LANES, ROW, add, exp, get, load, mul, put, splat, store

F = np.float32
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
    sources = b"".join(Path(module.__file__).read_bytes() for module in (microkernels, decode_vectors))
    stamp = sha256(sources).hexdigest()
    return _items(stamp, kind, rows), _outputs(stamp, kind)


def _items(stamp: str, kind: int, rows: int) -> Any:
    numbers = types.Array(types.int64, 1, "C")
    size, numbers_of_chunk, wide = SIZE[kind], chunk(kind), 64
    vectors_of_chunk = VECTORS[kind]

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
        table = work + every * query_pitch
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
                        x = F(get_number(at + size * d, kind) * F(scale))
                        put(work + row * query_pitch + 4 * _place(d, kind), x)
            keys = n[KEY] + b * n[KEY + 1] + h * n[KEY + 2]
            values = n[VALUE] + b * n[VALUE + 1] + h * n[VALUE + 2]
            key_stride, value_stride = n[KEY + 3], n[VALUE + 3]
            keys_ahead, values_ahead = key_stride * (AHEAD // (dim * size)), value_stride * (AHEAD // (width * size))
            for key in range(first, last, BLOCK):
                count = min(BLOCK, last - key)
                for row in range(0, every, rows):
                    block = table + 4 * row * BLOCK
                    for c in range(0, count, LANES):
                        scores(
                            kind, rows, keys + (key + c) * key_stride, key_stride, min(count - c, LANES),
                            work + row * query_pitch, query_pitch, chunks, tail, block + 4 * c,
                            keys_ahead,
                        )  # fmt: skip
                for row in range(asked):
                    to = out + row * pitch
                    _weigh(n, b, h, row, key, count, table + 4 * row * BLOCK, to, to + 2 * ROW, columns)
                base = values + key * value_stride
                for row in range(0, every, rows):
                    block, to, c = table + 4 * row * BLOCK, out + row * pitch + 2 * ROW, 0
                    while c < width:
                        left, here = width - c, base + size * c
                        if left >= wide:
                            mix_wide(kind, rows, here, value_stride, count, block, to, pitch, 0, values_ahead)
                            c += wide
                            to += wide * 4
                        elif left >= numbers_of_chunk:
                            mix_chunk(kind, rows, here, value_stride, count, block, to, pitch, 0, values_ahead)
                            c += numbers_of_chunk
                            to += numbers_of_chunk * 4
                        else:
                            mix_part(kind, rows, here, value_stride, count, block, to, pitch, left, 0)
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
