"""RWKV-4's weighted average: a softmax over the past whose weights fade by channel, as a recurrence."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mercer.backends.wkv import LEAST, serves, weighted_average
from mercer.errors import InvalidArgument, Unsupported

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
    chunk: int = 16,
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
        form: "recurrent": token by token. "chunked": torch's operators, all pairs within a chunk, in the memory of one
            chunk forward and backward. Both are differentiable twice. "fused": one pass over the tokens on the CPU
            (extra `cpu`), with first derivatives. "auto": fused where it can run and there are enough numbers to be
            worth a compiler, else chunked.
        chunk: tokens of a chunk, at least 1; default 16. It changes time and memory and no result but by rounding.

    Returns:
        y ``[B, L, C]`` in the dtype of value, and the state after the last real token of each row; a row without any
        keeps its own to the bit. Sums are float32, or float64 where key or value is. Gradients go to every tensor,
        through the state too.

    Raises:
        InvalidArgument: shapes, lengths or options that do not fit.
        Unsupported: form="fused" for float64, another device than the CPU, or without Numba.
    """
    _check(key, value, log_decay, bonus, state, lengths, form, chunk)
    tensors = (key, value, log_decay, bonus, *(state or ()))
    fused = form in ("auto", "fused") and serves(*tensors)
    if form == "fused" and not fused:
        raise Unsupported(
            "wkv's fused form is float32 or narrower on the CPU, with the extra cpu: use form='chunked' elsewhere"
        )
    if fused and (form == "fused" or key.numel() >= LEAST) and key.numel():
        return weighted_average(key, value, log_decay, bonus, state, lengths)
    return _by_chunks(key, value, log_decay, bonus, state, lengths, 1 if form == "recurrent" else chunk)


def _by_chunks(
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    state: WKVState | None,
    lengths: Tensor | None,
    chunk: int,
) -> tuple[Tensor, WKVState]:
    wide = torch.promote_types(torch.promote_types(key.dtype, value.dtype), torch.float32)
    batch, length, channels = key.shape
    dtype, (k, v, w, u) = value.dtype, (x.to(wide) for x in (key, value, log_decay, bonus))
    if state is None:
        zeros = k.new_zeros(batch, channels)
        num, den, peak = zeros, zeros, zeros - torch.inf
    else:
        num, den, peak = (x.to(wide) for x in state)
    if lengths is not None:
        absent = (torch.arange(length, device=k.device) >= lengths.unsqueeze(1)).unsqueeze(-1)
        k, v = k.masked_fill(absent, 0), v.masked_fill(absent, 0)
    outs: list[Tensor] = []
    for first in range(0, length, chunk):
        piece = slice(first, first + chunk)
        real = None if lengths is None else lengths - first
        given = (k[:, piece], v[:, piece], w, u, num, den, peak, real)
        if length > chunk and torch.is_grad_enabled():  # otherwise the pairs of every chunk would be kept
            out, num, den, peak = checkpoint(_chunk, *given, use_reentrant=False, preserve_rng_state=False)
        else:
            out, num, den, peak = _chunk(*given)
        outs.append(out)
    y = torch.cat(outs, 1) if outs else v
    if lengths is not None:
        y = y.masked_fill(absent, 0)
    return y.to(dtype), (num, den, peak)


def _chunk(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, num: Tensor, den: Tensor, peak: Tensor, real: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Some tokens, by their pairs [B, t, i, C], and the state behind them. real: [B], the real ones of each row."""
    length = k.shape[1]
    steps = torch.arange(length, device=k.device, dtype=w.dtype)
    apart = steps[:, None] - steps[None, :] - 1  # of the query t and the key i
    past = (apart >= 0)[None, :, :, None]
    own = u + k
    pairs = (apart.clamp_min(0)[None, :, :, None] * w + k[:, None]).masked_fill(~past, -torch.inf)
    before = peak[:, None] + steps[:, None] * w
    # a row's average does not depend on what its weights are relative to
    top = torch.maximum(torch.maximum(before, own), pairs.amax(2)).detach()
    weights = (pairs - top[:, :, None]).exp()
    old, new = (before - top).exp(), (own - top).exp()
    above = old * num[:, None] + (weights * v[:, None]).sum(2) + new * v
    out = above / (old * den[:, None] + weights.sum(2) + new)

    taken = k.new_full((k.shape[0], 1), length) if real is None else real.clamp(0, length).to(k.dtype)[:, None]
    behind = taken - 1 - steps  # [B, i]
    keys = (behind.clamp_min(0)[:, :, None] * w + k).masked_fill((behind < 0)[:, :, None], -torch.inf)
    none = taken == 0
    faded = peak + taken * w
    new_peak = torch.maximum(faded, keys.amax(1)).masked_fill(none, 0)
    old, new = (faded.masked_fill(none, -torch.inf) - new_peak).exp(), (keys - new_peak[:, None]).exp()
    after = (old * num + (new * v).sum(1), old * den + new.sum(1), new_peak)
    num, den, peak = (torch.where(none, x, y) for x, y in zip((num, den, peak), after, strict=True))
    return out, num, den, peak


def _check(
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    state: WKVState | None,
    lengths: Tensor | None,
    form: str,
    chunk: int,
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
        lengths.shape != (batch,) or lengths.dtype != torch.int64 or bool(((lengths < 0) | (lengths > length)).any())
    ):
        raise InvalidArgument(f"wkv: lengths must be int64 [{batch}], each from 0 to {length}")
    if form not in FORMS:
        raise InvalidArgument(f"wkv: form must be one of {', '.join(FORMS)}, not {form!r}")
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"wkv: chunk must be an integer of at least 1, not {chunk!r}")
