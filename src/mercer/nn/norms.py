"""LayerNorm and RMSNorm over the last dimension, with statistics in float32 at least."""

from math import isfinite
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from mercer.core.first_order import first_order
from mercer.errors import InvalidArgument


class LayerNorm(nn.Module):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dimension (Ba et al. 2016).

    The variance is the biased one. bias=False leaves the bias out.
    """

    def __init__(self, dim: int, *, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        _check(dim, eps)
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., dim]; returns the same shape and dtype."""
        weight, bias = self.weight, self.bias
        if x.dtype == weight.dtype == torch.float32:
            return torch.layer_norm(x, weight.shape, weight, bias, self.eps)
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = None if bias is None else bias.to(wide)
        return torch.layer_norm(x.to(wide), weight.shape, weight.to(wide), bias, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, bias={self.bias is not None}"


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * (offset + weight), over the last dimension (Zhang & Sennrich 2019).

    offset: added to the weight, which starts at 1 - offset, so that a new norm only normalises. 1 is what Gemma's
    checkpoints are stored for: weight decay then pulls the factor towards 1 and not towards 0.
    """

    def __init__(self, dim: int, *, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        _check(dim, eps)
        if isinstance(offset, bool) or not isinstance(offset, Real) or not isfinite(offset):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"a norm's offset must be a finite number, got {offset!r}")
        self.weight = nn.Parameter(torch.full((dim,), 1.0 - offset))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., dim]; returns the same shape and dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(wide)
        if self.offset:
            weight = weight + self.offset
        normed: Tensor = _RMSNorm.apply(x.to(wide), weight, self.eps)
        return normed.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}" + (f", offset={self.offset}" if self.offset else "")


class _RMSNorm(torch.autograd.Function):
    """RMSNorm in seven passes over memory where autograd takes about twenty.

    With r = (mean(x^2) + eps)^(-1/2) a row, n = x r and g = dL/dy:
    dL/dw = sum over rows of g n,   dL/dx = r (g w - n mean(g w n)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        size = x.shape[-1]
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(size).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(x, scale).mul_(weight)

    @staticmethod
    @first_order(instead="torch.nn.functional.rms_norm")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        product = grad * normed
        grad_weight = product.reshape(-1, x.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        grad_x = None
        if ctx.needs_input_grad[0]:
            mean = (product @ weight).div_(x.shape[-1])[..., None]
            grad_x = torch.mul(grad, weight, out=product).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_x, grad_weight, None


def _check(dim: int, eps: float) -> None:
    if dim < 1 or eps < 0:
        raise InvalidArgument(f"a norm needs dim of at least 1 and eps of at least 0, got dim={dim} and eps={eps}")
