"""BigBird's pattern: blocks, a window of three, global blocks at both ends, and random ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mercer.core.patterns import Blocks, Prefix
from mercer.core.places import Candidates, Geometry, Place
from mercer.core.structures import Causal, Either, Pattern, at_least, intersection
from mercer.errors import InvalidArgument


@dataclass(frozen=True)
class RandomBlocks(Pattern):
    """Every block of queries sees ``count`` blocks of keys, drawn without repetition by a seed.

    Args:
        size: tokens in a block.
        count: blocks drawn, or as many as there are.
        seed: of the drawing; the same seed gives the same blocks for the same length.
        heads: None (the default) draws the same blocks for all heads, a number draws for each of that many query
            heads.
        apart: draw among blocks that are neither the first nor the last and not next to a query's own, which BigBird
            shows anyway. Default False.
        causal: draw among the blocks up to a query's own, and show no key after the query. Default False.

    Queries before the first key, where there are more of them than keys, stand in no block and are shown none. The draw
    depends on the length, so states cannot be continued; with ``causal`` it depends on the query's block alone, and
    they can. Source: Zaheer et al. 2020, arXiv 2007.14062.
    """

    size: int
    count: int = 3
    seed: int = 0
    heads: int | None = None
    apart: bool = False
    causal: bool = False
    name: ClassVar[str] = "RandomBlocks"

    def __post_init__(self) -> None:
        at_least("RandomBlocks", size=self.size, count=self.count)
        at_least("RandomBlocks", 0, seed=self.seed)
        if self.heads is not None:
            at_least("RandomBlocks", heads=self.heads)

    @property
    def per_head(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.heads is not None

    @property
    def needs_length(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.causal

    @property
    def ends(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None if self.causal else "depends on the length"

    def table(self, total: int) -> NDArray[np.int64]:
        """The blocks that each block of queries sees, ``[heads or 1, blocks, count]``, -1 for none."""
        blocks = math.ceil(total / self.size)
        # A causal draw is part of that of any longer sequence, so one of few lengths serves all that tiles ask about.
        most = 1 << max(blocks - 1, 0).bit_length() if self.causal else blocks
        return _drawn(self.count, self.seed, self.heads or 1, self.apart, self.causal, most)[:, :blocks]

    def sees(self, at: Place) -> Tensor:
        if self.heads is not None and at.head.max() >= self.heads:
            raise InvalidArgument(
                f"{self.name}: heads={self.heads}, but the call has {int(at.head.max()) + 1} query heads or more."
            )
        found: Tensor | None = None
        past = max(int(at.query.max()) + 1, 0) if self.causal and at.query.numel() else 0
        for total in [past] if self.causal else at.total.unique().tolist():
            table = torch.from_numpy(self.table(int(total))).to(at.key.device)
            blocks = table.shape[1]
            head = at.head if self.heads is not None else at.head.new_zeros(1, 1, 1, 1)
            query = (at.query // self.size).clamp(0, max(blocks - 1, 0))
            if not blocks:
                continue
            drawn = table[head, query]  # [b, h, q, 1, count]
            seen = ((at.key // self.size).unsqueeze(-1) == drawn).any(-1) & (at.query >= 0)
            seen = seen & (at.key <= at.query if self.causal else at.total == total)
            found = seen if found is None else found | seen
        return torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=at.key.device) if found is None else found

    def candidates(self, geometry: Geometry) -> Candidates:
        totals = (max(geometry.first_query + geometry.queries, 0),) if self.causal else geometry.totals
        tables = [self.table(total) for total in totals]

        def keys(queries: NDArray[np.int64]) -> NDArray[np.int64]:
            blocks = np.unique(queries // self.size)
            drawn = [t[:, blocks[(blocks >= 0) & (blocks < t.shape[1])]].ravel() for t in tables]
            chosen = np.unique(np.concatenate(drawn))
            chosen = chosen[chosen >= 0]
            return (chosen[:, None] * self.size + np.arange(self.size)).ravel()

        return Candidates(keys, block=self.size)


class _RandomOfBigBird(RandomBlocks):
    """Those of :class:`BigBird`, which messages name."""

    name = "BigBird"


@lru_cache(maxsize=64)
def _drawn(count: int, seed: int, heads: int, apart: bool, causal: bool, blocks: int) -> NDArray[np.int64]:
    table = np.full((heads, blocks, count), -1, dtype=np.int64)
    for head in range(heads):
        draw = np.random.default_rng((seed, head, blocks))
        for block in range(blocks):
            if causal:  # each block's own draw, whatever follows
                draw = np.random.default_rng((seed, head, block))
            allowed = np.arange(block + 1 if causal else blocks)
            if apart:
                inner = (allowed > 0) & (causal | (allowed < blocks - 1))
                allowed = allowed[inner & (abs(allowed - block) > 1)]
            chosen = draw.permutation(allowed)[:count]
            table[head, block, : len(chosen)] = chosen
    return table


@dataclass(frozen=True)
class EndBlocks(Pattern):
    """The first and last block of ``size`` tokens: seen by all, and seeing all.

    Where the length is no multiple of the size the last block is the shorter rest.
    """

    size: int
    keys: bool = True
    """Whether these blocks are seen (True), or see (False)."""
    needs_length = True
    ends = "depends on the length"

    def sees(self, at: Place) -> Tensor:
        block = (at.key if self.keys else at.query) // self.size
        return (block == 0) | (block == (at.total - 1) // self.size)

    def candidates(self, geometry: Geometry) -> Candidates:
        ends = {0} | {max(total - 1, 0) // self.size for total in geometry.totals}
        found = tuple(p for block in sorted(ends) for p in range(block * self.size, (block + 1) * self.size))
        if self.keys:
            chosen = np.array(found, dtype=np.int64)
            return Candidates(lambda _: chosen)
        return Candidates(lambda _: range(geometry.first_key, geometry.stop), queries=found)


@dataclass(frozen=True)
class BigBird(Pattern):
    """A window of three blocks, the first and last block global, and random blocks besides.

    Args:
        size: tokens in a block. Where the length is no multiple of it the last block is the shorter rest.
        random: random blocks that each inner block of queries sees, besides the others. Default 3.
        seed, heads: of their drawing, as of :class:`RandomBlocks`.
        hf_compat: compute what the hub's models do when they are evaluated: there every random block is block 0,
            which queries of inner blocks therefore count 1 + random times in their softmax.
        causal: the variant for models that write: a query sees of its own block, the one before it, the first one and
            ``random`` ones drawn among those between, what does not come after it. Default False.

    The pattern depends on the length, so states cannot be continued; with ``causal`` it does not, and they can. Source:
    Zaheer et al. 2020, arXiv 2007.14062.
    """

    size: int
    random: int = 3
    seed: int = 0
    heads: int | None = None
    hf_compat: bool = False
    causal: bool = False

    def __post_init__(self) -> None:
        at_least("BigBird", size=self.size)
        at_least("BigBird", 0, random=self.random, seed=self.seed)
        if self.hf_compat and self.heads is not None:
            raise InvalidArgument("BigBird: with hf_compat nothing is drawn, so leave heads out.")
        if self.hf_compat and self.causal:
            raise InvalidArgument("BigBird: the hub has no causal models of it, so leave hf_compat or causal out.")
        if self.heads is not None:
            at_least("BigBird", heads=self.heads)

    @property
    def needs_length(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.causal

    @property
    def ends(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None if self.causal else "depends on the length"

    @property
    def per_head(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.heads is not None and self.random > 0

    @property
    def weighs(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.hf_compat and self.random > 0

    def alternatives(self) -> tuple[tuple[Pattern, ...], ...]:
        if self.causal:
            before: tuple[Pattern, ...] = (Blocks(self.size, 1), Prefix(self.size))
            if self.random:
                before += (_RandomOfBigBird(self.size, self.random, self.seed, self.heads, apart=True, causal=True),)
            return intersection((Either(before), Causal()))
        shown: list[Pattern] = [Blocks(self.size, 1, 1), EndBlocks(self.size, True), EndBlocks(self.size, False)]
        if self.random and not self.hf_compat:
            shown.append(_RandomOfBigBird(self.size, self.random, self.seed, self.heads, apart=True))
        return tuple((one,) for one in shown)

    def log_weight(self, at: Place) -> Tensor | None:
        if not self.weighs:
            return None
        query, key, last = (x // self.size for x in (at.query, at.key, at.total - 1))
        again = (key == 0) & (query > 0) & (query < last)
        return again.double() * math.log(1 + self.random)
