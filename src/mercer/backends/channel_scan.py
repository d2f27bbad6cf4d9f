"""The linear recurrence of channels on the CPU, one pass over memory in each direction (extra `cpu`).

    h_t = exp(g_t) h_{t-1} + x_t

Forward reads g and x and writes h; backward reads g, h and the incoming gradient and writes two: what it takes is
moving these. Tokens are walked in order for a run of channels whose h stays in the nearest cache. Sums are float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mercer.backends.sharing import installed, share
from mercer.core.first_order import first_order

__all__ = ["LEAST", "installed", "scan"]

LEAST = 1 << 12
"""Numbers in x below which torch's operators are used: nobody waits for a compiler because of a small call."""
RUN = 512
"""Channels that are walked together: rows of 2 kB, which memory gives at full speed."""


def scan(log_decay: Tensor, x: Tensor, state: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """h ``[B, L, C]`` and the last of it ``[B, C]``, both float32; first derivatives.

    log_decay, x: ``[B, L, C]`` on the CPU, any float dtype but float64 and any strides. state: ``[B, C]`` float32.
    lengths: ``[B]`` integers from 0 to L, or None; what stands behind them is not looked at, and h is 0 there.
    """
    limits = None if lengths is None else lengths.to(torch.int64).contiguous()
    out, last = _Scan.apply(_rows(log_decay), _rows(x), state.contiguous(), limits)  # pyright: ignore[reportGeneralTypeIssues]
    return out, last


class _Scan(torch.autograd.Function):
    """Saves the logarithms as they came, and what comes out."""

    @staticmethod
    def forward(ctx: Any, log_decay: Tensor, x: Tensor, state: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        from mercer.backends import channel_scan_kernels as kernels

        out, last = torch.empty(x.shape), torch.empty(state.shape)
        _run(kernels.compiled_forward(), (log_decay, x, out), (state, last), lengths, out.shape)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(log_decay, out, state, lengths)
        ctx.dtype = x.dtype
        return out, last

    @staticmethod
    @first_order(instead="linear_recurrence with form='recurrent'")
    def backward(ctx: Any, grad: Tensor | None, grad_last: Tensor | None) -> tuple[Tensor | None, ...]:
        from mercer.backends import channel_scan_kernels as kernels

        log_decay, out, state, lengths = ctx.saved_tensors
        grad = torch.zeros(1).expand(out.shape) if grad is None else grad
        begin = torch.zeros_like(state) if grad_last is None else grad_last.contiguous()
        grad_log, grad_x = (torch.empty(out.shape, dtype=dtype) for dtype in (log_decay.dtype, ctx.dtype))
        grad_state = torch.empty_like(state)
        tensors = (log_decay, out, _rows(grad), grad_log, grad_x)
        _run(kernels.compiled_backward(), tensors, (state, begin, grad_state), lengths, out.shape)
        return grad_log, grad_x, grad_state, None


def _run(
    kernel: Any, tensors: tuple[Tensor, ...], states: tuple[Tensor, ...], lengths: Tensor | None, shape: torch.Size
) -> None:
    batch, length, channels = shape
    table = [
        (t.data_ptr(), t.dtype == torch.bfloat16, *(n * t.element_size() for n in t.stride()[:2])) for t in tensors
    ]
    ends = np.full(batch, length, np.int64) if lengths is None else lengths.numpy()
    runs = -(-channels // RUN)
    rows, sums = np.array(table, np.int64), np.array([s.data_ptr() for s in states], np.int64)
    scratch = np.empty((batch * runs, RUN), np.float32)

    def part(_thread: int, start: int, stop: int) -> None:
        kernel(rows, sums, ends, channels, length, scratch, start, stop)

    share(batch * runs, part)


def _rows(x: Tensor) -> Tensor:
    """In float32 or bfloat16, the numbers of a row side by side."""
    x = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
