"""States handed from chunk to chunk of a sequence, across processes where the next chunk is held elsewhere.

Every process absorbs its own chunks from nothing; then the state of all that came before runs along the sequence once:
the holder of chunk c receives it, keeps it, merges its own state in and sends the result to the holder of chunk c + 1.
One state leaves a process for each of its chunks, whatever their length. Backward the gradient of the state runs the
other way.

Merging is associative, exact but for rounding, and knows about decay (:meth:`mercer.FeatureState.merge`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mercer.core.first_order import first_order
from mercer.core.state import FeatureState
from mercer.distributed.links import Link, Message, Parcel, Pending
from mercer.distributed.sharding import Sharding


@dataclass(frozen=True)
class Stop:
    """What a chunk does with a state that runs along the sequence.

    Attributes:
        index: the chunk.
        arrives: whether a state comes from the chunk before.
        leaves: whether one goes on to the chunk behind.
        joins: whether what leaves begins with what arrived; otherwise a document begins in between.
    """

    index: int
    arrives: bool
    leaves: bool
    joins: bool


def stops(sharding: Sharding, bounds: list[int], rank: int, backwards: bool) -> list[Stop]:
    """The stops at a process's chunks, in the order in which the state comes by."""
    found: list[Stop] = []
    for index in sharding.held(rank):
        before, behind = (crossing(bounds, border) for border in sharding.chunk(index))
        arrives, leaves = (behind, before) if backwards else (before, behind)
        joins = arrives is not None and arrives == leaves
        found.append(Stop(index, arrives is not None, leaves is not None, joins))
    return found[::-1] if backwards else found


def crossing(bounds: list[int], border: int) -> int | None:
    """The document that has tokens on both sides of a border between two tokens, or None."""
    index = bisect_right(bounds, border) - 1
    return None if border <= bounds[0] or border >= bounds[-1] or bounds[index] == border else index


def tensors(state: FeatureState) -> list[Tensor]:
    """A state's tensors in the order in which they travel: the largest items first."""
    peak = [] if state.peak is None else [state.peak]
    mass = [] if state.mass is None else [state.mass]
    return [state.length, state.log_decay, *peak, state.features, *mass]


def _like(like: FeatureState, parts: Sequence[Tensor]) -> FeatureState:
    """The state of which :func:`tensors` gives ``parts``."""
    left = list(parts)
    mass = left.pop() if like.mass is not None else None
    features = left.pop()
    peak = left.pop() if like.peak is not None else None
    return FeatureState(features, mass, left[0], left[1], like.kernel, peak)


@dataclass(frozen=True, eq=False)
class Chain:
    """A state that runs along a sequence, in its order or backwards.

    Attributes:
        sharding, link: the sequence and the processes.
        stops: those of this process, in the order in which the state comes by.
        nothing: the state of no token, of the shape of all.
        backwards: from the last chunk to the first.
    """

    sharding: Sharding
    link: Link
    stops: list[Stop]
    nothing: FeatureState
    backwards: bool

    def run(self, query: Tensor, own: Sequence[FeatureState]) -> tuple[Tensor, list[FeatureState]]:
        """The queries as they came, and the states that arrive, one for each stop that :attr:`Stop.arrives`.

        Args:
            query: what the output will depend on even where no state arrives: the backward pass of such a process has
                to come by here, too, since others wait for it.
            own: what each stop that :attr:`Stop.leaves` adds: the state of its tokens in the document that goes on.
        """
        parts = [x for state in own for x in tensors(state)]
        query, *found = _Run.apply(self, query, *parts)
        count = len(tensors(self.nothing))
        return query, [_like(self.nothing, found[i : i + count]) for i in range(0, len(found), count)]

    def join(self, arrived: list[Tensor], own: list[Tensor]) -> list[Tensor]:
        """What leaves a stop where a document goes on."""
        first, second = _like(self.nothing, arrived), _like(self.nothing, own)
        return tensors(second.merge(first) if self.backwards else first.merge(second))

    def pull(self, arrived: list[Tensor], own: list[Tensor], grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of what arrived and of one's own from those of what left; numbers without any keep their place."""
        with torch.enable_grad():
            given = [[x.detach().requires_grad_(i in self.learned) for i, x in enumerate(s)] for s in (arrived, own)]
            joined = self.join(*given)
            leaves = [state[i] for state in given for i in self.learned]
            found = torch.autograd.grad(
                [joined[i] for i in self.learned], leaves, [grads[i] for i in self.learned], allow_unused=True
            )
        found = [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]
        both: list[list[Tensor]] = []
        for state, part in ((given[0], found[: len(found) // 2]), (given[1], found[len(found) // 2 :])):
            at = dict(zip(self.learned, part, strict=True))
            both.append([at.get(i, x) for i, x in enumerate(state)])
        return both[0], both[1]

    @property
    def learned(self) -> list[int]:
        """Which of :func:`tensors` have gradients: all but the length and the peak."""
        return [i for i in range(len(tensors(self.nothing))) if i != 0 and (i != 2 or self.nothing.peak is None)]

    def neighbour(self, stop: Stop, behind: bool) -> int | None:
        """Who holds the chunk where the state goes next (``behind``) or comes from; None if this process does."""
        owner = self.sharding.owner(stop.index + (1 if behind != self.backwards else -1))
        return None if owner == self.link.rank else owner

    def send(self, kind: str, stop: Stop, to: int, parts: list[Tensor]) -> Pending:
        content = Parcel.of(parts).pack(parts)
        return self.link.post(kind, stop.index, [Message(to, content)], [])

    def receive(self, kind: str, index: int, source: int) -> list[Tensor]:
        parcel = Parcel.of(tensors(self.nothing))
        content = parcel.empty(self.nothing.features.device)
        self.link.post(kind, index, [], [Message(source, content)]).wait()
        return parcel.unpack(content)

    def step(self, stop: Stop, behind: bool) -> int:
        """The chunk next to a stop, whose number is on the message that comes from there."""
        return stop.index + (1 if behind != self.backwards else -1)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chain: Chain, query: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        count = len(tensors(chain.nothing))
        own = [list(parts[i : i + count]) for i in range(0, len(parts), count)]
        left = iter(own)
        arrived: list[list[Tensor]] = []
        passing: list[Tensor] = []
        sent: list[Pending] = []
        for stop in chain.stops:
            coming: list[Tensor] = []
            if stop.arrives:
                source = chain.neighbour(stop, behind=False)
                coming = passing if source is None else chain.receive("state", chain.step(stop, False), source)
                arrived.append(coming)
            if stop.leaves:
                mine = next(left)
                passing = chain.join(coming, mine) if stop.joins else mine
                target = chain.neighbour(stop, behind=True)
                if target is not None:
                    sent.append(chain.send("state", stop, target, passing))
        for one in sent:
            one.wait()
        found = [x for state in arrived for x in state]
        found = [x.clone() if any(x is p for p in parts) else x for x in found]
        ctx.chain = chain
        ctx.save_for_backward(*parts, *found)
        learned = chain.learned
        ctx.mark_non_differentiable(*(x for i, x in enumerate(found) if i % count not in learned))
        return query.view_as(query), *found

    @staticmethod
    @first_order(instead="one process with form='dense'")
    def backward(ctx: Any, *all_grads: Tensor) -> tuple[Tensor | None, ...]:
        chain: Chain = ctx.chain
        grad_query, *grads = all_grads
        count = len(tensors(chain.nothing))
        saved = [list(ctx.saved_tensors[i : i + count]) for i in range(0, len(ctx.saved_tensors), count)]
        leaving, arriving = sum(s.leaves for s in chain.stops), sum(s.arrives for s in chain.stops)
        own, arrived = saved[:leaving], saved[leaving:]
        wanted = [list(grads[i : i + count]) for i in range(0, len(grads), count)]
        found: list[list[Tensor]] = []
        passing: list[Tensor] = []
        sent: list[Pending] = []
        assert len(arrived) == arriving
        for stop in reversed(chain.stops):
            coming = arrived.pop() if stop.arrives else []
            grad = wanted.pop() if stop.arrives else []
            if stop.leaves:
                mine = own.pop()
                source = chain.neighbour(stop, behind=True)
                after = passing if source is None else chain.receive("state gradients", chain.step(stop, True), source)
                if stop.joins:
                    more, after = chain.pull(coming, mine, after)
                    both = enumerate(zip(grad, more, strict=True))
                    grad = [a + b if i in chain.learned else a for i, (a, b) in both]
                found.append(after)
            if stop.arrives:
                passing = grad
                target = chain.neighbour(stop, behind=False)
                if target is not None:
                    sent.append(chain.send("state gradients", stop, target, grad))
        for one in sent:
            one.wait()
        return (
            None,
            grad_query,
            *(g if i in chain.learned else None for state in reversed(found) for i, g in enumerate(state)),
        )
