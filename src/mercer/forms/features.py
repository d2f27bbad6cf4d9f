"""The features path: a state of fixed size, in the chunked form or token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mercer.backends.polynomial import polynomial_scan
from mercer.backends.step import recurrent_step
from mercer.core.layout import Tokens
from mercer.core.normalizers import Sum
from mercer.core.state import FeatureState
from mercer.errors import InvalidArgument
from mercer.forms import log_features, recurrent, scan
from mercer.forms.call import Call, Rows, blank


@dataclass(frozen=True, eq=False)
class Stream:
    """What a state passes over: a key is absorbed, then the query of the same step reads.

    Attributes:
        query: ``[B, Hq, Lq, D]``, the last of the steps if there are fewer than keys.
        key: ``[B, Hk, Lk, D]``, 0 where it is not there.
        value: ``[B, Hk, Lk, Dv]``, 0 where it is not there.
        valid: which keys are there, ``[b, Lk]``; None: all.
        log: cumulative log-decay after each step, ``[b, h, Lk]`` float64, with h 1 or the number of heads of the state.
        weight: what each key's contribution is multiplied by, as ``log``.
        added: ``[b]``, how many tokens the state grows by.
        causal: whether steps have an order; otherwise every query reads the state of all keys.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    valid: Tensor | None
    log: Tensor | None
    weight: Tensor | None
    added: Tensor
    causal: bool


def rows(call: Call, own: Tokens, query: Tensor, key: Tensor, value: Tensor) -> Rows:
    """Rows of a call whose queries, keys and values (blanked where padded) are laid out by ``own``."""
    log, weight = step_logs(call, own), step_weights(call, own)
    return read(call, Stream(query, key, value, own.key_valid, log, weight, own.count, call.merged.causal))


def read(call: Call, stream: Stream) -> Rows:
    """Rows of a stream under a call's kernel, scale, form, normaliser and initial state."""
    precision, kernel = call.precision, call.kernel
    query_heads, queries = stream.query.shape[1:3]
    raw = call.backend == "numba" and kernel.fused_map is not None
    if raw:
        query, key, value = stream.query, stream.key, stream.value
    else:
        key, value = stream.key.to(precision), stream.value.to(precision)
        # (first, so that the gradients of a group are summed unrounded)
        query = kernel.scaled_query(stream.query.to(precision), call.scale)
        key = kernel.scaled_key(key, call.scale)
    log, heads = stream.log, key.shape[1]
    weight = None if stream.weight is None else stream.weight.to(precision)
    if log is not None and log.shape[1] == query_heads != heads:
        key, value = (x.repeat_interleave(query_heads // heads, 1) for x in (key, value))
    state = _initial(call, value)
    running = log_factor = None
    if kernel.log_features:
        query, query_peak = log_features.lower(query)
        key, key_peak = log_features.lower(key)
        past = call.state.peak if isinstance(call.state, FeatureState) else None
        running = log_features.weigh_features(key_peak, log, stream.valid, past, stream.causal)
        log_factor = query_peak + _row_peak(running, query_peak, stream.causal)
        log, own = running.log, running.weight.to(precision)
        weight = own if weight is None else own * weight
        start = running.start.to(precision)
        if not stream.causal:  # otherwise ``log`` does it
            state = Sums(*(None if x is None else x * start.view(*start.shape, *(1,) * (x.dim() - 2)) for x in state))  # pyright: ignore[reportArgumentType]
    lead = key.shape[2] - queries if stream.causal else 0
    if lead > 0:  # bottom-right: as many queries as keys, those in front are not read
        query = torch.nn.functional.pad(query, (0, 0, lead, 0))
    elif lead < 0:  # or read nothing
        key, value = (torch.nn.functional.pad(x, (0, 0, -lead, 0)) for x in (key, value))
        log, weight = (None if x is None else torch.nn.functional.pad(x, (-lead, 0)) for x in (log, weight))
    valid = stream.valid if stream.valid is None or lead >= 0 else torch.nn.functional.pad(stream.valid, (-lead, 0))
    if lead < 0 and valid is None:
        valid = torch.arange(key.shape[2], device=key.device).unsqueeze(0) >= -lead
    scan = _fused if call.backend == "numba" else _plain
    numerator, denominator, final = scan(call, stream.causal, (query, key, value), (log, weight, valid), state)
    if stream.causal and numerator.shape[2] != queries:
        first = numerator.shape[2] - queries
        numerator = numerator[:, :, first:]
        denominator = None if denominator is None else denominator[:, :, first:]
    after = None
    if call.return_state:
        after = _state(call, stream, final, None if running is None else running.final)
    return Rows(numerator, denominator, log_factor, after)


class Sums(NamedTuple):
    """S ``[B, H, F, Dv]`` and, for denominators, z ``[B, H, F]``."""

    features: Tensor
    mass: Tensor | None


def _plain(
    call: Call,
    causal: bool,
    mapped: tuple[Tensor, Tensor, Tensor],
    steps: tuple[Tensor | None, Tensor | None, Tensor | None],
    state: Sums,
) -> tuple[Tensor, Tensor | None, Sums]:
    """The chunked or recurrent form in torch; the mass is the state of a value that is 1 for every real token."""
    query, key, value = mapped
    log, weight, valid = steps
    if call.form == "recurrent":
        every = recurrent.features(
            query, key, value, call.kernel, log, weight, valid, state.features, state.mass, causal
        )
        return every[0], every[1], Sums(every[2], every[3])
    width, start = value.shape[-1], state.features
    if state.mass is not None:
        ones = value.new_ones(()).expand(*value.shape[:-1], 1)
        value = torch.cat((value, blank(ones, valid)), -1)
        start = torch.cat((start, state.mass.unsqueeze(-1)), -1)
    if weight is not None:
        value = value * weight.unsqueeze(-1)
    carried, final = scan.chunked(query, key, value, call.kernel, log, start, causal)
    if state.mass is None:
        return carried, None, Sums(final, None)
    return carried[..., :width], carried[..., width], Sums(final[..., :width], final[..., width])


def _fused(
    call: Call,
    causal: bool,
    mapped: tuple[Tensor, Tensor, Tensor],
    steps: tuple[Tensor | None, Tensor | None, Tensor | None],
    state: Sums,
) -> tuple[Tensor, Tensor | None, Sums]:
    """Either form by this library's Numba kernels, which also divide by the denominators where that is all."""
    query, key, value = mapped
    log, weight, valid = steps
    coefficients = call.kernel.polynomial()
    if coefficients is None:  # finite all the same: the step takes features as they are
        query, key, coefficients = call.kernel.features(query), call.kernel.features(key), (0.0, 1.0)
    # Without an order there is one query and one key, and it sees that key.
    assert causal or (call.form == "recurrent" and key.shape[2] == query.shape[2] == 1)
    run = recurrent_step if call.form == "recurrent" else polynomial_scan
    given, masses, width = call.state is not None, state.mass is not None, value.shape[-1]
    start, mass_start = (state.features, state.mass) if given else (None, None)
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (log, weight))
    if trained:  # denominators as a column of the value: then every row has one gradient
        value = value.to(call.precision)
        if masses:
            value = torch.nn.functional.pad(value, (0, 1), value=1.0)
            start = start if mass_start is None or start is None else torch.cat((start, mass_start.unsqueeze(-1)), -1)
            mass_start = None
        if weight is not None:
            value, weight = value * weight.unsqueeze(-1), None
    if valid is not None:
        there = valid.unsqueeze(1).to(torch.float32)
        weight = there if weight is None else weight * there
    out, denominator, final, mass = run(
        query,
        key,
        value,
        coefficients=coefficients,
        map=call.kernel.fused_map or "identity",
        scale=1.0 if call.kernel.fused_map is None else call.scale,
        log=log,
        weight=weight,
        state=start,
        mass_state=mass_start,
        mass=masses and not trained,
        # The log-sum of a row is made of its denominator.
        divide=type(call.normalizer) is Sum
        and not (trained or call.unnormalized or call.log_sums or call.kernel.log_features),
    )
    if trained and masses:
        return out[..., :width], out[..., width], Sums(final[..., :width], final[..., width])
    return out, denominator, Sums(final, mass)


def _row_peak(running: log_features.Running, query_peak: Tensor, causal: bool) -> Tensor:
    """The keys' running maximum at each query, ``[B, Hq or Hk, Lq]`` (queries in front of all keys read the state)."""
    row, (batch, query_heads, queries) = running.row, query_peak.shape
    if causal:
        ahead = queries - row.shape[-1]
        early = running.first.unsqueeze(-1).expand(-1, -1, max(ahead, 0))
        row = torch.cat((early, row[..., max(-ahead, 0) :]), -1)
    return row.repeat_interleave(query_heads // row.shape[1], 1).expand(batch, query_heads, queries)


def step_weights(call: Call, own: Tokens) -> Tensor | None:
    """What each key's contribution is multiplied by, ``[b, h, Lk]`` with h as in :func:`step_logs`."""
    weight = own.key_weight
    if weight is not None and call.merged.weight_heads(call.query.shape[1], call.key.shape[1]) == call.key.shape[1]:
        weight = weight[:, :: call.query.shape[1] // call.key.shape[1]] if weight.shape[1] > 1 else weight
    return weight


def step_logs(call: Call, own: Tokens) -> Tensor | None:
    """Cumulative log-decay ``[b, h, Lk]``, h the number of key heads if the rates allow it and of query heads
    otherwise.
    """
    log = own.key_log
    groups = call.query.shape[1] // call.key.shape[1]
    if log is not None and groups > 1 and call.merged.alibi is None:
        assert call.merged.decay is not None
        if call.merged.decay.heads == call.key.shape[1]:
            log = log[:, ::groups]
    if call.merged.alibi is not None:
        steps = own.key_rank + 1 if own.key_valid is None else own.key_valid.cumsum(1)
        slope = -call.merged.alibi.slopes.double().view(1, -1, 1) * steps.unsqueeze(1)
        log = slope if log is None else slope + log
    return log


def _initial(call: Call, value: Tensor) -> Sums:
    """The sums to start from."""
    batch, heads, _, width = value.shape
    features = call.kernel.feature_dim(call.query.shape[-1])
    assert features is not None
    state = call.state
    if state is None:
        zeros = value.new_zeros(batch, heads, features, width, dtype=call.precision)
        return Sums(zeros, zeros.new_zeros(batch, heads, features) if call.mass else None)
    assert isinstance(state, FeatureState)
    tag = call.kernel.state_tag(call.scale)
    if state.kernel != tag:
        raise InvalidArgument(
            f"The state was made by {state.kernel}, but this call uses {tag}: continue with the kernel that made it, "
            "or begin without a state."
        )
    if call.mass and state.mass is None:
        raise InvalidArgument(
            f"The state has no mass z, which {call.kernel} with {call.normalizer} needs: make the state under a "
            "normaliser with denominators."
        )
    expected = (batch, heads, features, width)
    if state.features.shape != expected:
        raise InvalidArgument(
            f"The state's sums are {list(state.features.shape)}, but this call needs {list(expected)}: [B, heads, "
            "features, Dv]."
        )
    if state.features.dtype != call.precision:
        raise InvalidArgument(f"The state is {state.features.dtype}, but this call accumulates in {call.precision}.")
    return Sums(state.features, state.mass if call.mass else None)


def _state(call: Call, stream: Stream, final: Sums, peak: Tensor | None) -> FeatureState:
    batch, heads = final.features.shape[:2]
    past, length = call.state, stream.added.expand(batch).to(torch.int64)
    if isinstance(past, FeatureState):
        length, total, tag = length + past.length, past.log_decay, past.kernel
    else:
        total = final.features.new_zeros(batch, heads, dtype=torch.float64)
        tag = call.kernel.state_tag(call.scale)
    if stream.log is not None and stream.log.shape[-1]:
        total = total + stream.log[..., -1]
    return FeatureState(final.features, final.mass, length, total, tag, peak)
