"""The linear recurrence of channels in Numba: 16 channels a vector, tokens in order.

Tables of tensors have a row each: address, whether it is bfloat16, bytes from one batch entry and from one token to the
next. Scratch has a row of `RUN` floats for every run of channels of every batch entry.
"""

from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types

from mercer.backends import microkernels
from mercer.backends.channel_scan import RUN
from mercer.backends.microkernels import LANES, add, exp, fma, load, load_row, mul, splat, store, store_row

F = np.float32
ADDRESS, HALF, BATCH, TOKEN = 0, 1, 2, 3
LOG, X, OUT = 0, 1, 2
H, GRAD, GRAD_LOG, GRAD_X = 1, 2, 3, 4


@njit
def _at(rows: Any, which: int, batch: int, token: int, channel: int) -> int:
    size = 2 if rows[which, HALF] else 4
    return rows[which, ADDRESS] + batch * rows[which, BATCH] + token * rows[which, TOKEN] + channel * size


@njit
def _next(rows: Any, which: int, at: int) -> int:
    """The same channel's place 16 channels on."""
    return at + LANES * (2 if rows[which, HALF] else 4)


@njit
def _forward(rows: Any, sums: Any, ends: Any, channels: int, length: int, work: int, b: int, first: int) -> None:
    """One run of channels of one batch entry. sums: the state before, and where the one after goes."""
    count, end = min(RUN, channels - first), ends[b]
    state = 4 * (b * channels + first)
    for c in range(0, count, LANES):
        store(work + 4 * c, load_row(sums[0] + state + 4 * c, 0, count - c))
    for t in range(end):
        log, x, out = _at(rows, LOG, b, t, first), _at(rows, X, b, t, first), _at(rows, OUT, b, t, first)
        for c in range(0, count, LANES):
            a = exp(load_row(log, rows[LOG, HALF], count - c))
            h = fma(a, load(work + 4 * c), load_row(x, rows[X, HALF], count - c))
            store(work + 4 * c, h)
            store_row(out, 0, count - c, h)
            log, x, out = _next(rows, LOG, log), _next(rows, X, x), out + 4 * LANES
    for t in range(end, length):
        out = _at(rows, OUT, b, t, first)
        for c in range(0, count, LANES):
            store_row(out + 4 * c, 0, count - c, splat(F(0)))
    for c in range(0, count, LANES):
        store_row(sums[1] + state + 4 * c, 0, count - c, load(work + 4 * c))


@njit
def _backward(rows: Any, sums: Any, ends: Any, channels: int, length: int, work: int, b: int, first: int) -> None:
    """One run of channels of one batch entry. sums: the state before, the gradient of the last one, and where that of
    the one before goes."""
    count, end = min(RUN, channels - first), ends[b]
    state = 4 * (b * channels + first)
    zero = splat(F(0))
    for c in range(0, count, LANES):
        store(work + 4 * c, load_row(sums[1] + state + 4 * c, 0, count - c))
    for t in range(end, length):
        for which in (GRAD_LOG, GRAD_X):
            at = _at(rows, which, b, t, first)
            for c in range(0, count, LANES):
                store_row(at, rows[which, HALF], count - c, zero)
                at = _next(rows, which, at)
    for t in range(end - 1, -1, -1):
        log, grad = _at(rows, LOG, b, t, first), _at(rows, GRAD, b, t, first)
        to_log, to_x = _at(rows, GRAD_LOG, b, t, first), _at(rows, GRAD_X, b, t, first)
        before = _at(rows, H, b, t - 1, first) if t > 0 else sums[0] + state
        for c in range(0, count, LANES):
            g = add(load(work + 4 * c), load_row(grad, rows[GRAD, HALF], count - c))
            faded = mul(exp(load_row(log, rows[LOG, HALF], count - c)), g)
            store(work + 4 * c, faded)
            store_row(to_x, rows[GRAD_X, HALF], count - c, g)
            store_row(to_log, rows[GRAD_LOG, HALF], count - c, mul(faded, load_row(before + 4 * c, 0, count - c)))
            log, grad = _next(rows, LOG, log), _next(rows, GRAD, grad)
            to_log, to_x = _next(rows, GRAD_LOG, to_log), _next(rows, GRAD_X, to_x)
    for c in range(0, count, LANES):
        store_row(sums[2] + state + 4 * c, 0, count - c, load(work + 4 * c))


@lru_cache
def compiled_forward() -> Any:
    """The forward pass of a run of items, compiled for this machine or read from the cache on disk."""
    return _compiled_forward(_stamp())


@lru_cache
def compiled_backward() -> Any:
    """The backward pass of a run of items."""
    return _compiled_backward(_stamp())


def _stamp() -> str:
    # The source of the inlined parts is in the name: Numba's cache looks at this file alone.
    return sha256(Path(microkernels.__file__).read_bytes()).hexdigest()


_TABLE, _NUMBERS, _SCRATCH = (
    types.Array(types.int64, 2, "C"),
    types.Array(types.int64, 1, "C"),
    types.Array(types.float32, 2, "C"),
)
_SIGNATURE = types.void(_TABLE, _NUMBERS, _NUMBERS, types.int64, types.int64, _SCRATCH, types.int64, types.int64)


def _compiled_forward(stamp: str) -> Any:
    @njit(_SIGNATURE, nogil=True, cache=True)
    def call(rows: Any, sums: Any, ends: Any, channels: int, length: int, scratch: Any, start: int, stop: int) -> None:
        if len(stamp):
            runs = (channels + RUN - 1) // RUN
            for i in range(start, stop):
                _forward(rows, sums, ends, channels, length, scratch[i].ctypes.data, i // runs, i % runs * RUN)

    return call


def _compiled_backward(stamp: str) -> Any:
    @njit(_SIGNATURE, nogil=True, cache=True)
    def call(rows: Any, sums: Any, ends: Any, channels: int, length: int, scratch: Any, start: int, stop: int) -> None:
        if len(stamp):
            runs = (channels + RUN - 1) // RUN
            for i in range(start, stop):
                _backward(rows, sums, ends, channels, length, scratch[i].ctypes.data, i // runs, i % runs * RUN)

    return call
