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

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mercer.core.first_order import first_order
from mercer.core.kernels import Kernel
from mercer.distributed.links import Link, Message, Parcel, Pending, note
from mercer.distributed.scene import Block, Scene
from mercer.forms.tiles import backward_tiles, forward_tiles


def ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    logs: tuple[Tensor | None, Tensor | None, Tensor | None],
    kernel: Kernel,
    scene: Scene,
    link: Link,
    overlap: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Numerator ``[B, Hq, L, Dv]``, denominator ``[B, Hq, L]`` and, of exponential kernels, log row factor.

    Args:
        query: mapped and scaled queries of this process, in the dtype of sums.
        key: its keys, mapped unless the map is the identity, in the dtype that they travel in.
        value: its values, in the dtype that they travel in.
        logs: slopes ``[Hq]``, and the logarithms of weights of its queries and of its keys, ``[b, h, L]`` float64.
        kernel: their kernel.
        scene: who sees whom.
        link: the processes.
        overlap: whether the next keys are sent for before computing with the present ones.
    """
    numerator, denominator, factor = _Ring.apply(query, key, value, *logs, kernel, scene, link, overlap)
    return numerator, denominator, factor if kernel.exponential else None


@dataclass(frozen=True, eq=False)
class _Journey:
    """What travels, and when."""

    scene: Scene
    link: Link
    parcel: Parcel
    """Of this process; those of others differ in the number of tokens."""

    @property
    def steps(self) -> int:
        return self.link.size

    def source(self, step: int, rank: int | None = None) -> int:
        """Whose keys a process (this one) computes with."""
        return ((self.link.rank if rank is None else rank) - step) % self.link.size

    def sized(self, source: int, parcel: Parcel | None = None) -> Parcel:
        """The parcel with the number of tokens of another process."""
        mine, theirs = self.scene.sharding.size(self.link.rank), self.scene.sharding.size(source)
        specs = (self.parcel if parcel is None else parcel).specs
        return Parcel(
            tuple(
                (tuple(theirs if i == 2 else n for i, n in enumerate(shape)) if mine != theirs else shape, dtype)
                for shape, dtype in specs
            )
        )

    def pass_keys(self, step: int, buffer: Tensor) -> tuple[Pending, Tensor]:
        """Send this step's keys on, and receive the next step's, if anyone further on needs them."""
        rank, size, hop = self.link.rank, self.link.size, self.scene.last_hop
        coming = self.source(step + 1)
        arriving = buffer.new_empty(0)
        sends, receives = [], []
        if step < hop(self.source(step)):
            sends = [Message((rank + 1) % size, buffer)]
        if step < hop(coming):
            arriving = self.sized(coming).empty(buffer.device)
            receives = [Message((rank - 1) % size, arriving)]
        return self.link.post("keys", step, sends, receives), arriving

    def pass_gradients(self, step: int, totals: Tensor, parcel: Parcel) -> tuple[Pending, Tensor, Tensor]:
        """Send the gradients of this step's keys on, or home; receive those of the next step's, and at last one's own.

        What was not sent to this process comes back empty.
        """
        rank, size, hop = self.link.rank, self.link.size, self.scene.last_hop
        source, coming = self.source(step), self.source(step + 1)
        following = home = totals.new_empty(0)
        sends, receives = [], []
        if step <= hop(source):
            sends = [Message((rank + 1) % size if step < hop(source) else source, totals)]
        if step < hop(coming):
            following = self.sized(coming, parcel).empty(totals.device)
            receives.append(Message((rank - 1) % size, following))
        if step == hop(rank):
            home = parcel.empty(totals.device)
            receives.append(Message((rank + step) % size, home))
        return self.link.post("gradients", step, sends, receives), following, home


class _Rows:
    """Rows of this process, to which blocks of keys are added."""

    def __init__(self, query: Tensor, value_dim: int, exponential: bool) -> None:
        self.numerator = query.new_zeros(*query.shape[:3], value_dim)
        self.denominator = query.new_zeros(query.shape[:3])
        self.peak = query.new_full(query.shape[:3], -torch.inf) if exponential else None

    def add(self, at: slice, numerator: Tensor, denominator: Tensor, factor: Tensor) -> None:
        rows = self.numerator[:, :, at]
        if self.peak is None:
            rows.add_(numerator)
            self.denominator[:, :, at].add_(denominator)
            return
        before, part = self.peak[:, :, at], factor.masked_fill(denominator == 0, -torch.inf)
        after = torch.logaddexp(before, part)
        share = (part - after.masked_fill(after == -torch.inf, 0)).exp_()  # sigmoid(part - before)
        rows.lerp_(numerator, share.unsqueeze(-1))
        before.copy_(after)

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Numerator, denominator and log factor (empty if none was taken out)."""
        if self.peak is None:
            return self.numerator, self.denominator, self.numerator.new_zeros(0)
        empty = self.peak == -torch.inf
        return self.numerator, (~empty).to(self.numerator.dtype), self.peak.masked_fill(empty, 0)


def _side(x: Tensor, at: slice, dtype: torch.dtype) -> Tensor:
    return x[:, :, at].to(dtype).contiguous()


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
        kernel: Kernel,
        scene: Scene,
        link: Link,
        overlap: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        own = [x for x in (key_log, key, value) if x is not None]
        journey = _Journey(scene, link, Parcel.of(own))
        rows = _Rows(query, value.shape[-1], kernel.exponential)
        buffer = journey.parcel.pack(own) if link.size > 1 else None
        held = own
        for step in range(journey.steps):
            source = journey.source(step)
            moving = None
            if overlap and buffer is not None and step + 1 < journey.steps:
                moving = journey.pass_keys(step, buffer)
            blocks = scene.blocks(link.rank, source)
            note("compute", "keys", step, sum(scene.pairs(block) for block in blocks))
            for block in blocks:
                _forward(block, rows, query, held, (slopes, query_log), kernel, scene)
            if moving is None and buffer is not None and step + 1 < journey.steps:
                moving = journey.pass_keys(step, buffer)
            if moving is not None:
                moving[0].wait()
                buffer = moving[1]
                held = journey.sized(journey.source(step + 1)).unpack(buffer) if buffer.numel() else []
        numerator, denominator, factor = rows.result()
        ctx.call = kernel, scene, link, overlap
        ctx.save_for_backward(query, key, value, slopes, query_log, key_log, factor)
        ctx.mark_non_differentiable(factor)
        return numerator, denominator, factor

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        query, key, value, slopes, query_log, key_log, factor = ctx.saved_tensors
        kernel, scene, link, overlap = ctx.call
        own = [x for x in (key_log, key, value) if x is not None]
        journey = _Journey(scene, link, Parcel.of(own))
        sums = Parcel.of([x if x.dtype == torch.float64 else x.to(query.dtype) for x in own])
        back = _Backward(query, slopes, query_log, factor, grads[0], grads[1], kernel, scene, ctx.needs_input_grad[3:6])
        buffer = journey.parcel.pack(own) if link.size > 1 else None
        held = own
        following = home = query.new_empty(0, dtype=torch.uint8)
        returning: Pending | None = None
        mine: list[Tensor] = []
        for step in range(journey.steps):
            source = journey.source(step)
            moving = None
            if overlap and buffer is not None and step + 1 < journey.steps:
                moving = journey.pass_keys(step, buffer)
            note("compute", "gradients", step)
            passing = sums.empty(query.device) if step == 0 else journey.sized(source, sums).empty(query.device)
            totals = (sums if step == 0 else journey.sized(source, sums)).unpack(passing.zero_())
            for block in scene.blocks(link.rank, source):
                back.add(block, held, totals)
            if step == 0:
                mine = totals
            else:
                if returning is not None:
                    returning.wait()
                    if following.numel():
                        for total, part in zip(totals, journey.sized(source, sums).unpack(following), strict=True):
                            total.add_(part)
                    home = _arrived(home, mine, sums)
                returning, following, home = journey.pass_gradients(step, passing, sums)
            if moving is None and buffer is not None and step + 1 < journey.steps:
                moving = journey.pass_keys(step, buffer)
            if moving is not None:
                moving[0].wait()
                buffer = moving[1]
                held = journey.sized(journey.source(step + 1)).unpack(buffer) if buffer.numel() else []
        if returning is not None:
            returning.wait()
            _arrived(home, mine, sums)
        grad_log = mine.pop(0) if key_log is not None else None
        return back.query, mine[0], mine[1], back.slopes, back.query_log, grad_log, None, None, None, None


def _arrived(home: Tensor, mine: list[Tensor], sums: Parcel) -> Tensor:
    """Add what came home to a process's own gradients."""
    if home.numel():
        for total, part in zip(mine, sums.unpack(home), strict=True):
            total.add_(part)
    return home.new_empty(0)


def _forward(
    block: Block,
    rows: _Rows,
    query: Tensor,
    held: list[Tensor],
    logs: tuple[Tensor | None, Tensor | None],
    kernel: Kernel,
    scene: Scene,
) -> None:
    key, value = held[-2:]
    layout = scene.layout(block, *logs, held[0] if len(held) == 3 else None, query.device)
    at, of = block.queries, block.keys
    parts = (_side(query, at, query.dtype), _side(key, of, query.dtype), _side(value, of, query.dtype))
    rows.add(at, *forward_tiles(*parts, kernel, layout, True))


class _Backward:
    """Gradients of this process's queries and log-weights, and how a block adds to them and to those of its keys."""

    def __init__(
        self,
        query: Tensor,
        slopes: Tensor | None,
        query_log: Tensor | None,
        factor: Tensor,
        grad_numerator: Tensor,
        grad_denominator: Tensor,
        kernel: Kernel,
        scene: Scene,
        asked: tuple[bool, bool, bool],
    ) -> None:
        self.given = query, slopes, query_log
        self.factor, self.grads = factor, (grad_numerator, grad_denominator)
        self.kernel, self.scene, self.asked = kernel, scene, asked
        self.query = torch.zeros_like(query)
        self.slopes = torch.zeros_like(slopes) if slopes is not None and asked[0] else None
        self.query_log = torch.zeros_like(query_log) if query_log is not None and asked[1] else None

    def add(self, block: Block, held: list[Tensor], totals: list[Tensor]) -> None:
        query, slopes, query_log = self.given
        key, value = held[-2:]
        layout = self.scene.layout(block, slopes, query_log, held[0] if len(held) == 3 else None, query.device)
        at, of = block.queries, block.keys
        found = backward_tiles(
            _side(query, at, query.dtype),
            _side(key, of, query.dtype),
            _side(value, of, query.dtype),
            self.kernel,
            layout,
            self.factor[:, :, at] if self.kernel.exponential else self.factor,
            self.grads[0][:, :, at],
            self.grads[1][:, :, at],
            self.asked,
        )
        self.query[:, :, at].add_(found.query)
        totals[-2][:, :, of].add_(found.key)
        totals[-1][:, :, of].add_(found.value)
        if self.slopes is not None and found.slopes is not None:
            self.slopes.add_(found.slopes)
        if self.query_log is not None and found.query_log is not None:
            self.query_log[:, :, at].add_(found.query_log)
        if len(totals) == 3 and found.key_log is not None:
            totals[0][:, :, of].add_(found.key_log)
