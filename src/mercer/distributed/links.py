"""Messages between the processes of a group, each with a time limit, counted as they are sent.

Everything goes from one process to one other, collectives included: then a wait that fails knows whom it waited for.
Sends and receives of one step are posted together, as NCCL wants it; every process posts its steps in the same order.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mercer.errors import InvalidArgument, PeerError


@dataclass
class Traffic:
    """What this process sent and waited for while :func:`traffic` was open.

    Attributes:
        sent: bytes by kind of message (``"keys"``, ``"gradients"``, ``"state"``, ``"agreement"``, ...).
        messages: how many of them, by kind.
        waited: seconds that were spent waiting for messages.
        events: what was begun, in order: ``(what, kind, step)``, what being ``"post"``, ``"compute"`` or ``"wait"``.
        pairs: query-key pairs that were looked at, forward; once for each slab of heads that travels by itself.
    """

    sent: dict[str, int] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)
    waited: float = 0.0
    events: list[tuple[str, str, int]] = field(default_factory=list)
    pairs: int = 0


_open: list[Traffic] = []


@contextmanager
def traffic() -> Generator[Traffic]:
    """Count what this process sends: ``with traffic() as sent: ...``, forward and backward passes inside included."""
    counted = Traffic()
    _open.append(counted)
    try:
        yield counted
    finally:
        _open.remove(counted)


def note(event: str, kind: str, step: int, pairs: int = 0) -> None:
    """Tell whoever counts that something was begun."""
    for counted in _open:
        counted.events.append((event, kind, step))
        counted.pairs += pairs


@dataclass(frozen=True)
class Message:
    """Bytes for, or from, another process."""

    peer: int
    content: Tensor
    """``[n]`` uint8, read or written in place."""


_calls: dict[tuple[int, ...], int] = {}
"""How many links were made between the same processes."""


class Link:
    """The processes of a group as ranks 0 .. size - 1, this one's rank, and how long it waits for any other."""

    def __init__(self, group: Any, timeout: float) -> None:
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
            raise InvalidArgument(f"timeout must be a positive number of seconds, not {timeout!r}.")
        self.group, self.timeout = group, float(timeout)
        self.alone = group is None and not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.size = 1 if self.alone else dist.get_world_size(group)
        if self.rank < 0:
            raise InvalidArgument("This process does not belong to the group that it was given.")
        self.global_ranks = [0] if self.alone else dist.get_process_group_ranks(group or dist.group.WORLD)
        members = tuple(self.global_ranks)
        self.call = _calls[members] = _calls.get(members, 0) + 1

    def post(self, kind: str, step: int, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Begin to send and to receive; nothing of it may be touched before :meth:`Pending.wait`."""
        messages = [(dist.isend, m, "send") for m in sends] + [(dist.irecv, m, "receive") for m in receives]
        messages = [one for one in messages if one[1].content.numel()]
        for counted in _open:
            for message in sends:
                counted.sent[kind] = counted.sent.get(kind, 0) + message.content.numel()
                counted.messages[kind] = counted.messages.get(kind, 0) + bool(message.content.numel())
        note("post", kind, step)
        if not messages:
            return Pending(self, kind, step, [], [], [])
        # Told apart by call, too: backward passes that ran in another order elsewhere must not take each other's.
        tag = KINDS[kind] + len(KINDS) * (step % 512 + 512 * (self.call % 2**16))
        operations = [dist.P2POp(op, m.content, self.global_ranks[m.peer], self.group, tag) for op, m, _ in messages]
        told = [(m.peer, way) for _, m, way in messages]
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self.failure(kind, step, told, error) from error
        return Pending(self, kind, step, works, told, [m.content for _, m, _ in messages])

    def failure(self, kind: str, step: int, told: list[tuple[int, str]], error: RuntimeError) -> PeerError:
        """What to say when a message did not come through."""
        who = " or ".join(sorted({f"{peer}" for peer, _ in told}))
        receiving = any(way == "receive" for _, way in told)
        slow = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        if slow:
            what, way = ("send", "to") if receiving else ("take", "from")
            return PeerError(
                f"Process {who} of {self.size} did not {what} the {kind} of step {step} {way} process {self.rank} "
                f"within {self.timeout:g} s: it is dead, stuck or slower than timeout= allows."
            )
        return PeerError(
            f"Process {who} of {self.size} was lost while process {self.rank} exchanged the {kind} of step {step} with "
            f"it, before the time limit of {self.timeout:g} s: it is dead, or gave up on another one."
        )


KINDS = {
    "agreement": 0,
    "keys": 1,
    "gradients": 2,
    "state": 3,
    "state gradients": 4,
    "sums": 5,
    "masks": 6,
    "gather": 7,
}
"""Every kind of message, and its tag."""


class Pending:
    """Messages on their way."""

    def __init__(
        self,
        link: Link,
        kind: str,
        step: int,
        works: list[Any],
        told: list[tuple[int, str]],
        held: list[Tensor],
    ) -> None:
        self.link, self.kind, self.step, self.works, self.told = link, kind, step, works, told
        self.held = held  # so that nobody frees what is still on its way

    def wait(self) -> None:
        """Return when all have arrived; :class:`~mercer.PeerError` if that takes longer than the time limit."""
        note("wait", self.kind, self.step)
        began = perf_counter()
        limit = timedelta(seconds=self.link.timeout)
        for index, work in enumerate(self.works):
            told = [self.told[index]] if len(self.works) == len(self.told) else self.told
            try:
                work.wait(limit)
            except RuntimeError as error:
                raise self.link.failure(self.kind, self.step, told, error) from error
        self.held = []
        for counted in _open:
            counted.waited += perf_counter() - began


def everyone(link: Link, kind: str, content: Tensor, sizes: Sequence[int] | None = None) -> list[Tensor]:
    """Every process's ``content`` ``[n]`` uint8, by rank; ``sizes`` if they differ."""
    found = [
        content if rank == link.rank else content.new_empty(content.numel() if sizes is None else sizes[rank])
        for rank in range(link.size)
    ]
    others = [rank for rank in range(link.size) if rank != link.rank]
    link.post(kind, 0, [Message(r, content) for r in others], [Message(r, found[r]) for r in others]).wait()
    return found


@dataclass(frozen=True)
class Parcel:
    """Tensors that travel as one message: shapes and dtypes, in decreasing order of item size."""

    specs: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Parcel:
        """The parcel that would hold these tensors."""
        return Parcel(tuple((tuple(t.shape), t.dtype) for t in tensors))

    @property
    def sizes(self) -> list[int]:
        return [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.specs]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def empty(self, device: torch.device) -> Tensor:
        """A buffer to receive one in, ``[nbytes]`` uint8."""
        return torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """A buffer that holds copies of the tensors."""
        buffer = self.empty(tensors[0].device)
        for view, tensor in zip(self.unpack(buffer), tensors, strict=True):
            view.copy_(tensor)
        return buffer

    def unpack(self, buffer: Tensor) -> list[Tensor]:
        """The tensors in a buffer, as views."""
        parts = buffer.split(self.sizes)
        return [part.view(dtype).view(shape) for part, (shape, dtype) in zip(parts, self.specs, strict=True)]
