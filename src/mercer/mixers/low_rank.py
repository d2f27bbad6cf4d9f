"""A map through few channels, as RWKV makes decays, rates and gates of its tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from mercer.errors import InvalidArgument
from mercer.nn.product import product


class LowRank(nn.Module):
    """y = W_up f(W_down x) + b, from dim to rank channels and on to `out`.

    activation: f, "tanh", "sigmoid" or None for none. bias: whether there is b.
    """

    def __init__(
        self, dim: int, rank: int, out: int, *, activation: Literal["tanh", "sigmoid"] | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        if rank < 1:
            raise InvalidArgument(f"a map of low rank needs a rank of at least 1, got {rank}")
        if activation not in ("tanh", "sigmoid", None):
            raise InvalidArgument(f"a map of low rank has 'tanh', 'sigmoid' or None inside, not {activation!r}")
        self.activation = activation
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, out, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., dim]; returns [..., out]."""
        inner = product(self.down, x)
        if self.activation is not None:
            inner = torch.tanh(inner) if self.activation == "tanh" else torch.sigmoid(inner)
        return product(self.up, inner)


def suggested_rank(dim: int, factor: float) -> int:
    """factor sqrt(dim) to the nearest multiple of 32, at least 32: what RWKV-7's authors suggest."""
    return max(32, round(factor * dim**0.5 / 32) * 32)
