"""A token of RWKV-7's heads, in Numba: 16 channels in the lanes of a vector."""

import math
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types

from mercer.backends import microkernels, wkv_kernels
from mercer.backends.microkernels import (
    LANES,
    ROW,
    add,
    broadcast,
    exp,
    fma,
    from_lane,
    get,
    load,
    load_row,
    mul,
    splat,
    store,
    store_row,
)
from mercer.backends.wkv_kernels import below, divide, minus, where_below

F = np.float32
HEADS, SIZE = range(2)
(
    RECEPTANCE, KEY, VALUE, DECAY, RATE, GATE, SHARE, FIRST, KEY_SCALE, KEY_RATE, BONUS, WEIGHT, BIAS, STATE, SUMS, OUT,
) = range(2, 18)  # fmt: skip
"""The table: sizes, addresses (0: not there), and behind them, `HALF` further on, whether each tensor is bfloat16."""
HALF = 16
SLOWEST = F(-math.exp(-0.5))
"""The log-decay where the sigmoid is 1."""
LEAST_NORM = F(1e-12)
"""Below which a key to be cleared is not made of length 1, as torch's `normalize` has it."""
SCRATCH = 7
"""Vectors of a head that are kept: queries, keys, values, decays, what is pushed, what is sought, outputs."""


@njit
def _row(n: Any, which: int, place: int, count: int) -> Any:
    """16 numbers of a tensor; 0 in the lanes from `count` on."""
    half = n[which + HALF]
    return load_row(n[which] + (2 if half else 4) * place, half, count)


@njit
def _sigmoid(x: Any) -> Any:
    less, one = exp(below(x)), splat(F(1))
    return divide(where_below(x, less, one), add(one, less))


@njit
def _sum(x: Any, work: int) -> Any:
    """Of the lanes, by way of memory."""
    store(work, x)
    total = F(0)
    for i in range(LANES):
        total += get(work + 4 * i)
    return total


@njit
def head(n: Any, eps: float, item: int, work: int) -> None:
    """A token of one head of a row of the batch."""
    size = n[SIZE]
    place, first = item * size, item % n[HEADS] * size
    pitch = (size + LANES - 1) // LANES * ROW
    spare, query = work, work + ROW
    key, value, decay = query + pitch, query + 2 * pitch, query + 3 * pitch
    push, seek, out = query + 4 * pitch, query + 5 * pitch, query + 6 * pitch
    zero, one = splat(F(0)), splat(F(1))
    squares = own = zero
    for c in range(0, size, LANES):
        count, at = size - c, 4 * c
        r, k, v = (
            _row(n, RECEPTANCE, place + c, count),
            _row(n, KEY, place + c, count),
            _row(n, VALUE, place + c, count),
        )
        rate = _sigmoid(_row(n, RATE, place + c, count))
        if n[SHARE]:
            part = _sigmoid(_row(n, SHARE, place + c, count))
            v = fma(part, minus(_row(n, FIRST, place + c, count), v), v)
        sought = mul(k, _row(n, KEY_SCALE, first + c, count))
        squares = fma(sought, sought, squares)
        k = fma(k, mul(minus(rate, one), _row(n, KEY_RATE, first + c, count)), k)
        own = fma(mul(r, k), _row(n, BONUS, first + c, count), own)
        store(query + at, r)
        store(key + at, k)
        store(value + at, v)
        store(decay + at, exp(mul(splat(SLOWEST), _sigmoid(_row(n, DECAY, place + c, count)))))
        store(push + at, rate)
        store(seek + at, sought)
    scale = splat(F(1) / max(F(math.sqrt(_sum(squares, spare))), LEAST_NORM))
    own = splat(_sum(own, spare))
    for at in range(0, 4 * size, ROW):
        sought = mul(load(seek + at), scale)
        store(seek + at, sought)
        store(push + at, mul(load(push + at), minus(zero, sought)))
    total = zero
    for c in range(0, size, LANES):  # columns of the state
        count, at = size - c, 4 * c
        before, after = n[STATE] + 4 * (place * size + c), n[SUMS] + 4 * (place * size + c)
        v, y, read, other = load(value + at), zero, zero, zero
        if n[STATE]:
            for i in range(0, size - 1, 2):
                read = fma(broadcast(seek + 4 * i), load_row(before + 4 * i * size, 0, count), read)
                other = fma(broadcast(seek + 4 * i + 4), load_row(before + 4 * (i + 1) * size, 0, count), other)
            if size % 2:
                read = fma(broadcast(seek + 4 * size - 4), load_row(before + 4 * (size - 1) * size, 0, count), read)
            read = add(read, other)
        for i in range(size):
            s = mul(broadcast(key + 4 * i), v)
            if n[STATE]:
                s = fma(broadcast(push + 4 * i), read, s)
                s = fma(broadcast(decay + 4 * i), load_row(before + 4 * i * size, 0, count), s)
            store_row(after + 4 * i * size, 0, count, s)
            y = fma(broadcast(query + 4 * i), s, y)
        store(out + at, y)
        total = add(total, y)
    mean = splat(_sum(total, spare) / F(size))
    squares = zero
    for c in range(0, size, LANES):
        off = minus(load(out + 4 * c), mean)
        squares = fma(mul(off, off), minus(one, from_lane(size - c)), squares)
    scale = splat(F(1) / F(math.sqrt(_sum(squares, spare) / F(size) + F(eps))))
    half = n[OUT + HALF]
    for c in range(0, size, LANES):
        count, at = size - c, 4 * c
        y = mul(minus(load(out + at), mean), scale)
        y = fma(y, _row(n, WEIGHT, first + c, count), _row(n, BIAS, first + c, count))
        y = mul(fma(own, load(value + at), y), _row(n, GATE, place + c, count))
        store_row(n[OUT] + (2 if half else 4) * (place + c), half, count, y)


def room(size: int) -> int:
    """Floats of scratch of a thread."""
    return LANES + SCRATCH * -(-size // LANES) * LANES


def _stamp() -> str:
    """The source of the inlined parts, for the name of what inlines them: Numba's cache looks at this file alone."""
    sources = Path(microkernels.__file__).read_bytes() + Path(wkv_kernels.__file__).read_bytes()
    return sha256(sources).hexdigest()


@lru_cache
def compiled() -> Any:
    """:func:`head` for items from start to stop, heads of one row after the other, compiled for this machine or read
    from the cache on disk.
    """
    return _compiled(_stamp())


@lru_cache
def mixer() -> Any:
    """run(table): x + (before - x) * share for each share. The table: dim, rows, shares, the addresses of x, before,
    the results `[shares, rows, dim]` and each share, and in that order whether they are bfloat16.
    """
    return _mixer(_stamp())


def _mixer(stamp: str) -> Any:
    @njit(types.void(types.Array(types.int64, 1, "C")), nogil=True, cache=True)
    def call(n: Any) -> None:
        if not len(stamp):
            return
        dim, rows, shares = n[0], n[1], n[2]
        addresses, halves = n[3:], n[6 + shares :]
        size = 2 if halves[0] else 4
        for row in range(rows):
            for c in range(0, dim, LANES):
                count, at = dim - c, size * (row * dim + c)
                here = load_row(addresses[0] + at, halves[0], count)
                step = minus(load_row(addresses[1] + at, halves[1], count), here)
                for s in range(shares):
                    part = load_row(addresses[3 + s] + (2 if halves[3 + s] else 4) * c, halves[3 + s], count)
                    store_row(addresses[2] + size * s * rows * dim + at, halves[2], count, fma(step, part, here))

    return call


def _compiled(stamp: str) -> Any:
    @njit(types.void(types.Array(types.int64, 1, "C"), types.float64, types.int64, types.int64, types.int64),
          nogil=True, cache=True)  # fmt: skip
    def call(n: Any, eps: float, work: int, start: int, stop: int) -> None:
        if len(stamp):
            for item in range(start, stop):
                head(n, eps, item, work)

    return call
