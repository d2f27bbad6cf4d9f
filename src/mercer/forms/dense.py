"""The dense form: all Lq x Lk weights at once, in ordinary differentiable torch operations. O(Lq Lk) memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mercer.core.kernels import Kernel
from mercer.core.layout import Layout


class _Profile(torch.autograd.Function):
    """f(s) with the kernel's own derivative, which is accurate where differentiating f's steps would not be."""

    @staticmethod
    def forward(ctx: Any, score: Tensor, kernel: Kernel) -> Tensor:
        ctx.kernel = kernel
        ctx.save_for_backward(score)
        return kernel.profile(score).clone()  # a profile may return its argument

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (score,) = ctx.saved_tensors
        return grads[0] * ctx.kernel.derivative(score), None


def weights(
    query: Tensor, key: Tensor, kernel: Kernel, layout: Layout, queries: tuple[int, int], keys: tuple[int, int]
) -> tuple[Tensor, Tensor | None]:
    """Unnormalised weights ``[B, Hq, Lq, Lk]`` and, for an exponential kernel, the log factor ``[B, Hq, Lq]`` taken
    out of each row.

    ``query`` (mapped and scaled) is ``[B, Hq, Lq, D]``, ``key`` (mapped) ``[B, Hk, Lk, D]``; they are the rows
    ``queries`` and the columns ``keys`` (start, stop) of the layout.
    """
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1) if groups > 1 else key
    score = query @ key.transpose(-1, -2)
    rows, columns, every = slice(*queries), slice(*keys), slice(None)
    mask = layout.visible(rows, columns)
    hidden = None if mask is None else ~mask
    bias = layout.bias(rows, columns, every, every, score.dtype)
    if kernel.exponential:
        if bias is not None:
            score = score + bias
        if hidden is not None:
            score = score.masked_fill(hidden, -torch.inf)
        peak = score.detach().amax(-1) if key.shape[2] else score.new_full(score.shape[:-1], -torch.inf)
        peak = peak.masked_fill(peak == -torch.inf, 0)
        return (score - peak.unsqueeze(-1)).exp(), peak
    weight = _Profile.apply(score, kernel)
    assert isinstance(weight, Tensor)
    if bias is not None:
        weight = weight * bias.exp()
    return weight if hidden is None else weight.masked_fill(hidden, 0), None


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel,
    layout: Layout,
    needs_denominator: bool,
    queries: tuple[int, int] | None = None,
    keys: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Numerator ``[B, Hq, Lq, Dv]``, denominator ``[B, Hq, Lq]`` if needed, and log row factor ``[B, Hq, Lq]`` for
    exponential kernels.
    """
    weight, peak = weights(
        query, key, kernel, layout, queries or (0, layout.query_length), keys or (0, layout.key_length)
    )
    groups = query.shape[1] // value.shape[1]
    value = value.repeat_interleave(groups, dim=1) if groups > 1 else value
    return weight @ value, weight.sum(-1) if needs_denominator else None, peak
