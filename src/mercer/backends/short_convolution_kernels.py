"""A short causal convolution of each channel in Numba: a token's row at a time, with the rows before it still near."""

from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types

from mercer.backends import microkernels, selective_scan_vectors, short_convolution_table, step_kernels
from mercer.backends.microkernels import LANES, ROW, add, exp, fma, load, load_row, mul, splat, store, store_row
from mercer.backends.selective_scan_vectors import minus_size, one_minus, sigmoid_from
from mercer.backends.short_convolution_table import (
    BATCH,
    BIAS,
    CHANNELS,
    CHUNK,
    COUNTS,
    FINAL,
    GRAD_FINAL,
    GRAD_OUT,
    GRAD_PAST,
    GRAD_WEIGHT,
    GRAD_X,
    HALF,
    LENGTH,
    OUT,
    PAST,
    SILU,
    TOKEN,
    WEIGHT,
    WIDTH,
    X,
)
from mercer.backends.step_kernels import load_some, store_some

F = np.float32


def room(width: int, channels: int) -> int:
    """Bytes of scratch of a thread of the backward pass: the gradients of `width` rows before the activation."""
    return width * _padded(channels) * 4


@njit
def _padded(channels: int) -> int:
    return (channels + LANES - 1) // LANES * LANES


@microkernels._primitive(types.int64, microkernels.address)
def _whole(b: Any, at: Any) -> Any:
    """A 64-bit integer."""
    return microkernels._load(b, at, 0, microkernels.I64, 8)


@njit
def _count(t: Any, n: Any, row: int) -> int:
    """The real tokens of a row."""
    return n[LENGTH] if t[COUNTS, 0] == 0 else int(_whole(t[COUNTS, 0] + 8 * row))


@njit
def _at(t: Any, which: int, row: int, token: int, channel: int) -> int:
    """Where a number of a token stands."""
    size = 2 if t[which, HALF] else 4
    return t[which, 0] + row * t[which, BATCH] + token * t[which, TOKEN] + channel * size


@njit
def _input(t: Any, n: Any, row: int, token: int, channel: int) -> Any:
    """16 channels of an input; one of a negative number is of the past, 0 where there is none."""
    count = n[CHANNELS] - channel
    if token >= 0:
        x = load_row(_at(t, X, row, token, channel), t[X, HALF], count)
    elif t[PAST, 0]:
        x = load_some(_state(t, PAST, n, row, token + n[WIDTH] - 1) + 4 * channel, count)
    else:
        x = splat(F(0))
    return x


@njit
def _state(t: Any, which: int, n: Any, row: int, place: int) -> int:
    """Where a row of a tail stands."""
    return t[which, 0] + 4 * (row * (n[WIDTH] - 1) + place) * n[CHANNELS]


@njit
def _before(t: Any, n: Any, row: int, token: int, channel: int) -> Any:
    """What 16 channels are before the activation."""
    y, count = splat(F(0)), n[CHANNELS] - channel
    if t[BIAS, 0]:
        y = load_some(t[BIAS, 0] + 4 * channel, count)
    for i in range(n[WIDTH]):
        w = load_some(t[WEIGHT, 0] + 4 * (i * n[CHANNELS] + channel), count)
        y = fma(w, _input(t, n, row, token - n[WIDTH] + 1 + i, channel), y)
    return y


@njit
def _before_whole(
    bias: int, weight: int, pitch: int, inputs: int, stride: int, half: int, width: int, channel: int
) -> Any:
    """As `_before` for all of 16 channels, where all inputs stand in memory, a stride apart."""
    y = splat(F(0))
    if bias:
        y = load(bias + 4 * channel)
    weight, inputs = weight + 4 * channel, inputs + channel * (2 if half else 4)
    for _ in range(width):
        y = fma(load(weight), load_row(inputs, half, LANES), y)
        weight += pitch
        inputs += stride
    return y


@njit
def _silu(y: Any, wanted: int) -> Any:
    if wanted:
        y = mul(y, sigmoid_from(y, exp(minus_size(y))))
    return y


@njit
def _slope(g: Any, y: Any) -> Any:
    """g times the derivative of silu at y."""
    s = sigmoid_from(y, exp(minus_size(y)))
    return mul(g, mul(s, fma(y, one_minus(s), splat(F(1)))))


@njit
def forward(t: Any, n: Any, start: int, stop: int) -> None:
    """Outputs of runs of tokens, and the tail with the first of a row's."""
    runs, before = (n[LENGTH] + CHUNK - 1) // CHUNK, n[WIDTH] - 1
    for item in range(start, stop):
        row, begin = item // runs, item % runs * CHUNK
        tokens = _count(t, n, row)
        for token in range(begin, min(begin + CHUNK, n[LENGTH])):
            quick = 0
            if before <= token < tokens:
                quick = n[CHANNELS] // LANES * LANES
                inputs, to, out_half = _at(t, X, row, token - before, 0), _at(t, OUT, row, token, 0), t[OUT, HALF]
                for c in range(0, quick, LANES):
                    y = _before_whole(t[BIAS, 0], t[WEIGHT, 0], 4 * n[CHANNELS], inputs, t[X, TOKEN], t[X, HALF],
                                      n[WIDTH], c)  # fmt: skip
                    store_row(to + c * (2 if out_half else 4), out_half, LANES, _silu(y, n[SILU]))
            for c in range(quick, n[CHANNELS], LANES):
                y = splat(F(0))
                if token < tokens:
                    y = _silu(_before(t, n, row, token, c), n[SILU])
                store_row(_at(t, OUT, row, token, c), t[OUT, HALF], n[CHANNELS] - c, y)
        if begin == 0:
            for place in range(before):
                to = _state(t, FINAL, n, row, place)
                for c in range(0, n[CHANNELS], LANES):
                    store_some(to + 4 * c, n[CHANNELS] - c, _input(t, n, row, tokens - before + place, c))


@njit
def backward(t: Any, n: Any, work: int, start: int, stop: int) -> None:
    """Gradients of inputs and the past; those of weights and the bias for each run of tokens apart."""
    width, channels = n[WIDTH], n[CHANNELS]
    runs, pitch = (n[LENGTH] + CHUNK - 1) // CHUNK, 4 * _padded(channels)
    for item in range(start, stop):
        row, begin = item // runs, item % runs * CHUNK
        end, tokens = min(begin + CHUNK, n[LENGTH]), _count(t, n, row)
        sums = t[GRAD_WEIGHT, 0] + 4 * item * (width + 1) * channels
        for c in range(0, (width + 1) * channels, LANES):
            store_some(sums + 4 * c, (width + 1) * channels - c, splat(F(0)))
        for r in range(width):
            for c in range(0, pitch, ROW):
                store(work + r * pitch + c, splat(F(0)))
        first = begin if begin else 1 - width
        for token in range(begin, end + width - 1):
            held, counted, quick = work + token % width * pitch, token < min(end, tokens), 0
            if width - 1 <= token < tokens:
                quick = channels // LANES * LANES
                _gradients_whole(t, n, row, token, quick, held, sums if counted else 0)
            for c in range(quick, channels, LANES):
                count, g = channels - c, splat(F(0))
                if token < tokens:
                    g = load_row(_at(t, GRAD_OUT, row, token, c), t[GRAD_OUT, HALF], count)
                    if n[SILU]:
                        g = _slope(g, _before(t, n, row, token, c))
                store(held + 4 * c, g)
                if counted:
                    for i in range(width):
                        at = sums + 4 * (i * channels + c)
                        x = _input(t, n, row, token - width + 1 + i, c)
                        store_some(at, count, fma(g, x, load_some(at, count)))
                    at = sums + 4 * (width * channels + c)
                    store_some(at, count, add(g, load_some(at, count)))
            if token - width + 1 >= first:
                _input_gradient(t, n, row, token - width + 1, tokens, work, pitch)


@njit
def _gradients_whole(t: Any, n: Any, row: int, token: int, quick: int, held: int, sums: int) -> None:
    """Of whole vectors of a token: the gradient before the activation, and what it adds to those of the weights."""
    width, pitch = n[WIDTH], 4 * n[CHANNELS]
    inputs, grad, half = _at(t, X, row, token - width + 1, 0), _at(t, GRAD_OUT, row, token, 0), t[X, HALF]
    grad_half = t[GRAD_OUT, HALF]
    for c in range(0, quick, LANES):
        g = load_row(grad + c * (2 if grad_half else 4), grad_half, LANES)
        if n[SILU]:
            g = _slope(g, _before_whole(t[BIAS, 0], t[WEIGHT, 0], pitch, inputs, t[X, TOKEN], half, width, c))
        store(held + 4 * c, g)
        if sums:
            at, source = sums + 4 * c, inputs + c * (2 if half else 4)
            for _ in range(width):
                store(at, fma(g, load_row(source, half, LANES), load(at)))
                at += pitch
                source += t[X, TOKEN]
            store(at, add(g, load(at)))


@njit
def _input_gradient(t: Any, n: Any, row: int, token: int, tokens: int, work: int, pitch: int) -> None:
    """Of an input, of the past if its number is negative, from the outputs that looked at it."""
    width, channels = n[WIDTH], n[CHANNELS]
    place = token - tokens + width - 1  # in the tail
    quick = 0
    if token >= 0 and not (t[GRAD_FINAL, 0] and 0 <= place < width - 1):
        quick = channels // LANES * LANES
        to, half = _at(t, GRAD_X, row, token, 0), t[GRAD_X, HALF]
        newest = (token + width - 1) % width
        for c in range(0, quick, LANES):
            g, weight, slot = splat(F(0)), t[WEIGHT, 0] + 4 * c, newest
            for _ in range(width):
                g = fma(load(weight), load(work + slot * pitch + 4 * c), g)
                weight += 4 * channels
                slot = slot - 1 if slot else width - 1
            store_row(to + c * (2 if half else 4), half, LANES, g)
    for c in range(quick, channels, LANES):
        g, count = splat(F(0)), channels - c
        if t[GRAD_FINAL, 0] and 0 <= place < width - 1:
            g = load_some(_state(t, GRAD_FINAL, n, row, place) + 4 * c, count)
        for i in range(width):
            later = token + width - 1 - i
            if later >= 0:
                w = load_some(t[WEIGHT, 0] + 4 * (i * channels + c), count)
                g = fma(w, load(work + later % width * pitch + 4 * c), g)
        if token >= 0:
            store_row(_at(t, GRAD_X, row, token, c), t[GRAD_X, HALF], count, g)
        else:
            store_some(_state(t, GRAD_PAST, n, row, token + width - 1) + 4 * c, count, g)


@lru_cache
def compiled() -> Any:
    """`forward` and `backward`, compiled for this machine or read from the cache on disk."""
    modules = (microkernels, step_kernels, selective_scan_vectors, short_convolution_table)
    # The sources of the inlined parts are in the name: Numba's cache looks at this file alone.
    return _compiled(sha256(b"".join(Path(m.__file__).read_bytes() for m in modules)).hexdigest())


def _compiled(stamp: str) -> Any:
    tables = types.Array(types.int64, 2, "C"), types.Array(types.int64, 1, "C")

    @njit(types.void(*tables, types.int64, types.int64), nogil=True, cache=True)
    def run_forward(t: Any, n: Any, start: int, stop: int) -> None:
        if len(stamp):  # a closure over it, so that the cache tells versions apart
            forward(t, n, start, stop)

    @njit(types.void(*tables, types.int64, types.int64, types.int64), nogil=True, cache=True)
    def run_backward(t: Any, n: Any, work: int, start: int, stop: int) -> None:
        if len(stamp):
            backward(t, n, work, start, stop)

    return run_forward, run_backward
