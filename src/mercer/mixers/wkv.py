"""RWKV-4's weighted average: a softmax over the past whose weights fade by channel, as a recurrence."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mercer.backends.wkv import LEAST, LEAST_TOKEN, serves, weighted_average
from mercer.errors import InvalidArgument, Unsupported
from mercer.mixers.linear_recurrence import linear_recurrence

WKVState = tuple[Tensor, Tensor, Tensor]
"""num, den and peak, each [B, C] in float32 (float64 for float64 inputs): the sums of the past are num exp(peak) and
den exp(peak)."""
FORMS = ("auto", "recurrent", "chunked", "fused")


def wkv(
    key: Tensor,
    value: Tensor,
    *,
    log_decay: Tensor,
    bonus: Tensor,
    state: WKVState | None = None,
    lengths: Tensor | None = None,
    form: Literal["auto", "recurrent", "chunked", "fused"] = "auto",
) -> tuple[Tensor, WKVState]:
    """Averages of values under weights that fade with distance, for each channel by itself:

        y_t = (sum_{i<t} e^{(t-1-i) w + k_i} v_i + e^{u + k_t} v_t) / (sum_{i<t} e^{(t-1-i) w + k_i} + e^{u + k_t})

    with w = log_decay and u = bonus (Peng et al. 2023, arXiv 2305.13048). A token is read before it is absorbed; what
    is carried on is both sums, as num and den relative to the largest exponent so far, so that keys of any size, and
    decays over any distance, neither overflow nor lose the rest.

    Args:
        key: k, ``[B, L, C]``, any float dtype.
        value: v, ``[B, L, C]``.
        log_decay: w, ``[C]``, finite; 0 or less, unless the past is to grow.
        bonus: u, ``[C]``.
        state: what an earlier call returned, or None where nothing went before.
        lengths: int64 ``[B]``, how many tokens of each row are real, the first ones; None: all. Nothing behind them is
            looked at, and y is 0 there.
        form: "recurrent": token by token, and differentiable any number of times. "chunked": torch's operators on many
            tokens at once. "fused": one pass over the tokens on the CPU (extra `cpu`). "auto": fused where it can run
            and there are enough numbers to be worth a compiler, else chunked.

    Returns:
        y ``[B, L, C]`` in the dtype of value, and the state after the last real token of each row; a row without any
        keeps its own to the bit. Sums are float32, or float64 where key or value is. Gradients go to every tensor,
        through the state too.

    Raises:
        InvalidArgument: shapes, lengths or options that do not fit.
        Unsupported: form="fused" for float64, another device than the CPU, or without Numba.
    """
    _check(key, value, log_decay, bonus, state, lengths, form)
    tensors = (key, value, log_decay, bonus, *(state or ()))
    fused = form in ("auto", "fused") and serves(*tensors)
    if form == "fused" and not fused:
        raise Unsupported(
            "wkv's fused form is float32 or narrower on the CPU, with the extra cpu: use form='chunked' elsewhere"
        )
    token = key.shape[1] == 1 and not torch.is_grad_enabled()
    least = LEAST_TOKEN if token else LEAST
    if fused and (form == "fused" or key.numel() >= least) and key.numel():
        return weighted_average(key, value, log_decay, bonus, state, lengths)
    by = "recurrent" if form == "recurrent" or key.shape[1] == 1 else "chunked"
    return _by_scan(key, value, log_decay, bonus, state, lengths, by)


def _by_scan(
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    state: WKVState | None,
    lengths: Tensor | None,
    form: str,
) -> tuple[Tensor, WKVState]:
    """By `linear_recurrence`: relative to the running maximum P_t of the exponents, numerator and denominator decay by
    exp(w + P_{t-1} - P_t), which is at most 1, and gain exp(k_t - P_t) times the value and 1.
    """
    wide = torch.promote_types(torch.promote_types(key.dtype, value.dtype), torch.float32)
    batch, length, channels = key.shape
    k, v, w, u = (x.to(wide) for x in (key, value, log_decay, bonus))
    if state is None:
        zeros = k.new_zeros(batch, channels)
        state = zeros, zeros, zeros - torch.inf
    num, den, peak = (x.to(wide) for x in state)
    held = torch.cat((num, den), 1)
    if peak.requires_grad:  # a factor of 1 that has its derivative
        rise = (peak - peak.detach()).masked_fill(peak.detach() == -torch.inf, 0)
        held = held * torch.cat((rise, rise), 1).exp()
    absent = None
    if lengths is not None:
        absent = (torch.arange(length, device=k.device) >= lengths.unsqueeze(1)).unsqueeze(-1)
        k, v = k.masked_fill(absent, 0), v.masked_fill(absent, 0)
    top, which = _running_maximum(k, w, peak)
    # A maximum is only what sums are relative to, so that no derivative goes through it. Exponents that are near each
    # other are subtracted in float64, and so keep the digits that float32 has of each.
    log = w + (top[:, :-1] - top[:, 1:]).to(wide)
    new = (k.double() - top[:, 1:]).to(wide).exp()
    sums, last = linear_recurrence(
        torch.cat((log, log), 2),
        torch.cat((new * v, new), 2),
        state=held,
        lengths=lengths,
        form=form,
    )
    before = torch.cat((held.unsqueeze(1), sums[:, :-1]), 1) if length else sums
    ahead = (top[:, :-1] - k.double() - u.double()).to(wide)
    over = ahead.detach().clamp_min(0)
    old, own = (ahead - over).exp(), (-over).exp()
    y = (old * before[..., :channels] + own * v) / (old * before[..., channels:] + own)
    if absent is not None:
        y = y.masked_fill(absent, 0)
    # The state's own peak has its derivative, so that those of all parts are what differences of the results would be.
    count = torch.full((batch,), length, device=k.device) if lengths is None else lengths
    at = count[:, None, None].expand(-1, 1, channels)
    winner, reached = which.gather(1, at).squeeze(1), top.gather(1, at).squeeze(1)
    exponents = torch.cat((peak.unsqueeze(1), k), 1).gather(1, winner.unsqueeze(1)).squeeze(1)
    new_peak = exponents + (count.unsqueeze(1) - winner).to(wide) * w
    shift = (reached - new_peak.double()).masked_fill(reached == -torch.inf, 0).to(wide).exp()
    return y.to(value.dtype), (last[:, :channels] * shift, last[:, channels:] * shift, new_peak)


@torch.no_grad()
def _running_maximum(k: Tensor, w: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    """The largest exponent before each token and behind the last, [B, L + 1, C] in float64, and where it came from: 0
    for the state, i + 1 for token i.
    """
    steps = torch.arange(k.shape[1] + 1, device=k.device, dtype=torch.float64)[:, None] * w.double()
    highest, which = (torch.cat((peak.unsqueeze(1), k), 1).double() - steps).cummax(1)
    return highest + steps, which


def _check(
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    state: WKVState | None,
    lengths: Tensor | None,
    form: str,
) -> None:
    if key.dim() != 3 or value.shape != key.shape:
        raise InvalidArgument(
            f"wkv: key and value must be [B, L, C] of one shape; they are {list(key.shape)} and {list(value.shape)}"
        )
    batch, length, channels = key.shape
    for name, x in (("log_decay", log_decay), ("bonus", bonus)):
        if x.shape != (channels,):
            raise InvalidArgument(f"wkv: {name} must be [{channels}], a number for each channel, not {list(x.shape)}")
    if state is not None and (len(state) != 3 or any(x.shape != (batch, channels) for x in state)):
        raise InvalidArgument(
            f"wkv: a state is num, den and peak, each [{batch}, {channels}], not {[list(x.shape) for x in state]}"
        )
    if any(not x.is_floating_point() for x in (key, value, log_decay, bonus, *(state or ()))):
        raise InvalidArgument("wkv: all tensors but lengths must be of a float dtype")
    if lengths is not None and (
        lengths.shape != (batch,)
        or lengths.dtype != torch.int64
        or (not torch.compiler.is_compiling() and bool(((lengths < 0) | (lengths > length)).any()))
    ):
        raise InvalidArgument(f"wkv: lengths must be int64 [{batch}], each from 0 to {length}")
    if form not in FORMS:
        raise InvalidArgument(f"wkv: form must be one of {', '.join(FORMS)}, not {form!r}")
