"""What the tiles of the chunked form are cut from: slabs of heads and batch rows, and runs of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from mercer.core.places import Index
from mercer.core.schedule import Tile


class Keys(NamedTuple):
    """Keys of a tile; ``mask`` and ``asked`` as of :class:`mercer.core.schedule.Keys`."""

    at: Index
    mask: Tensor | None = None
    asked: bool = False


@dataclass(frozen=True, eq=False)
class TileOf:
    """Queries and the runs of keys that they are shown; ``first`` if no tile before had these queries."""

    queries: Index
    keys: list[Keys]
    first: bool = True
    made_from: Tile | None = None


class Slab:
    """Some batch rows and key heads, with the query heads of each key head stacked as rows."""

    def __init__(self, tensors: tuple[Tensor, Tensor], rows: slice, heads: slice) -> None:
        query, key = tensors
        self.rows, self.heads = rows, heads
        self.groups = query.shape[1] // key.shape[1]
        self.query_heads = slice(heads.start * self.groups, heads.stop * self.groups)
        self.batch, self.count = rows.stop - rows.start, (rows.stop - rows.start) * (heads.stop - heads.start)

    def key_side(self, x: Tensor, at: Index) -> Tensor:
        """``[N, tk, *]``, a view where the strides allow."""
        return _taken(x[self.rows, self.heads], at).flatten(0, 1)

    def query_side(self, x: Tensor, at: Index) -> Tensor:
        """``[N, g tq, *]``."""
        part = _taken(x[self.rows, self.query_heads], at)
        return part.reshape(self.count, -1, part.shape[-1])

    def query_rows(self, x: Tensor, at: Index) -> Tensor:
        """``[N, g tq, 1]`` of a tensor ``[B, Hq, Lq]``."""
        return _taken(x[self.rows, self.query_heads], at).reshape(self.count, -1, 1)

    def store(self, target: Tensor, at: Index, source: Tensor) -> None:
        """Write rows ``[N, g tq, *]`` (or without the last dimension) back to ``[B, Hq, Lq, *]``."""
        heads = self.query_heads.stop - self.query_heads.start
        last = target.shape[3:]
        target[self.rows, self.query_heads, at] = source.reshape(self.batch, heads, -1, *last)

    def add_to_keys(self, target: Tensor, at: Index, source: Tensor) -> None:
        """Add ``[N, tk, *]`` to ``[B, Hk, Lk, *]``."""
        part = source.unflatten(0, (self.batch, -1))
        if isinstance(at, slice):
            target[self.rows, self.heads, at].add_(part)
        else:
            target[self.rows, self.heads].index_add_(2, at, part)

    def by_head(self, tile: Tensor) -> Tensor:
        """A tile ``[N, g tq, tk]`` seen as ``[b, Hq', tq, tk]``."""
        heads = self.count // self.batch * self.groups
        return tile.view(self.batch, heads, -1, tile.shape[-1])


def _taken(x: Tensor, at: Index) -> Tensor:
    """Tokens of ``[b, h, L, *]``: a view, or a copy by the quicker of torch's two ways."""
    return x[:, :, at] if isinstance(at, slice) else x.index_select(2, at)
