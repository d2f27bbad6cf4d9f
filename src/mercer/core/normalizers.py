"""Normalisers: what turns the weighted sum of values u_i = sum_j w_ij K(q_i, k_j) v_j into an output.

A normaliser receives the numerator u and, if it asks for it, the denominator d_i = sum_j w_ij K(q_i, k_j). It
declares whether it is *scale invariant*, that is whether N(c u, c d) = N(u, d) for every row factor c > 0; then the
row maximum of the exponential kernel may be left out, and exp(S)V / |exp(S)V| is computed as stably as softmax. An
empty row, u = 0, gives zeros.

Writing one's own: subclass :class:`Normalizer`, set the two flags and give ``apply``; it is ordinary differentiable
torch code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mercer.errors import InvalidArgument


class Normalizer(ABC):
    """What replaces or is the denominator."""

    needs_denominator: ClassVar[bool] = False
    scale_invariant: ClassVar[bool] = False

    @abstractmethod
    def apply(self, numerator: Tensor, denominator: Tensor | None) -> Tensor:
        """The output ``[B, Hq, L, Dv]`` from a numerator ``[B, Hq, L, Dv]`` and a denominator ``[B, Hq, L]``.

        Both come in float32 (float64 for float64 inputs); the denominator is None unless ``needs_denominator``.
        """


@dataclass(frozen=True)
class Sum(Normalizer):
    """o = u / d, d the sum of the weights: softmax's. Scale invariant. A row with d = 0 gives zeros."""

    needs_denominator: ClassVar[bool] = True
    scale_invariant: ClassVar[bool] = True

    def apply(self, numerator: Tensor, denominator: Tensor | None) -> Tensor:
        if denominator is None:  # from a fused operator, which has divided already
            return numerator
        empty = denominator == 0
        # Divided, not multiplied by the inverse: that of a subnormal sum would be infinite.
        return (numerator / denominator.masked_fill(empty, 1).unsqueeze(-1)).masked_fill(empty.unsqueeze(-1), 0)


@dataclass(frozen=True, eq=False)
class L2(Normalizer):
    """o = gain * u / |u|, the Euclidean norm over the head dimension. Scale invariant; needs no denominator.

    No epsilon: adding one would make the result depend on the row factor that scale invariance removes. u = 0 gives 0.

    Args:
        gain: None, or a tensor ``[Hq]`` or ``[Hq, Dv]`` that multiplies the output (a parameter of the caller).

    Source: Mongaras and Larson 2025, arXiv 2507.23632 (no gain there).
    """

    gain: Tensor | None = None

    scale_invariant: ClassVar[bool] = True

    def __str__(self) -> str:
        return "L2()" if self.gain is None else "L2(gain)"

    def apply(self, numerator: Tensor, denominator: Tensor | None) -> Tensor:
        return _with_gain(unit(numerator), self.gain)


@dataclass(frozen=True, eq=False)
class RMS(Normalizer):
    """o = gain * u / sqrt(mean(u^2)) = sqrt(Dv) gain * u / |u| over the head dimension. Scale invariant, without
    epsilon.

    Args:
        gain: None, or a tensor ``[Hq]`` or ``[Hq, Dv]`` that multiplies the output (a parameter of the caller).

    Source: Qin et al. 2022 (NormAttention), arXiv 2210.10340; Zhang and Sennrich 2019 (RMSNorm), arXiv 1910.07467.
    """

    gain: Tensor | None = None

    scale_invariant: ClassVar[bool] = True

    def __str__(self) -> str:
        return "RMS()" if self.gain is None else "RMS(gain)"

    def apply(self, numerator: Tensor, denominator: Tensor | None) -> Tensor:
        return _with_gain(unit(numerator) * numerator.shape[-1] ** 0.5, self.gain)


@dataclass(frozen=True)
class Identity(Normalizer):
    """o = u: no normalisation. Not scale invariant, so exp(scale q.k) must itself be finite."""

    def apply(self, numerator: Tensor, denominator: Tensor | None) -> Tensor:
        return numerator


class _Unit(torch.autograd.Function):
    """u / |u| over the last dimension, and 1 / |u|; 0 at 0, with gradient 0. Squares neither overflow nor underflow.

    Both are outputs, so that the backward pass, which reads them, can be differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> tuple[Tensor, Tensor]:
        norm = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
        unsafe = (norm < 1e-15) | (norm > 1e15)  # squares may have left the range: rescale by the largest entry first
        direct = None
        if bool(unsafe.any()):
            largest = u.abs().amax(-1, keepdim=True)
            scaled = u / largest.masked_fill(largest == 0, 1)
            size = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
            norm = torch.where(unsafe, size * largest, norm)
            direct = scaled / size.masked_fill(size == 0, 1)
        inverse = norm.reciprocal().masked_fill_(norm == 0, 0).clamp_(max=torch.finfo(u.dtype).max)
        out = u * inverse
        if direct is not None:  # 1 / |u| of a subnormal u is out of range, u / |u| is not
            out = torch.where(unsafe, direct, out)
        ctx.save_for_backward(out, inverse)
        ctx.set_materialize_grads(False)
        return out, inverse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor | None:
        grad, grad_inverse = grads
        out, inverse = ctx.saved_tensors
        total = None
        if grad is not None:
            along = (out * grad).sum(-1, keepdim=True)
            total = torch.addcmul(grad, out, along, value=-1).mul_(inverse)
        if grad_inverse is not None:
            through = -out * inverse.square() * grad_inverse
            total = through if total is None else total + through
        return total


def unit(u: Tensor) -> Tensor:
    """u / |u| over the last dimension, 0 where u = 0."""
    out, _ = _Unit.apply(u)  # pyright: ignore[reportGeneralTypeIssues]
    assert isinstance(out, Tensor)
    return out


def _with_gain(out: Tensor, gain: Tensor | None) -> Tensor:
    if gain is None:
        return out
    heads, dim = out.shape[1], out.shape[-1]
    if gain.shape == (heads,):
        return out * gain.view(heads, 1, 1).to(out.dtype)
    if gain.shape == (heads, dim):
        return out * gain.view(heads, 1, dim).to(out.dtype)
    raise InvalidArgument(
        f"gain must have shape [{heads}] or [{heads}, {dim}] (heads, value dimension), not {list(gain.shape)}."
    )
