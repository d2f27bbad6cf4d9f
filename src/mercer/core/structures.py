"""Structures: who may see whom, and how strongly. A structure is a log-weight: w_ij = exp(bias_ij), 0 where j is
hidden from i.

Structures compose with ``&``: visibilities intersect and log-weights add, so ``Causal() & Window(255, 0) &
Padding(lengths=n)`` is a padded sliding window. Those that only say who sees whom, the patterns, compose with ``|``:
a pair is visible if either side shows it. What a structure needs to know of the tensors (lengths, batch, heads) it
learns when it is used. :mod:`mercer.core.patterns` has the sparse patterns of the literature.

Positions. Queries are aligned with the *last* keys (bottom-right): with Lq queries and Lk keys query i stands where key
i + Lk - Lq stands. A token that :class:`Padding` hides is as if absent: it adds nothing, decays nothing and does not
count in any position or distance, so a sequence gives the same answer alone and padded left, right or inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise, product
from operator import and_, or_
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mercer.core.places import Candidates, Geometry, Place
from mercer.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    import plotly.graph_objects as go  # pyright: ignore[reportMissingTypeStubs]


class Structure:
    """Base of all structures; a conjunction of parts."""

    @property
    def parts(self) -> tuple[Structure, ...]:
        return (self,)

    def __and__(self, other: Structure) -> Structure:
        if not isinstance(other, Structure):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"A structure composes with a structure, not with {other!r}.")
        return Both(tuple(p for s in (self, other) for p in s.parts if not isinstance(p, Full)) or (Full(),))

    def __or__(self, other: Structure) -> Structure:
        if not isinstance(other, Structure):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"A structure composes with a structure, not with {other!r}.")
        members = tuple(m for s in (self, other) for m in (s.members if isinstance(s, Either) else (s,)))
        for part in (p for m in members for p in m.parts):
            if not isinstance(part, Pattern):
                raise InvalidArgument(
                    f"{type(part).__name__} says more than who sees whom, so it has no place beside |: write "
                    f"(A | B) & {type(part).__name__}(...)."
                )
        return Either(members)

    def plot(
        self,
        queries: int,
        keys: int | None = None,
        *,
        rows: Sequence[int] = (0,),
        heads: Sequence[int] | None = None,
        batch: int | None = None,
        query_heads: int | None = None,
    ) -> go.Figure:
        """A picture of who sees whom: queries from the top down, keys from left to right.

        What is hidden is left empty. Colours are the logarithms of weights where there are some. Above 512 tokens a
        cell is a block of pairs, and its colour the share of them that is visible, or the logarithm of their mean
        weight.

        Args:
            queries: how many, up to 16,384: every pair is asked about.
            keys: how many; default as many as queries.
            rows: batch rows to draw, one below the other. Default the first.
            heads: query heads to draw, side by side. Default those that differ, 16 at most.
            batch: how many rows there are. Default what the structure's tensors are made for, else what is drawn.
            query_heads: how many heads there are, likewise.

        Returns:
            A plotly figure: ``figure.show()`` opens it, ``figure.write_html(path)`` keeps it.
        """
        from mercer.core import picture

        found = picture.weights(self, queries, keys, rows=rows, heads=heads, batch=batch, query_heads=query_heads)
        return picture.plot(self, found, rows, heads)


class Pattern(Structure):
    """A structure that only says who sees whom.

    A subclass gives :meth:`sees`, the definition, and :meth:`candidates`, where to look for the keys of some queries,
    so that work grows with what is visible; or, made of others, :meth:`alternatives`.

    Attributes:
        per_head: whether heads see different keys.
        per_row: whether batch rows see different keys, though their tokens stand at the same positions.
        needs_length: whether it depends on how many tokens there are in all.
        ends: why a state cannot continue it, as the predicate of a sentence; None if one can.
        weighs: whether :meth:`log_weight` gives anything.
        asks: whether only :meth:`sees` knows if rows or heads differ.
        exact: whether it shows no more than is visible.
        pairwise: whether :meth:`sees` also answers for a single pair, given tensors without dimensions.
    """

    per_head: bool = False
    per_row: bool = False
    needs_length: bool = False
    ends: str | None = None
    weighs: bool = False
    asks: bool = False
    exact: bool = True
    pairwise: bool = False

    def alternatives(self) -> tuple[tuple[Pattern, ...], ...]:
        """The pattern as a union of intersections of patterns that are not made of others."""
        return ((self,),)

    def sees(self, at: Place) -> Tensor:
        """Whether queries see keys: boolean, broadcast over what ``at`` holds."""
        return union(self.alternatives(), at)

    def candidates(self, geometry: Geometry) -> Candidates:
        """Where the keys of given queries are; may hold more than is visible, never less."""
        raise NotImplementedError(f"{type(self).__name__} must give candidates() or alternatives().")

    def decides(self, queries: tuple[int, int], keys: tuple[int, int]) -> bool | None:
        """Whether all (True) or none (False) of the pairs of two ranges of positions are visible, both ends included;
        None if some are, or nobody knows.
        """
        return None

    def log_weight(self, at: Place) -> Tensor | None:
        """Logarithms of weights that pairs have beside their visibility, constants; None for none."""
        return None

    def laid(self, key_rank: Tensor, key_valid: Tensor | None) -> Pattern:
        """The pattern for a call's own tokens, given their positions ``[b, L]`` and validity."""
        return self

    def planned(self) -> Pattern:
        """The pattern as far as it is known without a call's tokens, for counting work."""
        return self

    def in_documents(self) -> Pattern:
        """The pattern within each packed document, whose rows are not those of the batch."""
        if self.per_row:
            raise Unsupported(f"{self} with Documents: give a pattern that is the same in all rows and documents.")
        return self

    def plain(self) -> Pattern:
        """The pattern, or one without tensors that shows as much or more in every row (not ``exact`` then)."""
        return self


def union(alternatives: Sequence[tuple[Pattern, ...]], at: Place) -> Tensor:
    """Whether any of some intersections of patterns shows a pair."""
    everything = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=at.key.device)
    return reduce(or_, (reduce(and_, (p.sees(at) for p in together), everything) for together in alternatives))


@dataclass(frozen=True)
class Both(Structure):
    """Several structures at once; made by ``&``."""

    members: tuple[Structure, ...]

    @property
    def parts(self) -> tuple[Structure, ...]:
        return self.members

    def __str__(self) -> str:
        return " & ".join(map(str, self.members))


@dataclass(frozen=True)
class Either(Pattern):
    """Several patterns, any of which shows a pair; made by ``|``."""

    members: tuple[Structure, ...]

    def __post_init__(self) -> None:
        for part in self._patterns:
            if part.weighs:
                raise InvalidArgument(f"{part} also weighs pairs, so it has no place beside |: compose it with &.")

    @property
    def _patterns(self) -> list[Pattern]:
        return [part for member in self.members for part in member.parts if isinstance(part, Pattern)]

    @property
    def per_head(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(part.per_head for part in self._patterns)

    @property
    def needs_length(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(part.needs_length for part in self._patterns)

    @property
    def ends(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return next((part.ends for part in self._patterns if part.ends is not None), None)

    def in_documents(self) -> Pattern:
        return self._mapped(lambda part: part.in_documents())

    def planned(self) -> Pattern:
        return self._mapped(lambda part: part.planned())

    def laid(self, key_rank: Tensor, key_valid: Tensor | None) -> Pattern:
        return self._mapped(lambda part: part.laid(key_rank, key_valid))

    def _mapped(self, change: Callable[[Pattern], Pattern]) -> Pattern:
        return Either(
            tuple(
                Both(tuple(change(p) if isinstance(p, Pattern) else p for p in member.parts)) for member in self.members
            )
        )

    def alternatives(self) -> tuple[tuple[Pattern, ...], ...]:
        return tuple(together for member in self.members for together in intersection(member.parts))

    def __str__(self) -> str:
        return " | ".join(f"({m})" if isinstance(m, Both) else str(m) for m in self.members)


def intersection(parts: Sequence[Structure]) -> tuple[tuple[Pattern, ...], ...]:
    """The intersection of patterns as a union of intersections."""
    each = [part.alternatives() for part in parts if isinstance(part, Pattern)]
    return tuple(tuple(dict.fromkeys(p for chosen in one for p in chosen)) for one in product(*each))


@dataclass(frozen=True)
class Full(Pattern):
    """Every query sees every key."""

    def alternatives(self) -> tuple[tuple[Pattern, ...], ...]:
        return ((),)


@dataclass(frozen=True)
class Causal(Pattern):
    """A query sees the keys at its own position and before."""

    def alternatives(self) -> tuple[tuple[Pattern, ...], ...]:
        return ((Window(None, 0),),)


@dataclass(frozen=True)
class Window(Pattern):
    """A query at position i sees keys at positions i - left .. i + right, both inclusive.

    Args:
        left: distance seen backwards, 0 or more, or None for no limit.
        right: distance seen forwards, 0 or more, or None for no limit. Default 0.
        dilation: keys at distances that are multiples of this alone; ``left`` and ``right`` count such steps, so that
            the window reaches dilation times as far. Default 1.

    ``Window.last(width)`` is the sliding window of Mistral: the last ``width`` keys, at distances 0..width-1.
    """

    left: int | None
    right: int | None = 0
    dilation: int = 1
    pairwise = True

    def __post_init__(self) -> None:
        for name, value in (("left", self.left), ("right", self.right)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidArgument(f"Window: {name} must be an integer of 0 or more, or None, not {value!r}.")
        at_least("Window", dilation=self.dilation)

    @staticmethod
    def last(width: int, dilation: int = 1) -> Window:
        """The last ``width`` keys up to and including one's own position, or every ``dilation``-th one."""
        if width < 1:
            raise InvalidArgument(f"Window.last: width must be 1 or more, not {width}.")
        return Window(width - 1, 0, dilation)

    def __str__(self) -> str:
        dilation = "" if self.dilation == 1 else f", dilation={self.dilation}"
        return f"Window(left={self.left}, right={self.right}{dilation})"

    def sees(self, at: Place) -> Tensor:
        ahead = at.key - at.query
        seen = torch.ones_like(ahead, dtype=torch.bool) if self.dilation == 1 else ahead % self.dilation == 0
        if self.left is not None:
            seen = seen & (ahead >= -self.left * self.dilation)
        return seen if self.right is None else seen & (ahead <= self.right * self.dilation)

    def candidates(self, geometry: Geometry) -> Candidates:
        step = self.dilation

        def keys(queries: NDArray[np.int64]) -> range:
            first, last = int(queries[0]), int(queries[-1])
            low = first % step if self.left is None else first - self.left * step
            low = low if low >= 0 else low % step
            return range(low, geometry.stop if self.right is None else last + self.right * step + 1, step)

        return Candidates(keys, step)

    def decides(self, queries: tuple[int, int], keys: tuple[int, int]) -> bool | None:
        nearest, farthest = keys[0] - queries[1], keys[1] - queries[0]
        low = -math.inf if self.left is None else -self.left * self.dilation
        high = math.inf if self.right is None else self.right * self.dilation
        if farthest < low or nearest > high:
            return False
        return True if self.dilation == 1 and nearest >= low and farthest <= high else None


@dataclass(frozen=True, eq=False)
class Padding(Structure):
    """Hides tokens that are not there. Give exactly one of ``mask`` and ``lengths``.

    Args:
        mask: boolean ``[B, Lk]``, True for a real token; padding may stand anywhere.
        lengths: integers ``[B]``: the first ``lengths[b]`` keys are real.
        queries: for cross-attention: boolean ``[B, Lq]``, True for a real query; rows of the others are zero. By
            default the tail of ``mask`` under a structure that orders its tokens (causal, window, decay:
            self-attention), and all True otherwise (cross-attention).
    """

    mask: Tensor | None = None
    lengths: Tensor | None = None
    queries: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.mask is None) == (self.lengths is None):
            raise InvalidArgument("Padding: give exactly one of mask and lengths.")
        _tensors("Padding", mask=self.mask, lengths=self.lengths, queries=self.queries)
        for name, value in (("mask", self.mask), ("queries", self.queries)):
            if value is not None and (value.dtype != torch.bool or value.dim() != 2):
                raise InvalidArgument(
                    f"Padding: {name} must be a boolean [batch, length] tensor (True = real token), not "
                    f"{value.dtype} {list(value.shape)}."
                )
        if self.lengths is not None and (self.lengths.dim() != 1 or self.lengths.is_floating_point()):
            raise InvalidArgument(
                f"Padding: lengths must be integers [batch], not {self.lengths.dtype} {list(self.lengths.shape)}."
            )

    def __str__(self) -> str:
        return "Padding(mask)" if self.mask is not None else "Padding(lengths)"


@dataclass(frozen=True, eq=False)
class Documents(Structure):
    """Sequences packed one behind the other: a token sees only its own document. Query and key lengths must be equal.

    Args:
        offsets: integers ``[N + 1]``, from 0 to L, not decreasing: document d is tokens offsets[d] .. offsets[d+1] -
            1. Lengths of 0 are allowed. Read anew at every call.

    States, given and returned, then have one batch entry per document: entry b * N + d is document d of batch row b.
    """

    offsets: Tensor

    def __post_init__(self) -> None:
        _tensors("Documents", offsets=self.offsets)
        if self.offsets.dim() != 1 or self.offsets.numel() < 2 or self.offsets.is_floating_point():
            raise InvalidArgument(
                f"Documents: offsets must be integers [N + 1], N at least 1, not {self.offsets.dtype} "
                f"{list(self.offsets.shape)}."
            )

    def bounds(self, length: int) -> list[int]:
        """The offsets as a list, checked against the length of the packed sequence."""
        bounds: list[int] = self.offsets.tolist()
        if bounds[0] != 0 or bounds[-1] != length or any(a > b for a, b in pairwise(bounds)):
            raise InvalidArgument(
                f"Documents: offsets must rise from 0 to the packed length {length}, not {_short(bounds)}."
            )
        return bounds

    def __str__(self) -> str:
        return f"Documents({self.offsets.numel() - 1} documents)"


@dataclass(frozen=True, eq=False)
class Alibi(Structure):
    """Log-weight -slope_h |i - j|, distances exact in any dtype; differentiable in the slopes.

    Under :class:`~mercer.Exp` it is ALiBi; under a finite kernel and a causal structure, exponential decay.

    Args:
        slopes: ``[Hq]``, 0 or more. :func:`mercer.nn.alibi_slopes` gives the standard ones.

    Source: Press et al. 2021, arXiv 2108.12409.
    """

    slopes: Tensor

    def __post_init__(self) -> None:
        _tensors("Alibi", slopes=self.slopes)
        if self.slopes.dim() != 1:
            raise InvalidArgument(f"Alibi: slopes must be [heads], not {list(self.slopes.shape)}.")
        if not bool(((self.slopes >= 0) & (self.slopes < torch.inf)).all()):
            raise InvalidArgument("Alibi: every slope must be finite and 0 or more.")

    def __str__(self) -> str:
        return "Alibi(slopes)"


@dataclass(frozen=True, eq=False)
class RelativeBias(Structure):
    """Log-weight table[h, n] of a key that stands n - left positions after the query; keys further away have that of
    the nearest entry. Differentiable in the table; by pairs.

    Args:
        table: ``[Hq, distances]``, finite. :class:`mercer.nn.T5Bias` learns one.
        left: the first entry is for keys at this distance before the query, 0 or more and below the number of entries.
            Default that number less 1: the last entry is the query's own place, and its weight that of keys ahead.

    Source: Shaw et al. 2018, arXiv 1803.02155 (clipped distances); Raffel et al. 2020, arXiv 1910.10683 (scalars).
    """

    table: Tensor
    left: int | None = None

    def __post_init__(self) -> None:
        _tensors("RelativeBias", table=self.table)
        if self.table.dim() != 2 or not self.table.shape[1]:
            raise InvalidArgument(f"RelativeBias: table must be [heads, distances], not {list(self.table.shape)}.")
        if not bool(torch.isfinite(self.table).all()):
            raise InvalidArgument("RelativeBias: every entry of the table must be finite.")
        if self.left is not None:
            at_least("RelativeBias", 0, left=self.left)
            if self.left >= self.table.shape[1]:
                raise InvalidArgument(
                    f"RelativeBias: left must be below the table's {self.table.shape[1]} distances, not {self.left}."
                )

    @property
    def before(self) -> int:
        """The distance of the first entry."""
        return self.table.shape[1] - 1 if self.left is None else self.left

    def __str__(self) -> str:
        return f"RelativeBias({self.table.shape[1]} distances, left={self.before})"


@dataclass(frozen=True, eq=False)
class Decay(Structure):
    """Log-weight sum_{t=j+1..i} log(rate_t): every step multiplies what was seen before by its rate. Needs a causal
    structure.

    Under a finite kernel this is the decay of RetNet (per head) and of gated linear recurrences with scalar gates
    (per token); under :class:`~mercer.Exp` it is the forgetting attention of Lin et al. 2025. Differentiable in the
    rates.

    Args:
        rate: ``[H]`` per head or ``[B, H, L]`` per token, in (0, 1]; H is 1, the number of key heads, or of query
            heads; L that of keys.
        log_rate: the same as logarithms, 0 or less. Give exactly one of the two; gates near 1 keep their precision as
            logarithms.
        complement: also weigh what token j adds by 1 - rate_j, so that the weights of a long past sum to 1: the
            recency gate of random-feature attention, S_j = rate_j S_{j-1} + (1 - rate_j) phi(k_j) v_j^T. (By pairs
            the gradient of a rate of exactly 1 leaves this factor out.)

    Source: Sun et al. 2023 (RetNet), arXiv 2307.08621; Lin et al. 2025 (Forgetting Transformer), arXiv 2503.02130;
    Peng et al. 2021 (RFA), arXiv 2103.02143.
    """

    rate: Tensor | None = None
    log_rate: Tensor | None = None
    complement: bool = False

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.log_rate is None):
            raise InvalidArgument("Decay: give exactly one of rate and log_rate.")
        _tensors("Decay", rate=self.rate, log_rate=self.log_rate)
        value = self.rate if self.rate is not None else self.log_rate
        assert value is not None
        if value.dim() not in (1, 3):
            raise InvalidArgument(f"Decay: rates must be [heads] or [batch, heads, length], not {list(value.shape)}.")
        inside = ((value > 0) & (value <= 1)) if self.rate is not None else ((value > -torch.inf) & (value <= 0))
        if not bool(inside.all()):
            allowed = "in (0, 1]" if self.rate is not None else "finite and 0 or less"
            raise InvalidArgument(f"Decay: every {'rate' if self.rate is not None else 'log_rate'} must be {allowed}.")

    @property
    def per_token(self) -> bool:
        return (self.rate if self.rate is not None else self.log_rate).dim() == 3  # pyright: ignore[reportOptionalMemberAccess]

    def logs(self) -> Tensor:
        """Logarithms of the rates in float64, ``[1, H, 1]`` or ``[B, H, L]``."""
        logs = self.log_rate.double() if self.log_rate is not None else self.rate.double().log()  # pyright: ignore[reportOptionalMemberAccess]
        return logs.view(1, -1, 1) if logs.dim() == 1 else logs

    def __str__(self) -> str:
        rates = "per token" if self.per_token else "per head"
        return f"Decay({rates}, complement)" if self.complement else f"Decay({rates})"


class Pairwise(Structure):
    """What a tensor says of every pair of a call's own queries and keys: :mod:`mercer.core.pairwise`.

    Attributes:
        tensor: ``[B or 1, Hq or 1, Lq, Lk]``.
        hides: whether it says who sees whom; otherwise it is a log-weight.
    """

    tensor: Tensor
    hides: ClassVar[bool]


@dataclass(frozen=True, eq=False)
class Merged:
    """A structure's parts, merged: what the forms and the support table ask about."""

    left: int | None
    right: int | None
    padding: Padding | None
    documents: Documents | None
    alibi: Alibi | None
    decay: Decay | None
    relative: RelativeBias | None = None
    patterns: tuple[Pattern, ...] = ()
    """What is visible beside the band from ``left`` to ``right``: all of these must show a pair."""
    mask: Pairwise | None = None
    bias: Pairwise | None = None

    @property
    def pairwise(self) -> tuple[Pairwise, ...]:
        """What is said of every pair by a tensor."""
        return tuple(part for part in (self.mask, self.bias) if part is not None)

    @property
    def causal(self) -> bool:
        """Nothing after a query's own position is visible."""
        return self.right == 0

    @property
    def ordered(self) -> bool:
        """Positions matter, so queries and keys are the same tokens (self-attention)."""
        band = self.left is not None or self.right is not None
        return band or self.weighted or self.documents is not None or bool(self.patterns)

    @property
    def weighted(self) -> bool:
        """Log-weights are not all 0."""
        parts = (self.alibi, self.decay, self.relative)
        return any(p is not None for p in parts) or any(p.weighs for p in self.patterns)

    def entries(self, batch: int) -> int:
        """Batch entries of a state: one per row, or per document of each row."""
        return batch * (self.documents.offsets.numel() - 1) if self.documents is not None else batch

    def weight_heads(self, query_heads: int, key_heads: int) -> int:
        """Heads of a feature state: those of the keys, or of the queries where each of them has a decay of its own."""
        decays = 1 if self.decay is None else self.decay.logs().shape[1]
        return query_heads if self.alibi is not None or decays not in (1, key_heads) else key_heads

    def without_documents(self, padding: Padding) -> Structure:
        """The same structure for documents laid out as a padded batch (per-token decay must be re-laid by the
        caller).
        """
        parts: list[Structure] = [Window(self.left, self.right), padding, *self.patterns]
        parts += [p for p in (self.alibi, self.decay, self.relative) if p is not None]
        return Both(tuple(parts))


def merge(structure: Structure) -> Merged:
    """Merge a structure's parts; raises :class:`Unsupported` where they exclude each other."""
    left: int | None = None
    right: int | None = None
    found: dict[type, Structure] = {}
    patterns: list[Pattern] = []
    for part in structure.parts:
        if isinstance(part, Full) or (isinstance(part, Pattern) and () in part.planned().alternatives()):
            continue
        if isinstance(part, Causal | Window) and getattr(part, "dilation", 1) == 1:
            other_left, other_right = (None, 0) if isinstance(part, Causal) else (part.left, part.right)
            left, right = _tighter(left, other_left), _tighter(right, other_right)
        elif isinstance(part, Padding | Documents | Alibi | Decay | RelativeBias | Pairwise):
            kind = type(part)
            if kind in found:
                raise Unsupported(f"Two {kind.__name__} in one structure: combine their tensors into one.")
            found[kind] = part
        elif isinstance(part, Pattern):
            patterns.append(part)
        else:
            raise Unsupported(
                f"{type(part).__name__} is not a structure that the forms know; compose the ones in "
                "mercer.core.structures, or subclass its Pattern."
            )
    padding, documents, alibi, decay, relative = (
        found.get(kind) for kind in (Padding, Documents, Alibi, Decay, RelativeBias)
    )
    if alibi is not None and relative is not None:
        raise Unsupported("Alibi together with RelativeBias: take the slopes' log-weights into the table.")
    if decay is not None and right != 0:
        raise Unsupported("Decay needs a causal structure: write Causal() & Decay(...).")
    if padding is not None and documents is not None:
        raise Unsupported(
            "Padding together with Documents: leave the padding tokens out of the packed sequence, or make them a "
            "document."
        )
    mask, bias = (
        next((p for p in found.values() if isinstance(p, Pairwise) and p.hides == h), None) for h in (True, False)
    )
    for part in (mask, bias):
        if part is not None and documents is not None:
            raise Unsupported(
                f"{type(part).__name__} together with Documents: make the boundaries of documents a part of a Mask."
            )
    if documents is not None:
        patterns = [part.in_documents() for part in patterns]
    merged = Merged(left, right, padding, documents, alibi, decay, relative, tuple(patterns), mask, bias)  # pyright: ignore[reportArgumentType]
    if merged.padding is not None and merged.padding.queries is not None and merged.ordered:
        raise Unsupported(
            "Padding's queries= is for cross-attention: under a structure that orders its tokens the queries are the "
            "last of the keys, so leave it out, and mask or lengths tell which of them are real."
        )
    return merged


def _tensors(where: str, **values: object) -> None:
    for name, value in values.items():
        if value is not None and not isinstance(value, Tensor):
            raise InvalidArgument(f"{where}: {name} must be a tensor, not {type(value).__name__}.")


def at_least(where: str, least: int = 1, **values: object) -> None:
    """Raise unless every value is an integer of ``least`` or more."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidArgument(f"{where}: {name} must be an integer of {least} or more, not {value!r}.")


def _tighter(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {values[-1]}]"
