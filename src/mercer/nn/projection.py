"""Which projections of an attention have biases, and one matrix for several projections of which some have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from mercer.errors import InvalidArgument

PARTS = ("query", "key", "value", "output", "gate")
"""The projections of an attention layer that may have a bias."""


def biased(bias: bool | str | Iterable[str]) -> frozenset[str]:
    """The projections of PARTS with a bias: all for True, none for False, else those named; "qkv" names three."""
    if isinstance(bias, bool):
        return frozenset(PARTS if bias else ())
    names = (bias,) if isinstance(bias, str) else tuple(bias)
    unknown = [name for name in names if name not in (*PARTS, "qkv")]
    if unknown:
        raise InvalidArgument(
            f"bias must be True, False or the names of projections, out of {', '.join(PARTS)} and qkv (the first "
            f"three), got {unknown[0]!r}"
        )
    return frozenset(PARTS[:3] if "qkv" in names else ()) | (frozenset(names) - {"qkv"})


class FusedLinear(nn.Linear):
    """[y_1 | y_2 | ...] = x [W_1; W_2; ...]^T + [b_1 | b_2 | ...] as one product, where only some b_i exist.

    widths: channels of each y_i. biased: whether it has a bias, one for each. `weight` is [sum of widths, dim] and
    `bias` the biases that exist, one behind the other, or None; `full_bias` has zeros for the others.
    """

    def __init__(self, dim: int, widths: Sequence[int], biased: Sequence[bool]) -> None:
        super().__init__(dim, sum(widths), bias=all(biased))
        self.widths, self.biased = tuple(widths), tuple(biased)
        if any(biased) and not all(biased):
            present = sum(width for width, has in zip(widths, biased, strict=True) if has)
            self.bias = nn.Parameter(torch.empty(present).uniform_(-(dim**-0.5), dim**-0.5))  # as nn.Linear draws it

    def full_bias(self) -> Tensor | None:
        """The biases of all channels, [sum of widths], or None if no part has one."""
        if self.bias is None or all(self.biased):
            return self.bias
        own = iter(self.bias.split([width for width, has in zip(self.widths, self.biased, strict=True) if has]))
        parts = (
            next(own) if has else self.bias.new_zeros(width)
            for width, has in zip(self.widths, self.biased, strict=True)
        )
        return torch.cat(list(parts))

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] -> [..., sum of widths]."""
        return nn.functional.linear(x, self.weight, self.full_bias())

    def extra_repr(self) -> str:
        return f"{self.in_features}, widths={self.widths}, biased={self.biased}"
