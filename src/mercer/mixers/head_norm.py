"""A norm of every head, or group of channels, alone."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from mercer.errors import InvalidArgument


class HeadNorm(nn.Module):
    """y = n(x) * weight + bias with n over each of `heads` runs of channels alone: x / sqrt(mean(x^2) + eps) ("rms") or
    (x - mean(x)) / sqrt(var(x) + eps) ("layer", which is group normalisation of a token's channels).

    heads: how many runs; size: channels of a run. shared: one weight of `size` channels for all runs, as in
    DeltaNet; default one for every channel, as in retention. bias: only with "layer"; default none.

    Statistics are float32 at least, and so is what comes out.

    Source: Wu & He 2018, arXiv 1803.08494; Zhang & Sennrich 2019, arXiv 1910.07467.
    """

    def __init__(
        self,
        heads: int,
        size: int,
        *,
        kind: Literal["rms", "layer"] = "rms",
        eps: float = 1e-5,
        shared: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        if kind not in ("rms", "layer"):
            raise InvalidArgument(f"the norm of heads must be 'rms' or 'layer', got {kind!r}")
        if bias and kind != "layer":
            raise InvalidArgument("the norm of heads has a bias only as kind='layer'")
        self.heads, self.size, self.kind, self.eps = heads, size, kind, eps
        self.weight = nn.Parameter(torch.ones(size if shared else heads * size))
        self.bias = nn.Parameter(torch.zeros(size if shared else heads * size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., heads * size]; returns the same shape, float32 at least."""
        wide = torch.promote_types(x.dtype, torch.float32)
        runs = x.to(wide).unflatten(-1, (self.heads, self.size))
        if self.kind == "rms":
            normed = nn.functional.rms_norm(runs, (self.size,), eps=self.eps)
        else:
            normed = nn.functional.layer_norm(runs, (self.size,), eps=self.eps)
        weight, bias = self.weight.to(wide), None if self.bias is None else self.bias.to(wide)
        if weight.shape[0] != self.size:
            normed = normed.flatten(-2)
        y = normed * weight if bias is None else torch.addcmul(bias, normed, weight)
        return y.flatten(-2) if weight.shape[0] == self.size else y

    def extra_repr(self) -> str:
        return f"{self.heads}, {self.size}, kind={self.kind!r}, eps={self.eps}"
