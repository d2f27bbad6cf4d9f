"""A structure laid over concrete tensors: positions, validity and log-weights as one-dimensional vectors.

Every structure reduces to a handful of vectors over queries and over keys; a tile of the visibility mask or of the
bias is made from slices of them, so nothing of size Lq x Lk exists unless a form asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from mercer.core.merged import Merged
from mercer.core.places import Index, Place
from mercer.core.structures import Pattern, intersection, union
from mercer.errors import InvalidArgument


@dataclass(frozen=True, eq=False)
class Tokens:
    """What a call's own tokens are, before any past: validity, rank among the valid ones, and cumulative log-decay.

    Shapes: ``b`` is 1 or the batch size, ``h`` 1 or the number of query heads.
    """

    key_valid: Tensor | None  # [b, Lk] bool
    query_valid: Tensor | None  # [b, Lq] bool
    key_rank: Tensor  # [b, Lk] int64: position among valid keys of this call
    query_rank: Tensor  # [b, Lq] int64: the same scale, bottom-right aligned
    count: Tensor  # [b] int64: valid keys
    key_log: Tensor | None  # [b, h, Lk] float64: cumulative log-decay after each key's own step
    query_log: Tensor | None  # [b, h, Lq] float64
    key_weight: Tensor | None = None  # [b, h, Lk] float64: what each key's own contribution is multiplied by
    batch: int = 1
    heads: int = 1  # of queries


@dataclass(frozen=True, eq=False)
class PastKeys:
    """What a layout must know of cached keys."""

    position: Tensor  # [b, Lp] int64
    valid: Tensor | None  # [b, Lp] bool; without it the kept keys are an unbroken run up to the newest token
    count: Tensor  # [b] int64: real tokens absorbed so far (more than are kept under a window)
    log: Tensor | None  # [b, h, Lp] float64: cumulative log-decay, 0 at the newest token, less the key's log-weight


@dataclass(frozen=True, eq=False)
class Layout:
    """Queries against all keys they may see, past ones included."""

    query_position: Tensor  # [b, Lq]
    key_position: Tensor  # [b, Lk]
    query_valid: Tensor | None
    key_valid: Tensor | None
    query_document: Tensor | None  # [Lq]
    key_document: Tensor | None
    left: int | None
    right: int | None
    slopes: Tensor | None  # [Hq], what a pair loses for each step between; or [Hq, n], log-weights by distance
    query_log: Tensor | None  # [b, Hq or 1, Lq] float64
    key_log: Tensor | None
    offset: int | None
    """If every position is just its index, the position of query 0 on the scale of the keys; else None."""
    patterns: tuple[Pattern, ...] = ()
    """What must show a pair beside the band from left to right."""
    weighing: tuple[Pattern, ...] = ()
    """Those that also weigh pairs."""
    total: Tensor | None = None
    """Real tokens in all of each query's sequence, ``[b, 1]`` or, in packed documents, ``[b, Lq]``; with patterns."""
    batch: int = 1
    heads: int = 1
    before: int = 0
    """The distance of the first entry of log-weights by distance."""
    pair_mask: Tensor | None = None
    """Which pairs are visible, ``[b, h, Lq, Lk]``, beside all else."""
    pair_log: Tensor | None = None
    """Log-weights of pairs, ``[b, h, Lq, Lk]``, added to all else."""

    @property
    def query_length(self) -> int:
        return self.query_position.shape[1]

    @property
    def key_length(self) -> int:
        return self.key_position.shape[1]

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """A key range that holds every key visible to queries ``start`` .. ``stop - 1`` (empty: (0, 0))."""
        if stop <= start or not self.key_length or not self.query_position.shape[0]:
            return 0, 0
        low, high = 0, self.key_length
        if self.offset is not None:
            if self.left is not None:
                low = max(0, self.offset + start - self.left)
            if self.right is not None:
                high = min(high, self.offset + stop + self.right)
        else:
            queries = self.query_position[:, start:stop]
            if self.left is not None:
                newest = self.key_position.amax(0).cpu().numpy()
                low = int(np.searchsorted(newest, int(queries.min()) - self.left, side="left"))
            if self.right is not None:
                oldest = self.key_position.amin(0).cpu().numpy()
                high = int(np.searchsorted(oldest, int(queries.max()) + self.right, side="right"))
        return (low, high) if low < high else (0, 0)

    def visible(
        self,
        queries: Index,
        keys: Index,
        rows: slice = slice(None),
        heads: slice = slice(None),
        shown: tuple[tuple[Pattern, ...], ...] | None = None,
        hidden: tuple[tuple[Pattern, ...], ...] = (),
    ) -> Tensor | None:
        """Boolean mask ``[b, h, Lq', Lk']`` of a tile (b, h may be 1), or None if all of it is visible.

        ``rows`` and ``heads`` select batch entries and query heads. ``shown`` and ``hidden`` replace the patterns and
        the band by some of their alternatives, less others.
        """
        patterned, given = (
            bool(self.patterns) or shown is not None,
            self.given(self.pair_mask, queries, keys, rows, heads),
        )
        if self.offset is not None and self.query_document is None and not patterned and given is None:
            assert isinstance(queries, slice)
            assert isinstance(keys, slice)
            first, last = self.offset + queries.start, self.offset + queries.stop - 1
            if (self.right is None or keys.stop - 1 <= first + self.right) and (
                self.left is None or keys.start >= last - self.left
            ):
                return None
        if self.offset is not None and not patterned:
            rows = slice(0, 1)  # rows of different pasts differ in their positions but not in their distances
        q = _rows(self.query_position, rows)[:, queries].unsqueeze(2)
        k = _rows(self.key_position, rows)[:, keys].unsqueeze(1)
        mask: Tensor | None = None
        if self.right is not None and shown is None:
            mask = k <= q + self.right
        if self.left is not None and shown is None:
            near = k >= q - self.left
            mask = near if mask is None else mask & near
        for valid, at, dim in ((self.query_valid, queries, 2), (self.key_valid, keys, 1)):
            if valid is not None:
                part = _rows(valid, rows)[:, at].unsqueeze(dim)
                mask = part if mask is None else mask & part
        if self.query_document is not None:
            assert self.key_document is not None
            same = (self.query_document[queries].unsqueeze(1) == self.key_document[keys].unsqueeze(0)).unsqueeze(0)
            mask = same if mask is None else mask & same
        mask = None if mask is None else mask.unsqueeze(1)
        if patterned:
            place = self.place(queries, keys, rows, heads)
            seen = union(intersection(self.patterns) if shown is None else shown, place)
            if hidden:
                seen = seen & ~union(hidden, place)
            mask = seen if mask is None else mask & seen
        return mask if given is None else given if mask is None else mask & given

    def given(self, pairs: Tensor | None, queries: Index, keys: Index, rows: slice, heads: slice) -> Tensor | None:
        """A tile ``[b, h, Lq', Lk']`` of what is said pair by pair."""
        return None if pairs is None else _heads(_rows(pairs, rows), heads)[:, :, queries][..., keys]

    def place(self, queries: Index, keys: Index, rows: slice = slice(None), heads: slice = slice(None)) -> Place:
        """Where the queries and keys of a tile stand."""
        device = self.query_position.device
        total = self.total if self.total is not None else self.key_position.new_full((1, 1), self.key_length)
        total = total[:, queries] if total.shape[1] > 1 else total
        return Place(
            _rows(self.query_position, rows)[:, None, queries].unsqueeze(3),
            _rows(self.key_position, rows)[:, keys][:, None, None],
            _rows(total, rows)[:, None, :, None],
            torch.arange(self.batch, device=device)[rows].view(-1, 1, 1, 1),
            torch.arange(self.heads, device=device)[heads].view(1, -1, 1, 1),
        )

    def distance(self, queries: Index, keys: Index, rows: slice = slice(None)) -> Tensor:
        """|position difference| of a tile, ``[b, Lq', Lk']`` int64: exact in every dtype of the scores."""
        query, key = (_rows(x, rows)[:, at] for x, at in ((self.query_position, queries), (self.key_position, keys)))
        return (query.unsqueeze(2) - key.unsqueeze(1)).abs()

    def entry(self, queries: Index, keys: Index, rows: slice = slice(None)) -> Tensor:
        """Which entry of log-weights by distance each pair of a tile has, ``[b, Lq', Lk']`` int64."""
        assert self.slopes is not None
        query, key = (_rows(x, rows)[:, at] for x, at in ((self.query_position, queries), (self.key_position, keys)))
        ahead = key.unsqueeze(1) - query.unsqueeze(2)
        return (ahead + self.before).clamp_(0, self.slopes.shape[1] - 1)

    def bias(self, queries: Index, keys: Index, rows: slice, heads: slice, dtype: torch.dtype) -> Tensor | None:
        """Log-weights of a tile, ``[b, h, Lq', Lk']`` (b, h may be 1), or None if all are 0."""
        total: Tensor | None = None
        if self.slopes is not None and self.slopes.dim() == 2:
            total = self.slopes[heads].to(dtype)[:, self.entry(queries, keys, rows)].transpose(0, 1)
        elif self.slopes is not None:
            slopes = self.slopes[heads].to(dtype)
            total = slopes.view(1, -1, 1, 1) * self.distance(queries, keys, rows).unsqueeze(1).to(dtype).neg_()
        if self.query_log is not None:
            assert self.key_log is not None
            q = _heads(_rows(self.query_log, rows), heads)[:, :, queries]
            k = _heads(_rows(self.key_log, rows), heads)[:, :, keys]
            # Differences of cumulative sums in float64: no digit of the float32 result is lost even after 10^6 steps.
            decay = (q.unsqueeze(-1) - k.unsqueeze(-2)).clamp_(max=0).to(dtype)
            total = decay if total is None else total + decay
        for pattern in self.weighing:
            weight = pattern.log_weight(self.place(queries, keys, rows, heads))
            if weight is not None:
                total = weight.to(dtype) if total is None else total + weight.to(dtype)
        given = self.given(self.pair_log, queries, keys, rows, heads)
        if given is not None:
            total = given.to(dtype, copy=True) if total is None else total + given.to(dtype)
        return total


def tokens(
    merged: Merged,
    batch: int,
    query_heads: int,
    key_heads: int,
    query_length: int,
    key_length: int,
    device: torch.device,
) -> Tokens:
    """Lay a structure over a call's own tokens."""
    few = max(query_length, key_length) <= _FEW and not torch.compiler.is_compiling()
    if few and merged.padding is None and merged.documents is None and merged.decay is None:
        return _in_order(batch, query_heads, query_length, key_length, device)
    key_valid, query_valid = _validity(merged, batch, query_length, key_length, device)
    shift = key_length - query_length
    if key_valid is None:
        key_rank = torch.arange(key_length, device=device).unsqueeze(0)
        count = torch.full((1,), key_length, device=device)
        query_rank = torch.arange(shift, key_length, device=device).unsqueeze(0)
    else:
        key_rank = key_valid.cumsum(1) - 1
        count = key_valid.sum(1)
        if query_valid is None:
            query_rank = (count - query_length).unsqueeze(1) + torch.arange(query_length, device=device)
        else:
            query_rank = query_valid.cumsum(1) - 1 + (count - query_valid.sum(1)).unsqueeze(1)
    if merged.documents is not None:
        if query_length != key_length:
            raise InvalidArgument(
                f"Documents: queries and keys must be the same tokens, but there are {query_length} and {key_length}."
            )
        bounds = merged.documents.bounds(key_length)
        starts = torch.tensor(bounds[:-1], device=device).repeat_interleave(
            torch.tensor(np.diff(bounds), device=device)
        )
        key_rank = query_rank = key_rank - starts
    key_log = query_log = None
    if merged.decay is not None:
        key_log = _cumulative_log(merged, batch, query_heads, key_heads, key_length, key_valid)
        pad = max(0, -shift)
        query_log = torch.nn.functional.pad(key_log, (pad, 0))[..., key_length + pad - query_length :]
    weight = _complement(merged, query_heads, key_heads, key_length)
    return Tokens(key_valid, query_valid, key_rank, query_rank, count, key_log, query_log, weight, batch, query_heads)


_FEW = 16


@lru_cache(maxsize=64)
def _in_order(batch: int, query_heads: int, query_length: int, key_length: int, device: torch.device) -> Tokens:
    """A few tokens that all are real: made once, since steps of decoding ask for the same at every token."""
    with torch.inference_mode(False):
        key_rank = torch.arange(key_length, device=device).unsqueeze(0)
        query_rank = torch.arange(key_length - query_length, key_length, device=device).unsqueeze(0)
        count = torch.full((1,), key_length, device=device)
    return Tokens(None, None, key_rank, query_rank, count, None, None, None, batch, query_heads)


def layout(merged: Merged, own: Tokens, past: PastKeys | None = None) -> Layout:
    """The layout of queries against this call's keys, with the keys of a cache before them."""
    for pattern in merged.patterns:
        if pattern.rows not in (None, own.batch):
            raise InvalidArgument(
                f"{pattern} is given for {pattern.rows} batch rows, but this call has {own.batch}: give one row each."
            )
    query_position, key_position, key_valid = own.query_rank, own.key_rank, own.key_valid
    query_log, key_log = own.query_log, own.key_log
    if key_log is not None and own.key_weight is not None:
        zero = own.key_weight == 0
        log_weight = own.key_weight.masked_fill(zero, 1).log().masked_fill(zero, -torch.inf)
        key_log = key_log - log_weight
    plain = key_valid is None and own.query_valid is None and merged.documents is None
    offset = own.key_rank.shape[1] - own.query_rank.shape[1] if plain else None
    if past is not None:
        seen = past.count.unsqueeze(1)
        key_position = _join(past.position, key_position + seen)
        query_position = query_position + seen
        if past.valid is not None or key_valid is not None:
            ones = [torch.ones_like(p, dtype=torch.bool) for p in (past.position, own.key_rank)]
            key_valid = _join(
                past.valid if past.valid is not None else ones[0], key_valid if key_valid is not None else ones[1]
            )
            offset = None
        elif offset is not None:
            offset += past.position.shape[1]
        if key_log is not None:
            assert past.log is not None
            key_log = _join(past.log, key_log)
    document = None
    if merged.documents is not None:
        bounds = merged.documents.bounds(own.key_rank.shape[1])
        device = own.key_rank.device
        document = torch.arange(len(bounds) - 1, device=device).repeat_interleave(
            torch.tensor(np.diff(bounds), device=device)
        )
    return Layout(
        query_position=query_position,
        key_position=key_position,
        query_valid=own.query_valid,
        key_valid=key_valid,
        query_document=document,
        key_document=document,
        left=merged.left,
        right=merged.right,
        slopes=merged.alibi.slopes if merged.alibi is not None else _table(merged),
        query_log=query_log,
        key_log=key_log,
        offset=offset,
        patterns=tuple(p.laid(own.key_rank, own.key_valid) for p in merged.patterns),
        weighing=tuple(p for p in merged.patterns if p.weighs),
        total=_totals(merged, own, past) if merged.patterns else None,
        batch=own.batch,
        heads=own.heads,
        before=0 if merged.relative is None else merged.relative.before,
        pair_mask=None if merged.mask is None else merged.mask.tensor,
        pair_log=None if merged.bias is None else merged.bias.tensor,
    )


def _table(merged: Merged) -> Tensor | None:
    """Log-weights by distance, ``[Hq, n]``, in a dtype whose sums can take the gradients of many pairs."""
    if merged.relative is None:
        return None
    table = merged.relative.table
    return table.to(torch.promote_types(table.dtype, torch.float32))


def _totals(merged: Merged, own: Tokens, past: PastKeys | None) -> Tensor:
    """Real tokens in all of each query's sequence, ``[b, 1]``, or ``[1, Lq]`` in packed documents."""
    if merged.documents is not None:
        sizes = torch.tensor(np.diff(merged.documents.bounds(own.key_rank.shape[1])), device=own.key_rank.device)
        return sizes.repeat_interleave(sizes).unsqueeze(0)
    total = own.count.unsqueeze(1)
    return total if past is None else total + past.count.unsqueeze(1)


def with_weights(
    plan: Layout,
    slopes: Tensor | None,
    query_log: Tensor | None,
    key_log: Tensor | None,
    pair_log: Tensor | None,
) -> Layout:
    """The same layout with other log-weight tensors (what an autograd function received)."""
    return replace(plan, slopes=slopes, query_log=query_log, key_log=key_log, pair_log=pair_log)


def _validity(
    merged: Merged, batch: int, query_length: int, key_length: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    padding = merged.padding
    if padding is None:
        return None, None
    if padding.lengths is not None:
        lengths = padding.lengths.to(device)
        if lengths.shape != (batch,):
            raise InvalidArgument(
                f"Padding: lengths must have one entry per batch row, [{batch}], not {list(lengths.shape)}."
            )
        # A compiler has no values to look at.
        if not torch.compiler.is_compiling() and bool(((lengths < 0) | (lengths > key_length)).any()):
            raise InvalidArgument(f"Padding: lengths must lie between 0 and the key length {key_length}.")
        valid = torch.arange(key_length, device=device) < lengths.unsqueeze(1)
    else:
        assert padding.mask is not None
        valid = padding.mask.to(device)
        if valid.shape != (batch, key_length):
            raise InvalidArgument(
                f"Padding: mask must be [batch, key length] = [{batch}, {key_length}], not {list(valid.shape)}."
            )
    if padding.queries is not None:
        queries = padding.queries.to(device)
        if queries.shape != (batch, query_length):
            raise InvalidArgument(
                f"Padding: queries must be [batch, query length] = [{batch}, {query_length}], not "
                f"{list(queries.shape)}."
            )
        return valid, queries
    if not merged.ordered:
        return valid, None
    if query_length <= key_length:
        return valid, valid[:, key_length - query_length :]
    return valid, torch.nn.functional.pad(valid, (query_length - key_length, 0), value=True)


def _cumulative_log(
    merged: Merged, batch: int, query_heads: int, key_heads: int, key_length: int, valid: Tensor | None
) -> Tensor:
    assert merged.decay is not None
    logs = merged.decay.logs()
    if logs.shape[1] not in (1, key_heads, query_heads):
        raise InvalidArgument(
            f"Decay: {logs.shape[1]} heads given; allowed are 1, {key_heads} (key heads) or {query_heads} (query "
            "heads)."
        )
    if merged.decay.per_token and (logs.shape[0] != batch or logs.shape[-1] != key_length):
        raise InvalidArgument(
            f"Decay: per-token rates must be [{batch}, heads, {key_length}] (batch, heads, key length), not "
            f"{list(logs.shape)}."
        )
    logs = logs.expand(-1, -1, key_length)
    if logs.shape[1] not in (1, query_heads):
        logs = logs.repeat_interleave(query_heads // key_heads, dim=1)
    if valid is not None:
        logs = torch.where(valid.unsqueeze(1), logs, 0.0)
    return logs.cumsum(-1)


def _complement(merged: Merged, query_heads: int, key_heads: int, key_length: int) -> Tensor | None:
    """1 - rate of each token, ``[b, h, Lk]``, where the decay asks for it."""
    if merged.decay is None or not merged.decay.complement:
        return None
    weight = -torch.expm1(merged.decay.logs()).expand(-1, -1, key_length)
    return weight if weight.shape[1] in (1, query_heads) else weight.repeat_interleave(query_heads // key_heads, dim=1)


def _join(past: Tensor, new: Tensor) -> Tensor:
    """Concatenate along the last dimension, expanding leading dimensions of size 1."""
    lead = torch.broadcast_shapes(past.shape[:-1], new.shape[:-1])
    return torch.cat((past.expand(*lead, -1), new.expand(*lead, -1)), -1)


def _rows(x: Tensor, rows: slice) -> Tensor:
    return x if x.shape[0] == 1 else x[rows]


def _heads(x: Tensor, heads: slice) -> Tensor:
    return x if x.shape[1] == 1 else x[:, heads]
