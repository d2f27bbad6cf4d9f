"""A selective scan in Numba: 16 channels in the lanes of a vector, states in the nearest cache, tokens one by one.

The channels of a batch row go in groups. Of a group, 32 tokens at a time are walked for 16 channels after the other, so
that the rows of B and C that all channels share stay near. The backward pass walks 32 tokens forward from a kept state,
writing down decays and states, and then back.
"""

from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit, types

from mercer.backends import microkernels, selective_scan_table, selective_scan_vectors, step_kernels
from mercer.backends.microkernels import (
    LANES,
    ROW,
    add,
    broadcast,
    exp,
    fma,
    get,
    lane_sums,
    load,
    load_row,
    load_turned,
    mul,
    prefetch,
    put,
    splat,
    store,
    store_row,
)
from mercer.backends.selective_scan_table import (
    BATCH,
    BATCHES,
    BIAS,
    CHANNELS,
    CHUNK,
    FINAL,
    GATE,
    GRAD_BIAS,
    GRAD_BOTH,
    GRAD_FINAL,
    GRAD_GATE,
    GRAD_OUT,
    GRAD_RATES,
    GRAD_SKIP,
    GRAD_STATE,
    GRAD_STEP,
    GRAD_X,
    GROUP,
    HALF,
    LENGTH,
    LENGTHS,
    MARKS,
    OUT,
    RATES,
    READ,
    SKIP,
    SOFTPLUS,
    STATE,
    STATES,
    STEP,
    TOKEN,
    WRITE,
    X,
)
from mercer.backends.selective_scan_vectors import (
    LOG2_E,
    LOG_2,
    decay,
    minus_size,
    one_minus,
    sigmoid_from,
    softplus_from,
)
from mercer.backends.step_kernels import load_some, store_some

F = np.float32
BLOCKS = GROUP // LANES


def forward_room(states: int) -> int:
    """Bytes of scratch of a thread: rates and states of a group."""
    return 2 * BLOCKS * states * ROW


def backward_room(states: int) -> int:
    """Bytes of scratch of a thread: rates, gradients of rates and of states of a group, and of 32 tokens the sums for B
    and C, and for 16 channels decays, states and five rows.
    """
    return (3 * BLOCKS * states + 2 * BLOCKS + CHUNK * (_both(states) + 2 * states + 5) + states) * ROW


@njit
def _both(states: int) -> int:
    """Rows of sums for B and C of a token: whole tiles."""
    return 2 * ((states + LANES - 1) // LANES * LANES)


@njit
def _at(t: Any, which: int, row: int, token: int) -> int:
    """Where a token's numbers stand; 0 if the tensor is not there."""
    if t[which, 0] == 0:
        return 0
    return t[which, 0] + row * t[which, BATCH] + token * t[which, TOKEN]


@njit
def _count(t: Any, n: Any, row: int) -> int:
    """The real tokens of a row."""
    if t[LENGTHS, 0] == 0:
        return n[LENGTH]
    return int(_whole(t[LENGTHS, 0] + 8 * row))


@microkernels._primitive(types.int64, microkernels.address)
def _whole(b: Any, at: Any) -> Any:
    """A 64-bit integer."""
    return microkernels._load(b, at, 0, microkernels.I64, 8)


@njit
def _fetch(source: int, states: int, channels: int, first: int, count: int, to: int) -> None:
    """[N, D] in memory to blocks of [N][16], for `count` channels; zeros where there is no source."""
    for c in range(0, count, LANES):
        for s in range(states):
            x = splat(F(0))
            if source:
                x = load_some(source + 4 * (s * channels + first + c), count - c)
            store(to, x)
            to += ROW


@njit
def _fetch_rates(source: int, states: int, first: int, count: int, to: int) -> None:
    """[D, N] in memory, times log2(e), to blocks of [N][16]; zeros beyond the channels."""
    factor = splat(F(LOG2_E))
    for c in range(0, count, LANES):
        row = source + 4 * (first + c) * states
        whole = states // LANES * LANES if count - c >= LANES else 0
        for s in range(0, whole, LANES):
            load_turned(row + 4 * s, 0, 4 * states, 0, to + s * ROW)
        for s in range(whole, states):
            store(to + s * ROW, splat(F(0)))
            for lane in range(min(LANES, count - c)):
                put(to + s * ROW + 4 * lane, get(row + 4 * (lane * states + s)))
        for s in range(states):
            store(to + s * ROW, mul(factor, load(to + s * ROW)))
        to += states * ROW


@njit
def _keep(source: int, states: int, channels: int, first: int, count: int, to: int) -> None:
    """Blocks of [N][16] to [N, D] in memory."""
    for c in range(0, count, LANES):
        for s in range(states):
            store_some(to + 4 * (s * channels + first + c), count - c, load(source))
            source += ROW


@njit
def _clear(at: int, rows: int) -> None:
    for r in range(rows):
        store(at + r * ROW, splat(F(0)))


@njit
def _blank(at: int, half: int, count: int) -> None:
    """A row of zeros."""
    size = 2 if half else 4
    for c in range(0, count, LANES):
        store_row(at + c * size, half, min(LANES, count - c), splat(F(0)))


@njit
def _first(at: int, half: int, channel: int) -> int:
    return at + channel * (2 if half else 4)


@njit
def forward(t: Any, n: Any, work: int, start: int, stop: int) -> None:
    """Outputs, final states and, where there is room for them, the states before every 32 tokens."""
    channels, states = n[CHANNELS], n[STATES]
    groups, chunks = (channels + GROUP - 1) // GROUP, (n[LENGTH] + CHUNK - 1) // CHUNK
    rates, held = work, work + BLOCKS * states * ROW
    for item in range(start, stop):
        row, first = item // groups, item % groups * GROUP
        count = min(GROUP, channels - first)
        tokens = _count(t, n, row)
        whole = 4 * states * channels
        _fetch_rates(t[RATES, 0], states, first, count, rates)
        before = t[STATE, 0] + row * whole if t[STATE, 0] else 0
        _fetch(before, states, channels, first, count, held)
        for begin in range(0, tokens, CHUNK):
            if t[MARKS, 0]:
                to = t[MARKS, 0] + (row * chunks + begin // CHUNK) * whole
                _keep(held, states, channels, first, count, to)
            for block in range((count + LANES - 1) // LANES):
                offset, channel = block * states * ROW, first + block * LANES
                ahead = _following(channel, first, count)
                _walk(t, n, row, channel, begin, min(tokens, begin + CHUNK), ahead, rates + offset, held + offset)
        _keep(held, states, channels, first, count, t[FINAL, 0] + row * whole)
        for token in range(tokens, n[LENGTH]):
            at = _first(_at(t, OUT, row, token), t[OUT, HALF], first)
            _blank(at, t[OUT, HALF], count)


@njit
def _following(channel: int, first: int, count: int) -> Any:
    """What is walked after 16 channels: how many channels and tokens further. Rows are far apart, so that nothing but
    the program itself can ask for them early.
    """
    if channel + LANES < first + count:
        return LANES, 0
    return first - channel, CHUNK


@njit
def _ask(t: Any, which: int, row: int, token: int, channel: int, ahead: Any) -> None:
    """Prefetch the numbers of a token that are `ahead`."""
    if t[which, 0]:
        prefetch(_first(_at(t, which, row, token + ahead[1]), t[which, HALF], channel + ahead[0]))


@njit
def _walk(t: Any, n: Any, row: int, channel: int, begin: int, end: int, ahead: Any, rates: int, held: int) -> None:
    """Some tokens of 16 channels."""
    count, states = min(LANES, n[CHANNELS] - channel), n[STATES]
    skip, bias = splat(F(0)), splat(F(0))
    if t[SKIP, 0]:
        skip = load_some(t[SKIP, 0] + 4 * channel, count)
    if t[BIAS, 0]:
        bias = load_some(t[BIAS, 0] + 4 * channel, count)
    for token in range(begin, end):
        for which in (X, STEP, GATE, OUT):
            _ask(t, which, row, token, channel, ahead)
        x = load_row(_first(_at(t, X, row, token), t[X, HALF], channel), t[X, HALF], count)
        d = add(load_row(_first(_at(t, STEP, row, token), t[STEP, HALF], channel), t[STEP, HALF], count), bias)
        if n[SOFTPLUS]:
            d = softplus_from(d, exp(minus_size(d)))
        u, y = mul(d, x), mul(skip, x)
        write, read = _at(t, WRITE, row, token), _at(t, READ, row, token)
        for s in range(states):
            a = decay(d, load(rates + s * ROW))
            h = fma(a, load(held + s * ROW), mul(u, broadcast(write + 4 * s)))
            store(held + s * ROW, h)
            y = fma(h, broadcast(read + 4 * s), y)
        if t[GATE, 0]:
            z = load_row(_first(_at(t, GATE, row, token), t[GATE, HALF], channel), t[GATE, HALF], count)
            y = mul(y, mul(z, sigmoid_from(z, exp(minus_size(z)))))
        store_row(_first(_at(t, OUT, row, token), t[OUT, HALF], channel), t[OUT, HALF], count, y)


@njit
def backward(t: Any, n: Any, work: int, start: int, stop: int) -> None:
    """All gradients; those of B and C for each group of channels apart, those of rates and vectors for each row."""
    channels, states = n[CHANNELS], n[STATES]
    groups, chunks = (channels + GROUP - 1) // GROUP, (n[LENGTH] + CHUNK - 1) // CHUNK
    size = BLOCKS * states * ROW
    rates, grad_rates, carried = work, work + size, work + 2 * size
    vectors = work + 3 * size
    both = vectors + 2 * BLOCKS * ROW
    scratch = both + CHUNK * _both(states) * ROW
    for item in range(start, stop):
        row, first = item // groups, item % groups * GROUP
        count = min(GROUP, channels - first)
        tokens = _count(t, n, row)
        whole = 4 * states * channels
        _fetch_rates(t[RATES, 0], states, first, count, rates)
        _clear(grad_rates, BLOCKS * states)
        _clear(vectors, 2 * BLOCKS)
        after = t[GRAD_FINAL, 0] + row * whole if t[GRAD_FINAL, 0] else 0
        _fetch(after, states, channels, first, count, carried)
        to = t[GRAD_BOTH, 0] + (item % groups * n[BATCHES] + row) * n[LENGTH] * 8 * states
        for chunk in range((tokens + CHUNK - 1) // CHUNK - 1, -1, -1):
            begin = chunk * CHUNK
            end = min(tokens, begin + CHUNK)
            mark = t[MARKS, 0] + (row * chunks + chunk) * whole
            _clear(both, CHUNK * _both(states))
            for block in range((count + LANES - 1) // LANES):
                offset, channel = block * states * ROW, first + block * LANES
                ahead = _preceding(channel, first, count)
                _retrace(t, n, row, channel, begin, end, ahead, mark, rates + offset, scratch)
                _return(t, n, row, channel, begin, end, rates + offset, grad_rates + offset, carried + offset,
                        vectors + block * 2 * ROW, both, scratch)  # fmt: skip
            for token in range(begin, end):
                _sum_lanes(both + (token - begin) * _both(states) * ROW, states, to + token * 8 * states)
        for token in range(tokens, n[LENGTH]):
            _blank(to + token * 8 * states, 0, 2 * states)
            for which in (GRAD_X, GRAD_STEP, GRAD_GATE):
                at = _at(t, which, row, token)
                if at:
                    _blank(_first(at, t[which, HALF], first), t[which, HALF], count)
        _keep(carried, states, channels, first, count, t[GRAD_STATE, 0] + row * whole)
        _keep(grad_rates, states, channels, first, count, t[GRAD_RATES, 0] + row * whole)
        for block in range((count + LANES - 1) // LANES):
            for which, x in ((GRAD_SKIP, vectors + block * 2 * ROW), (GRAD_BIAS, vectors + (block * 2 + 1) * ROW)):
                at = t[which, 0] + 4 * (row * channels + first + block * LANES)
                store_some(at, count - block * LANES, load(x))


@njit
def _preceding(channel: int, first: int, count: int) -> Any:
    """As `_following`, on the way back."""
    ahead = _following(channel, first, count)
    return ahead[0], -ahead[1]


@njit
def _retrace(
    t: Any, n: Any, row: int, channel: int, begin: int, end: int, ahead: Any, mark: int, rates: int, scratch: int
) -> None:
    """Some tokens of 16 channels again. Scratch has a state, and of each token x, the step, the slope of softplus, the
    gradient of what was read before the gate, one row free, and N decays and N states. Gradients of the gate are done.
    """
    channels, states = n[CHANNELS], n[STATES]
    count, pitch = min(LANES, channels - channel), (2 * states + 5) * ROW
    skip, bias = splat(F(0)), splat(F(0))
    if t[SKIP, 0]:
        skip = load_some(t[SKIP, 0] + 4 * channel, count)
    if t[BIAS, 0]:
        bias = load_some(t[BIAS, 0] + 4 * channel, count)
    before = scratch
    for s in range(states):
        store(before + s * ROW, load_some(mark + 4 * (s * channels + channel), count))
    at = scratch + states * ROW
    for token in range(begin, end):
        for which in (X, STEP, GATE, GRAD_OUT, GRAD_X, GRAD_STEP, GRAD_GATE):
            _ask(t, which, row, token, channel, ahead)
        x = load_row(_first(_at(t, X, row, token), t[X, HALF], channel), t[X, HALF], count)
        d = add(load_row(_first(_at(t, STEP, row, token), t[STEP, HALF], channel), t[STEP, HALF], count), bias)
        if n[SOFTPLUS]:
            e = exp(minus_size(d))
            store(at + 2 * ROW, sigmoid_from(d, e))
            d = softplus_from(d, e)
        u, y = mul(d, x), mul(skip, x)
        store(at, x)
        store(at + ROW, d)
        write, read = _at(t, WRITE, row, token), _at(t, READ, row, token)
        decays = at + 5 * ROW
        here = decays + states * ROW
        for s in range(states):
            a = decay(d, load(rates + s * ROW))
            h = fma(a, load(before + s * ROW), mul(u, broadcast(write + 4 * s)))
            store(decays + s * ROW, a)
            store(here + s * ROW, h)
            y = fma(h, broadcast(read + 4 * s), y)
        g = load_row(_first(_at(t, GRAD_OUT, row, token), t[GRAD_OUT, HALF], channel), t[GRAD_OUT, HALF], count)
        if t[GATE, 0]:
            z = load_row(_first(_at(t, GATE, row, token), t[GATE, HALF], channel), t[GATE, HALF], count)
            s = sigmoid_from(z, exp(minus_size(z)))
            slope = mul(s, fma(z, one_minus(s), splat(F(1))))
            to = _first(_at(t, GRAD_GATE, row, token), t[GRAD_GATE, HALF], channel)
            store_row(to, t[GRAD_GATE, HALF], count, mul(mul(g, y), slope))
            g = mul(g, mul(z, s))
        store(at + 3 * ROW, g)
        before = here
        at += pitch


@njit
def _return(
    t: Any, n: Any, row: int, channel: int, begin: int, end: int, rates: int, grad_rates: int, carried: int,
    vectors: int, both: int, scratch: int,
) -> None:  # fmt: skip
    """From the last of these tokens to the first: gradients of x and steps, and what they add to all others."""
    states = n[STATES]
    count, pitch = min(LANES, n[CHANNELS] - channel), (2 * states + 5) * ROW
    skip, natural = splat(F(0)), splat(F(LOG_2))
    if t[SKIP, 0]:
        skip = load_some(t[SKIP, 0] + 4 * channel, count)
    for token in range(end - 1, begin - 1, -1):
        at = scratch + states * ROW + (token - begin) * pitch
        x, d, g = load(at), load(at + ROW), load(at + 3 * ROW)
        decays = at + 5 * ROW
        here = decays + states * ROW
        before = at - states * ROW  # the state before: at the end of the token before, or the first rows
        u = mul(d, x)
        write, read = _at(t, WRITE, row, token), _at(t, READ, row, token)
        sums = both + (token - begin) * _both(states) * ROW
        reads = sums + _both(states) // 2 * ROW
        grad_u, grad_d = splat(F(0)), splat(F(0))
        for s in range(states):
            w = fma(g, broadcast(read + 4 * s), load(carried + s * ROW))
            store(reads + s * ROW, fma(g, load(here + s * ROW), load(reads + s * ROW)))
            store(sums + s * ROW, fma(w, u, load(sums + s * ROW)))
            grad_u = fma(w, broadcast(write + 4 * s), grad_u)
            m = mul(w, load(decays + s * ROW))
            store(carried + s * ROW, m)
            k = mul(m, load(before + s * ROW))
            grad_d = fma(k, load(rates + s * ROW), grad_d)
            store(grad_rates + s * ROW, fma(k, d, load(grad_rates + s * ROW)))
        to = _first(_at(t, GRAD_X, row, token), t[GRAD_X, HALF], channel)
        store_row(to, t[GRAD_X, HALF], count, fma(grad_u, d, mul(g, skip)))
        grad_d = fma(grad_u, x, mul(grad_d, natural))
        if n[SOFTPLUS]:
            grad_d = mul(grad_d, load(at + 2 * ROW))
        to = _first(_at(t, GRAD_STEP, row, token), t[GRAD_STEP, HALF], channel)
        store_row(to, t[GRAD_STEP, HALF], count, grad_d)
        store(vectors, fma(g, x, load(vectors)))
        store(vectors + ROW, add(grad_d, load(vectors + ROW)))


@njit
def _sum_lanes(sums: int, states: int, to: int) -> None:
    """A token's gradients of B and of C, from vectors of 16 channels."""
    one, half = splat(F(1)), _both(states) // 2 * ROW
    for which in range(2):
        for s in range(0, states, LANES):
            x = lane_sums(sums + which * half + s * ROW, one)
            store_some(to + 4 * (which * states + s), states - s, x)


@lru_cache
def compiled_forward() -> Any:
    """`forward`, compiled for this machine or read from the cache on disk."""
    return _forward(_stamp())


@lru_cache
def compiled_backward() -> Any:
    """`backward`, likewise."""
    return _backward(_stamp())


@lru_cache
def _stamp() -> str:
    """Names the sources of the inlined parts: Numba's cache looks at this file alone."""
    modules = (microkernels, step_kernels, selective_scan_vectors, selective_scan_table)
    return sha256(b"".join(Path(m.__file__).read_bytes() for m in modules)).hexdigest()


_CALL = types.void(types.Array(types.int64, 2, "C"), types.Array(types.int64, 1, "C"), *[types.int64] * 3)


def _forward(stamp: str) -> Any:
    @njit(_CALL, nogil=True, cache=True)
    def call(t: Any, n: Any, work: int, start: int, stop: int) -> None:
        if len(stamp):  # a closure over it, so that the cache tells versions apart
            forward(t, n, work, start, stop)

    return call


def _backward(stamp: str) -> Any:
    @njit(_CALL, nogil=True, cache=True)
    def call(t: Any, n: Any, work: int, start: int, stop: int) -> None:
        if len(stamp):
            backward(t, n, work, start, stop)

    return call
