"""What is computed at a stop of the ring: rows of a block of pairs, and their gradients.

:class:`Tiled` serves every kernel, structure and device by the tiles of :mod:`mercer.forms.tiles`; :class:`Fused`
serves exact softmax attention on the CPU by the kernels of :mod:`mercer.backends.softmax`. Both leave the rows of an
exponential kernel divided by the sum of their weights, with its logarithm, and take that of all blocks in the backward
pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mercer.backends import softmax
from mercer.core.kernels import Exp, Kernel
from mercer.core.layout import Layout
from mercer.core.merged import Merged
from mercer.core.normalizers import Normalizer
from mercer.distributed.scene import Block, Scene
from mercer.distributed.sharding import Sharding
from mercer.forms.tiles import backward_tiles, forward_tiles


@dataclass(frozen=True, eq=False)
class Keys:
    """Keys and values of one process, in the dtypes that they travel in, and the logarithms of weights of keys.

    Attributes:
        log: ``[b, h, L]`` float64, or None.
        key: ``[B, Hk, L, D]``.
        value: ``[B, Hk, L, Dv]``.
    """

    log: Tensor | None
    key: Tensor
    value: Tensor

    @staticmethod
    def of(parts: list[Tensor]) -> Keys:
        """From what :meth:`parts` gave."""
        return Keys(parts[0] if len(parts) == 3 else None, parts[-2], parts[-1])

    def parts(self) -> list[Tensor]:
        """The tensors in the order in which they travel: the largest items first."""
        return [x for x in (self.log, self.key, self.value) if x is not None]

    def of_heads(self, heads: slice, groups: int) -> Keys:
        """Those of some key heads, each of which ``groups`` query heads read, as views."""
        log = None if self.log is None else _weights(self.log, heads, groups)
        return Keys(log, self.key[:, heads], self.value[:, heads])


@dataclass(frozen=True, eq=False)
class Queries:
    """Queries of this process.

    Attributes:
        query: ``[B, Hq, L, D]``.
        slopes: ``[Hq]``, or None.
        log: ``[b, h, L]`` float64, or None.
    """

    query: Tensor
    slopes: Tensor | None
    log: Tensor | None

    def of_heads(self, heads: slice, groups: int) -> Queries:
        """Those that read some key heads, as views."""
        log = None if self.log is None else _weights(self.log, heads, groups)
        at = _read(heads, groups)
        return Queries(self.query[:, at], None if self.slopes is None else self.slopes[at], log)

    def layout(self, scene: Scene, block: Block, keys: Keys) -> Layout:
        return scene.layout(block, self.slopes, self.log, keys.log, self.query.device)


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of this process, to which blocks of keys are added.

    Attributes:
        numerator: ``[B, Hq, L, Dv]``.
        denominator: ``[B, Hq, L]``; 0 and 1 of an exponential kernel.
        log_sum: of an exponential kernel, the logarithm of the sum of a row's weights, -infinity where there are none.
    """

    numerator: Tensor
    denominator: Tensor
    log_sum: Tensor | None

    @staticmethod
    def empty(query: Tensor, value_dim: int, dtype: torch.dtype, exponential: bool) -> Rows:
        denominator = query.new_zeros(query.shape[:3], dtype=dtype)
        log_sum = torch.full_like(denominator, -torch.inf) if exponential else None
        return Rows(query.new_zeros(*query.shape[:3], value_dim, dtype=dtype), denominator, log_sum)

    def of_heads(self, heads: slice, groups: int) -> Rows:
        """Those of the query heads that read some key heads, as views."""
        at = _read(heads, groups)
        log_sum = None if self.log_sum is None else self.log_sum[:, at]
        return Rows(self.numerator[:, at], self.denominator[:, at], log_sum)

    def add(self, at: slice, numerator: Tensor, denominator: Tensor) -> None:
        """Add sums."""
        self.numerator[:, :, at].add_(numerator)
        self.denominator[:, :, at].add_(denominator)

    def merge(self, at: slice, rows: Tensor, log_sum: Tensor) -> None:
        """Add rows that are divided by their sums, whose logarithms are ``log_sum``."""
        assert self.log_sum is not None
        before = self.log_sum[:, :, at]
        after = torch.logaddexp(before, log_sum)
        share = (log_sum - after.masked_fill(after == -torch.inf, 0)).exp_()  # sigmoid(log_sum - before)
        self.numerator[:, :, at].lerp_(rows, share.unsqueeze(-1))
        before.copy_(after)

    def finish(self) -> None:
        """Enter where an exponential kernel's rows saw anything."""
        if self.log_sum is not None:
            self.denominator.copy_(self.log_sum != -torch.inf)


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients of this process's queries and their log-weights, to which blocks of keys are added.

    Attributes:
        query, slopes, query_log: of the queries; the last two None where nobody asked.
        asked: which gradients are wanted of slopes, query_log and key_log.
    """

    query: Tensor
    slopes: Tensor | None
    query_log: Tensor | None
    asked: tuple[bool, bool, bool]

    @staticmethod
    def zero(queries: Queries, dtype: torch.dtype, asked: tuple[bool, bool, bool]) -> Gradients:
        slopes, log = queries.slopes, queries.log
        return Gradients(
            torch.zeros_like(queries.query, dtype=dtype),
            torch.zeros_like(slopes) if slopes is not None and asked[0] else None,
            torch.zeros_like(log) if log is not None and asked[1] else None,
            asked,
        )

    def of_heads(self, heads: slice, groups: int) -> Gradients:
        """Those of the query heads that read some key heads, as views."""
        at = _read(heads, groups)
        slopes = None if self.slopes is None else self.slopes[at]
        log = None if self.query_log is None else _weights(self.query_log, heads, groups)
        return Gradients(self.query[:, at], slopes, log, self.asked)


def _read(heads: slice, groups: int) -> slice:
    """The query heads that read some key heads."""
    return slice(heads.start * groups, heads.stop * groups)


def _weights(log: Tensor, heads: slice, groups: int) -> Tensor:
    """Log-weights ``[b, h, L]`` of the query heads that read some key heads; h is 1 or their number."""
    return log if log.shape[1] == 1 else log[:, _read(heads, groups)]


class Engine(Protocol):
    """How blocks are computed."""

    @property
    def scene(self) -> Scene: ...

    @property
    def exponential(self) -> bool: ...

    def forward(self, block: Block, queries: Queries, keys: Keys, rows: Rows) -> None:
        """Add a block's rows."""
        ...

    def backward(
        self,
        block: Block,
        queries: Queries,
        keys: Keys,
        rows: Rows,
        grads: tuple[Tensor, Tensor],
        into: Gradients,
        totals: Keys,
    ) -> None:
        """Add a block's gradients, given those of the numerator and denominator, to its queries' and keys'."""
        ...


@dataclass(frozen=True, eq=False)
class Tiled:
    """Any kernel: queries come mapped and scaled, keys mapped."""

    scene: Scene
    kernel: Kernel

    @property
    def exponential(self) -> bool:
        return self.kernel.exponential

    def forward(self, block: Block, queries: Queries, keys: Keys, rows: Rows) -> None:
        parts, layout = self._parts(block, queries, keys), queries.layout(self.scene, block, keys)
        numerator, denominator, factor = forward_tiles(*parts, self.kernel, layout, True)
        if self.exponential:
            rows.merge(block.queries, numerator, factor.masked_fill(denominator == 0, -torch.inf))
        else:
            rows.add(block.queries, numerator, denominator)

    def backward(
        self,
        block: Block,
        queries: Queries,
        keys: Keys,
        rows: Rows,
        grads: tuple[Tensor, Tensor],
        into: Gradients,
        totals: Keys,
    ) -> None:
        at, of = block.queries, block.keys
        factor = queries.query.new_zeros(0)
        if rows.log_sum is not None:
            factor = rows.log_sum[:, :, at]
            factor = factor.masked_fill(factor == -torch.inf, 0)
        found = backward_tiles(
            *self._parts(block, queries, keys),
            self.kernel,
            queries.layout(self.scene, block, keys),
            factor,
            *(grad[:, :, at] for grad in grads),
            into.asked,
        )
        into.query[:, :, at].add_(found.query)
        for total, grad in ((totals.key, found.key), (totals.value, found.value)):
            heads = total.shape[1]
            total[:, :, of].add_(grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2))
        if into.slopes is not None and found.slopes is not None:
            into.slopes.add_(found.slopes)
        if into.query_log is not None and found.query_log is not None:
            into.query_log[:, :, at].add_(found.query_log)
        if totals.log is not None and found.key_log is not None:
            totals.log[:, :, of].add_(found.key_log)

    def _parts(self, block: Block, queries: Queries, keys: Keys) -> tuple[Tensor, Tensor, Tensor]:
        dtype = queries.query.dtype
        sides = (queries.query, block.queries), (keys.key, block.keys), (keys.value, block.keys)
        query, key, value = (x[:, :, at].to(dtype).contiguous() for x, at in sides)
        groups = query.shape[1] // key.shape[1]
        if groups > 1 and any(p.per_head for p in self.scene.patterns):  # each query head needs keys of its own
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return query, key, value


@dataclass(frozen=True, eq=False)
class Fused:
    """Softmax attention in float32 sums on the CPU: queries and keys come as they are."""

    scene: Scene
    scale: float
    exponential: bool = True

    @staticmethod
    def serves(query: Tensor, value: Tensor, kernel: Kernel, normalizer: Normalizer, merged: Merged) -> bool:
        """Whether it computes what is asked; ``query`` and ``value`` are those of a process."""
        slopes = None if merged.alibi is None else merged.alibi.slopes
        return (
            type(kernel) is Exp
            and normalizer.scale_invariant
            and normalizer.takes_divided_rows
            and merged.decay is None
            and merged.relative is None
            and not merged.patterns
            and not (slopes is not None and slopes.requires_grad and torch.is_grad_enabled())
            and query.device.type in ("cpu", "meta")  # (planned as on the CPU)
            and query.dtype != torch.float64
            and query.shape[0] > 0
            and max(query.shape[-1], value.shape[-1]) <= softmax.WIDEST
            and softmax.installed()
        )

    @staticmethod
    def worth_while(query: Tensor, sharding: Sharding) -> bool:
        """Whether there is enough to compute between two processes to pay for the kernels' start."""
        pairs = (sharding.length // sharding.processes) ** 2
        return query.shape[0] * query.shape[1] * pairs >= softmax.LEAST_PAIRS

    def forward(self, block: Block, queries: Queries, keys: Keys, rows: Rows) -> None:
        parts, sight = self._parts(block, queries, keys), softmax.Sight.under(queries.layout(self.scene, block, keys))
        rows.merge(block.queries, *softmax.forward(*parts, self.scale, sight, torch.float32))

    def backward(
        self,
        block: Block,
        queries: Queries,
        keys: Keys,
        rows: Rows,
        grads: tuple[Tensor, Tensor],
        into: Gradients,
        totals: Keys,
    ) -> None:
        at, of = block.queries, block.keys
        assert rows.log_sum is not None
        sight = softmax.Sight.under(queries.layout(self.scene, block, keys))
        query, key, value = softmax.backward(
            *self._parts(block, queries, keys),
            rows.numerator[:, :, at],
            rows.log_sum[:, :, at],
            grads[0][:, :, at],
            None,
            self.scale,
            sight,
            torch.float32,
        )
        into.query[:, :, at].add_(query)
        totals.key[:, :, of].add_(key)
        totals.value[:, :, of].add_(value)

    def _parts(self, block: Block, queries: Queries, keys: Keys) -> tuple[Tensor, Tensor, Tensor]:
        return queries.query[:, :, block.queries], keys.key[:, :, block.keys], keys.value[:, :, block.keys]
