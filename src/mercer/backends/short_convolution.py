"""A short causal convolution of each channel on the CPU, outputs and first derivatives, in Numba (extra `cpu`).

    y_t[c] = f(bias[c] + sum_i weight[c, i] x_{t-width+1+i}[c])

What torch's operators read and write once for every i is read once. Sums are float32. `mercer.mixers.short_convolution`
has the definition.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mercer.backends import short_convolution_table as at
from mercer.backends.selective_scan import serves
from mercer.backends.sharing import share, threads_for
from mercer.core.first_order import first_order

__all__ = ["LEAST", "serves", "short_convolution"]

LEAST = 1 << 15
"""Numbers of x from which nobody minds that a compiler starts."""


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, past: Tensor | None, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs [B, L, C] in the dtype of x and the tail [B, width - 1, C] in float32. x: float32 or less, L at least 1;
    weight: [C, width]; past: a tail or None; lengths: [B] from 0 to L or None.
    """
    dtype = x.dtype
    x = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    bias, past = (None if v is None else v.float().contiguous() for v in (bias, past))
    lengths = None if lengths is None else lengths.to(torch.int64).contiguous()
    y, tail = _Convolution.apply(x, weight.float(), bias, past, lengths, silu)  # pyright: ignore[reportGeneralTypeIssues]
    return y.to(dtype), tail


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        past: Tensor | None,
        lengths: Tensor | None,
        silu: bool,
    ) -> tuple[Tensor, Tensor]:
        from mercer.backends import short_convolution_kernels as kernels

        batch, length, channels = x.shape
        width = weight.shape[1]
        out, final = torch.empty(batch, length, channels, dtype=x.dtype), torch.empty(batch, width - 1, channels)
        across = weight.t().contiguous()
        tensors = _table({at.X: x, at.WEIGHT: across, at.BIAS: bias, at.PAST: past, at.COUNTS: lengths})
        _fill(tensors, {at.OUT: out, at.FINAL: final})
        sizes = np.array((length, channels, width, silu), np.int64)
        kernel = kernels.compiled()[0]
        share(_items(x), lambda _thread, start, stop: kernel(tensors, sizes, start, stop))
        ctx.set_materialize_grads(False)
        ctx.silu = silu
        ctx.save_for_backward(x, weight, bias, past, lengths)
        return out, final

    @staticmethod
    @first_order(instead="float64, which torch's operators convolve")
    def backward(ctx: Any, grad_out: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        from mercer.backends import short_convolution_kernels as kernels

        x, weight, bias, past, lengths = ctx.saved_tensors
        batch, length, channels = x.shape
        width = weight.shape[1]
        if grad_out is None:
            grad_out = x.new_zeros(1, 1, channels).expand(batch, length, channels)
        elif grad_out.stride(-1) != 1 and channels > 1:
            grad_out = grad_out.contiguous()
        grad_final = None if grad_final is None else grad_final.contiguous()
        grad_x, grad_past = torch.empty(x.shape, dtype=x.dtype), torch.empty(batch, width - 1, channels)
        sums = torch.empty(_items(x), width + 1, channels)
        across = weight.t().contiguous()
        tensors = _table({at.X: x, at.WEIGHT: across, at.BIAS: bias, at.PAST: past, at.COUNTS: lengths})
        _fill(tensors, {at.GRAD_OUT: grad_out, at.GRAD_FINAL: grad_final, at.GRAD_X: grad_x})
        _fill(tensors, {at.GRAD_PAST: grad_past, at.GRAD_WEIGHT: sums})
        sizes = np.array((length, channels, width, ctx.silu), np.int64)
        work = torch.empty(threads_for(_items(x)), kernels.room(width, channels) // 4)
        kernel = kernels.compiled()[1]
        share(_items(x), lambda thread, start, stop: kernel(tensors, sizes, work[thread].data_ptr(), start, stop))
        total = sums.sum(0)
        grad_bias = None if bias is None else total[width]
        return grad_x, total[:width].t(), grad_bias, None if past is None else grad_past, None, None


def _items(x: Tensor) -> int:
    """Runs of tokens over all rows."""
    return x.shape[0] * -(-x.shape[1] // at.CHUNK)


def _table(given: dict[int, Tensor | None]) -> Any:
    tensors = np.zeros((at.ROWS, 4), np.int64)
    _fill(tensors, given)
    return tensors


def _fill(tensors: Any, given: dict[int, Tensor | None]) -> None:
    for row, x in given.items():
        if x is not None:
            strides = [n * x.element_size() for n in x.stride()[:2]] if row < at.PAST else (0, 0)
            tensors[row] = x.data_ptr(), x.dtype == torch.bfloat16, *strides
