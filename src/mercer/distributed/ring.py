"""Attention by pairs over several processes: keys and values travel round a ring, and partial rows are merged.

Process r computes with the keys of process r - t at step t, while those of the next step are on their way. Rows of an
exponential kernel come divided by the sum of their weights, with its logarithm l; two parts of a row merge as

    o = o_a + sigmoid(l_b - l_a) (o_b - o_a),        l = log(exp(l_a) + exp(l_b)),

rows of other kernels are sums and are added. Backward, the keys and values make the same journey, followed one step
behind by their gradients, which everyone adds to; the last one sends them home. Saved are a process's own queries,
keys and values and the l of its rows, so memory grows with the tokens of one process.

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
    """
    numerator, denominator, factor = _Ring.apply(query, key, value, *logs, engine, link, dtype, overlap)  # pyright: ignore[reportGeneralTypeIssues]
    return numerator, denominator, factor if engine.exponential else None


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
    ) -> tuple[Tensor, Tensor, Tensor]:
        queries, own = Queries(query, slopes, query_log), Keys(key_log, key, value)
        rows = Rows(query, value.shape[-1], dtype, engine.exponential)
        scene = engine.scene
        for step, source, keys in _Travelling(own, engine, link, overlap):
            blocks = scene.blocks(link.rank, source)
            note("compute", "keys", step, sum(scene.pairs(block) for block in blocks))
            for block in blocks:
                engine.forward(block, queries, keys, rows)
            del keys  # else three of them would be held while the next but one is received
        rows.finish()
        log_sum = rows.denominator.new_zeros(0) if rows.log_sum is None else rows.log_sum
        factor = log_sum.masked_fill(log_sum == -torch.inf, 0)
        ctx.call = engine, link, overlap
        # (The rows themselves are needed by one engine only, but they are the output, which is kept anyway.)
        ctx.save_for_backward(query, key, value, slopes, query_log, key_log, rows.numerator, rows.denominator, log_sum)
        ctx.mark_non_differentiable(factor)
        return rows.numerator, rows.denominator, factor

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        query, key, value, slopes, query_log, key_log, numerator, denominator, log_sum = ctx.saved_tensors
        engine, link, overlap = ctx.call
        queries, own = Queries(query, slopes, query_log), Keys(key_log, key, value)
        rows = Rows.__new__(Rows)
        rows.numerator, rows.denominator = numerator, denominator
        rows.log_sum = log_sum if engine.exponential else None
        into = Gradients(queries, numerator.dtype, ctx.needs_input_grad[3:6])
        sums = Parcel.of([x if x.dtype == torch.float64 else x.to(numerator.dtype) for x in own.parts()])
        journey = Journey(engine.scene, link, sums)
        upstream = grads[0].contiguous(), grads[1].contiguous()
        following = home = nothing = query.new_empty(0, dtype=torch.uint8)
        returning: Pending | None = None
        mine: list[Tensor] = []

        def settle() -> None:
            """Wait for the last gradients that were sent for, and add those that came home to one's own."""
            if returning is not None:
                returning.wait()
                _add(mine, home, sums)

        for step, source, keys in _Travelling(own, engine, link, overlap):
            note("compute", "gradients", step)
            parcel = journey.sized(source)
            passing = parcel.empty(query.device).zero_()
            totals = parcel.unpack(passing)
            for block in engine.scene.blocks(link.rank, source):
                engine.backward(block, queries, keys, rows, upstream, into, Keys.of(totals))
            del keys
            if step == 0:
                mine = totals
                continue
            settle()
            _add(totals, following, parcel)
            following = home = nothing  # freed before the next ones are received
            returning, following, home = journey.pass_gradients(step, passing)
        settle()
        grad_log = mine.pop(0) if key_log is not None else None
        return into.query, mine[0], mine[1], into.slopes, into.query_log, grad_log, None, None, None, None


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
