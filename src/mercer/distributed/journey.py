"""Who sends which keys, and which of their gradients, to whom at which step of a ring."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mercer.distributed.links import Link, Message, Parcel, Pending
from mercer.distributed.scene import Scene


@dataclass(frozen=True, eq=False)
class Journey:
    """What travels, and when."""

    scene: Scene
    link: Link
    parcel: Parcel
    """Of this process; those of others differ in the number of tokens."""

    def source(self, step: int, rank: int | None = None) -> int:
        """Whose keys a process (this one) computes with."""
        return ((self.link.rank if rank is None else rank) - step) % self.link.size

    def sized(self, source: int) -> Parcel:
        """The parcel with the number of tokens of another process."""
        mine, theirs = self.scene.sharding.size(self.link.rank), self.scene.sharding.size(source)
        if mine == theirs:
            return self.parcel
        specs = self.parcel.specs
        return Parcel(
            tuple((tuple(theirs if i == 2 else n for i, n in enumerate(shape)), dtype) for shape, dtype in specs)
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

    def pass_gradients(self, step: int, totals: Tensor) -> tuple[Pending, Tensor, Tensor]:
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
            following = self.sized(coming).empty(totals.device)
            receives.append(Message((rank - 1) % size, following))
        if step == hop(rank):
            home = self.parcel.empty(totals.device)
            receives.append(Message((rank + step) % size, home))
        return self.link.post("gradients", step, sends, receives), following, home
