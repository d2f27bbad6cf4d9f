"""What the tokens of one process see of those of another: blocks of pairs, each laid out like a call of its own.

A run of queries against a run of keys, both unbroken and in one document, is a band or a rectangle; runs that see
nothing of each other are left out. Positions are those of the whole sequence, so padding and distances come out as in
one process.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mercer.core.layout import Layout
from mercer.core.merged import Merged
from mercer.core.structures import Pattern, intersection
from mercer.distributed.sharding import Sharding


@dataclass(frozen=True)
class Block:
    """Queries of one process against keys of another.

    Attributes:
        queries, keys: where they stand among the tokens that their processes hold.
        first_query, first_key: where their first ones stand in the sequence.
        document: the tokens of the document that they are in, first and behind the last.
    """

    queries: slice
    keys: slice
    first_query: int
    first_key: int
    document: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Scene:
    """A structure over a sharded sequence.

    Attributes:
        sharding: who holds what.
        left, right: the band of visible distances, None for no limit.
        before: the distance of the first entry of log-weights by distance.
        patterns: what must show a pair beside the band.
        rows, heads: batch rows and query heads, for patterns that differ in them.
        bounds: where documents begin, from 0 to the length; one document if nothing was said.
        padded: whether some tokens may not be real.
        valid: which tokens of the whole sequence are real, ``[B, length]``, or None for all.
        ordered: whether tokens have an order, so that a query that is not real sees nothing.
    """

    sharding: Sharding
    left: int | None
    right: int | None
    before: int
    patterns: tuple[Pattern, ...]
    rows: int
    heads: int
    bounds: list[int]
    padded: bool
    valid: Tensor | None
    ordered: bool

    @staticmethod
    def of(merged: Merged, sharding: Sharding, valid: Tensor | None, rows: int, heads: int) -> Scene:
        """The scene of a merged structure; ``valid`` as the attribute, or None where only its places are asked for."""
        length = sharding.length
        bounds = [0, length] if merged.documents is None else merged.documents.bounds(length)
        patterns = merged.patterns
        if patterns:
            if merged.documents is not None:
                patterns = tuple(p.in_documents() for p in patterns)
            places = torch.arange(length).unsqueeze(0)
            patterns = tuple(p.laid(places, None) for p in patterns)
        return Scene(
            sharding=sharding,
            left=merged.left,
            right=merged.right,
            before=0 if merged.relative is None else merged.relative.before,
            patterns=patterns,
            rows=rows,
            heads=heads,
            bounds=bounds,
            padded=merged.padding is not None,
            valid=valid,
            ordered=merged.ordered,
        )

    @cached_property
    def position(self) -> Tensor | None:
        """Real tokens up to each one, less 1: where a padded sequence's tokens stand, ``[B, length]``."""
        return None if self.valid is None else self.valid.cumsum(1) - 1

    def blocks(self, rank: int, source: int) -> list[Block]:
        """What the queries of ``rank`` see of the keys of ``source``; empty if nothing."""
        return list(self._blocks(rank, source))

    def _blocks(self, rank: int, source: int) -> Iterator[Block]:
        before_query = 0
        for query, stop_query in self.sharding.pieces(rank):
            before_key = 0
            for key, stop_key in self.sharding.pieces(source):
                for start, stop in self._documents(max(query, key), min(stop_query, stop_key)):
                    q, q_stop = max(query, start), min(stop_query, stop)
                    k, k_stop = max(key, start), min(stop_key, stop)
                    if q < q_stop and k < k_stop and self._sees(q - start, q_stop - start, k - start, k_stop - start):
                        at, of = before_query + q - query, before_key + k - key
                        yield Block(slice(at, at + q_stop - q), slice(of, of + k_stop - k), q, k, (start, stop))
                before_key += stop_key - key
            before_query += stop_query - query

    def _documents(self, after: int, before: int) -> Iterator[tuple[int, int]]:
        """Documents that end behind token ``after`` and begin before token ``before``."""
        document = max(0, bisect_right(self.bounds, after) - 1)
        while document < len(self.bounds) - 1 and self.bounds[document] < before:
            yield self.bounds[document], self.bounds[document + 1]
            document += 1

    def _sees(self, query: int, stop_query: int, key: int, stop_key: int) -> bool:
        """Whether any of some queries may see any of some keys, by where they stand."""
        if self.padded:  # it brings tokens closer together: only their order can be told from their places
            return self.right != 0 or key < stop_query
        ahead = self.right is None or key < stop_query + self.right
        if not (ahead and (self.left is None or stop_key > query - self.left)):
            return False
        spans = (query, stop_query - 1), (key, stop_key - 1)
        return not self.patterns or any(
            all(pattern.decides(*spans) is not False for pattern in together)
            for together in intersection(self.patterns)
        )

    def needs(self, rank: int, source: int) -> bool:
        """Whether a process has to look at the keys of another one."""
        return bool(self._table[rank][source])

    @cached_property
    def _table(self) -> list[list[bool]]:
        every = range(self.sharding.processes)
        return [[next(self._blocks(rank, source), None) is not None for source in every] for rank in every]

    def last_hop(self, source: int) -> int:
        """How many steps round the ring the keys of a process have to go: to the last one that needs them."""
        size = self.sharding.processes
        return max((hop for hop in range(1, size) if self.needs((source + hop) % size, source)), default=0)

    def pairs(self, block: Block) -> int:
        """Visible pairs of a block; with padding or patterns, those that would be visible without."""
        count = block.queries.stop - block.queries.start
        query = np.arange(block.first_query, block.first_query + count)
        first, stop = block.first_key, block.first_key + block.keys.stop - block.keys.start
        low = first if self.left is None or self.padded else np.maximum(first, query - self.left)
        high = stop if self.right is None else np.minimum(stop, query + self.right + 1)
        return int(np.clip(np.broadcast_to(high - low, query.shape), 0, None).sum())

    def layout(
        self,
        block: Block,
        slopes: Tensor | None,
        query_log: Tensor | None,
        key_log: Tensor | None,
        device: torch.device,
    ) -> Layout:
        """A block as the layout of a call; the log-weights are those of all tokens of its two processes."""
        count, keys = block.queries.stop - block.queries.start, block.keys.stop - block.keys.start
        q, k = slice(block.first_query, block.first_query + count), slice(block.first_key, block.first_key + keys)
        query_valid = key_valid = None
        if self.position is not None and self.valid is not None:
            query_position, key_position = self.position[:, q], self.position[:, k]
            query_valid, key_valid = self.valid[:, q] if self.ordered else None, self.valid[:, k]
        else:
            start = block.document[0]
            query_position = torch.arange(q.start - start, q.stop - start, device=device).unsqueeze(0)
            key_position = torch.arange(k.start - start, k.stop - start, device=device).unsqueeze(0)
        return Layout(
            query_position=query_position,
            key_position=key_position,
            query_valid=query_valid,
            key_valid=key_valid,
            query_document=None,
            key_document=None,
            left=self.left,
            right=self.right,
            slopes=slopes,
            query_log=None if query_log is None else query_log[..., block.queries],
            key_log=None if key_log is None else key_log[..., block.keys],
            offset=block.first_query - block.first_key if self.valid is None else None,
            patterns=self.patterns,
            weighing=tuple(p for p in self.patterns if p.weighs),
            total=torch.tensor([[block.document[1] - block.document[0]]], device=device) if self.patterns else None,
            batch=self.rows,
            heads=self.heads,
            before=self.before,
        )
