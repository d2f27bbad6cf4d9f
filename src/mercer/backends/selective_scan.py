"""The selective scan on the CPU, outputs and first derivatives, in Numba (extra `cpu`).

    h_t = exp(d_t A) h_{t-1} + d_t x_t B_t,   y_t = (C_t . h_t + D x_t) silu(z_t),   d_t = softplus(step_t + bias)

States exist in the nearest cache only; what stays for the backward pass are the inputs and the states before every 32
tokens. Sums are float32. `mercer.mixers.selective_scan` has the definition and checks what it is given.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from mercer.backends import selective_scan_table as at
from mercer.backends.sharing import installed, share, threads_for
from mercer.core.first_order import first_order

LEAST = 1 << 16
"""Channels times states times tokens from which nobody minds that a compiler starts."""


def serves(*tensors: Tensor | None) -> bool:
    """Whether the kernels compute this: float32 sums, on the CPU, without forward-mode derivatives or a compiler."""
    given = [x for x in tensors if x is not None]
    return (
        installed()
        and not torch.compiler.is_compiling()
        and all(x.is_cpu and x.dtype != torch.float64 and forward_ad.unpack_dual(x).tangent is None for x in given)
    )


def selective_scan(
    x: Tensor,
    step: Tensor,
    a: Tensor,
    write: Tensor,
    read: Tensor,
    skip: Tensor | None,
    gate: Tensor | None,
    bias: Tensor | None,
    softplus: bool,
    state: Tensor | None,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, L, D] in the dtype of x, and final states [B, N, D] in float32; arguments as the operator's."""
    x, step = _rows(x), _rows(step)
    gate = None if gate is None else _rows(gate)
    a, write, read = a.float(), _wide(write), _wide(read)
    skip, bias, state = (None if v is None else v.float().contiguous() for v in (skip, bias, state))
    lengths = None if lengths is None else lengths.to(torch.int64).contiguous()
    return _Scan.apply(x, step, a, write, read, skip, gate, bias, state, lengths, softplus)  # pyright: ignore[reportReturnType]


def _rows(x: Tensor) -> Tensor:
    """In float32 or bfloat16, the numbers of a row side by side."""
    x = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _wide(x: Tensor) -> Tensor:
    return _rows(x.float())


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        step: Tensor,
        a: Tensor,
        write: Tensor,
        read: Tensor,
        skip: Tensor | None,
        gate: Tensor | None,
        bias: Tensor | None,
        state: Tensor | None,
        lengths: Tensor | None,
        softplus: bool,
    ) -> tuple[Tensor, Tensor]:
        from mercer.backends import selective_scan_kernels as kernels

        batch, length, channels = x.shape
        states = a.shape[1]
        out = torch.empty(batch, length, channels, dtype=x.dtype)
        final = torch.empty(batch, states, channels)
        marks = None
        if any(ctx.needs_input_grad):
            marks = torch.empty(batch, -(-length // at.CHUNK), states, channels)
        rates = _rates(a)
        table = _inputs(x, step, rates, write, read, skip, gate, bias, state, lengths)
        table |= {at.OUT: out, at.FINAL: final, at.MARKS: marks}
        _run(kernels.compiled_forward(), table, (batch, length, channels, states, softplus), kernels.forward_room)
        ctx.set_materialize_grads(False)
        ctx.softplus, ctx.begun = softplus, state is not None
        ctx.save_for_backward(x, step, a, write, read, skip, gate, bias, lengths, marks)
        return out, final

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        from mercer.backends import selective_scan_kernels as kernels

        x, step, a, write, read, skip, gate, bias, lengths, marks = ctx.saved_tensors
        batch, length, channels = x.shape
        states = a.shape[1]
        if grad_out is None:
            grad_out = x.new_zeros(1, 1, channels).expand(batch, length, channels)
        grads = [None if v is None else torch.empty(v.shape, dtype=v.dtype) for v in (x, step, gate)]
        grad_state, grad_rates = torch.empty(batch, states, channels), torch.empty(batch, states, channels)
        grad_skip, grad_bias = torch.empty(batch, channels), torch.empty(batch, channels)
        both = torch.empty(-(-channels // at.GROUP), batch, length, 2, states)
        table = _inputs(x, step, _rates(a), write, read, skip, gate, bias, None, lengths)
        table |= {at.MARKS: marks, at.GRAD_OUT: _rows(grad_out)}
        table[at.GRAD_FINAL] = None if grad_final is None else grad_final.contiguous()
        table |= {at.GRAD_X: grads[0], at.GRAD_STEP: grads[1], at.GRAD_GATE: grads[2], at.GRAD_STATE: grad_state}
        table |= {at.GRAD_RATES: grad_rates, at.GRAD_SKIP: grad_skip, at.GRAD_BIAS: grad_bias, at.GRAD_BOTH: both}
        sizes = (batch, length, channels, states, ctx.softplus)
        _run(kernels.compiled_backward(), table, sizes, kernels.backward_room)
        grad_write, grad_read = both.sum(0).unbind(2)
        vectors = (None if v is None else g.sum(0) for v, g in ((skip, grad_skip), (bias, grad_bias)))
        grad_a = grad_rates.sum(0).t()
        return *_spread(grads, grad_a, grad_write, grad_read, *vectors), grad_state if ctx.begun else None, None, None


def _spread(
    grads: list[Tensor | None], a: Tensor, write: Tensor, read: Tensor, skip: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients in the order of the arguments."""
    return grads[0], grads[1], a, write, read, skip, grads[2], bias


def _rates(a: Tensor) -> Tensor:
    """A log2(e) as [N, D]."""
    return (a.detach().t() * math.log2(math.e)).contiguous()


def _inputs(
    x: Tensor,
    step: Tensor,
    rates: Tensor,
    write: Tensor,
    read: Tensor,
    skip: Tensor | None,
    gate: Tensor | None,
    bias: Tensor | None,
    state: Tensor | None,
    lengths: Tensor | None,
) -> dict[int, Tensor | None]:
    table = {at.X: x, at.STEP: step, at.RATES: rates, at.WRITE: write, at.READ: read}
    return table | {at.SKIP: skip, at.GATE: gate, at.BIAS: bias, at.STATE: state, at.LENGTHS: lengths}


def _run(kernel: Any, table: dict[int, Tensor | None], sizes: tuple[int, ...], room: Any) -> None:
    """Run a kernel over groups of channels of all rows, an equal run of them a thread, each with scratch of its own."""
    tensors = np.zeros((at.ROWS, 4), np.int64)
    for row, x in table.items():
        if x is not None:
            strides = [n * x.element_size() for n in x.stride()[:2]] if row < at.STATE else (0, 0)
            tensors[row] = x.data_ptr(), x.dtype == torch.bfloat16, *strides
    batch, _, channels, states, _ = sizes
    numbers = np.array(sizes, np.int64)
    items = batch * -(-channels // at.GROUP)
    work = torch.empty(threads_for(items), room(states) // 4)

    def part(thread: int, start: int, stop: int) -> None:
        kernel(tensors, numbers, work[thread].data_ptr(), start, stop)

    share(items, part)
