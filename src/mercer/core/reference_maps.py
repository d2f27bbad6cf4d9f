"""The specification of kernels that are defined by their features: phi written out from the formulas, in float64.

Part of ``mercer.core.reference``; it takes from a kernel its settings and numbers only.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mercer.core.feature_maps import Dpfp, ExpFeatures
from mercer.core.kernels import Kernel
from mercer.core.learned_maps import Hedgehog, LearnedMap, MlpFeatures
from mercer.core.random_features import PositiveRandomFeatures, TrigonometricRandomFeatures


def literal_features(kernel: Kernel, x: Tensor, scale: float, side: str) -> Tensor | None:
    """phi(x) of ``[B, H, D]`` or ``[..., D]``, so that K = <phi(q), phi(k)>; None if ``kernel`` is not of these.

    The scale of K stands on the query's side where the features do not depend on it.
    """
    factor = scale if side == "query" else 1.0
    if isinstance(kernel, PositiveRandomFeatures):
        return _positive(kernel, x, scale)
    if isinstance(kernel, TrigonometricRandomFeatures):
        return _trigonometric(kernel, x, scale)
    if isinstance(kernel, Dpfp):
        return factor * _dpfp(kernel, x)
    if isinstance(kernel, ExpFeatures):
        return factor * (torch.cat((x.exp(), (-x).exp()), -1) if kernel.negation else x.exp())
    if isinstance(kernel, Hedgehog | MlpFeatures):
        return factor * torch.stack([_learned(kernel, x[:, h], h, x.shape[1], side) for h in range(x.shape[1])], 1)
    return None


def _positive(kernel: PositiveRandomFeatures, x: Tensor, scale: float) -> Tensor:
    small = math.sqrt(scale) * x
    directions = kernel.directions_for(x.shape[-1]).double()
    half = torch.zeros_like(small[..., 0]) if kernel.plain else (small * small).sum(-1) / 2
    columns: list[Tensor] = []
    for sign in (1, -1) if kernel.hyperbolic else (1,):
        columns += [torch.exp(sign * (small * w).sum(-1) - half) for w in directions]
    return torch.stack(columns, -1) / math.sqrt(len(columns))


def _trigonometric(kernel: TrigonometricRandomFeatures, x: Tensor, scale: float) -> Tensor:
    if kernel.unit:
        norm = x.square().sum(-1, keepdim=True).sqrt()
        x = torch.where(norm > 0, x / torch.where(norm > 0, norm, 1.0), 0.0)
    small = math.sqrt(scale) * x
    directions = kernel.directions_for(x.shape[-1]).double()
    angles = torch.stack([(small * w).sum(-1) for w in directions], -1)
    size = torch.exp((small * small).sum(-1, keepdim=True) / 2) / math.sqrt(len(directions))
    return torch.cat((size * torch.sin(angles), size * torch.cos(angles)), -1)


def _dpfp(kernel: Dpfp, x: Tensor) -> Tensor:
    dim = x.shape[-1]
    rectified = [x[..., d].clamp(min=0) for d in range(dim)] + [(-x[..., d]).clamp(min=0) for d in range(dim)]
    return torch.stack(
        [rectified[j] * rectified[(j - i) % (2 * dim)] for i in range(1, kernel.nu + 1) for j in range(2 * dim)], -1
    )


def _learned(kernel: LearnedMap, x: Tensor, head: int, heads: int, side: str) -> Tensor:
    """phi of one head, x ``[B, D]``; the heads of a group share the weights of their key head."""

    def weight(name: str) -> Tensor:
        every = kernel.tensors()[f"{side}_{name}"].double()
        return every[head * every.shape[0] // heads]

    if isinstance(kernel, Hedgehog):
        along = x @ weight("weight")
        above, below = along.exp(), (-along).exp()
        return torch.cat((above / above.sum(-1, keepdim=True), below / below.sum(-1, keepdim=True)), -1)
    assert isinstance(kernel, MlpFeatures)
    if kernel.hidden is None:
        return (x @ weight("w2") + weight("b2")).clamp(min=0)
    inner = x @ weight("w1") + weight("b1")
    inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
    return torch.log1p(torch.exp(inner @ weight("w2") + weight("b2")))
