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
from dataclasses import dataclass, replace
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


FARTHEST = 2**62
"""No window reaches farther."""


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
        rows: the batch rows that it is given for; None: any number.
        pairwise: whether :meth:`sees` also answers for a single pair, given tensors without dimensions.
    """

    per_head: bool = False
    per_row: bool = False
    needs_length: bool = False
    ends: str | None = None
    weighs: bool = False
    asks: bool = False
    exact: bool = True
    rows: int | None = None
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

    def spaced(self, step: int) -> Pattern:
        """A pattern that shows the same where positions of queries and keys differ by multiples of ``step`` alone, and
        whose :meth:`decides` may know more.
        """
        return self

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
        if self.per_row or self.rows is not None:
            raise Unsupported(f"{self} with Documents: give a pattern that is the same in all rows and documents.")
        return self

    def plain(self) -> Pattern:
        """The pattern, or one without tensors that shows as much or more in every row (not ``exact`` then)."""
        return self

    def in_row(self, row: int) -> Pattern:
        """The pattern as one batch row has it, the same in all rows then."""
        return InRow(self, row) if self.per_row or self.asks else self


@dataclass(frozen=True)
class InRow(Pattern):
    """What a pattern shows in one batch row, in every row."""

    pattern: Pattern
    row: int

    @property
    def per_head(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.pattern.per_head

    @property
    def needs_length(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.pattern.needs_length

    @property
    def asks(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.pattern.asks

    def sees(self, at: Place) -> Tensor:
        return self.pattern.sees(replace(at, row=torch.full_like(at.row[:1], self.row)))

    def candidates(self, geometry: Geometry) -> Candidates:
        return self.pattern.plain().candidates(geometry)

    def __str__(self) -> str:
        return f"{self.pattern} in row {self.row}"


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
        return " & ".join(f"({m})" if isinstance(m, Either) else str(m) for m in self.members)


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
    def asks(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(part.asks for part in self._patterns)

    @property
    def ends(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return next((part.ends for part in self._patterns if part.ends is not None), None)

    @property
    def rows(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return next((part.rows for part in self._patterns if part.rows is not None), None)

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
        for name, value in (("left", self.left), ("right", self.right)):
            if value is not None and value * self.dilation > FARTHEST:  # sums of it and a position must not overflow
                raise InvalidArgument(f"Window: {name}={value} is farther than any key: say None for no limit.")

    @staticmethod
    def last(width: int, dilation: int = 1) -> Window:
        """The last ``width`` keys up to and including one's own position, or every ``dilation``-th one."""
        if width < 1:
            raise InvalidArgument(f"Window.last: width must be 1 or more, not {width}.")
        return Window(width - 1, 0, dilation)

    def __str__(self) -> str:
        dilation = "" if self.dilation == 1 else f", dilation={self.dilation}"
        return f"Window(left={self.left}, right={self.right}{dilation})"

    def alternatives(self) -> tuple[tuple[Pattern, ...], ...]:
        return ((),) if self.left is None and self.right is None and self.dilation == 1 else ((self,),)

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

    def spaced(self, step: int) -> Pattern:
        if step % self.dilation:
            return self
        left, right = (None if reach is None else reach * self.dilation for reach in (self.left, self.right))
        return Window(left, right)

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
        tensors_only("Padding", mask=self.mask, lengths=self.lengths, queries=self.queries)
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
        tensors_only("Documents", offsets=self.offsets)
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


class Pairwise(Structure):
    """What a tensor says of every pair of a call's own queries and keys: :mod:`mercer.core.pairwise`.

    Attributes:
        tensor: ``[B or 1, Hq or 1, Lq, Lk]``.
        hides: whether it says who sees whom; otherwise it is a log-weight.
    """

    tensor: Tensor
    hides: ClassVar[bool]


def tensors_only(where: str, **values: object) -> None:
    for name, value in values.items():
        if value is not None and not isinstance(value, Tensor):
            raise InvalidArgument(f"{where}: {name} must be a tensor, not {type(value).__name__}.")


def at_least(where: str, least: int = 1, **values: object) -> None:
    """Raise unless every value is an integer of ``least`` or more."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidArgument(f"{where}: {name} must be an integer of {least} or more, not {value!r}.")


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {values[-1]}]"
