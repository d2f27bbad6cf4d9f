"""The selective scan of state-space models: a diagonal recurrence whose rates follow the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import silu
from torch.nn.functional import softplus as soft
from torch.utils.checkpoint import checkpoint

from mercer.backends import selective_scan as fused
from mercer.errors import InvalidArgument, Unsupported

Form = Literal["auto", "recurrent", "chunked", "fused"]
CHUNK = 32
"""Tokens whose states the chunked form holds at a time."""


def selective_scan(
    x: Tensor,
    step: Tensor,
    rates: Tensor,
    write: Tensor,
    read: Tensor,
    *,
    skip: Tensor | None = None,
    gate: Tensor | None = None,
    bias: Tensor | None = None,
    softplus: bool = False,
    state: Tensor | None = None,
    lengths: Tensor | None = None,
    expand: Tensor | None = None,
    form: Form = "auto",
) -> tuple[Tensor, Tensor]:
    """Outputs and the final state of a state-space model with input-dependent steps, for every channel d and place n:

        h_t[n, d] = exp(s_t[d] A[d, n]) h_{t-1}[n, d] + s_t[d] x_t[d] B_t[n]
        y_t[d] = (sum_n C_t[n] h_t[n, d] + D[d] x_t[d]) silu(z_t[d])

    with s_t = step_t + bias, or softplus of it. Sums are float32, float64 where x is.

    Args:
        x: ``[B, L, D]``.
        step: Delta before bias and softplus, ``[B, L, D]``; s must not be negative. With ``expand`` r, ``[B, L, R]``.
        rates: A, ``[D, N]``, none positive.
        write: B, ``[B, L, N]``.
        read: C, ``[B, L, N]``.
        skip: D, ``[D]``; default 0.
        gate: z, ``[B, L, D]``; default: outputs are not gated.
        bias: of the steps, ``[D]``; default 0.
        softplus: whether steps are made positive by it.
        state: h before the first token, ``[B, N, D]``; default 0.
        lengths: how many tokens of each row are real, the first ones, ``[B]`` integers. What follows them is not
            looked at, neither decays nor adds, and has outputs of 0. Default: all.
        expand: W, ``[D, R]``: Delta is r W^T. The fused form makes it for a segment of tokens at a time, forward and
            backward, so that it is never there as a whole. Default: ``step`` is Delta itself.
        form: ``recurrent``, token by token as above; ``chunked``, by doubled strides within chunks of 32 tokens, which
            are made again for the gradient, so that memory beyond the inputs is bounded; ``fused``, Numba's kernels on
            the CPU, likewise bounded; ``auto``, the quickest that can be had: ``fused``, or else chunks, on the CPU
            token by token within each, since that passes over memory less often, but not under `torch.compile`.

    Returns:
        y ``[B, L, D]`` in the dtype of x, and h after the last real token of each row, ``[B, N, D]`` in float32 or
        float64. A row without tokens keeps its state to the bit.

    Raises:
        InvalidArgument: shapes that do not fit, or another form.
        Unsupported: ``fused`` where the kernels cannot run.

    Source: Gu & Dao 2023, arXiv 2312.00752, algorithm 2, with B discretised by the step alone as in its code.
    """
    _check(x, step, rates, write, read, skip, gate, bias, state, lengths, expand, form)
    tensors = (x, step, rates, write, read, skip, gate, bias, state, expand)
    if form == "fused" and not fused.serves(*tensors):
        raise Unsupported(
            "form='fused' needs Numba (extra `cpu`) and tensors of float32 or less on the CPU: use form='chunked'"
        )
    work = x.numel() * rates.shape[1]
    if form == "fused" or (form == "auto" and x.numel() and work >= fused.LEAST and fused.serves(*tensors)):
        return fused.selective_scan(x, step, rates, write, read, skip, gate, bias, softplus, state, lengths, expand)
    if expand is not None:
        step = torch.nn.functional.linear(step, expand)
    wide = torch.promote_types(x.dtype, torch.float32)
    absent = None
    if lengths is not None:
        absent = (torch.arange(x.shape[1], device=x.device) >= lengths[:, None])[..., None]
        x, step, write, read = (v.masked_fill(absent, 0) for v in (x, step, write, read))
        gate = None if gate is None else gate.masked_fill(absent, 0)
    s = step.to(wide) if bias is None else step.to(wide) + bias.to(wide)
    s = soft(s) if softplus else s
    s = s if absent is None else s.masked_fill(absent, 0)
    u = x.to(wide)
    before = u.new_zeros(x.shape[0], rates.shape[1], x.shape[2]) if state is None else state.to(wide)
    across, write, read = rates.to(wide).t(), write.to(wide), read.to(wide)
    with torch.autocast(x.device.type, enabled=False):  # sums are float32 or float64, whatever surrounds the call
        if form == "recurrent" or x.shape[1] == 1:
            y, after = _recurrent(across, before, u, s, write, read)
        else:
            steps = form == "auto" and x.is_cpu and not torch.compiler.is_compiling()  # every step would be traced
            within = _recurrent if steps else _doubled
            y, after = _chunked(within, across, before, u, s, write, read)
    if skip is not None:
        y = y + skip.to(wide) * u
    if gate is not None:
        y = y * silu(gate.to(wide))
    if lengths is not None and absent is not None:
        y = y.masked_fill(absent, 0)
        after = torch.where((lengths > 0)[:, None, None], after, before)
    return y.to(x.dtype), after


def _recurrent(
    across: Tensor, state: Tensor, x: Tensor, step: Tensor, write: Tensor, read: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition; a step of 0 leaves the state as it is. across: the rates, [N, D]."""
    outputs = [torch.zeros_like(x[:, :0])]
    for t in range(x.shape[1]):
        added = (step[:, t] * x[:, t])[:, None] * write[:, t, :, None]
        state = torch.exp(step[:, t, None] * across) * state + added
        outputs.append(read[:, t, None] @ state)
    return torch.cat(outputs, 1), state


def _doubled(
    across: Tensor, state: Tensor, x: Tensor, step: Tensor, write: Tensor, read: Tensor
) -> tuple[Tensor, Tensor]:
    """After round r every token has summed the 2^r tokens up to it; decays are products of numbers of 1 or less."""
    keep = torch.exp(step[:, :, None] * across)
    held = (step * x)[:, :, None] * write[..., None]
    held = torch.cat((held[:, :1] + keep[:, :1] * state[:, None], held[:, 1:]), 1)
    stride, length = 1, x.shape[1]
    while stride < length:
        held = torch.cat((held[:, :stride], held[:, stride:] + keep[:, stride:] * held[:, :-stride]), 1)
        keep = torch.cat((keep[:, :stride], keep[:, stride:] * keep[:, :-stride]), 1)
        stride *= 2
    return (read[:, :, None] @ held).squeeze(2), held[:, -1]


def _chunked(
    within: Callable[..., tuple[Tensor, Tensor]], across: Tensor, state: Tensor, *along: Tensor
) -> tuple[Tensor, Tensor]:
    """Chunk after chunk; for a gradient each is computed again, so that its states do not stay. along: what has a row
    for each token.
    """
    outputs = [torch.zeros_like(along[0][:, :0])]
    for t in range(0, along[0].shape[1], CHUNK):
        parts = [v[:, t : t + CHUNK] for v in along]
        if torch.is_grad_enabled():
            y, state = checkpoint(within, across, state, *parts, use_reentrant=False, preserve_rng_state=False)  # pyright: ignore[reportGeneralTypeIssues]
        else:
            y, state = within(across, state, *parts)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def _check(
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
    expand: Tensor | None,
    form: str,
) -> None:
    if form not in ("auto", "recurrent", "chunked", "fused"):
        raise InvalidArgument(f"form must be 'auto', 'recurrent', 'chunked' or 'fused', got {form!r}")
    if x.dim() != 3 or rates.dim() != 2:
        raise InvalidArgument(f"x must be [B, L, D] and rates [D, N], got {list(x.shape)} and {list(rates.shape)}")
    batch, length, channels = x.shape
    states = rates.shape[1]
    if expand is not None and (expand.dim() != 2 or expand.shape[0] != channels or not expand.is_floating_point()):
        raise InvalidArgument(
            f"expand must be [{channels}, R] beside x {list(x.shape)}, and floating point, got {list(expand.shape)} of "
            f"{expand.dtype}"
        )
    expected = (
        ("step", step, (batch, length, channels if expand is None else expand.shape[1])),
        ("rates", rates, (channels, states)),
        ("write", write, (batch, length, states)),
        ("read", read, (batch, length, states)),
        ("skip", skip, (channels,)),
        ("gate", gate, (batch, length, channels)),
        ("bias", bias, (channels,)),
        ("state", state, (batch, states, channels)),
        ("lengths", lengths, (batch,)),
    )
    for name, given, shape in expected:
        if given is not None and given.shape != shape:
            raise InvalidArgument(f"{name} must be {list(shape)} beside x {list(x.shape)}, got {list(given.shape)}")
    for name, given, _ in (("x", x, ()), *expected[:-1]):
        if given is not None and not given.is_floating_point():
            raise InvalidArgument(f"{name} must be floating point, got {given.dtype}")
    if lengths is not None and (lengths.is_floating_point() or lengths.dtype == torch.bool):
        raise InvalidArgument(f"lengths must be integers, got {lengths.dtype}")
    if (
        lengths is not None
        and batch
        and not torch.compiler.is_compiling()  # values are not looked at there
        and not 0 <= int(lengths.min()) <= int(lengths.max()) <= length
    ):
        raise InvalidArgument(f"lengths must be between 0 and {length}, got {lengths.tolist()}")
