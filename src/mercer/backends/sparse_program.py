"""A schedule as arrays that compiled kernels walk (no Numba here): 16 queries in the lanes of a vector, keys 16 a tile.

A tile of the schedule has vectors of queries and tiles of keys, and for each of their pairs a code: whether all of the
256 pairs are visible, none, or which mask or log-weights say it. Equal masks and log-weights are kept once, so that
what grows with the length is the codes, 4 bytes for 256 pairs, and the numbers of the keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from mercer.core.places import Geometry, Index, Place
from mercer.core.schedule import Keys, Positions, Schedule, Tile
from mercer.core.structures import Pattern

LANES = 16
VECTOR, VECTORS, FIRST_KEYS, KEY_TILES, CODE, LATER = range(6)
"""Columns of a tile: its first vector of queries and how many, its first tile of keys and how many, its first code
(those of a vector stand together), and 1 if earlier passes have had some of its queries."""
ROWS, STEP, LOWEST, HIGHEST = range(LANES, LANES + 4)
"""Columns behind the 16 numbers of tokens: how many there are, how far they are apart (0: not evenly), the lowest and
the highest."""
NONE, ALL, MASK, WEIGHTS = range(4)
"""Codes: mask m is MASK + 2 m, log-weights w are WEIGHTS + 2 w."""


@dataclass(frozen=True, eq=False)
class Program:
    """The arrays.

    Attributes:
        tiles: ``[tiles, 6]``.
        passes: where the tiles of each pass begin, and the end; no query is in two tiles of a pass.
        queries: ``[vectors, 20]``.
        keys: ``[tiles of keys, 20]``.
        codes: of vectors and tiles of keys.
        masks: ``[masks, 16 keys]``, a bit for each of 16 queries, 1 where visible.
        weights: ``[weights, 16 keys, 16 queries]``, log-weights in powers of 2, -infinity where hidden.
        work: pairs of each tile that are computed.
        most: the most vectors of queries in a tile.
        whole: whether the first pass has all queries.
    """

    tiles: NDArray[np.int64]
    passes: tuple[int, ...]
    queries: NDArray[np.int32]
    keys: NDArray[np.int32]
    codes: NDArray[np.int32]
    masks: NDArray[np.uint16]
    weights: NDArray[np.float32]
    work: NDArray[np.int64]
    most: int
    whole: bool


def program(schedule: Schedule, geometry: Geometry, head: int, weighing: tuple[Pattern, ...] = ()) -> Program:
    """The program of a schedule whose rows are alike, for one of its masks' heads; kept as long as the schedule is."""
    found = _made.setdefault(schedule, {})
    name = (head, weighing, geometry if weighing else None)
    if name not in found:
        found[name] = _Builder(schedule, geometry, head, weighing).program()
    return found[name]


_made: WeakKeyDictionary[Schedule, dict[object, Program]] = WeakKeyDictionary()


def by_head(schedule: Schedule) -> bool:
    """Whether heads have masks of their own."""
    return any(k.mask is not None and k.mask.shape[0] > 1 for tile in schedule.tiles for k in tile.keys)


class _Builder:
    def __init__(self, schedule: Schedule, geometry: Geometry, head: int, weighing: tuple[Pattern, ...]) -> None:
        self.schedule, self.geometry, self.head, self.weighing = schedule, geometry, head, weighing
        self.masks: dict[bytes, int] = {}
        self.weights: dict[bytes, int] = {}
        self.coded: dict[object, NDArray[np.int32]] = {}

    def program(self) -> Program:
        tiles: list[tuple[int, ...]] = []
        queries: list[NDArray[np.int32]] = []
        keys: list[NDArray[np.int32]] = []
        codes: list[NDArray[np.int32]] = []
        passes, work = [0], list[int]()
        vector = key = code = first = 0
        before: Tile | None = None
        for tile in self.schedule.tiles:
            if before is not None and before.hidden != tile.hidden:
                passes.append(len(tiles))
            before = tile
            at, runs, mine = self._sorted(tile)
            new = [_sixteens(run) for run in runs]
            queries.append(_sixteens(at))
            keys += new
            codes.append(mine.ravel())
            vectors, count = mine.shape
            tiles.append((vector, vectors, key, count, code, int(not tile.first)))
            work.append(int((mine != NONE).sum()) * LANES * LANES)
            vector, key, code = vector + vectors, key + count, code + mine.size
            first += len(at) if len(passes) == 1 else 0
        masks = b"".join(self.masks) or bytes(2 * LANES)
        weights = b"".join(self.weights) or bytes(4 * LANES * LANES)
        return Program(
            np.array(tiles, dtype=np.int64).reshape(-1, 6),
            (*passes, len(tiles)),
            _joined(queries, LANES + 4),
            _joined(keys, LANES + 4),
            np.concatenate(codes).astype(np.int32) if codes else np.zeros(0, np.int32),
            np.frombuffer(masks, np.uint16).reshape(-1, LANES).copy(),
            np.frombuffer(weights, np.float32).reshape(-1, LANES * LANES).copy(),
            np.array(work, dtype=np.int64),
            max((t[VECTORS] for t in tiles), default=0),
            first == self.geometry.queries,
        )

    def _sorted(self, tile: Tile) -> tuple[Positions, list[Positions], NDArray[np.int32]]:
        """Queries and runs of keys of a tile in an order that leaves few pairs to compute, and their codes ``[vectors,
        tiles of keys]``.

        Queries that take turns, as short runs of every d-th one do, are put beside those that see the same keys.
        """
        queries, runs = _numbers(tile.queries), [_numbers(k.at) for k in tile.keys]
        codes = np.concatenate([self._run(keys, queries) for keys in tile.keys], 1)
        if self.weighing or all(k.mask is None for k in tile.keys):
            return queries, runs, codes
        seen = [self._seen(k, len(queries)) for k in tile.keys]
        order = _by_first(np.concatenate(seen, 1))
        if order is None:
            return queries, runs, codes
        turned = [mine[order] for mine in seen]
        columns = [_by_first(mine.T) for mine in turned]
        turned = [mine if to is None else mine[:, to] for mine, to in zip(turned, columns, strict=True)]
        other = np.concatenate([self._coded(mine, None) for mine in turned], 1)
        if (other != NONE).sum() >= (codes != NONE).sum():
            return queries, runs, codes
        return queries[order], [run if to is None else run[to] for run, to in zip(runs, columns, strict=True)], other

    def _run(self, keys: Keys, queries: Positions) -> NDArray[np.int32]:
        """The codes of a run of keys."""
        weights = self._log_weights(keys, queries) if self.weighing else None
        if weights is not None:
            return self._coded(self._seen(keys, len(queries)), weights)
        name = (id(keys.mask), len(queries), keys.count)  # the schedule keeps equal masks once
        if name not in self.coded:
            self.coded[name] = self._coded(self._seen(keys, len(queries)), None)
        return self.coded[name]

    def _seen(self, keys: Keys, queries: int) -> NDArray[np.bool_]:
        if keys.mask is None:
            return np.ones((queries, keys.count), np.bool_)
        mask = keys.mask.cpu().numpy()
        return mask[self.head if mask.shape[0] > 1 else 0]

    def _coded(self, seen: NDArray[np.bool_], weights: NDArray[np.float32] | None) -> NDArray[np.int32]:
        rows, columns = seen.shape
        vectors, tiles = -(-rows // LANES), -(-columns // LANES)
        pad = (0, vectors * LANES - rows), (0, tiles * LANES - columns)
        # Queries that are not there may see anything, nobody reads it; keys that are not there are seen by nobody.
        whole = np.pad(np.pad(seen, (pad[0], (0, 0)), constant_values=True), ((0, 0), pad[1]))
        blocks = whole.reshape(vectors, LANES, tiles, LANES).transpose(0, 2, 3, 1)  # [vectors, tiles, keys, queries]
        there = np.pad(seen, pad).reshape(vectors, LANES, tiles, LANES).any((1, 3))
        bits = np.packbits(blocks, axis=-1, bitorder="little")
        codes = np.where(blocks.all((2, 3)), ALL, NONE).astype(np.int32)
        for v, t in np.argwhere(there & (codes == NONE)):
            codes[v, t] = MASK + 2 * self.masks.setdefault(bits[v, t].tobytes(), len(self.masks))
        if weights is not None:
            log = np.pad(weights, pad).reshape(vectors, LANES, tiles, LANES).transpose(0, 2, 3, 1)
            for v, t in np.argwhere(there & (log != 0).any((2, 3))):
                one = np.where(blocks[v, t], log[v, t], np.float32(-np.inf)).tobytes()
                codes[v, t] = WEIGHTS + 2 * self.weights.setdefault(one, len(self.weights))
        return codes

    def _log_weights(self, keys: Keys, queries: Positions) -> NDArray[np.float32] | None:
        """Logarithms to base 2 of the weights of a run, ``[queries, keys]``, if they are not all 0."""
        geometry = self.geometry
        place = Place(
            torch.from_numpy(queries + geometry.first_query).view(1, 1, -1, 1),
            torch.from_numpy(_numbers(keys.at) + geometry.first_key).view(1, 1, 1, -1),
            torch.tensor(geometry.totals or (0,)).view(-1, 1, 1, 1)[-1:],
            torch.zeros(1, 1, 1, 1, dtype=torch.int64),
            torch.full((1, 1, 1, 1), self.head),
        )
        total = torch.zeros(1, 1, len(queries), keys.count, dtype=torch.float64)
        for pattern in self.weighing:
            weight = pattern.log_weight(place)
            total = total if weight is None else total + weight
        return (total[0, 0] / math.log(2)).float().numpy() if bool(total.any()) else None


def _by_first(seen: NDArray[np.bool_]) -> NDArray[np.intp] | None:
    """Rows in the order of the first column that each of them sees, those that see none last; None if they are."""
    first = np.where(seen.any(1), seen.argmax(1), seen.shape[1])
    return None if bool((first[1:] >= first[:-1]).all()) else np.argsort(first, kind="stable")


def _numbers(at: Index) -> Positions:
    if isinstance(at, slice):
        return np.arange(at.start, at.stop, at.step or 1, dtype=np.int64)
    return at.cpu().numpy()


def _sixteens(at: Positions) -> NDArray[np.int32]:
    """Numbers 16 a row, -1 beyond their end, and what the columns behind them say."""
    count = -(-len(at) // LANES)
    out = np.full((count, LANES + 4), -1, np.int32)
    body = np.pad(at, (0, count * LANES - len(at)), constant_values=-1).reshape(count, LANES)
    out[:, :LANES] = body
    there = body >= 0
    apart = np.diff(body, axis=1)
    even = ((apart == apart[:, :1]) | ~there[:, 1:]).all(1) & (apart[:, 0] > 0)
    out[:, ROWS] = there.sum(1)
    out[:, STEP] = np.where(out[:, ROWS] == 1, 1, np.where(even, apart[:, 0], 0))
    out[:, LOWEST] = np.where(there, body, np.iinfo(np.int32).max).min(1)
    out[:, HIGHEST] = body.max(1)
    return out


def _joined(parts: Sequence[NDArray[np.int32]], width: int) -> NDArray[np.int32]:
    return np.concatenate(parts) if parts else np.zeros((0, width), np.int32)
