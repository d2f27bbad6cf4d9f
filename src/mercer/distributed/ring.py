"""Attention by pairs over several processes: keys and values travel round a ring, and partial rows are merged.

Process r computes with the keys of process r - t at step t, while those of the next step are on their way. Rows of an
exponential kernel come divided by the sum of their weights, with its logarithm l; two parts of a row merge as

    o = o_a + sigmoid(l_b - l_a) (o_b - o_a),        l = log(exp(l_a) + exp(l_b)),

rows of other kernels are sums and are added. Backward, the keys and values make the same journey, followed one step
behind by their gradients, which everyone adds to; the last one sends them home. Saved are a process's own queries,
keys and values, its rows and their l, so memory grows with the tokens of one process. Of long sequences some heads
travel after the others: then little is held beside that.

Source: Liu et al. 2023 (Ring Attention), arXiv 2310.01889; the merge is that of online softmax (Milakov and
Gimelshein 2018, arXiv 1805.02867).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mercer.core.first_order import first_order
from mercer.distributed.blocks import Engine, Gradients, Keys, Queries, Rows
from mercer.distributed.journey import Journey
from mercer.distributed.links import Link, Parcel, Pending, note


def ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logs: tuple[Tensor | None, Tensor | None, Tensor | None],
    engine: Engine,
    link: Link,
    dtype: torch.dtype,
    overlap: bool = True,
    slabs: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Numerator ``[B, Hq, L, Dv]``, denominator ``[B, Hq, L]`` and, of exponential kernels, log row factor.

    Args:
        query: queries of this process, as the engine takes them.
        key: its keys, as the engine takes them, in the dtype that they travel in.
        value: its values, in the dtype that they travel in.
        logs: slopes ``[Hq]``, and the logarithms of weights of its queries and of its keys, ``[b, h, L]`` float64.
        engine: how blocks are computed.
        link: the processes.
        dtype: of sums.
        overlap: whether the next keys are sent for before computing with the present ones.
        slabs: into how many slabs of heads the call is cut; one travels after the other, so that fewer keys are here
            at once.
    """
    numerator, denominator, factor = _Ring.apply(query, key, value, *logs, engine, link, dtype, overlap, slabs)  # pyright: ignore[reportGeneralTypeIssues]
    return numerator, denominator, factor if engine.exponential else None


def _slabs(key: Tensor, count: int) -> Iterator[slice]:
    heads = key.shape[1]
    for index in range(count):
        yield slice(index * heads // count, (index + 1) * heads // count)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        slopes: Tensor | None,
        query_log: Tensor | None,
        key_log: Tensor | None,
        engine: Engine,
        link: Link,
        dtype: torch.dtype,
        overlap: bool,
        slabs: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        queries, own = Queries(query, slopes, query_log), Keys(key_log, key, value)
        rows = Rows.empty(query, value.shape[-1], dtype, engine.exponential)
        groups = query.shape[1] // key.shape[1]
        for heads in _slabs(key, slabs):
            _look(*(x.of_heads(heads, groups) for x in (queries, own, rows)), engine, link, overlap)
        rows.finish()
        log_sum = rows.denominator.new_zeros(0) if rows.log_sum is None else rows.log_sum
        factor = log_sum.masked_fill(log_sum == -torch.inf, 0)
        ctx.call = engine, link, overlap, slabs
        # (The rows themselves are needed by one engine only, but they are the output, which is kept anyway.)
        ctx.save_for_backward(query, key, value, slopes, query_log, key_log, rows.numerator, rows.denominator, log_sum)
        ctx.mark_non_differentiable(factor)
        return rows.numerator, rows.denominator, factor

    @staticmethod
    @first_order(instead="one process with form='dense'")
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        query, key, value, slopes, query_log, key_log, numerator, denominator, log_sum = ctx.saved_tensors
        engine, link, overlap, slabs = ctx.call
        queries, own = Queries(query, slopes, query_log), Keys(key_log, key, value)
        rows = Rows(numerator, denominator, log_sum if engine.exponential else None)
        into = Gradients.zero(queries, numerator.dtype, ctx.needs_input_grad[3:6])
        mine = Keys.of([torch.zeros_like(x, dtype=_sum_dtype(x, numerator)) for x in own.parts()])
        groups = query.shape[1] // key.shape[1]
        for heads in _slabs(key, slabs):
            parts = (x.of_heads(heads, groups) for x in (queries, own, rows, into, mine))
            read = slice(heads.start * groups, heads.stop * groups)
            _retrace(*parts, (grads[0][:, read].contiguous(), grads[1][:, read].contiguous()), engine, link, overlap)
        return into.query, mine.key, mine.value, into.slopes, into.query_log, mine.log, None, None, None, None, None


def _sum_dtype(x: Tensor, like: Tensor) -> torch.dtype:
    """In what the gradient of something that travels is summed."""
    return x.dtype if x.dtype == torch.float64 else like.dtype


def _look(queries: Queries, own: Keys, rows: Rows, engine: Engine, link: Link, overlap: bool) -> None:
    """Fill the rows of some heads."""
    scene = engine.scene
    for step, source, keys in _Travelling(own, engine, link, overlap):
        blocks = scene.blocks(link.rank, source)
        note("compute", "keys", step, sum(scene.pairs(block) for block in blocks))
        for block in blocks:
            engine.forward(block, queries, keys, rows)
        del keys  # else three of them would be held while the next but one is received


def _retrace(
    queries: Queries,
    own: Keys,
    rows: Rows,
    into: Gradients,
    mine: Keys,
    upstream: tuple[Tensor, Tensor],
    engine: Engine,
    link: Link,
    overlap: bool,
) -> None:
    """Add the gradients of some heads to ``into`` and ``mine``."""
    sums = Parcel.of(mine.parts())
    journey = Journey(engine.scene, link, sums)
    following = home = nothing = own.key.new_empty(0, dtype=torch.uint8)
    returning: Pending | None = None
    for step, source, keys in _Travelling(own, engine, link, overlap):
        note("compute", "gradients", step)
        parcel = journey.sized(source)
        passing = parcel.empty(own.key.device).zero_() if step else nothing
        totals = parcel.unpack(passing) if step else mine.parts()
        for block in engine.scene.blocks(link.rank, source):
            engine.backward(block, queries, keys, rows, upstream, into, Keys.of(totals))
        del keys
        if not step:
            continue
        if returning is not None:
            returning.wait()
            _add(mine.parts(), home, sums)
        _add(totals, following, parcel)
        following = home = nothing  # freed before the next ones are received
        returning, following, home = journey.pass_gradients(step, passing)
    if returning is not None:
        returning.wait()
        _add(mine.parts(), home, sums)


def _add(totals: list[Tensor], buffer: Tensor, parcel: Parcel) -> None:
    """Add the contents of a message to some sums; an empty one is none."""
    if buffer.numel():
        for total, part in zip(totals, parcel.unpack(buffer), strict=True):
            total.add_(part)


class _Travelling:
    """Steps of the ring: the step, whose keys are here, and the keys; empty if nobody here or further on needs them."""

    def __init__(self, own: Keys, engine: Engine, link: Link, overlap: bool) -> None:
        self.own, self.link, self.overlap = own, link, overlap
        self.journey = Journey(engine.scene, link, Parcel.of(own.parts()))

    def __iter__(self) -> Iterator[tuple[int, int, Keys]]:
        journey, keys = self.journey, self.own
        last = self.link.size - 1
        buffer = journey.parcel.pack(self.own.parts()) if last else self.own.key.new_empty(0, dtype=torch.uint8)
        for step in range(last + 1):
            moving = journey.pass_keys(step, buffer) if self.overlap and step < last else None
            yield step, journey.source(step), keys
            if step == last:
                return
            pending, buffer = journey.pass_keys(step, buffer) if moving is None else moving
            pending.wait()
            if buffer.numel():
                keys = Keys.of(journey.sized(journey.source(step + 1)).unpack(buffer))
