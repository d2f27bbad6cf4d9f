"""States of mixers that are no attention, and of layers that hold several states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from mercer.core.state import State
from mercer.errors import InvalidArgument


@dataclass(frozen=True, eq=False, repr=False)
class MixerState(State):
    """What a recurrent mixer leaves behind: sums, and the last inputs of a convolution or a token shift.

    Attributes:
        kind: which mixer's parts these are, with its sizes, such as ``mamba(64, state=16, width=4)``; a mixer refuses
            a state of another kind.
        parts: named tensors, each ``[B, ...]``: sums in float32 (float64 for float64 inputs), inputs as they came.
        length: ``[B]`` int64: real tokens absorbed so far.
    """

    kind: str
    parts: Mapping[str, Tensor]
    length: Tensor

    def _own_tensors(self) -> dict[str, Tensor]:
        kind = torch.tensor(list(self.kind.encode()), dtype=torch.uint8)
        return {"mixer": kind, "length": self.length} | {f"part.{name}": t for name, t in self.parts.items()}

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The state that :meth:`tensors` described."""
        names = {name.removeprefix("part.") for name in tensors if name.startswith("part.")}
        unknown = sorted(set(tensors) - {"mixer", "length"} - {f"part.{name}" for name in names})
        if unknown or "length" not in tensors:
            what = f"has no tensors {unknown}" if unknown else "needs the tensor 'length', which is missing"
            raise InvalidArgument(f"A {cls.__name__} {what}.")
        try:
            kind = bytes(tensors["mixer"].tolist()).decode()
        except (TypeError, ValueError) as error:
            raise InvalidArgument("The tensor 'mixer' of a state holds the bytes of a name in UTF-8.") from error
        return cls(kind, {name: tensors[f"part.{name}"] for name in sorted(names)}, tensors["length"])

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(self.kind, {name: change(t) for name, t in self.parts.items()}, change(self.length))

    def __repr__(self) -> str:
        """The fields, with the shape and dtype of each tensor in place of its numbers."""
        parts = ", ".join(
            f"{name}={str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for name, t in self.parts.items()
        )
        return f"{type(self).__name__}(kind={self.kind!r}, {parts}, length={self.length.tolist()})"


@dataclass(frozen=True, eq=False, repr=False)
class JoinedState(State):
    """The states of the parts of one layer, which have read the same tokens: a mixer's and its feed-forward's, or an
    attention's beside a mixer's.

    Attributes:
        parts: of each part's name, without a slash, its state.
    """

    parts: Mapping[str, State]

    @property
    def length(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """``[B]`` int64: real tokens absorbed so far."""
        return next(iter(self.parts.values())).length

    def _own_tensors(self) -> dict[str, Tensor]:
        return {f"{part}/{name}": t for part, state in self.parts.items() for name, t in state.tensors().items()}

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The state that :meth:`tensors` described."""
        names = dict.fromkeys(name.partition("/")[0] for name in tensors if "/" in name)
        loose = sorted(name for name in tensors if "/" not in name)
        if loose:
            raise InvalidArgument(f"A {cls.__name__} has no tensors {loose}.")
        return cls(
            {
                part: State.from_tensors(
                    {n.removeprefix(f"{part}/"): t for n, t in tensors.items() if n.startswith(f"{part}/")}
                )
                for part in names
            }
        )

    def _each(self, change: Callable[[State], State]) -> Self:
        return type(self)({name: change(state) for name, state in self.parts.items()})

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return self._each(lambda state: state._map(change))  # pyright: ignore[reportPrivateUsage]

    def detach(self) -> Self:
        """The same values, cut from the graph."""
        return self._each(lambda state: state.detach())

    def to(self, device: torch.device | str) -> Self:
        return self._each(lambda state: state.to(device))

    def select(self, index: Tensor) -> Self:
        """The states of the batch rows ``index``, in that order."""
        return self._each(lambda state: state.select(index))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={state!r}' for name, state in self.parts.items())})"
