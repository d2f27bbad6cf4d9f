"""Normalisers: what turns the weighted sum of values u_i = sum_j w_ij K(q_i, k_j) v_j into an output.

A normaliser receives the numerator u and, if it asks for it, the denominator d_i = sum_j w_ij K(q_i, k_j). It
declares whether it is *scale invariant*, that is whether N(c u, c d) = N(u, d) for every row factor c > 0; then the
row maximum of the exponential kernel may be left out, and exp(S)V / |exp(S)V| is computed as stably as softmax. A row
that sees nothing gives zeros.

Writing one's own: subclass :class:`Normalizer`, set the flags and give ``apply``; it is ordinary differentiable
torch code. Those that stand something else in the denominator's place are in ``mercer.core.denominators``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mercer.errors import InvalidArgument


class Normalizer(ABC):
    """What replaces or is the denominator."""

    needs_denominator: ClassVar[bool] = False
    """Whether ``apply`` receives the sum of each row's weights."""
    needs_count: ClassVar[bool] = False
    """Whether ``apply`` receives the number of keys that each row sees. At most one of the two."""
    scale_invariant: ClassVar[bool] = False
    """Whether ``apply(c u, c d) = apply(u, d)`` for every row factor c > 0."""
    takes_any_sign: ClassVar[bool] = False
    """Whether a denominator of 0 or below does no harm; without it only positive kernels, or ``signed=True``, pass."""
    takes_divided_rows: ClassVar[bool] = True
    """Whether fused operators may serve a scale-invariant normaliser: their rows come divided by their sums, and the
    gradient flows through that division."""

    @abstractmethod
    def apply(self, numerator: Tensor, denominator: Tensor | None) -> Tensor:
        """The output ``[B, Hq, L, Dv]`` from a numerator ``[B, Hq, L, Dv]`` and a denominator ``[B, Hq, L]``.

        Both come in float32 (float64 for float64 inputs). The second is the denominator with ``needs_denominator``,
        the number of keys seen, ``[B or 1, 1, L]`` in the same dtype, with ``needs_count``, and None otherwise.
        """

    def apply_factored(self, numerator: Tensor, denominator: Tensor | None, log_factor: Tensor) -> Tensor:
        """``apply(e^f numerator, e^f denominator)`` for the log-factors f ``[B, Hq, L]`` that were taken out of rows.

        Called where the normaliser is not scale invariant and the kernel's rows had a factor taken out. Give it if the
        output can be had without forming e^f, which overflows where a score is above 88 (709 in float64). A count, of
        ``needs_count``, has no such factor and comes as it is.
        """
        factor = log_factor.exp().to(numerator.dtype)
        wide = factor.unsqueeze(-1)
        # 0 stays 0 even where the factor is infinite.
        numerator = torch.where(numerator == 0, numerator, numerator * wide)
        if denominator is not None and not self.needs_count:
            denominator = denominator * factor
        return self.apply(numerator, denominator)

    def check(self, batch: int, heads: int, length: int, value_dim: int) -> None:  # noqa: B027  (most take all)
        """Raise :class:`~mercer.InvalidArgument` if this normaliser's tensors do not fit ``[B, Hq, L, Dv]``."""

    def map_tokens(self, select: Callable[[Tensor], Tensor]) -> Self:
        """This normaliser with ``select`` done to each of its tensors that has an entry per token, ``[B, Hq, L, *]``.

        Packed documents run in a layout of their own, and their gates have to come along.
        """
        return self


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


@dataclass(frozen=True, eq=False)
class Standardize(Normalizer):
    """Layer normalisation, o = gain * (u - mean(u)) / sd(u) + bias over the head dimension, sd(u)^2 = mean((u -
    mean(u))^2). Scale invariant; needs no denominator.

    Without epsilon, as :class:`L2`: a u whose entries are all equal gives the bias, with finite gradients. A row that
    sees nothing gives zeros, with a bias too. Named for what it does, since ``LayerNorm`` is the module of
    :mod:`mercer.nn` (which has an epsilon); its name in :func:`~mercer.parse_attention` is ``layernorm``.

    Args:
        gain: None, or a tensor ``[Hq]`` or ``[Hq, Dv]`` that multiplies the standardised row (a parameter of the
            caller).
        bias: None, or a tensor ``[Hq]`` or ``[Hq, Dv]`` that is added to it.

    Source: Ba et al. 2016, arXiv 1607.06450; per head in place of the denominator: the ablation of Mongaras and Larson
    2025, arXiv 2507.23632.
    """

    gain: Tensor | None = None
    bias: Tensor | None = None

    scale_invariant: ClassVar[bool] = True

    @property
    def needs_count(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.bias is not None  # which rows see nothing

    def __str__(self) -> str:
        return f"Standardize({', '.join(n for n in ('gain', 'bias') if getattr(self, n) is not None)})"

    def apply(self, numerator: Tensor, denominator: Tensor | None) -> Tensor:
        out = _with_gain(unit(_centred(numerator)) * numerator.shape[-1] ** 0.5, self.gain)
        if self.bias is None:
            return out
        assert denominator is not None
        return (out + _per_head(self.bias, "bias", out)).masked_fill((denominator == 0).unsqueeze(-1), 0)


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
        if torch.compiler.is_compiling() or bool(unsafe.any()):  # traced, it cannot depend on the numbers
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


def _centred(u: Tensor) -> Tensor:
    """A positive multiple of u - mean(u) over the last dimension: exactly 0 where all entries are equal."""
    limit = torch.finfo(u.dtype).max * 2.0**-24  # differences and sums of up to 2^22 entries stay in range below it
    if u.numel() and (torch.compiler.is_compiling() or bool(u.detach().abs().amax() > limit)):
        large = u.detach().abs().amax(-1, keepdim=True) > limit
        u = u * torch.where(large, 2.0**-24, 1.0).to(u.dtype)
    shifted = u - u[..., :1]  # first: the mean of equal entries need not round to them, their difference is 0
    return shifted - shifted.mean(-1, keepdim=True)


def _with_gain(out: Tensor, gain: Tensor | None) -> Tensor:
    return out if gain is None else out * _per_head(gain, "gain", out)


def _per_head(x: Tensor, what: str, out: Tensor) -> Tensor:
    """A tensor of heads, or of heads and channels, in the shape and dtype to combine with ``[B, Hq, L, Dv]``."""
    heads, dim = out.shape[1], out.shape[-1]
    if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"{what} must be a tensor [{heads}] or [{heads}, {dim}], not {x!r}.")
    if x.shape == (heads,):
        return x.view(heads, 1, 1).to(out.dtype)
    if x.shape == (heads, dim):
        return x.view(heads, 1, dim).to(out.dtype)
    raise InvalidArgument(
        f"{what} must have shape [{heads}] or [{heads}, {dim}] (heads, value dimension), not {list(x.shape)}."
    )
