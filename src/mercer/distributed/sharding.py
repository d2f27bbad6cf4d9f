"""Which tokens of a sequence each process holds, and helpers to cut a tensor so and to put it together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mercer.errors import InvalidArgument

ORDERS = ("zigzag", "contiguous")


@dataclass(frozen=True)
class Sharding:
    """A sequence of ``length`` tokens cut over ``processes`` processes; any length will do.

    ``"zigzag"``: 2 P chunks, process r holds chunks r and 2 P - 1 - r, so that under a causal structure everyone has
    the same number of pairs to look at. ``"contiguous"``: P chunks, process r holds chunk r: the least is sent under
    windows, and by the exchange of states. Chunk c of C is tokens c length // C .. (c + 1) length // C - 1, so chunks
    differ by one token at most.

    Args:
        length: tokens of the whole sequence, 0 or more.
        processes: P, 1 or more.
        order: ``"zigzag"`` (default) or ``"contiguous"``.

    Source: the zig-zag order is that of Llama 3's context parallelism (Dubey et al. 2024, arXiv 2407.21783).
    """

    length: int
    processes: int
    order: str = "zigzag"

    def __post_init__(self) -> None:
        for name, value, least in (("length", self.length, 0), ("processes", self.processes, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidArgument(f"Sharding: {name} must be an integer of {least} or more, not {value!r}.")
        if self.order not in ORDERS:
            raise InvalidArgument(f"Sharding: order must be {' or '.join(map(repr, ORDERS))}, not {self.order!r}.")

    @property
    def chunks(self) -> int:
        """How many chunks the sequence is cut into."""
        return 2 * self.processes if self.order == "zigzag" else self.processes

    def chunk(self, index: int) -> tuple[int, int]:
        """The first token of a chunk, and the first behind it."""
        return index * self.length // self.chunks, (index + 1) * self.length // self.chunks

    def owner(self, index: int) -> int:
        """The process that holds a chunk."""
        return min(index, self.chunks - 1 - index) if self.order == "zigzag" else index

    def held(self, rank: int) -> tuple[int, ...]:
        """The chunks of a process, in the order of the sequence."""
        self._check(rank)
        return (rank, self.chunks - 1 - rank) if self.order == "zigzag" else (rank,)

    def pieces(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The runs of tokens of a process, ``(start, stop)`` each, in the order in which it holds them."""
        return tuple(self.chunk(index) for index in self.held(rank))

    def size(self, rank: int) -> int:
        """How many tokens a process holds."""
        return sum(stop - start for start, stop in self.pieces(rank))

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """The places of a process's tokens in the sequence, ``[size]`` int64: what rotary positions are made from."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self.pieces(rank)])

    def shard(self, x: Tensor, rank: int, dim: int = 2) -> Tensor:
        """The part of a whole tensor that a process holds; ``dim`` is the tokens'. Differentiable."""
        if x.shape[dim] != self.length:
            raise InvalidArgument(
                f"shard: dimension {dim} has {x.shape[dim]} entries, but the sharding is of {self.length} tokens."
            )
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.pieces(rank)], dim)

    def unshard(self, parts: Sequence[Tensor], dim: int = 2) -> Tensor:
        """The whole tensor from every process's part, in the order of ranks. Differentiable."""
        if [part.shape[dim] for part in parts] != [self.size(rank) for rank in range(self.processes)]:
            raise InvalidArgument(
                f"unshard: the parts must have {[self.size(rank) for rank in range(self.processes)]} tokens in "
                f"dimension {dim}, not {[part.shape[dim] for part in parts]}."
            )
        found: dict[int, Tensor] = {}
        for rank, part in enumerate(parts):
            sizes = [stop - start for start, stop in self.pieces(rank)]
            found |= dict(zip(self.held(rank), part.split(sizes, dim), strict=True))
        return torch.cat([found[index] for index in range(self.chunks)], dim)

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.processes:
            raise InvalidArgument(f"Sharding: rank must lie between 0 and {self.processes - 1}, not {rank}.")
