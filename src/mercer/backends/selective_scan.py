"""The selective scan on the CPU, outputs and first derivatives, in Numba (extra `cpu`).

    h_t = exp(d_t A) h_{t-1} + d_t x_t B_t,   y_t = (C_t . h_t + D x_t) silu(z_t),   d_t = softplus(step_t + bias)

States exist in the nearest cache only; what stays for the backward pass are the inputs and the states before every 32
tokens. Steps that are made from fewer numbers exist for a segment of tokens at a time, and so do their gradients. Sums
are float32. `mercer.mixers.selective_scan` has the definition and checks what it is given.
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
SEGMENT = 1 << 20
"""Numbers of steps that exist at a time where they are made from fewer."""
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
    expand: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, L, D] in the dtype of x, and final states [B, N, D] in float32; arguments as the operator's."""
    dtype = x.dtype
    x, step = _rows(x), _rows(step)
    if expand is not None:
        wide = torch.promote_types(step.dtype, expand.dtype)
        wide = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else wide
        step, expand = step.to(wide), expand.to(wide)
    gate = None if gate is None else _rows(gate)
    a, write, read = a.float().contiguous(), _wide(write), _wide(read)
    skip, bias, state = (None if v is None else v.float().contiguous() for v in (skip, bias, state))
    lengths = None if lengths is None else lengths.to(torch.int64).contiguous()
    inputs = (x, step, a, write, read, skip, gate, bias, state, lengths)
    if torch.is_grad_enabled():
        y, final = _Scan.apply(*inputs, expand, softplus)  # pyright: ignore[reportGeneralTypeIssues]
    else:
        y, final = _forward(inputs, expand, softplus, None)
    return y.to(dtype), final


def _rows(x: Tensor) -> Tensor:
    """In float32 or bfloat16, the numbers of a row side by side."""
    x = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _wide(x: Tensor) -> Tensor:
    return _rows(x.float())


def _size(x: Tensor, expand: Tensor | None) -> int:
    """Tokens of a segment: all, unless steps are made for one at a time."""
    if expand is None:
        return max(x.shape[1], 1)
    return max(SEGMENT // max(x.shape[0] * x.shape[2], 1) // at.CHUNK, 1) * at.CHUNK


def _segment(
    inputs: tuple[Tensor | None, ...], expand: Tensor | None, state: Tensor | None, start: int, stop: int
) -> dict[int, Tensor | None]:
    """Rows of the table for some tokens, which begin with a state."""
    table = dict(zip(INPUTS, inputs, strict=True))
    x, lengths = table[at.X], table[at.LENGTHS]
    if x is not None and stop - start < x.shape[1]:
        for row in (at.X, at.STEP, at.GATE, at.WRITE, at.READ):
            whole = table[row]
            table[row] = None if whole is None else whole[:, start:stop]
        table[at.LENGTHS] = None if lengths is None else (lengths - start).clamp(0, stop - start)
    step = table[at.STEP]
    if expand is not None and step is not None:
        table[at.STEP] = _rows(torch.nn.functional.linear(step, expand))
    table[at.STATE] = state
    return table


def _forward(
    inputs: tuple[Tensor | None, ...], expand: Tensor | None, softplus: bool, marks: list[Tensor] | None
) -> tuple[Tensor, Tensor]:
    """marks: is given the states before every 32 tokens, a tensor for each segment."""
    from mercer.backends import selective_scan_kernels as kernels

    x, a, state = inputs[0], inputs[2], inputs[8]
    assert x is not None
    assert a is not None
    batch, length, channels = x.shape
    states, size = a.shape[1], _size(x, expand)
    out, final = torch.empty(batch, length, channels, dtype=x.dtype), torch.empty(batch, states, channels)
    for start in range(0, max(length, 1), size):
        stop = min(start + size, length)
        table = _segment(inputs, expand, state, start, stop)
        if marks is not None:
            marks.append(torch.empty(batch, -(-(stop - start) // at.CHUNK), states, channels))
        final = torch.empty(batch, states, channels)
        table |= {at.OUT: out[:, start:stop], at.FINAL: final, at.MARKS: marks[-1] if marks else None}
        _run(kernels.compiled_forward(), table, (batch, stop - start, channels, states, softplus), kernels.forward_room)
        state = final
    return out, final


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        *inputs, expand, softplus = given
        marks: list[Tensor] | None = [] if any(ctx.needs_input_grad) else None
        found = _forward(tuple(inputs), expand, softplus, marks)
        ctx.set_materialize_grads(False)
        ctx.softplus = softplus
        ctx.save_for_backward(*inputs, expand, *(marks or ()))
        return found

    @staticmethod
    @first_order(instead="selective_scan with form='chunked'")
    def backward(ctx: Any, grad_out: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        from mercer.backends import selective_scan_kernels as kernels

        (*inputs, expand), marks = ctx.saved_tensors[:11], ctx.saved_tensors[11:]
        x, step, a, write, read, skip, gate, bias, state, _ = inputs
        batch, length, channels = x.shape
        states, size = a.shape[1], _size(x, expand)
        upstream = torch.zeros(1, 1, channels).expand(x.shape) if grad_out is None else _rows(grad_out)
        grad_x, grad_step, grad_write, grad_read = (torch.empty(v.shape, dtype=v.dtype) for v in (x, step, write, read))
        grad_gate = None if gate is None else torch.empty(gate.shape, dtype=gate.dtype)
        grad_rates, grad_skip = torch.zeros(batch, states, channels), torch.zeros(batch, channels)
        grad_bias, grad_expand = torch.zeros(batch, channels), None if expand is None else torch.zeros(expand.shape)
        carried = None if grad_final is None else grad_final.contiguous()
        for start, mark in reversed(list(zip(range(0, max(length, 1), size), marks, strict=True))):
            stop = min(start + size, length)
            own = [None if g is None else g[:, start:stop] for g in (grad_x, grad_step, grad_gate)]
            table = _segment(tuple(inputs), expand, None, start, stop)
            steps = table[at.STEP]
            if expand is not None and steps is not None:
                own[1] = torch.empty_like(steps)
            before, rates = torch.empty(batch, states, channels), torch.empty(batch, states, channels)
            vectors = torch.empty(2, batch, channels)
            both = torch.empty(-(-channels // at.GROUP), batch, stop - start, 2, states)
            table |= {at.MARKS: mark, at.GRAD_OUT: upstream[:, start:stop], at.GRAD_FINAL: carried}
            table |= {at.GRAD_X: own[0], at.GRAD_STEP: own[1], at.GRAD_GATE: own[2], at.GRAD_STATE: before}
            table |= {at.GRAD_RATES: rates, at.GRAD_SKIP: vectors[0], at.GRAD_BIAS: vectors[1], at.GRAD_BOTH: both}
            sizes = (batch, stop - start, channels, states, ctx.softplus)
            _run(kernels.compiled_backward(), table, sizes, kernels.backward_room)
            carried = before
            grad_rates += rates
            grad_skip += vectors[0]
            grad_bias += vectors[1]
            for into, found in zip((grad_write, grad_read), both.sum(0).unbind(2), strict=True):
                into[:, start:stop] = found
            if expand is not None and grad_expand is not None and own[1] is not None:
                grad_step[:, start:stop] = own[1] @ expand
                grad_expand += own[1].flatten(0, 1).float().t() @ step[:, start:stop].flatten(0, 1).float()
        of_skip, of_bias = (None if v is None else g.sum(0) for v, g in ((skip, grad_skip), (bias, grad_bias)))
        beside = (grad_rates.sum(0).t(), grad_write, grad_read, of_skip, grad_gate, of_bias)
        grad_expand = None if expand is None or grad_expand is None else grad_expand.to(expand.dtype)
        return grad_x, grad_step, *beside, None if state is None else carried, None, grad_expand, None


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
