"""The linear recurrence of single channels: what gated linear recurrent units carry from token to token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mercer.backends import channel_scan
from mercer.core.first_order import first_order
from mercer.errors import InvalidArgument, Unsupported

FORMS = ("auto", "recurrent", "chunked", "fused")
CHUNK = 64
"""Tokens of a chunk: six passes inside of it, one product for each chunk between them."""
SLAB = 1 << 17
"""Numbers of an input that the chunked form works on at a time: with what is made of them they fit a second cache."""


def linear_recurrence(
    log_decay: Tensor,
    x: Tensor,
    *,
    state: Tensor | None = None,
    lengths: Tensor | None = None,
    form: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Every h_t, and the last one, of

        h_t = exp(g_t) h_{t-1} + x_t        for each channel alone.

    Sums are float32, or float64 if an input is; first derivatives of every tensor.

    Args:
        log_decay: g, ``[B, L, C]``, 0 or less, of any float dtype. -inf forgets everything.
        x: ``[B, L, C]``, of any float dtype.
        state: h_0, ``[B, C]`` in the dtype of the sums; default 0.
        lengths: ``[B]`` integers from 0 to L, how many tokens of each row are there, the first ones; default all. What
            stands behind them is not looked at, has an h of 0 and leaves the state as it is, to the bit.
        form: ``recurrent``, token by token, the definition; ``chunked``, chunks of tokens at once, by products of
            decays of neighbouring tokens alone, so that nothing is divided by a decay that has vanished; ``fused``, the
            same recurrence in one pass over memory (extra `cpu`); ``auto`` takes the quickest that there is.

    Returns:
        ``h [B, L, C]`` and the state after the last token, ``[B, C]``, both in the dtype of the sums.

    Raises:
        InvalidArgument: shapes, dtypes or names that do not fit.
        Unsupported: ``fused`` without Numba, in float64 or on another device than the CPU.

    Source: De et al. 2024 (Griffin), arXiv 2402.19427; the pairing of neighbours is Blelloch's scan (1990).
    """
    sums = _check(log_decay, x, state, lengths, form)
    if state is None:
        state = x.new_zeros(x.shape[0], x.shape[2], dtype=sums)
    if not x.shape[1]:
        return x.to(sums), state.clone()
    fits = sums == torch.float32 and x.is_cpu and channel_scan.installed()
    if form == "fused" and not fits:
        raise Unsupported(
            "linear_recurrence: the fused form computes in float32 on the CPU with Numba (extra cpu): use "
            "form='chunked'."
        )
    if form == "auto":
        form = "recurrent" if x.shape[1] == 1 else "chunked"
        if fits and not torch.compiler.is_compiling() and x.numel() >= channel_scan.LEAST:
            form = "fused"
    if form == "fused":
        return channel_scan.scan(log_decay, x, state, lengths)
    log_decay, x = log_decay.to(sums), x.to(sums)
    if lengths is None:
        return _recurrent(log_decay, x, state) if form == "recurrent" else _chunked(log_decay, x, state)
    absent = (torch.arange(x.shape[1], device=x.device) >= lengths.unsqueeze(1)).unsqueeze(-1)
    log_decay, x = log_decay.masked_fill(absent, 0), x.masked_fill(absent, 0)
    run = _recurrent if form == "recurrent" else _chunked
    out, last = run(log_decay, x, state)
    return out.masked_fill(absent, 0), torch.where(lengths.unsqueeze(1) == 0, state, last)


def _recurrent(log_decay: Tensor, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token; any derivative."""
    rows: list[Tensor] = []
    for decay, own in zip(log_decay.exp().unbind(1), x.unbind(1), strict=True):
        state = torch.addcmul(own, decay, state)
        rows.append(state)
    return torch.stack(rows, 1), state


def _chunked(log_decay: Tensor, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    out: Tensor = _Scan.apply(log_decay, x, state)
    return out, out[:, -1].clone()


class _Scan(torch.autograd.Function):
    """Saves the logarithms and what comes out. With G the gradient of all of h, G_t = dh_t + exp(g_{t+1}) G_{t+1} is
    the same recurrence from the end, dx = G, and dg_t = G_t exp(g_t) h_{t-1}.
    """

    @staticmethod
    def forward(ctx: Any, log_decay: Tensor, x: Tensor, state: Tensor) -> Tensor:
        out = torch.empty_like(x)
        ctx.save_for_backward(log_decay, out, state)
        size = max(SLAB // max(x[:, 0].numel(), 1) // CHUNK, 1) * CHUNK
        for start in range(0, x.shape[1], size):
            rows = slice(start, start + size)
            out[:, rows] = _chunks(log_decay[:, rows].exp(), x[:, rows], state)
            state = out[:, rows][:, -1]
        return out

    @staticmethod
    @first_order(instead="linear_recurrence with form='recurrent'")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_decay, out, state = ctx.saved_tensors
        length = out.shape[1]
        grad_log, grad_x = torch.empty_like(out), torch.empty_like(out)
        size = max(SLAB // max(out[:, 0].numel(), 1) // CHUNK, 1) * CHUNK
        carried = torch.zeros_like(state)  # exp(g) G of the token after
        for start in reversed(range(0, length, size)):
            rows = slice(start, min(start + size, length))
            decay = log_decay[:, rows].exp()
            later = torch.cat((decay[:, 1:], torch.ones_like(decay[:, :1])), 1)
            found = _chunks(later.flip(1), grad[:, rows].flip(1), carried).flip(1)
            grad_x[:, rows] = found
            before = torch.cat(
                (state.unsqueeze(1) if start == 0 else out[:, start - 1 : start], out[:, rows][:, :-1]), 1
            )
            faded = found * decay
            carried = faded[:, 0]
            grad_log[:, rows] = faded * before
        return grad_log, grad_x, carried


def _chunks(decay: Tensor, x: Tensor, state: Tensor) -> Tensor:
    """h of some tokens: in all chunks at once by doubling, then from chunk to chunk."""
    batch, length, channels = x.shape
    size = min(CHUNK, length)
    pad = -length % size
    if pad:
        decay = torch.nn.functional.pad(decay, (0, 0, 0, pad))
        x = torch.nn.functional.pad(x, (0, 0, 0, pad))
    shape = (batch, (length + pad) // size, size, channels)
    a, h = decay.reshape(shape).clone(), x.reshape(shape).clone()
    step = 1
    while step < size:  # a and h of 2 step tokens from those of step tokens
        h[:, :, step:] = torch.addcmul(h[:, :, step:], a[:, :, step:], h[:, :, :-step])
        a[:, :, step:] = a[:, :, step:] * a[:, :, :-step]
        step *= 2
    for chunk in range(h.shape[1]):
        h[:, chunk].addcmul_(a[:, chunk], state.unsqueeze(1))
        state = h[:, chunk, -1]
    return h.flatten(1, 2)[:, :length]


def _check(log_decay: Tensor, x: Tensor, state: Tensor | None, lengths: Tensor | None, form: str) -> torch.dtype:
    if form not in FORMS:
        raise InvalidArgument(f"linear_recurrence: form must be one of {', '.join(FORMS)}, not {form!r}.")
    if x.dim() != 3 or log_decay.shape != x.shape:
        raise InvalidArgument(
            f"linear_recurrence: log_decay and x must both be [B, L, C]; they are {list(log_decay.shape)} and "
            f"{list(x.shape)}."
        )
    if not (log_decay.is_floating_point() and x.is_floating_point()):
        raise InvalidArgument(
            f"linear_recurrence: log_decay and x must be floats; they are {log_decay.dtype} and {x.dtype}."
        )
    sums = torch.float64 if torch.float64 in (log_decay.dtype, x.dtype) else torch.float32
    shape = (x.shape[0], x.shape[2])
    if state is not None and (state.shape != shape or state.dtype != sums):
        raise InvalidArgument(
            f"linear_recurrence: state must be {sums} {list(shape)}, not {state.dtype} {list(state.shape)}."
        )
    if lengths is not None:
        if lengths.shape != shape[:1] or lengths.is_floating_point() or lengths.dtype == torch.bool:
            raise InvalidArgument(
                f"linear_recurrence: lengths must be integers [{shape[0]}], not {lengths.dtype} {list(lengths.shape)}."
            )
        compiling = torch.compiler.is_compiling()  # values are not looked at there
        if not compiling and shape[0] and not 0 <= int(lengths.min()) <= int(lengths.max()) <= x.shape[1]:
            raise InvalidArgument(f"linear_recurrence: lengths must be from 0 to {x.shape[1]}, not {lengths.tolist()}.")
    return sums
