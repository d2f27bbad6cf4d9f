"""From a pattern to tiles of pairs: which queries to take together, and which keys to show them.

A pattern is a union of intersections of simple patterns. In each intersection the one with the fewest candidates says
where to look, the others narrow that down. Queries are then visited in passes: first those that have keys of their own
(global tokens), then all others in runs of neighbours, then in runs of every d-th query for each dilation d. A pass
leaves out the pairs that an earlier one has shown, so that none counts twice. What no query of a tile sees is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mercer.core.places import Candidates, Geometry, Index, Place
from mercer.core.structures import Pattern, union

Terms = tuple[tuple[Pattern, ...], ...]
Positions = NDArray[np.int64]
_Some = list[tuple[Pattern, ...]]

ROWS = 64
"""Queries of a tile."""
CHUNK = 1024
"""Keys that are asked about at once; neighbours that are wholly visible are joined up to WIDEST."""
WIDEST = 2048
DENSE_ENOUGH = 0.75
"""Share of visible columns from which a run of keys is kept whole: gathering the others costs more than it saves."""


@dataclass(frozen=True, eq=False)
class Keys:
    """Keys of a tile.

    Attributes:
        at: which.
        mask: boolean ``[1 or heads, queries, keys]``, True where visible; None: all are, or it must be asked.
        asked: whether visibility has to be asked anew in each call, since rows differ.
        count: how many.
    """

    at: Index
    mask: Tensor | None
    asked: bool
    count: int


@dataclass(frozen=True, eq=False)
class Tile:
    """Some queries and the keys that they see in one pass.

    Attributes:
        queries: which.
        keys: runs of keys.
        first: whether no earlier tile has these queries.
        shown, hidden: which of the pattern's alternatives this pass shows, and which earlier passes have shown.
    """

    queries: Index
    keys: tuple[Keys, ...]
    first: bool
    shown: tuple[int, ...]
    hidden: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Schedule:
    """All tiles, how many pairs they hold, and how many of these are visible (asked ones count as visible)."""

    tiles: tuple[Tile, ...]
    pairs: int
    visible: int


def schedule(terms: Terms, geometry: Geometry, rows: int | None = None) -> Schedule:
    """Tiles for a union of intersections, of ``rows`` queries (default ``ROWS``); the last ones made are kept."""
    patterns = [p for together in terms for p in together]
    asks = any(p.asks for p in patterns)
    asked = replace(
        geometry,
        rows=geometry.rows if asks else 1,
        heads=geometry.heads if asks or any(p.per_head for p in patterns) else (0, 1),
        totals=geometry.totals if any(p.needs_length for p in patterns) else (),
    )
    return _schedule(tuple(tuple(p.plain() for p in together) for together in terms), asked, rows or ROWS)


@lru_cache(maxsize=128)
def _schedule(terms: Terms, geometry: Geometry, rows: int) -> Schedule:
    builder = _Builder(terms, geometry, rows)
    tiles = tuple(builder.tiles())
    return Schedule(tiles, builder.pairs, builder.visible)


class _Builder:
    def __init__(self, terms: Terms, geometry: Geometry, rows: int) -> None:
        self.terms, self.geometry, self.rows = terms, geometry, rows
        self.exact = len(geometry.totals) < 2 or not any(p.needs_length for one in terms for p in one)
        self.exact = self.exact and all(p.exact for one in terms for p in one)
        self.found = [[p.candidates(geometry) for p in together] for together in terms]
        self.drivers = [self._driver(i) for i in range(len(terms))]
        steps = {d.step for d in self.drivers}
        self.spaced = {n: tuple(tuple(p.spaced(n) for p in one) for one in terms) for n in steps if n > 1}
        self.pairs = self.visible = 0
        self.masks: dict[tuple[tuple[int, ...], bytes], Tensor] = {}
        every_row = torch.arange(geometry.rows, device=geometry.device).view(-1, 1, 1, 1)
        heads = torch.arange(*geometry.heads, device=geometry.device).view(1, -1, 1, 1)
        self.row, self.head = every_row, heads
        totals = geometry.totals or (0,)
        self.total = torch.tensor(totals[-1:], device=geometry.device).view(1, 1, 1, 1)

    def tiles(self) -> Iterator[Tile]:
        first, count = self.geometry.first_query, self.geometry.queries
        left = np.arange(first, first + count)
        everyone = tuple(range(len(self.terms)))
        own = [d.queries for d in self.drivers if d.queries is not None]
        if own:
            chosen = np.unique(np.concatenate([np.array(q, dtype=np.int64) for q in own]))
            chosen = chosen[(chosen >= first) & (chosen < first + count)]
            left = np.setdiff1d(left, chosen, assume_unique=True)
            for start in range(0, len(chosen), self.rows):
                yield from self._tile(chosen[start : start + self.rows], everyone, (), True)
        before: tuple[int, ...] = ()
        first_pass = True  # until one has shown anything
        for step in sorted({d.step for d in self.drivers if d.queries is None}):
            pairs = self.pairs
            shown = tuple(i for i, d in enumerate(self.drivers) if d.step == step and d.queries is None)
            for queries in self._runs(left, step, shown):
                yield from self._tile(queries, shown, before, first_pass, step)
            before += shown
            first_pass = first_pass and self.pairs == pairs

    def _runs(self, left: Positions, step: int, shown: tuple[int, ...]) -> Iterator[Positions]:
        """The queries cut into tiles; blocks are not cut where that can be helped."""
        blocks = [d.block for i in shown for d in self.found[i] if d.block is not None]
        unit = max((b for b in blocks if b <= 2 * self.rows), default=max(blocks, default=0))
        longest = -(-(int(left[-1]) - int(left[0]) + 1) // step) if len(left) else 1
        together = max(1, self.rows // longest) if step > 1 else 1  # short runs share a tile
        for residue in range(0, step, together):
            mine = left[(left % step >= residue) & (left % step < residue + together)] if step > 1 else left
            if step > 1 or not unit:
                edges = np.arange(self.rows, len(mine), self.rows)
            else:  # tiles end where blocks do
                whole = max(1, self.rows // unit) * unit if unit <= 2 * self.rows else unit
                inside = mine // whole
                size = whole if unit <= 2 * self.rows else self.rows
                piece = (mine % whole) // size
                edges = np.flatnonzero(np.diff(inside * (whole // size + 1) + piece)) + 1
            yield from (run for run in np.split(mine, edges) if len(run))

    def _driver(self, term: int) -> Candidates:
        """What of an intersection says where to look: what has the fewest candidates."""
        geometry, found = self.geometry, self.found[term]
        everything = Candidates(lambda _: range(geometry.first_key, geometry.stop))
        own = [c for c in found if c.queries is not None]
        if own:
            return min(own, key=lambda c: len(c.queries or ()))
        count = geometry.queries
        starts = range(geometry.first_query, geometry.first_query + count, max(1, count // 16))

        def size(one: Candidates) -> float:
            tiles = [np.arange(s, geometry.first_query + count, one.step)[: self.rows] for s in starts]
            return sum(len(self._clipped(one.keys(t))) * len(t) / max(len(t), 1) for t in tiles if len(t))

        return min(found, key=size) if found and count else everything

    def _clipped(self, keys: range | Positions) -> range | Positions:
        """Those that exist."""
        low, high = self.geometry.first_key, self.geometry.stop
        if isinstance(keys, range):
            start = keys.start if keys.start >= low else keys.start + -(-(low - keys.start) // keys.step) * keys.step
            return range(start, max(start, min(keys.stop, high)), keys.step)
        return keys[(keys >= low) & (keys < high)]

    def _keys(self, queries: Positions, shown: tuple[int, ...]) -> range | Positions:
        """Candidates of these queries over some alternatives, ascending."""
        parts: list[range | Positions] = []
        for term in shown:
            driver = self.drivers[term]
            if driver.step > 1 and len(residues := np.unique(queries % driver.step)) > 1:
                each = [self._clipped(driver.keys(queries[queries % driver.step == r])) for r in residues]
                keys: range | Positions = np.unique(np.concatenate([_positions(k) for k in each]))
            elif driver.queries is not None and not np.isin(queries, driver.queries).any():
                continue
            else:
                keys = self._clipped(driver.keys(queries))
            for other in self.found[term]:
                if other is driver or other.step > 1 or not len(keys):
                    continue
                bound = self._clipped(other.keys(queries))
                if not len(bound):
                    keys = range(0)
                elif isinstance(keys, range):
                    low, high = int(bound[0]), int(bound[-1]) + 1
                    start = max(keys.start, keys.start + -(-(low - keys.start) // keys.step) * keys.step)
                    keys = range(start, max(start, min(keys.stop, high)), keys.step)
                else:
                    keys = keys[(keys >= int(bound[0])) & (keys <= int(bound[-1]))]
            if len(keys):
                parts.append(keys)
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return range(0)
        joined = np.unique(np.concatenate([_positions(p) for p in parts]))
        whole = int(joined[-1]) - int(joined[0]) + 1 == len(joined)
        return range(int(joined[0]), int(joined[-1]) + 1) if whole else joined

    def _tile(
        self, queries: Positions, shown: tuple[int, ...], hidden: tuple[int, ...], first: bool, step: int = 1
    ) -> Iterator[Tile]:
        keys = self._keys(queries, shown)
        runs: list[Keys] = []
        whole: list[int | Positions] = []

        def flush() -> None:
            if whole:
                positions = np.concatenate([np.atleast_1d(w) for w in whole])
                runs.append(Keys(self._index(positions, self.geometry.first_key), None, False, len(positions)))
                self._count(queries, len(positions), None)
                whole.clear()

        for start in range(0, len(keys), CHUNK):
            part = _positions(keys[start : start + CHUNK])
            terms = self._terms(queries, part, step)
            answer = self._decided(queries, part, [terms[i] for i in shown], [terms[i] for i in hidden])
            if answer is False:
                continue
            seen: NDArray[np.bool_] | None = None
            if answer is None:
                asked = self._seen(queries, part, [terms[i] for i in shown], [terms[i] for i in hidden])
                if not asked.any():
                    continue
                if not self.exact or asked.shape[0] > 1:
                    runs += self._asked(queries, part[asked.any((0, 1, 2))])
                    continue
                seen = None if asked.all() else asked[0]
            elif not self.exact:
                runs += self._asked(queries, part)
                continue
            if seen is None:
                if sum(len(np.atleast_1d(w)) for w in whole) + len(part) > WIDEST:
                    flush()
                whole.append(part)
                continue
            flush()
            columns: NDArray[np.bool_] = np.asarray(seen.any((0, 1)))
            edges = np.flatnonzero(columns)
            chosen = slice(int(edges[0]), int(edges[-1]) + 1)
            if columns[chosen].mean() >= DENSE_ENOUGH:
                part, seen = part[chosen], seen[..., chosen]
            else:
                part, seen = part[columns], seen[..., columns]
            runs.append(Keys(self._index(part, self.geometry.first_key), self._mask(seen), False, len(part)))
            self._count(queries, len(part), seen)
        flush()
        if runs:
            yield Tile(self._index(queries, self.geometry.first_query), tuple(runs), first, shown, hidden)

    def _asked(self, queries: Positions, keys: Positions) -> list[Keys]:
        self._count(queries, len(keys), None)
        return [Keys(self._index(keys, self.geometry.first_key), None, True, len(keys))]

    def _count(self, queries: Positions, keys: int, seen: NDArray[np.bool_] | None) -> None:
        self.pairs += len(queries) * keys
        self.visible += len(queries) * keys if seen is None else int(seen.sum()) // seen.shape[0]

    def _terms(self, queries: Positions, keys: Positions, step: int) -> Terms:
        """The pattern, in the form that knows most of these positions."""
        if step == 1 or (queries % step != keys[0] % step).any() or (keys % step != keys[0] % step).any():
            return self.terms
        return self.spaced[step]

    def _decided(self, queries: Positions, keys: Positions, shown: _Some, hidden: _Some) -> bool | None:
        """Whether all or none of the pairs are shown, if ranges can tell."""
        q, k = (int(queries[0]), int(queries[-1])), (int(keys[0]), int(keys[-1]))
        now, earlier = self._any(q, k, shown), self._any(q, k, hidden)
        if now is False or earlier is True:
            return False
        return True if now is True and earlier is False else None

    def _any(self, queries: tuple[int, int], keys: tuple[int, int], terms: _Some) -> bool | None:
        answers = {self._all(queries, keys, together) for together in terms}
        return True if True in answers else None if None in answers else False

    @staticmethod
    def _all(queries: tuple[int, int], keys: tuple[int, int], together: tuple[Pattern, ...]) -> bool | None:
        answers = {p.decides(queries, keys) for p in together}
        return False if False in answers else None if None in answers else True

    def _seen(self, queries: Positions, keys: Positions, shown: _Some, hidden: _Some) -> NDArray[np.bool_]:
        """Visibility ``[rows or 1, heads or 1, queries, keys]``; where totals differ, what any of them shows."""
        if not self.exact:  # candidates are enough, the call asks
            return np.ones((1, 1, len(queries), len(keys)), dtype=np.bool_)
        device = self.geometry.device
        query = torch.from_numpy(queries).to(device).view(1, 1, -1, 1)
        key = torch.from_numpy(keys).to(device).view(1, 1, 1, -1)
        place = Place(query, key, self.total, self.row, self.head)
        seen = union(shown, place)
        if hidden:
            seen = seen & ~union(hidden, place)
        return seen.expand(-1, -1, len(queries), len(keys)).cpu().numpy()

    def _index(self, positions: Positions, first: int) -> Index:
        at = positions - first
        step = int(at[1] - at[0]) if len(at) > 1 else 1
        if len(at) == 1 or bool((np.diff(at) == step).all()):
            return slice(int(at[0]), int(at[-1]) + 1, step)
        return torch.from_numpy(at).to(self.geometry.device)

    def _mask(self, seen: NDArray[np.bool_]) -> Tensor:
        """The mask as a tensor; equal ones are kept once."""
        name = (seen.shape, np.packbits(seen).tobytes())
        if name not in self.masks:
            self.masks[name] = torch.from_numpy(seen.copy()).to(self.geometry.device)
        return self.masks[name]


def _positions(keys: range | Positions) -> Positions:
    """Keys as an array; numpy would count a range out number by number."""
    if isinstance(keys, range):
        return np.arange(keys.start, keys.stop, keys.step, dtype=np.int64)
    return np.asarray(keys, dtype=np.int64)
