"""Room for keys and values to grow into: a cache that gains a token does not move the tokens that it has.

Keys and values stand in a buffer with free places at its end; a cache is a view of a run of its tokens. The buffer
knows how many of its places are taken. Who appends to a cache that ends there takes the next places and writes into
them, which no other cache sees; who appends to a cache that ends earlier (an older one, from which something has gone
on already) gets a buffer of its own, with a copy. So a cache never changes, whatever is made of it.
"""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

LEAST_SPARE = 64
"""Free tokens of a new buffer at least; a quarter of the tokens it holds, if that is more. Growing by a quarter at a
time copies every token about four times in all, where each step reads all of them."""


def spare(tokens: int) -> int:
    """Free places beside ``tokens`` that are taken."""
    return max(LEAST_SPARE, tokens // 4)


class Room:
    """A buffer of keys ``[B, Hk, C, D]`` and values ``[B, Hk, C, Dv]``, of whose C places the first ones are taken."""

    __slots__ = ("_lock", "_taken", "keys", "values")

    def __init__(self, keys: Tensor, values: Tensor, taken: int) -> None:
        self.keys, self.values = keys, values
        self._taken, self._lock = taken, Lock()

    @property
    def capacity(self) -> int:
        """Places, taken or free."""
        return self.keys.shape[2]

    def take(self, end: int, count: int) -> bool:
        """Take the ``count`` places from ``end`` on, if they are the next free ones; False if they are not."""
        with self._lock:  # of two threads that go on from one cache, one gets the places
            if self._taken != end or end + count > self.capacity:
                return False
            self._taken = end + count
            return True

    def give_back(self, end: int, count: int) -> None:
        """Free places again that were taken, unless more were taken after them."""
        with self._lock:
            if self._taken == end + count:
                self._taken = end

    def write(self, start: int, key: Tensor, value: Tensor) -> None:
        """Put tokens at places that were taken for them.

        No view that anybody holds has these places, so nothing that autograd has saved changes: ``.data`` tells it so.
        """
        for target, source in ((self.keys, key), (self.values, value)):
            target.data.narrow(2, start, source.shape[2]).copy_(source)

    def view(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a run of places."""
        return self.keys.narrow(2, start, stop - start), self.values.narrow(2, start, stop - start)


class Spot(NamedTuple):
    """Where the tokens of a cache stand: its first one at ``start``."""

    room: Room
    start: int


class Joined(NamedTuple):
    """Cached and new tokens in a row; ``spot`` is None where they are a tensor of their own."""

    keys: Tensor
    values: Tensor
    spot: Spot | None


def room_for(key: Tensor, value: Tensor, *more: tuple[Tensor, Tensor]) -> Joined:
    """These keys and values, and ``more`` behind them, copied into a new buffer with free places at its end."""
    parts = [(key, value), *more]
    tokens = sum(k.shape[2] for k, _ in parts)
    with torch.inference_mode(False):  # so that it can be written to in any mode, and saved for a gradient
        keys, values = (
            torch.empty((*x.shape[:2], tokens + spare(tokens), x.shape[3]), dtype=x.dtype, device=x.device)
            for x in (key, value)
        )
    room, at = Room(keys, values, tokens), 0
    for k, v in parts:
        room.write(at, k, v)
        at += k.shape[2]
    return Joined(*room.view(0, tokens), Spot(room, 0))


def join(past: tuple[Tensor, Tensor], spot: Spot | None, key: Tensor, value: Tensor, kept: bool) -> Joined:
    """Cached keys and values ``[B, Hk, Lp, *]``, and new ones behind them.

    Args:
        past: keys and values of the cache.
        spot: where they stand, if they stand in a buffer.
        key, value: the new tokens.
        kept: whether a cache of the result will be kept. If not, give it back with :func:`leave`.
    """
    if not key.shape[2]:
        return Joined(*past, spot)
    if fixed(*past, key, value) or not (kept or (spot is not None and not torch.is_grad_enabled())):
        return Joined(torch.cat((past[0], key), 2), torch.cat((past[1], value), 2), None)
    count = past[0].shape[2]
    if spot is not None:
        room, start = spot
        end = start + count
        if room.take(end, key.shape[2]):
            room.write(end, key, value)
            return Joined(*room.view(start, end + key.shape[2]), spot)
    if not kept:
        return Joined(torch.cat((past[0], key), 2), torch.cat((past[1], value), 2), None)
    return room_for(*past, (key, value))


def leave(joined: Joined, count: int) -> None:
    """Free the last ``count`` places of what nobody keeps. Only for a result of :func:`join` that is not ``kept``."""
    if joined.spot is not None and count:
        end = joined.spot.start + joined.keys.shape[2] - count
        joined.spot.room.give_back(end, count)


def last(joined: Joined, first: int, own: bool) -> Joined:
    """The tokens from ``first`` on, as what is kept: in the buffer while it is not much larger than they need.

    Whoever drops tokens (a window) moves the others when the free places are used up, not at every step. ``own``:
    whether the tensors belong to a cache already, rather than to the caller.
    """
    keys, values, spot = joined
    if spot is None and own and not first:
        return joined
    tokens = keys.shape[2] - first
    fits = spot is not None and spot.room.capacity <= 2 * (tokens + spare(tokens))
    if fits and not first:
        return joined
    keys, values = keys[:, :, first:], values[:, :, first:]
    if fits and spot is not None:
        return Joined(keys, values, Spot(spot.room, spot.start + first))
    # A tensor of its own: neither the caller's nor a view that keeps what was dropped.
    if fixed(keys, values):
        return Joined(keys.clone(), values.clone(), None)
    return room_for(keys, values)


def fixed(*tensors: Tensor) -> bool:
    """Whether these must stay as they are, because a gradient is wanted through them or a compiler traces them."""
    if torch.compiler.is_compiling():
        return True
    if torch.is_inference_mode_enabled():  # which records neither kind of gradient
        return False
    recorded = torch.is_grad_enabled()
    return any((recorded and x.requires_grad) or forward_ad.unpack_dual(x).tangent is not None for x in tensors)
