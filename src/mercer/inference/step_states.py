"""The keys and values of all layers in one buffer, which a decoding step of a whole model writes into."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import overload

import torch
from torch import Tensor

from mercer.core.growth import spare
from mercer.core.state import CacheState, State
from mercer.errors import InvalidArgument

NOWHERE = 1 << 30
"""The position of a key that is not there; no query sees it."""


class Buffer:
    """Keys and values ``[layers, 2, B, Hk, C, D]`` of C places, of which the first ones are taken; and positions of
    keys ``[B, C]`` int32, if not all rows have a token at each place.
    """

    def __init__(self, entries: Tensor, positions: Tensor | None, taken: int) -> None:
        self.entries, self.positions = entries, positions
        self._taken, self._lock = taken, Lock()

    def take(self, end: int) -> bool:
        """Take the place after `end`, if it is the next free one; False if it is not."""
        with self._lock:
            if self._taken != end or end == self.entries.shape[4]:
                return False
            self._taken = end + 1
            return True


class DecoderStates(Sequence[State]):
    """What all layers of a decoder keep: reads as one `CacheState` a layer. A value, as every state.

    Attributes:
        buffer: where keys and values stand, from place `start` to `stop` - 1.
        length: ``[B]`` int64: real tokens absorbed so far.
        longest: the largest of them.
    """

    def __init__(self, buffer: Buffer, start: int, stop: int, length: Tensor, longest: int) -> None:
        self.buffer, self.start, self.stop, self.length, self.longest = buffer, start, stop, length, longest

    def __len__(self) -> int:
        return self.buffer.entries.shape[0]

    @overload
    def __getitem__(self, index: int) -> CacheState: ...

    @overload
    def __getitem__(self, index: slice) -> list[CacheState]: ...

    def __getitem__(self, index: int | slice) -> CacheState | list[CacheState]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        keys, values = self.buffer.entries[index, :, :, :, self.start : self.stop]
        positions = self.buffer.positions
        valid = None if positions is None else positions[:, self.start : self.stop] != NOWHERE
        return CacheState(keys, values, self.length, valid)

    @property
    def dtype(self) -> torch.dtype:
        return self.buffer.entries.dtype

    def grown(self, positions: bool, window: int | None = None) -> DecoderStates:
        """The same in a buffer of its own with free places; with positions of keys if asked. Keys that no token to come
        sees, under a window of all layers, are left behind.
        """
        old, start = self.buffer, self.start
        if window is not None and old.positions is None:
            start = max(start, self.stop - window + 1)
        count = self.stop - start
        layers, _, batch, heads, _, dim = old.entries.shape
        new = empty_states(layers, batch, heads, count + spare(count), dim, old.entries.dtype, self.length).buffer
        new.entries[..., :count, :] = old.entries[..., start : self.stop, :]
        if old.positions is not None:
            places = old.positions[:, start : self.stop]
        else:
            places = self.length[:, None] - torch.arange(count, 0, -1)
        if old.positions is not None or positions:
            new.positions = torch.full((batch, new.entries.shape[4]), NOWHERE, dtype=torch.int32)
            new.positions[:, :count] = places
        new._taken = count
        return DecoderStates(new, 0, count, self.length, self.longest)


def empty_states(
    layers: int, batch: int, heads: int, places: int, dim: int, dtype: torch.dtype, length: Tensor | None = None
) -> DecoderStates:
    """Room for `places` tokens of each row, of which none is there."""
    with torch.inference_mode(False):  # so that what goes on from it may record gradients
        entries = torch.empty(layers, 2, batch, heads, places, dim, dtype=dtype)
        length = torch.zeros(batch, dtype=torch.int64) if length is None else length
    return DecoderStates(Buffer(entries, None, 0), 0, 0, length, 0)


def gathered(states: Sequence[State], dtype: torch.dtype) -> DecoderStates:
    """States of a model's layers as they came from it, copied into one buffer.

    Raises:
        InvalidArgument: they are not caches of one shape.
    """
    first = states[0]
    if not all(isinstance(s, CacheState) and s.log is None for s in states) or not isinstance(first, CacheState):
        raise InvalidArgument(f"the layers keep keys and values (CacheState), not a {type(first).__name__}")
    if any(s.keys.shape != first.keys.shape or s.values.shape != first.keys.shape for s in states):
        raise InvalidArgument("the states of all layers must have keys and values of one shape")
    batch, heads, count, dim = first.keys.shape
    made = empty_states(len(states), batch, heads, count + spare(count), dim, dtype, first.length)
    buffer = made.buffer
    for to, state in zip(buffer.entries, states, strict=True):
        to[0, :, :, :count], to[1, :, :, :count] = state.keys, state.values
    if first.valid is not None and not bool(first.valid.all()):
        buffer.positions = torch.full((batch, buffer.entries.shape[4]), NOWHERE, dtype=torch.int32)
        places = first.past().position.to(torch.int32)
        buffer.positions[:, :count] = places.masked_fill(~first.valid, NOWHERE)
    elif batch > 1 and bool((first.length != first.length[0]).any()):
        buffer.positions = torch.full((batch, buffer.entries.shape[4]), NOWHERE, dtype=torch.int32)
        buffer.positions[:, :count] = first.past().position
    buffer._taken = count
    longest = int(first.length.max()) if batch else 0
    return DecoderStates(buffer, 0, count, first.length, longest)
