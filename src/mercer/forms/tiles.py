"""The chunked form over pairs: tiles of scores, any kernel and any structure, memory linear in the length.

Forward, for each tile of queries: over tiles of the keys they can see, scores are made, weighted and summed; an
exponential kernel keeps a running maximum and is left scaled by exp(-l), l the log-sum-exp of its row. Backward the
scores are made again, tile by tile, so nothing of size Lq x Lk is ever stored. With w the weight of a pair and u, d
the numerator and denominator of a row,

    dw = <du, v> + dd        dv += w du        ds = dw * (w if exponential, else exp(bias) f'(s))        dbias = w dw

Workspaces are allocated once a call and used by every tile. Where the structure is more than a band of distances the
tiles are those of its schedule (:mod:`mercer.core.schedule`), whose queries and keys need not be neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mercer.core.first_order import DENSE, first_order
from mercer.core.kernels import Kernel
from mercer.core.layout import Layout, with_weights
from mercer.core.places import Geometry, Index, firsts
from mercer.core.schedule import CHUNK, schedule
from mercer.core.structures import Window, intersection
from mercer.forms.slabs import Keys, Slab, TileOf

ROWS = 64
"""Queries per tile."""
COLUMNS = 2048
"""Keys per tile."""
WORKSPACE = 2 * 2**20
"""Bytes of scores that are worked on at once: heads and batch rows are taken together until they fill it."""

LOG2_E, LN_2 = 1 / math.log(2), math.log(2)


def tiles(
    query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, layout: Layout, needs_denominator: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Numerator ``[B, Hq, Lq, Dv]``, denominator ``[B, Hq, Lq]`` if needed, and log row factor ``[B, Hq, Lq]`` for
    exponential kernels.
    """
    numerator, denominator, factor = _Tiles.apply(  # pyright: ignore[reportGeneralTypeIssues]
        query,
        key,
        value,
        layout.slopes,
        layout.query_log,
        layout.key_log,
        layout.pair_log,
        kernel,
        layout,
        needs_denominator,
    )
    return numerator, denominator if needs_denominator else None, factor if kernel.exponential else None


class _Run:
    """What forward and backward share: how a call is cut, and how the weights of a tile are made."""

    def __init__(self, query: Tensor, key: Tensor, kernel: Kernel, layout: Layout) -> None:
        self.query, self.key, self.kernel, self.layout = query, key, kernel, layout
        self.buffers: dict[str, Tensor] = {}
        self.masks: dict[object, Tensor | None] = {}
        self.band = not layout.patterns
        if not self.band:
            self.terms = intersection((*layout.patterns, Window(layout.left, layout.right)))
            self.first_query = firsts(layout.query_position, layout.query_valid)
            self.first_key = firsts(layout.key_position, layout.key_valid)
            self.by_row = len({*self.first_query} - {None}) > 1 or len({*self.first_key} - {None}) > 1
            self.by_head = any(p.per_head for p in layout.patterns)

    def slabs(self) -> Iterator[Slab]:
        batch, heads = self.key.shape[:2]
        groups = self.query.shape[1] // heads
        columns = min(COLUMNS if self.band else CHUNK, self.key.shape[2])  # sparse tiles are seldom wider
        tile = groups * min(ROWS, self.query.shape[2]) * columns * self.query.element_size()
        together = max(1, WORKSPACE // max(tile, 1))
        if not self.band and self.by_head:
            together = 1
        if together >= heads and (self.band or not self.by_row):
            step = together // heads
            for start in range(0, batch, step):
                yield Slab((self.query, self.key), slice(start, min(batch, start + step)), slice(0, heads))
            return
        for row in range(batch):
            for start in range(0, heads, together):
                yield Slab((self.query, self.key), slice(row, row + 1), slice(start, min(heads, start + together)))

    def tiles(self, slab: Slab) -> Iterator[TileOf]:
        """The tiles of a slab that hold anything visible."""
        if not self.band:
            for tile in schedule(self.terms, self.geometry(slab)).tiles:
                yield TileOf(tile.queries, [Keys(k.at, k.mask, k.asked) for k in tile.keys], tile.first, tile)
            return
        for start in range(0, self.query.shape[2], ROWS):
            queries = slice(start, min(start + ROWS, self.query.shape[2]))
            low, high = self.layout.span(queries.start, queries.stop)
            keys = [Keys(slice(first, min(first + COLUMNS, high))) for first in range(low, high, COLUMNS)]
            if keys:
                yield TileOf(queries, keys)

    def geometry(self, slab: Slab) -> Geometry:
        """Where the tokens of a slab stand; its rows are alike, and what is hidden stands behind the rest."""
        layout = self.layout
        heads = slab.query_heads if self.by_head else slice(0, layout.heads)
        assert layout.total is not None
        totals = layout.total[slab.rows if layout.total.shape[0] > 1 else slice(0, 1)]
        first_query, first_key = (
            next((p for p in (each[slab.rows] if len(each) > 1 else each) if p is not None), 0)
            for each in (self.first_query, self.first_key)
        )
        return Geometry(
            first_query,
            layout.query_length,
            first_key,
            layout.key_length,
            tuple(sorted(set(totals.flatten().tolist()))),
            layout.batch,
            (heads.start, heads.stop),
            layout.query_position.device,
        )

    def buffer(self, name: str, *shape: int) -> Tensor:
        """A workspace, grown when needed and reused by every tile."""
        size = 1
        for extent in shape:
            size *= extent
        flat = self.buffers.get(name)
        if flat is None or flat.numel() < size:
            flat = self.buffers[name] = self.query.new_empty(size)
        return flat[:size].view(shape)

    def add_product(self, slab: Slab, total: Tensor, at: Index, left: Tensor, right: Tensor) -> None:
        """total[keys] += left @ right. torch would run a product into a strided total one matrix at a time."""
        shape = (left.shape[0], left.shape[1], right.shape[2])
        slab.add_to_keys(total, at, torch.bmm(left, right, out=self.buffer("product", *shape)))

    def hide(self, slab: Slab, tile: TileOf, keys: Keys, weights: Tensor) -> None:
        """Zero what is hidden, in place; ``weights`` is ``[N, g tq, tk]``."""
        view = slab.by_head(weights)
        layout = self.layout
        if (
            layout.offset is not None and self.band and layout.pair_mask is None
        ):  # a band: far faster to cut than a mask is to apply
            queries, at = tile.queries, keys.at
            assert isinstance(queries, slice)
            assert isinstance(at, slice)
            diagonal = layout.offset + queries.start - at.start
            if layout.right is not None and at.stop - at.start > diagonal + layout.right + 1:
                view.tril_(diagonal + layout.right)
            if layout.left is not None and queries.stop - queries.start + diagonal > layout.left + 1:
                view.triu_(diagonal - layout.left)
            return
        hidden = self.hidden(slab, tile, keys)
        if hidden is not None and hidden.dtype == torch.bool:
            view.masked_fill_(hidden, 0)
        elif hidden is not None:
            view.mul_(hidden.exp())

    def hidden(self, slab: Slab, tile: TileOf, keys: Keys) -> Tensor | None:
        """What is hidden of a tile, or None: boolean ``[b, h, tq, tk]`` (True = hidden); or where rows do not differ 0
        and -inf ``[1, h, tq, tk]``, which is faster to apply.
        """
        layout, queries, at = self.layout, tile.queries, keys.at
        if self.band:
            if layout.offset is None or layout.pair_mask is not None:
                mask = layout.visible(queries, at, slab.rows, slab.query_heads)
                return None if mask is None else ~mask
            assert isinstance(queries, slice)
            assert isinstance(at, slice)
            # Without padding a mask depends on the tile's place relative to the diagonal alone.
            where = (queries.start - at.start, queries.stop - queries.start, at.stop - at.start)
            if where not in self.masks:
                self.masks[where] = self.additive(layout.visible(queries, at))
            return self.masks[where]
        if keys.asked:
            assert tile.made_from is not None
            shown, hidden = (
                tuple(self.terms[i] for i in terms) for terms in (tile.made_from.shown, tile.made_from.hidden)
            )
            mask = layout.visible(queries, at, slab.rows, slab.query_heads, shown, hidden)
            return None if mask is None else ~mask
        mask = keys.mask
        if mask is not None and len(mask) > 1 and not self.by_head:  # only asking told heads apart: it holds them all
            mask = mask[slab.query_heads]
        if layout.query_valid is None and layout.key_valid is None and layout.pair_mask is None:
            if mask is None:
                return None
            name = (id(keys.mask), slab.heads.start, slab.heads.stop)  # the schedule keeps equal masks once
            if name not in self.masks:
                self.masks[name] = self.additive(mask.unsqueeze(0))
            return self.masks[name]
        there = layout.visible(queries, at, slab.rows, slab.query_heads, ((),))
        mask = there if mask is None else mask if there is None else mask & there
        return None if mask is None else ~mask

    def additive(self, visible: Tensor | None) -> Tensor | None:
        """0 where visible and -inf elsewhere."""
        if visible is None:
            return None
        zeros = torch.zeros(visible.shape, dtype=self.query.dtype, device=visible.device)
        return zeros.masked_fill_(~visible, -torch.inf)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.bmm(q, k.transpose(1, 2), out=self.buffer("score", q.shape[0], q.shape[1], k.shape[1]))

    def bias(self, slab: Slab, tile: TileOf, keys: Keys, dtype: torch.dtype) -> Tensor | None:
        return self.layout.bias(tile.queries, keys.at, slab.rows, slab.query_heads, dtype)

    def logits(self, slab: Slab, tile: TileOf, keys: Keys, q: Tensor, k: Tensor) -> Tensor:
        """Scores with bias over ln 2, minus infinity where hidden: an exponential kernel's weights are 2 to this power.

        torch's exp2 is three times as fast as its exp, and a factor on q costs nothing.
        """
        score = self.scores(q * LOG2_E, k)
        view = slab.by_head(score)
        bias = self.bias(slab, tile, keys, score.dtype)
        if bias is not None:
            view.add_(bias, alpha=LOG2_E)
        hidden = self.hidden(slab, tile, keys)
        if hidden is not None:
            if hidden.dtype == torch.bool:
                view.masked_fill_(hidden, -torch.inf)
            else:
                view.add_(hidden)
        return score


def forward_tiles(
    query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, layout: Layout, needs_denominator: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What :func:`tiles` returns, without a graph: the rows of queries against the keys that ``layout`` lays out.

    Queries (mapped and scaled), keys (mapped) and values must be contiguous. A row of an exponential kernel is divided
    by exp(l), l its log-sum-exp: the log factor, 0 where nothing is seen. Without a denominator the second is zeros,
    and for other kernels the third is empty.
    """
    run = _Run(query, key, kernel, layout)
    numerator = query.new_zeros(*query.shape[:3], value.shape[-1])
    denominator = query.new_zeros(query.shape[:3])
    factor = query.new_zeros(query.shape[:3] if kernel.exponential else 0)
    sums = _exponential_rows if kernel.exponential else _plain_rows
    for slab in run.slabs():
        for tile in run.tiles(slab):
            sums(run, slab, tile, value, needs_denominator, (numerator, denominator, factor))
    return numerator, denominator, factor


def backward_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel,
    layout: Layout,
    factor: Tensor,
    grad_numerator: Tensor,
    grad_denominator: Tensor | None,
    asked: tuple[bool, bool, bool] = (False, False, False),
    pairs_asked: bool = False,
) -> Gradients:
    """Gradients of :func:`forward_tiles`.

    ``factor`` is the log factor that the rows were divided by. It may be that of all keys where these are some of
    them, so that a row's gradients can be summed over blocks of keys. ``grad_denominator`` also takes the gradient of
    the log-sum-exp, whose derivative by a score is the pair's weight too. ``asked`` says which gradients of slopes,
    query_log and key_log are wanted, ``pairs_asked`` whether that of pair_log is.
    """
    run = _Run(query, key, kernel, layout)
    grad_numerator = grad_numerator.contiguous()
    totals = Gradients(query, key, value, layout.slopes, layout.query_log, layout.key_log, asked)
    if pairs_asked and layout.pair_log is not None:
        totals.pair_log = torch.zeros_like(layout.pair_log)
    for slab in run.slabs():
        for tile in run.tiles(slab):
            _backward_rows(run, slab, tile, value, factor, grad_numerator, grad_denominator, totals)
    return totals


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        slopes: Tensor | None,
        query_log: Tensor | None,
        key_log: Tensor | None,
        pair_log: Tensor | None,
        kernel: Kernel,
        layout: Layout,
        needs_denominator: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        layout = with_weights(layout, slopes, query_log, key_log, pair_log)
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        numerator, denominator, factor = forward_tiles(query, key, value, kernel, layout, needs_denominator)
        ctx.call, ctx.needs_denominator = (kernel, with_weights(layout, None, None, None, None)), needs_denominator
        ctx.save_for_backward(query, key, value, slopes, query_log, key_log, pair_log, factor)
        ctx.mark_non_differentiable(factor)
        return numerator, denominator, factor

    @staticmethod
    @first_order(instead=DENSE)
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        query, key, value, slopes, query_log, key_log, pair_log, factor = ctx.saved_tensors
        kernel, layout = ctx.call
        layout = with_weights(layout, slopes, query_log, key_log, pair_log)
        grad_denominator = grads[1] if ctx.needs_denominator else None
        asked = ctx.needs_input_grad[3:7]
        totals = backward_tiles(
            query, key, value, kernel, layout, factor, grads[0], grad_denominator, asked[:3], asked[3]
        )
        logs = (totals.slopes, totals.query_log, totals.key_log, totals.pair_log)
        return totals.query, totals.key, totals.value, *logs, None, None, None


class Gradients:
    """Where the gradients of a call are summed; None where nobody asked."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        slopes: Tensor | None,
        query_log: Tensor | None,
        key_log: Tensor | None,
        asked: tuple[bool, bool, bool],
    ) -> None:
        self.query, self.key, self.value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        self.slopes = torch.zeros_like(slopes) if slopes is not None and asked[0] else None
        self.query_log = torch.zeros_like(query_log) if query_log is not None and asked[1] else None
        self.key_log = torch.zeros_like(key_log) if key_log is not None and asked[2] else None
        self.pair_log: Tensor | None = None

    @property
    def biased(self) -> bool:
        """Whether any gradient of a log-weight is wanted."""
        return any(x is not None for x in (self.slopes, self.query_log, self.key_log, self.pair_log))

    def add_bias(self, run: _Run, slab: Slab, queries: Index, keys: Index, tile: Tensor) -> None:
        """``tile`` is dbias, ``[b, Hq', tq, tk]``."""
        if self.slopes is not None and self.slopes.dim() == 2:
            entry, sums = run.layout.entry(queries, keys, slab.rows), self.slopes[slab.query_heads]
            parts = tile.sum(0, keepdim=True) if entry.shape[0] == 1 else tile
            for where, part in zip(entry, parts, strict=True):
                sums.index_add_(1, where.flatten(), part.flatten(1).to(sums.dtype))
        elif self.slopes is not None:
            distance = run.layout.distance(queries, keys, slab.rows).unsqueeze(1).to(tile.dtype)
            self.slopes[slab.query_heads] -= (tile * distance).sum((0, 2, 3)).to(self.slopes.dtype)
        for target, dimension, at, sign in ((self.query_log, 3, queries, 1), (self.key_log, 2, keys, -1)):
            if target is not None:
                rows = slab.rows if target.shape[0] > 1 else slice(None)
                heads = slab.query_heads if target.shape[1] > 1 else slice(None)
                view = target[rows, heads]
                size = tile.shape[2 if dimension == 3 else 3]
                part = tile.sum(dimension, dtype=target.dtype).sum_to_size(*view.shape[:2], size) * sign
                view[:, :, at] += part
        if self.pair_log is not None:
            rows = slab.rows if self.pair_log.shape[0] > 1 else slice(None)
            heads = slab.query_heads if self.pair_log.shape[1] > 1 else slice(None)
            view = self.pair_log[rows, heads]
            part = tile.sum_to_size(*view.shape[:2], *tile.shape[2:]).to(view.dtype)
            if isinstance(queries, slice) and isinstance(keys, slice):
                view[:, :, queries, keys] += part
            else:
                q, k = (
                    torch.arange(n, device=tile.device)[at]
                    for n, at in ((view.shape[2], queries), (view.shape[3], keys))
                )
                view[:, :, q.unsqueeze(1), k] += part


def _exponential_rows(
    run: _Run,
    slab: Slab,
    tile: TileOf,
    value: Tensor,
    needs_denominator: bool,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Rows of an exponential kernel: online softmax over the key tiles, left scaled by exp(-log-sum-exp)."""
    q = slab.query_side(run.query, tile.queries)
    peak = total = rows = None
    if not tile.first:  # what an earlier pass has left: rows divided by their sums, and the logarithms of these
        rows = slab.query_side(into[0], tile.queries).clone()
        total = slab.query_rows(into[1], tile.queries).clone()
        peak = (slab.query_rows(into[2], tile.queries) * LOG2_E).masked_fill_(total == 0, -torch.inf)
    for keys in tile.keys:
        score = run.logits(slab, tile, keys, q, slab.key_side(run.key, keys.at))
        highest = score.amax(-1, keepdim=True)
        if peak is not None:
            highest = torch.maximum(highest, peak)
        shift = highest.masked_fill(highest == -torch.inf, 0)
        weight = score.sub_(shift).exp2_()
        part = torch.bmm(weight, slab.key_side(value, keys.at))
        mass = weight.sum(-1, keepdim=True)
        if peak is None or rows is None or total is None:
            rows, total = part, mass
        else:
            fade = (peak - shift).exp2_()
            rows, total = rows.mul_(fade).add_(part), total.mul_(fade).add_(mass)
        peak = highest
    assert rows is not None
    assert total is not None
    assert peak is not None
    empty = total == 0
    rows.mul_(total.reciprocal().masked_fill_(empty, 0))
    slab.store(into[0], tile.queries, rows)
    slab.store(into[2], tile.queries, peak.add_(total.log2()).mul_(LN_2).masked_fill_(empty, 0))
    if needs_denominator or not run.band:
        slab.store(into[1], tile.queries, (~empty).to(rows.dtype))


def _plain_rows(
    run: _Run,
    slab: Slab,
    tile: TileOf,
    value: Tensor,
    needs_denominator: bool,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Rows of a kernel that is summed as it is."""
    q = slab.query_side(run.query, tile.queries)
    rows = total = None
    if not tile.first:
        rows = slab.query_side(into[0], tile.queries).clone()
        total = slab.query_rows(into[1], tile.queries).squeeze(-1).clone() if needs_denominator else None
    for keys in tile.keys:
        weight = run.kernel.profile(run.scores(q, slab.key_side(run.key, keys.at)))
        view = slab.by_head(weight)
        bias = run.bias(slab, tile, keys, weight.dtype)
        if bias is not None:
            view.mul_(bias.exp_())
        run.hide(slab, tile, keys, weight)
        v = slab.key_side(value, keys.at)
        rows = torch.bmm(weight, v) if rows is None else rows.baddbmm_(weight, v)
        if needs_denominator:
            mass = weight.sum(-1)
            total = mass if total is None else total.add_(mass)
    assert rows is not None
    slab.store(into[0], tile.queries, rows)
    if total is not None:
        slab.store(into[1], tile.queries, total)


def _backward_rows(
    run: _Run,
    slab: Slab,
    tile: TileOf,
    value: Tensor,
    factor: Tensor,
    grad_numerator: Tensor,
    grad_denominator: Tensor | None,
    totals: Gradients,
) -> None:
    queries = tile.queries
    q, du = slab.query_side(run.query, queries), slab.query_side(grad_numerator, queries)
    dd = None if grad_denominator is None else slab.query_rows(grad_denominator, queries)
    log2_factor = slab.query_rows(factor, queries) * LOG2_E if run.kernel.exponential else None
    grad_q = torch.zeros_like(q) if tile.first else slab.query_side(totals.query, queries).clone()
    biased = totals.biased
    for keys in tile.keys:
        at = keys.at
        k, v = slab.key_side(run.key, at), slab.key_side(value, at)
        dw = torch.bmm(du, v.transpose(1, 2), out=run.buffer("grad", du.shape[0], du.shape[1], v.shape[1]))
        if dd is not None:
            dw.add_(dd)
        if log2_factor is not None:
            weight = run.logits(slab, tile, keys, q, k).sub_(log2_factor).exp2_()
            ds = dw.mul_(weight)
            if biased:
                totals.add_bias(run, slab, queries, at, slab.by_head(ds))
        else:
            weight, slope = run.kernel.profile_and_derivative(run.scores(q, k))
            bias = run.bias(slab, tile, keys, weight.dtype)
            if bias is not None:
                slab.by_head(weight).mul_(bias.exp_())
            run.hide(slab, tile, keys, weight)
            if biased:
                totals.add_bias(run, slab, queries, at, slab.by_head(weight * dw))
            if bias is not None:
                slab.by_head(dw).mul_(bias)
            ds = dw if slope is None else dw.mul_(slope)
            run.hide(slab, tile, keys, ds)
        run.add_product(slab, totals.value, at, weight.transpose(1, 2), du)
        grad_q.baddbmm_(ds, k)
        run.add_product(slab, totals.key, at, ds.transpose(1, 2), q)
    slab.store(totals.query, queries, grad_q)
