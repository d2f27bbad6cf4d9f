"""The sparse patterns of the literature, by position: work and memory grow with the pairs that they show.

They compose with ``&`` and ``|`` among each other and with :class:`~mercer.Causal` and :class:`~mercer.Window`. A
position counts the real tokens before a token in its own sequence, or document, so padding changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mercer.core.places import Candidates, Geometry, Place
from mercer.core.structures import Causal, Either, Pattern, Window, at_least, intersection
from mercer.errors import InvalidArgument

NONE = -(2**62)
"""No position: no query stands there, not even where queries are more than keys and the first ones stand before 0."""


@dataclass(frozen=True)
class Blocks(Pattern):
    """Blocks of ``size`` tokens: a query sees its own block, ``before`` blocks before it and ``after`` behind it.

    Without neighbours it is the block-diagonal pattern; ``Blocks(size, before=1) & Causal()`` is local attention.
    """

    size: int
    before: int = 0
    after: int = 0
    pairwise = True

    def __post_init__(self) -> None:
        at_least("Blocks", size=self.size)
        at_least("Blocks", 0, before=self.before, after=self.after)

    def sees(self, at: Place) -> Tensor:
        ahead = at.key // self.size - at.query // self.size
        return (ahead >= -self.before) & (ahead <= self.after)

    def candidates(self, geometry: Geometry) -> Candidates:
        def keys(queries: NDArray[np.int64]) -> range:
            first, last = int(queries[0]) // self.size, int(queries[-1]) // self.size
            return range(max(0, first - self.before) * self.size, (last + self.after + 1) * self.size)

        return Candidates(keys, block=self.size)

    def decides(self, queries: tuple[int, int], keys: tuple[int, int]) -> bool | None:
        (q0, q1), (k0, k1) = ((a // self.size, b // self.size) for a, b in (queries, keys))
        if k1 < q0 - self.before or k0 > q1 + self.after:
            return False
        return True if k0 >= q1 - self.before and k1 <= q0 + self.after else None


@dataclass(frozen=True)
class Columns(Pattern):
    """The last ``columns`` tokens of every block of ``size`` are seen by all: the summaries of :class:`Fixed`."""

    size: int
    columns: int
    pairwise = True

    def __post_init__(self) -> None:
        _check_columns("Columns", self.size, self.columns)

    def sees(self, at: Place) -> Tensor:
        return at.key % self.size >= self.size - self.columns

    def candidates(self, geometry: Geometry) -> Candidates:
        positions = np.arange(geometry.first_key, geometry.stop)
        chosen = positions[positions % self.size >= self.size - self.columns]
        return Candidates(lambda _: chosen)


@dataclass(frozen=True)
class Strided(Pattern):
    """A query sees the last ``stride`` keys and every ``stride``-th one before: j <= i and (i - j < stride or
    (i - j) mod stride = 0).

    Source: Child et al. 2019 (Sparse Transformer), arXiv 1904.10509.
    """

    stride: int

    def __post_init__(self) -> None:
        at_least("Strided", stride=self.stride)

    def alternatives(self) -> tuple[tuple[Pattern, ...], ...]:
        return (Window.last(self.stride),), (Window(None, 0, self.stride),)


@dataclass(frozen=True)
class Fixed(Pattern):
    """A query sees its own block of ``size`` up to itself, and the last ``columns`` tokens of all blocks before it.

    Source: Child et al. 2019 (Sparse Transformer), arXiv 1904.10509.
    """

    size: int
    columns: int = 1

    def __post_init__(self) -> None:
        _check_columns("Fixed", self.size, self.columns)

    def alternatives(self) -> tuple[tuple[Pattern, ...], ...]:
        return intersection((Either((Blocks(self.size), Columns(self.size, self.columns))), Causal()))


@dataclass(frozen=True)
class _Chosen(Pattern):
    """Keys, or queries, at chosen positions; not ``exact``: some rows have others, at these positions too."""

    positions: tuple[int, ...] | range
    of_keys: bool
    exact: bool = True
    pairwise = True

    def sees(self, at: Place) -> Tensor:
        where = at.key if self.of_keys else at.query
        if not where.dim():  # one of the pairs of a function that torch maps over all of them
            table = torch.tensor(self.positions, dtype=where.dtype, device=where.device)
            return (where == table).any()
        return torch.isin(where, torch.tensor(self.positions, dtype=where.dtype, device=where.device))

    def candidates(self, geometry: Geometry) -> Candidates:
        if self.of_keys:
            known = self.positions
            chosen = known if isinstance(known, range) else np.array(known, dtype=np.int64)
            return Candidates(lambda _: chosen)
        return Candidates(lambda _: range(geometry.first_key, geometry.stop), queries=tuple(self.positions))


@dataclass(frozen=True, eq=False)
class _ChosenInRows(Pattern):
    """The same with positions of their own for each batch row: ``[B, G]``, ``NONE`` for none."""

    table: Tensor
    of_keys: bool
    per_row = True

    def sees(self, at: Place) -> Tensor:
        where = at.key if self.of_keys else at.query
        table = self.table.to(where.device)[at.row.flatten()]
        return (where.unsqueeze(-1) == table[:, None, None, None, :]).any(-1)

    def plain(self) -> Pattern:
        return _Chosen(tuple(sorted({p for p in self.table.flatten().tolist() if p >= 0})), self.of_keys, exact=False)

    def in_row(self, row: int) -> Pattern:
        return _Chosen(tuple(sorted({p for p in self.table[row].tolist() if p >= 0})), self.of_keys)


@dataclass(frozen=True, eq=False)
class Global(Pattern):
    """Global tokens: they see every token, and every token sees them.

    Args:
        positions: where they stand, the same in every row; integers of 0 or more, any sequence. Default (0,).
        mask: in place of positions: boolean ``[B, L]``, True for a global token of this call's keys. Not with states
            or Documents.
        see: whether global tokens see all keys. Default True.
        seen: whether all queries see global tokens. Default True.

    ``Window(w, w) | Global((0,))`` is the pattern of Longformer, see :class:`Longformer`. Source: Beltagy et al. 2020,
    arXiv 2004.05150.
    """

    positions: Sequence[int] = (0,)
    mask: Tensor | None = None
    see: bool = True
    seen: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", _positions("Global", self.positions, self.mask))
        if not (self.see or self.seen):
            raise InvalidArgument("Global: with see=False and seen=False no pair is visible; leave one of them True.")

    def alternatives(self) -> tuple[tuple[Pattern, ...], ...]:
        if self.mask is not None:
            raise InvalidArgument(
                "Global: mask= marks tokens of a call and can only be read in one; give positions= instead."
            )
        positions = tuple(sorted(set(self.positions)))
        return tuple((_Chosen(positions, keys),) for keys, wanted in ((True, self.seen), (False, self.see)) if wanted)

    @property
    def ends(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None if self.mask is None else "marks the tokens of one call"

    @property
    def per_row(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.mask is not None

    @property
    def rows(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None if self.mask is None else self.mask.shape[0]

    def planned(self) -> Pattern:
        if self.mask is None:
            return self
        return replace(self, positions=tuple(self.mask.any(0).nonzero().flatten().tolist()), mask=None)

    def laid(self, key_rank: Tensor, key_valid: Tensor | None) -> Pattern:
        if self.mask is None:
            return self
        if self.mask.shape[1] != key_rank.shape[1]:
            raise InvalidArgument(
                f"Global: mask is {list(self.mask.shape)}, but there are {key_rank.shape[1]} keys in this call."
            )
        mask = self.mask.to(key_rank.device)
        mask = mask if key_valid is None else mask & key_valid
        ranks = key_rank.expand(mask.shape)
        if bool((mask == mask[:1]).all()) and bool((ranks == ranks[:1]).all()):
            return replace(self, positions=tuple(ranks[0][mask[0]].tolist()), mask=None)
        most = max(1, int(mask.sum(1).max()))
        table = ranks.masked_fill(~mask, NONE).sort(1, descending=True).values[:, :most]
        kinds = tuple(_ChosenInRows(table, keys) for keys, wanted in ((True, self.seen), (False, self.see)) if wanted)
        return kinds[0] if len(kinds) == 1 else Either(kinds)

    def __str__(self) -> str:
        what = "mask" if self.mask is not None else str(self.positions)
        return f"Global({what}{'' if self.see else ', see=False'}{'' if self.seen else ', seen=False'})"


@dataclass(frozen=True, eq=False)
class Longformer(Pattern):
    """A window of ``window // 2`` tokens on either side, and global tokens.

    Args:
        window: the whole width, even, as in the published models (their configuration's ``attention_window``).
        positions, mask: the global tokens, as of :class:`Global`. Default: none.

    :class:`mercer.nn.LongformerAttention` gives global tokens projections of their own. Source: Beltagy et al. 2020,
    arXiv 2004.05150.
    """

    window: int
    positions: Sequence[int] = ()
    mask: Tensor | None = None

    def __post_init__(self) -> None:
        at_least("Longformer", 2, window=self.window)
        if self.window % 2:
            raise InvalidArgument(f"Longformer: window is the whole width and must be even, not {self.window}.")
        object.__setattr__(self, "positions", _positions("Longformer", self.positions, self.mask))

    def alternatives(self) -> tuple[tuple[Pattern, ...], ...]:
        side = Window(self.window // 2, self.window // 2)
        known = Global(self.positions, self.mask).alternatives() if self.positions or self.mask is not None else ()
        return ((side,), *known)

    @property
    def ends(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None if self.mask is None else "marks the tokens of one call"

    @property
    def per_row(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.mask is not None

    @property
    def rows(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return None if self.mask is None else self.mask.shape[0]

    def planned(self) -> Pattern:
        if self.mask is None:
            return self
        return Longformer(self.window, tuple(self.mask.any(0).nonzero().flatten().tolist()))

    def laid(self, key_rank: Tensor, key_valid: Tensor | None) -> Pattern:
        if self.mask is None:
            return self
        side = Window(self.window // 2, self.window // 2)
        return Either((side, Global(mask=self.mask).laid(key_rank, key_valid)))

    def __str__(self) -> str:
        what = "mask" if self.mask is not None else str(self.positions)
        return f"Longformer({self.window}, {what})"


@dataclass(frozen=True, eq=False)
class Prefix(Pattern):
    """Every query sees the first ``length`` tokens: an integer, or integers ``[B]``, one for each batch row."""

    length: int | Tensor
    rows: int | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        _check_prefix("Prefix", self.length)
        object.__setattr__(self, "rows", len(self.length) if isinstance(self.length, Tensor) else None)
        if isinstance(self.length, Tensor) and bool((self.length == self.length[:1]).all()):
            object.__setattr__(self, "length", int(self.length[0]) if len(self.length) else 0)

    @property
    def per_row(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return isinstance(self.length, Tensor)

    @property
    def pairwise(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.per_row

    def __eq__(self, other: object) -> bool:
        both = (self.length, other.length) if isinstance(other, Prefix) else (self.length, None)
        return self is other or (isinstance(both[0], int) and isinstance(both[1], int) and both[0] == both[1])

    def __hash__(self) -> int:
        return hash(("Prefix", self.longest))

    @property
    def longest(self) -> int:
        """The longest prefix of any row."""
        return int(self.length.max()) if isinstance(self.length, Tensor) else self.length

    def plain(self) -> Pattern:
        return _Chosen(range(self.longest), True, exact=False) if self.per_row else self

    def in_row(self, row: int) -> Pattern:
        return Prefix(int(self.length[row])) if isinstance(self.length, Tensor) else self

    def sees(self, at: Place) -> Tensor:
        if not isinstance(self.length, Tensor):
            return at.key < self.length
        return at.key < self.length.to(at.key.device)[at.row.flatten()].view(-1, 1, 1, 1)

    def candidates(self, geometry: Geometry) -> Candidates:
        return Candidates(lambda _: range(self.longest))

    def decides(self, queries: tuple[int, int], keys: tuple[int, int]) -> bool | None:
        if keys[0] >= self.longest:
            return False
        return True if not self.per_row and keys[1] < self.longest else None

    def __str__(self) -> str:
        return f"Prefix({'lengths' if self.per_row else self.length})"


@dataclass(frozen=True, eq=False)
class PrefixLM(Pattern):
    """Causal, but the first ``length`` tokens see each other: an integer, or integers ``[B]``.

    Source: Raffel et al. 2020 (T5), arXiv 1910.10683.
    """

    length: int | Tensor

    def __post_init__(self) -> None:
        _check_prefix("PrefixLM", self.length)

    @property
    def per_row(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Prefix(self.length).per_row

    @property
    def rows(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Prefix(self.length).rows

    def alternatives(self) -> tuple[tuple[Pattern, ...], ...]:
        return *Causal().alternatives(), (Prefix(self.length),)

    def __str__(self) -> str:
        return f"PrefixLM({'lengths' if isinstance(self.length, Tensor) else self.length})"


@dataclass(frozen=True)
class Visible(Pattern):
    """A function of one's own: ``function(row, head, query, key)`` says whether a query sees a key.

    Args:
        function: gets four integer tensors that broadcast to ``[batch, heads, queries, keys]``: batch rows, query
            heads, and positions of queries and keys; returns a boolean tensor that broadcasts to the same. It must
            depend on nothing else: where its answer has one row and one head, it is asked once for each length and
            remembered with the function itself. What no query of a tile sees is not computed; all pairs are asked.
        name: for messages.
        rows_alike: refuse answers that depend on the row. Always so with Documents, whose rows it cannot tell apart.
    """

    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    name: str = "function"
    rows_alike: bool = False
    asks = True
    pairwise = True

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise InvalidArgument(
                f"Visible: function must be one of (row, head, query, key), not {type(self.function).__name__}; a "
                "tensor over all pairs is a Mask."
            )

    def sees(self, at: Place) -> Tensor:
        found = self.function(at.row, at.head, at.query, at.key)
        if not at.query.dim():
            return found
        full = (at.row.shape[0], at.head.shape[1], at.query.shape[2], at.key.shape[3])
        fits = isinstance(found, Tensor) and found.dtype == torch.bool and found.dim() <= 4  # pyright: ignore[reportUnnecessaryIsInstance]
        if fits:
            shape = (1,) * (4 - found.dim()) + tuple(found.shape)
            fits = all(n in (1, m) for n, m in zip(shape, full, strict=True))
            found = found.view(shape)
        if not fits:
            what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else repr(found)  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(
                f"Visible: {self.name} must return a boolean tensor that broadcasts to [batch, heads, queries, keys] = "
                f"{list(full)}, not {what}."
            )
        if self.rows_alike and found.shape[0] > 1 and self._tells_rows_apart(at):
            raise InvalidArgument(f"Visible: with Documents {self.name} must not depend on the batch row.")
        return found

    def _tells_rows_apart(self, at: Place) -> bool:
        """Whether the answer for one and the same pair of positions has a batch row of its own."""
        found = self.function(at.row, at.head, at.query[:1, :, :1], at.key[:1, :, :, :1])
        return found.dim() == 4 and found.shape[0] > 1

    def in_documents(self) -> Pattern:
        return replace(self, rows_alike=True)

    def candidates(self, geometry: Geometry) -> Candidates:
        return Candidates(lambda _: range(geometry.first_key, geometry.stop))

    def __str__(self) -> str:
        return f"Visible({self.name})"


def _check_columns(where: str, size: int, columns: int) -> None:
    at_least(where, size=size, columns=columns)
    if columns > size:
        raise InvalidArgument(f"{where}: columns must be {size} (the block's size) or less, not {columns}.")


def _check_prefix(where: str, length: object) -> None:
    if isinstance(length, Tensor):
        whole = not (length.is_floating_point() or length.is_complex() or length.dtype == torch.bool)
        fits = length.dim() == 1 and whole and not bool((length < 0).any())
    else:
        fits = isinstance(length, int) and not isinstance(length, bool) and length >= 0
    if not fits:
        raise InvalidArgument(
            f"{where}: length must be an integer of 0 or more, or a tensor of one for each batch row, not {length!r}."
        )


def _positions(where: str, positions: object, mask: object) -> tuple[int, ...]:
    """Positions of global tokens as a tuple, where no mask stands for them."""
    if mask is not None and not (isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() == 2):
        raise InvalidArgument(f"{where}: mask must be a boolean [batch, length] tensor (True = a global token).")
    listed: Any = positions.tolist() if isinstance(positions, Tensor) else positions
    found: tuple[Any, ...] = tuple(listed) if isinstance(listed, Iterable) else (None,)
    if mask is None and not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in found):
        raise InvalidArgument(
            f"{where}: positions must be integers of 0 or more, such as (0,), not {positions!r}; a boolean "
            "[batch, length] tensor of global tokens is given as mask=."
        )
    return found
