"""RWKV-4's weighted average on the CPU, fused, forward and backward (extra `cpu`).

Every token is read once and written once; the backward pass keeps the inputs and the state before them, and makes the
rest again. Sums are float32 and relative to a running maximum, so that no exponential is above 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from mercer.backends.sharing import installed, share, threads_for, transformed
from mercer.core.first_order import first_order

LEAST = 1 << 14
"""Numbers in the keys of a call below which torch's operators are used: nobody waits for a compiler because of few."""
LEAST_TOKEN = 1 << 9
"""The same for single tokens, which come one after the other and are some forty operators each."""
ALONE = 1 << 15
"""Numbers in the keys of a call up to which one thread is quicker than waking others."""


def serves(*tensors: Tensor | None) -> bool:
    """Whether these tensors can be taken: on the CPU, not float64, and no forward-mode derivative or
    transform of `torch.func` is under way."""
    given = [x for x in tensors if x is not None]
    return (
        installed()
        and not transformed()
        and not torch.compiler.is_compiling()  # a compiler makes its own kernels of torch's form
        and all(x.is_cpu and x.dtype != torch.float64 and forward_ad.unpack_dual(x).tangent is None for x in given)
    )


def weighted_average(
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    state: tuple[Tensor, Tensor, Tensor] | None,
    lengths: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """As `mercer.mixers.wkv.wkv`, for arguments that it has checked and `serves` takes. out has the dtype of value."""
    key, value = (x if x.dtype in (torch.float32, torch.bfloat16) else x.float() for x in (key, value))
    num, den, peak = (None, None, None) if state is None else (x.float() for x in state)
    given = (key, value, log_decay.float(), bonus.float(), num, den, peak, lengths)
    out, *after = _Average.apply(*given) if torch.is_grad_enabled() else _forward(*given)[1]
    return out, (after[0], after[1], after[2])


LEAST_RUN, MOST = 64, 512
"""Channels that are walked together."""
SCRATCH = 1 << 22
"""Floats of scratch of a thread beyond which it walks fewer channels at a time."""


def _forward(
    key: Tensor, value: Tensor, *others: Tensor | None
) -> tuple[list[Tensor | None], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The inputs without gaps, and the averages and the state after the last token."""
    inputs = [None if x is None else x.contiguous() for x in (key, value, *others)]
    out = torch.empty(value.shape, dtype=value.dtype)
    num, den, peak = (torch.empty(key.shape[0], key.shape[2]) for _ in range(3))
    _run(inputs, out.dtype, [out, num, den, peak], [])
    return inputs, (out, num, den, peak)


class _Average(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        bonus: Tensor,
        num: Tensor | None,
        den: Tensor | None,
        peak: Tensor | None,
        lengths: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs, results = _forward(key, value, decay, bonus, num, den, peak, lengths)
        ctx.save_for_backward(*inputs, *results[1:])
        ctx.dtype = value.dtype
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @first_order(instead="wkv with form='recurrent'")
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        key, value, decay, bonus, num, den, peak, lengths, new_num, new_den, _ = ctx.saved_tensors
        grad_out, *later = grads
        batch, _, channels = key.shape
        grad_out = torch.zeros(key.shape) if grad_out is None else grad_out.float().contiguous()
        behind = any(g is not None for g in later)
        grad_num, grad_den, grad_peak = (
            torch.zeros(batch, channels) if g is None else g.float().contiguous() for g in later
        )
        grad_key, grad_value = torch.empty(key.shape), torch.empty(key.shape)
        rows = [torch.empty(batch, channels) for _ in range(3)]
        old = [None, None] if num is None else [torch.empty(batch, channels) for _ in range(2)]
        results = [grad_key, grad_value, rows[0], rows[1], *old, rows[2]]
        incoming = [grad_out, *((grad_num, grad_den) if behind else (None, None))]
        _run([key, value, decay, bonus, num, den, peak, lengths], ctx.dtype, [None] * 4, [*incoming, *results])
        grad_decay, grad_old_peak = rows[0], None
        if num is not None:
            grad_old_peak = old[0] * num + old[1] * den
        if behind:
            # Numerator and denominator were differentiated with the peak held; what is left goes to the one number
            # that the peak is. A caller that only continues the state leaves nothing but rounding here.
            count = lengths if lengths is not None else torch.full((batch,), key.shape[1])
            rest = grad_peak - new_num * grad_num - new_den * grad_den
            born = rows[2].long()
            grad_decay = grad_decay + torch.where(born < 0, count[:, None], count[:, None] - 1 - born) * rest
            if key.shape[1]:
                mine = torch.where(born < 0, 0.0, rest)
                grad_key.scatter_add_(1, born.clamp_min(0).unsqueeze(1), mine.unsqueeze(1))
            if grad_old_peak is not None:
                grad_old_peak = grad_old_peak + torch.where(born < 0, rest, 0.0)
        return (
            grad_key.to(key.dtype), grad_value.to(value.dtype), grad_decay.sum(0), rows[1].sum(0), *old, grad_old_peak,
            None,
        )  # fmt: skip


def _channels(batch: int, channels: int, threads: int, room: int) -> int:
    """How many channels of a row are walked together: as many as lie side by side, so that memory is read in long
    pieces, while every thread has some and the scratch of each, `room` floats a channel, stays small.
    """
    pieces = -(-threads // max(batch, 1))
    most = min(MOST, -(-channels // pieces), max(SCRATCH // room, LEAST_RUN))
    return max(-(-most // LEAST_RUN), 1) * LEAST_RUN


def _run(inputs: list[Any], dtype: torch.dtype, outputs: list[Tensor | None], gradients: list[Tensor | None]) -> None:
    """One pass over all rows: backwards if there are gradients."""
    from mercer.backends import wkv_kernels as kernels

    key, value, decay, bonus, num, den, peak, lengths = inputs
    batch, length, channels = key.shape
    halves = [x == torch.bfloat16 for x in (key.dtype, value.dtype, dtype)]
    tensors = (decay, bonus, key, value, lengths, num, den, peak, *outputs, *gradients)
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    threads = 1 if key.numel() <= ALONE else threads_for(batch * channels)
    room = kernels.room(length, bool(gradients))
    run = _channels(batch, channels, threads, room)
    numbers = [run, length, channels, *halves, *addresses]
    table = np.array(numbers + [0] * (kernels.TABLE - len(numbers)), np.int64)
    counts = np.zeros(0, np.int64) if lengths is None else lengths.numpy()
    items, pitch = batch * -(-channels // run), room * run
    threads = min(threads, items)
    work = torch.empty(threads * pitch + 2 * kernels.LANES)
    start = -(-work.data_ptr() // kernels.ROW) * kernels.ROW
    kernel = kernels.compiled(bool(gradients))

    def part(thread: int, first: int, stop: int) -> None:
        kernel(table, counts, start + 4 * thread * pitch, first, stop)

    if threads == 1:
        part(0, 0, items)
    else:
        share(items, part)
