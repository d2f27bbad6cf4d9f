"""What is said pair by pair, by a tensor over a call's own queries and keys: masks and biases of any shape.

Both take the memory of their tensor, and every pair is computed where no other part of the structure hides it. A
pattern (:mod:`mercer.core.patterns`) that says the same by position takes less of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mercer.core.structures import Pairwise
from mercer.errors import InvalidArgument


@dataclass(frozen=True, eq=False)
class Mask(Pairwise):
    """Query i sees key j where ``tensor[..., i, j]`` is True.

    Args:
        tensor: boolean ``[B or 1, Hq or 1, Lq, Lk]``. Queries and keys are counted as they come, padding too.

    Alone it aligns nothing, so queries and keys may be different tokens. Not with states, packed documents or finite
    states of features: those are laid out in other ways.
    """

    tensor: Tensor
    hides: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check(self, self.tensor)
        if self.tensor.dtype != torch.bool:
            raise InvalidArgument(f"Mask: tensor must be boolean (True = seen), not {self.tensor.dtype}.")

    def __str__(self) -> str:
        return "Mask(tensor)"


@dataclass(frozen=True, eq=False)
class Bias(Pairwise):
    """Log-weight ``tensor[..., i, j]``: what is added to a score under :class:`~mercer.Exp`, and whose exponential is a
    factor of the weight under any other kernel. Differentiable.

    Args:
        tensor: floating-point ``[B or 1, Hq or 1, Lq, Lk]``. Minus infinity gives the weight 0, though
            :class:`~mercer.Length` counts the key: hide it with :class:`Mask`.

    It composes as :class:`Mask` does.
    """

    tensor: Tensor
    hides: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check(self, self.tensor)
        if not self.tensor.is_floating_point():
            raise InvalidArgument(f"Bias: tensor must be of floating-point numbers, not {self.tensor.dtype}.")

    def __str__(self) -> str:
        return "Bias(tensor)"


def _check(part: Pairwise, tensor: object) -> None:
    name = type(part).__name__
    if not isinstance(tensor, Tensor):
        raise InvalidArgument(f"{name}: tensor must be a tensor, not {type(tensor).__name__}.")
    if tensor.dim() != 4:
        raise InvalidArgument(
            f"{name}: tensor must be [batch or 1, query heads or 1, queries, keys], not {list(tensor.shape)}."
        )
