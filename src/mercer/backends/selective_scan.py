"""The selective scan on the CPU, outputs and first derivatives, in Numba (extra `cpu`).

    h_t = exp(d_t A) h_{t-1} + d_t x_t B_t,   y_t = (C_t . h_t + D x_t) silu(z_t),   d_t = softplus(step_t + bias)

States exist in the nearest cache only; what stays for the backward pass are the inputs and the states before every 32
tokens. Sums are float32. `mercer.mixers.selective_scan` has the definition and checks what it is given.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from mercer.backends import selective_scan_table as at
from mercer.backends.sharing import installed, share, threads_for
from mercer.core.first_order import first_order

LEAST = 1 << 14
"""Channels times states times tokens from which nobody minds that a compiler starts."""
ALONE = 1 << 18
"""Likewise, up to which one thread is quicker than waking others."""
INPUTS = (at.X, at.STEP, at.RATES, at.WRITE, at.READ, at.SKIP, at.GATE, at.BIAS, at.STATE, at.LENGTHS)
"""Rows of the table in the order of the arguments."""


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
    dtype = x.dtype
    x, step = _rows(x), _rows(step)
    gate = None if gate is None else _rows(gate)
    a, write, read = a.float().contiguous(), _wide(write), _wide(read)
    skip, bias, state = (None if v is None else v.float().contiguous() for v in (skip, bias, state))
    lengths = None if lengths is None else lengths.to(torch.int64).contiguous()
    inputs = (x, step, a, write, read, skip, gate, bias, state, lengths)
    if torch.is_grad_enabled():
        y, final = _Scan.apply(*inputs, softplus)  # pyright: ignore[reportGeneralTypeIssues]
    else:
        y, final = _forward(inputs, softplus, None)
    return y.to(dtype), final


def _rows(x: Tensor) -> Tensor:
    """In float32 or bfloat16, the numbers of a row side by side."""
    x = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _wide(x: Tensor) -> Tensor:
    return _rows(x.float())


def _forward(inputs: tuple[Tensor | None, ...], softplus: bool, marks: Tensor | None) -> tuple[Tensor, Tensor]:
    from mercer.backends import selective_scan_kernels as kernels

    x, a = inputs[0], inputs[2]
    assert x is not None
    assert a is not None
    batch, length, channels = x.shape
    states = a.shape[1]
    out, final = torch.empty(batch, length, channels, dtype=x.dtype), torch.empty(batch, states, channels)
    table = dict(zip(INPUTS, inputs, strict=True)) | {at.OUT: out, at.FINAL: final, at.MARKS: marks}
    _run(kernels.compiled_forward(), table, (batch, length, channels, states, softplus), kernels.forward_room)
    return out, final


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        *inputs, softplus = given
        x, a = inputs[0], inputs[2]
        marks = None
        if any(ctx.needs_input_grad):
            marks = torch.empty(x.shape[0], -(-x.shape[1] // at.CHUNK), a.shape[1], x.shape[2])
        found = _forward(tuple(inputs), softplus, marks)
        ctx.set_materialize_grads(False)
        ctx.softplus = softplus
        ctx.save_for_backward(*inputs, marks)
        return found

    @staticmethod
    @first_order(instead="selective_scan with form='chunked'")
    def backward(ctx: Any, grad_out: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        from mercer.backends import selective_scan_kernels as kernels

        *inputs, marks = ctx.saved_tensors
        x, step, a, _, _, skip, gate, bias, state, _ = inputs
        batch, length, channels = x.shape
        states = a.shape[1]
        upstream = torch.zeros(1, 1, channels).expand(x.shape) if grad_out is None else _rows(grad_out)
        grads = [None if v is None else torch.empty(v.shape, dtype=v.dtype) for v in (x, step, gate)]
        grad_state, grad_rates = torch.empty(batch, states, channels), torch.empty(batch, states, channels)
        grad_skip, grad_bias = torch.empty(batch, channels), torch.empty(batch, channels)
        both = torch.empty(-(-channels // at.GROUP), batch, length, 2, states)
        table: dict[int, Tensor | None] = dict(zip(INPUTS, inputs, strict=True))
        table |= {at.MARKS: marks, at.GRAD_OUT: upstream}
        table[at.GRAD_FINAL] = None if grad_final is None else grad_final.contiguous()
        table |= {at.GRAD_X: grads[0], at.GRAD_STEP: grads[1], at.GRAD_GATE: grads[2], at.GRAD_STATE: grad_state}
        table |= {at.GRAD_RATES: grad_rates, at.GRAD_SKIP: grad_skip, at.GRAD_BIAS: grad_bias, at.GRAD_BOTH: both}
        sizes = (batch, length, channels, states, ctx.softplus)
        _run(kernels.compiled_backward(), table, sizes, kernels.backward_room)
        grad_write, grad_read = both.sum(0).unbind(2)
        grad_skip, grad_bias = (None if v is None else g.sum(0) for v, g in ((skip, grad_skip), (bias, grad_bias)))
        beside = (grad_rates.sum(0).t(), grad_write, grad_read, grad_skip, grads[2], grad_bias)
        return *grads[:2], *beside, None if state is None else grad_state, None, None


def _run(kernel: Any, table: dict[int, Tensor | None], sizes: tuple[int, ...], room: Any) -> None:
    """Run a kernel over groups of channels of all rows, an equal run of them a thread, each with scratch of its own."""
    numbers = [0] * (4 * at.ROWS)
    for row, x in table.items():
        if x is not None:
            numbers[4 * row] = x.data_ptr()
            if row < at.STATE:
                size, strides = x.element_size(), x.stride()
                numbers[4 * row + 1 : 4 * row + 4] = size == 2, size * strides[0], size * strides[1]
    tensors, switches = np.array(numbers, np.int64).reshape(at.ROWS, 4), np.array(sizes, np.int64)
    batch, length, channels, states, _ = sizes
    items = batch * -(-channels // at.GROUP)
    threads = 1 if batch * length * channels * states <= ALONE else threads_for(items)
    pitch = room(states)
    work = torch.empty(threads * pitch // 4)
    address = work.data_ptr()

    def part(thread: int, start: int, stop: int) -> None:
        kernel(tensors, switches, address + thread * pitch, start, stop)

    if threads == 1:
        part(0, 0, items)
    else:
        share(items, part)
