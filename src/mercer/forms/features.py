"""The features path: a state of fixed size, in the chunked form or token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mercer.core.layout import Tokens
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
    precision, scale, causal = call.precision, call.scale, stream.causal
    batch, query_heads, queries, _ = stream.query.shape
    key, value = stream.key.to(precision), stream.value.to(precision)
    # (first, so that the gradients of a group are summed unrounded)
    mapped_query = call.kernel.scaled_query(stream.query.to(precision), scale)
    mapped_key = call.kernel.scaled_key(key, scale)
    log, heads = stream.log, key.shape[1]
    if log is not None and log.shape[1] == query_heads != heads:
        mapped_key, value = (x.repeat_interleave(query_heads // heads, 1) for x in (mapped_key, value))
        heads = query_heads
    value_dim = value.shape[-1]
    if call.normalizer.needs_denominator:  # the mass z is the state of a value that is 1 for every real token
        ones = value.new_ones(()).expand(*value.shape[:-1], 1)
        value = torch.cat((value, blank(ones, stream.valid)), -1)
    if stream.weight is not None:
        value = value * stream.weight.unsqueeze(-1).to(precision)
    state = _initial(call, batch, heads, value)
    running = log_factor = None
    if call.kernel.log_features:
        mapped_query, query_peak = log_features.lower(mapped_query)
        mapped_key, key_peak = log_features.lower(mapped_key)
        past = call.state.peak if isinstance(call.state, FeatureState) else None
        running = log_features.weigh_features(key_peak, log, stream.valid, past, causal)
        log_factor = query_peak + _row_peak(running, query_peak, causal)
        log = running.log
        value = value * running.weight.unsqueeze(-1).to(precision)
        state = state * running.start[..., None, None].to(precision)
    form = scan.chunked if call.form == "chunked" else recurrent.features
    if causal:  # bottom-right: as many queries as keys, those in front read nothing or are not read
        lead = key.shape[2] - queries
        if lead > 0:
            mapped_query = torch.nn.functional.pad(mapped_query, (0, 0, lead, 0))
        elif lead < 0:
            mapped_key, value = (torch.nn.functional.pad(x, (0, 0, -lead, 0)) for x in (mapped_key, value))
            log = None if log is None else torch.nn.functional.pad(log, (-lead, 0))
    carried, final = form(mapped_query, mapped_key, value, call.kernel, log, state, causal)
    if causal and carried.shape[2] != queries:
        carried = carried[:, :, carried.shape[2] - queries :]
    numerator, denominator = carried, None
    if call.normalizer.needs_denominator:
        numerator, denominator = carried[..., :value_dim], carried[..., value_dim]
    after = None
    if call.return_state:
        after = _state(call, stream, final, value_dim, None if running is None else running.final)
    return Rows(numerator, denominator, log_factor, after)


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
        if call.merged.decay.logs().shape[1] == call.key.shape[1]:
            log = log[:, ::groups]
    if call.merged.alibi is not None:
        steps = own.key_rank + 1 if own.key_valid is None else own.key_valid.cumsum(1)
        slope = -call.merged.alibi.slopes.double().view(1, -1, 1) * steps.unsqueeze(1)
        log = slope if log is None else slope + log
    return log


def _initial(call: Call, batch: int, heads: int, value: Tensor) -> Tensor:
    """The state to start from, ``[B, H, F, Dv (+ 1 for the mass)]``."""
    features = call.kernel.feature_dim(call.query.shape[-1])
    assert features is not None
    if call.state is None:
        return value.new_zeros(batch, heads, features, value.shape[-1])
    state = call.state
    assert isinstance(state, FeatureState)
    tag = call.kernel.state_tag(call.scale)
    if state.kernel != tag:
        raise InvalidArgument(f"The state was made by {state.kernel}, but this call uses {tag}.")
    if call.normalizer.needs_denominator and state.mass is None:
        raise InvalidArgument(
            f"The state has no mass z, which {call.normalizer} needs: make the state under a normaliser with "
            "denominators."
        )
    parts = (
        [state.features]
        if not call.normalizer.needs_denominator or state.mass is None
        else [state.features, state.mass.unsqueeze(-1)]
    )
    start = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    expected = (batch, heads, features, value.shape[-1])
    if start.shape != expected:
        raise InvalidArgument(
            f"The state's sums (with mass) are {list(start.shape)}, but this call needs {list(expected)}: [B, "
            "heads, features, Dv]."
        )
    if start.dtype != value.dtype:
        raise InvalidArgument(f"The state is {start.dtype}, but this call accumulates in {value.dtype}.")
    return start


def _state(call: Call, stream: Stream, final: Tensor, value_dim: int, peak: Tensor | None) -> FeatureState:
    batch, heads = final.shape[:2]
    length = stream.added.expand(batch).to(torch.int64)
    total = final.new_zeros(batch, heads, dtype=torch.float64)
    if stream.log is not None and stream.log.shape[-1]:
        total = total + stream.log[..., -1]
    if call.state is not None:
        assert isinstance(call.state, FeatureState)
        length, total = length + call.state.length, total + call.state.log_decay
    mass = final[..., value_dim] if call.normalizer.needs_denominator else None
    return FeatureState(final[..., :value_dim], mass, length, total, call.kernel.state_tag(call.scale), peak)
