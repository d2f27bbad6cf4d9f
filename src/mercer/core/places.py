"""Where queries and keys stand: what the patterns of :mod:`mercer.core.structures` are asked about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Index = slice | Tensor
"""Tokens of a call: a slice, with a step where they are that regular, or int64 indices."""


@dataclass(frozen=True, eq=False)
class Place:
    """Some queries and keys, as integer tensors that broadcast to ``[batch, heads, queries, keys]``.

    Attributes:
        query: positions of queries, ``[b, 1, q, 1]``: real tokens before each in its own sequence.
        key: positions of keys, ``[b, 1, 1, k]``.
        total: real tokens in all of a query's sequence, ``[b, 1, q or 1, 1]``.
        row: batch rows, ``[B, 1, 1, 1]``.
        head: query heads, ``[1, H, 1, 1]``.
    """

    query: Tensor
    key: Tensor
    total: Tensor
    row: Tensor
    head: Tensor


@dataclass(frozen=True)
class Geometry:
    """Sequences whose tokens stand one behind the other without gaps, the same in every batch row.

    Attributes:
        first_query, queries: the queries stand at positions first_query .. first_query + queries - 1.
        first_key, keys: likewise.
        totals: how many real tokens rows have in all: the distinct values, in order.
        rows: how many batch rows there are.
        heads: which query heads: from the first up to, and without, the last.
        device: where a user's own function is asked.
    """

    first_query: int
    queries: int
    first_key: int
    keys: int
    totals: tuple[int, ...]
    rows: int = 1
    heads: tuple[int, int] = (0, 1)
    device: torch.device = field(default=torch.device("cpu"))

    @property
    def stop(self) -> int:
        """The position behind the last key."""
        return self.first_key + self.keys


@dataclass(frozen=True, eq=False)
class Candidates:
    """Where to look for the keys that queries see.

    Attributes:
        keys: from positions of some queries, ascending, to positions of keys, ascending: a range or an array. Keys
            that do not exist may be among them.
        step: queries are best taken together if their positions differ by multiples of this.
        queries: the positions of those that see anything, ascending; None: all.
        block: where queries change what they see: positions that are multiples of this; None: everywhere.
    """

    keys: Callable[[NDArray[np.int64]], range | NDArray[np.int64]]
    step: int = 1
    queries: tuple[int, ...] | None = None
    block: int | None = None


def firsts(positions: Tensor, valid: Tensor | None) -> list[int | None]:
    """The position of the first token of each row, None for rows without any; tokens that are there stand first."""
    if not positions.shape[1]:
        return [None]
    if valid is None:
        return list(positions[:, 0].tolist())
    both = torch.broadcast_shapes(positions.shape, valid.shape)
    found, there = positions.expand(both)[:, 0].tolist(), valid.expand(both)[:, 0].tolist()
    return [first if real else None for first, real in zip(found, there, strict=True)]
