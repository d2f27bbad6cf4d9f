"""Products with weights as they are, of which a single input's are quicker as a matrix times a vector."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's `linear`, x W^T + b. One input on the CPU, without gradients, is a vector: torch reads a matrix of
    bfloat16 about twice as fast for it as for a matrix with one row, and rounds as often.
    """
    size = x.shape[-1]
    if size != x.numel() or torch.is_grad_enabled() or not x.is_cpu or torch.is_autocast_enabled("cpu"):
        return nn.functional.linear(x, weight, bias)
    vector = x if x.ndim == 1 else x.view(size)
    y = torch.mv(weight, vector) if bias is None else torch.addmv(bias, weight, vector)
    return y if vector is x else y.view(*x.shape[:-1], -1)


def as_vectors(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Tensors `[1, 1, dim]` as `[dim]`, others as they are: a vector is multiplied without a view before and behind."""
    return (x.reshape(-1), y.reshape(-1)) if x.shape[:2].numel() == 1 else (x, y)


def product(layer: nn.Module, x: Tensor) -> Tensor:
    """layer(x), by `linear` where it is a plain linear layer that nobody watches by hooks."""
    if type(layer) is not nn.Linear or layer._forward_hooks or layer._forward_pre_hooks:  # pyright: ignore[reportPrivateUsage]
        return layer(x)
    held = layer._parameters  # pyright: ignore[reportPrivateUsage]  (attributes of modules are slow to find)
    return linear(x, cast(Tensor, held["weight"]), held["bias"])
