"""From tensors as they lie on a disk to the parameters here, and back: each rule is read in both directions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mercer.errors import InvalidArgument


class Layout(ABC):
    """How one tensor lies on the disk. `write(read(x))` is x."""

    @abstractmethod
    def read(self, stored: Tensor) -> Tensor: ...

    @abstractmethod
    def write(self, tensor: Tensor) -> Tensor: ...


class AsIs(Layout):
    """As it is here."""

    def read(self, stored: Tensor) -> Tensor:
        return stored

    def write(self, tensor: Tensor) -> Tensor:
        return tensor


class Transposed(Layout):
    """[in, out] for a linear layer, as GPT-2's Conv1D."""

    def read(self, stored: Tensor) -> Tensor:
        return stored.transpose(-2, -1)

    def write(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(-2, -1)


@dataclass(frozen=True)
class PerHead(Layout):
    """Rows [heads, parts, d] for what is [parts, heads, d] here: the fused queries, keys and values of BLOOM and
    GPT-NeoX. Weights and biases alike."""

    heads: int
    parts: int = 3

    def read(self, stored: Tensor) -> Tensor:
        return stored.unflatten(0, (self.heads, self.parts, -1)).transpose(0, 1).flatten(0, 2)

    def write(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (self.parts, self.heads, -1)).transpose(0, 1).flatten(0, 2)


@dataclass(frozen=True)
class Neighbours(Layout):
    """Rows of queries or keys whose rotary pairs are (2i, 2i + 1), for pairs (i, i + turned / 2) here.

    turned: how many of each head's rows turn; None: all.
    """

    heads: int
    turned: int | None = None

    def read(self, stored: Tensor) -> Tensor:
        return self._each(stored, lambda rows: rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2))

    def write(self, tensor: Tensor) -> Tensor:
        return self._each(tensor, lambda rows: rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))

    def _each(self, tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        rows = tensor.unflatten(0, (self.heads, -1))
        turned = rows.shape[1] if self.turned is None else self.turned
        head = change(rows[:, :turned])
        return torch.cat((head, rows[:, turned:]), 1).flatten(0, 1)


AS_IS = AsIs()
TRANSPOSED = Transposed()


@dataclass(frozen=True)
class Rule:
    """One parameter here, and the tensors on disk that it is made of, one under the other.

    ours: its name here. theirs: theirs on disk. layouts: how each lies there, one for all or one each. rows: how many
    rows of ours each makes; only with several. shape: of ours, where it has other dimensions than the pieces; stored:
    then of a single piece, where it is not the rows of ours one under the other.
    """

    ours: str
    theirs: tuple[str, ...]
    layouts: tuple[Layout, ...] = (AS_IS,)
    rows: tuple[int, ...] = ()
    shape: tuple[int, ...] | None = None
    stored: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.layouts) not in (1, len(self.theirs)) or len(self.rows) not in (0, len(self.theirs)):
            raise InvalidArgument(
                f"the rule of {self.ours} has {len(self.theirs)} pieces and not as many layouts or rows"
            )
        if not self.theirs:
            raise InvalidArgument(f"{self.ours} is made of no tensor")
        if len(self.theirs) > 1 and not self.rows:
            raise InvalidArgument(f"{self.ours} has several pieces and must say how many rows each has")

    @property
    def copies(self) -> bool:
        """Whether reading makes a new tensor."""
        return len(self.theirs) > 1 or any(layout is not AS_IS for layout in self.layouts)

    def read(
        self, stored: Iterable[Tensor], *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Our tensor from the pieces on disk: the piece itself where it lies as it is needed, else a new tensor, of the
        narrowest dtype that holds every piece if none is given.

        The pieces are taken one by one and copied to their places in what is returned, so that nothing else is held.
        """
        pieces = iter(stored)
        first = next(pieces)
        kind, place = first.dtype if dtype is None else dtype, torch.device(device)
        if not self.copies and self.shape is None:
            return first.to(device=place, dtype=kind)
        layouts = iter(self._each_layout())
        laid = next(layouts).read(first)
        shape = self.shape or ((sum(self.rows), *laid.shape[1:]) if self.rows else laid.shape)
        out = torch.empty(shape, dtype=kind, device=place)
        target = self._targets(out)[0]
        target.copy_(laid.reshape(target.shape))
        del first, laid
        for i, (layout, piece) in enumerate(zip(layouts, pieces, strict=True), 1):
            if dtype is None:
                out = out.to(torch.promote_types(out.dtype, piece.dtype))
            self._targets(out)[i].copy_(layout.read(piece))
        return out

    def _targets(self, out: Tensor) -> tuple[Tensor, ...]:
        """Where each piece goes in our tensor."""
        rows = out if self.shape is None or not self.rows else out.flatten(0, len(self.shape) - 2)
        return rows.split(self.rows) if self.rows else (rows,)

    def write(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """The pieces on disk from our tensor; views where they can be."""
        if self.stored is not None:
            tensor = tensor.reshape(self.stored)
        elif self.shape is not None:
            tensor = tensor.flatten(0, len(self.shape) - 2)
        pieces = (tensor,) if len(self.theirs) == 1 else tensor.split(self.rows)
        return tuple(layout.write(piece) for layout, piece in zip(self._each_layout(), pieces, strict=True))

    def _each_layout(self) -> tuple[Layout, ...]:
        return self.layouts if len(self.layouts) == len(self.theirs) else self.layouts * len(self.theirs)


@dataclass(frozen=True)
class Twin:
    """A tensor on disk that repeats another, as the scores of a model whose embedding is tied do. It may be absent, and
    must be equal where it is there. why: the key of the configuration that says so.
    """

    theirs: str
    of: str
    why: str = "tie_word_embeddings"


@dataclass(frozen=True)
class Names:
    """All rules of one model.

    twins: repeated tensors. without_meaning: names (regular expressions, matched whole) of tensors that are buffers of
    another library, such as causal masks and rotary rates, and that the configuration says already.
    """

    rules: tuple[Rule, ...]
    twins: tuple[Twin, ...] = ()
    without_meaning: tuple[str, ...] = field(default=())


def same(ours: str, theirs: str) -> Rule:
    """A tensor that is stored as it is."""
    return Rule(ours, (theirs,))
