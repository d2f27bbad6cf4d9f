"""One call of one layout: map, run a form, normalise, and leave a state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mercer.backends.causal import causal_softmax
from mercer.backends.sdpa import sdpa
from mercer.core.counts import keys_seen
from mercer.core.kernels import Kernel
from mercer.core.layout import Layout, Tokens, layout, tokens
from mercer.core.normalizers import Normalizer, Sum
from mercer.core.state import CacheState, FeatureState, State
from mercer.core.structures import Merged
from mercer.errors import InvalidArgument, NonFinite
from mercer.forms import log_features, recurrent, scan
from mercer.forms.dense import dense
from mercer.forms.tiles import tiles


@dataclass(frozen=True, eq=False)
class Call:
    """A resolved call of :func:`mercer.attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    kernel: Kernel
    normalizer: Normalizer
    merged: Merged
    scale: float
    state: State | None
    return_state: bool
    form: str
    path: str
    backend: str


def run(call: Call) -> tuple[Tensor, State | None]:
    """Compute a call whose documents, if any, the form handles itself."""
    with torch.autocast(
        call.query.device.type, enabled=False
    ):  # sums are float32 or float64, whatever surrounds the call
        return _run(call)


def _run(call: Call) -> tuple[Tensor, State | None]:
    batch, query_heads, query_length, _ = call.query.shape
    key_heads, key_length = call.key.shape[1], call.key.shape[2]
    own = tokens(call.merged, batch, query_heads, key_heads, query_length, key_length, call.query.device)
    query = _blank(call.query, own.query_valid)
    key, value = _blank(call.key, own.key_valid), _blank(call.value, own.key_valid)
    rows = _features if call.path == "features" else _pairs
    numerator, denominator, log_factor, after = rows(call, own, query, key, value)
    if call.normalizer.needs_count:
        past = None if call.state is None else call.state.length
        denominator = keys_seen(call.merged, own, past, numerator.dtype)
    if log_factor is None or call.normalizer.scale_invariant:
        out = call.normalizer.apply(numerator, denominator)
    else:
        out = call.normalizer.apply_factored(numerator, denominator, log_factor)
    if out.shape != numerator.shape:
        raise InvalidArgument(
            f"{call.normalizer} returned {list(out.shape)} for a numerator {list(numerator.shape)}: apply must keep "
            "the shape."
        )
    if own.query_valid is not None:
        out = out.masked_fill(~own.query_valid[:, None, :, None], 0)
    out = out.to(call.query.dtype)
    if (
        out.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(torch.isfinite(out.detach().sum()))
    ):  # elsewhere the check would wait for the device
        _explain(call, query, key, value, out)
    return out, after


def _explain(call: Call, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
    """Raise if a result is not finite although everything that went in is."""
    given = [query, key, value]
    if call.state is not None:
        given += [t for t in call.state.tensors().values() if t.is_floating_point()]
    if all(bool(torch.isfinite(t).all()) for t in given) and not bool(torch.isfinite(out).all()):
        largest = call.scale * (query.double().norm(dim=-1).amax() * key.double().norm(dim=-1).amax()).item()
        raise NonFinite(
            f"{call.kernel} with {call.normalizer} left the range of {out.dtype} or of its sums, though all inputs "
            "are finite: "
            f"scores may reach {abs(largest):.4g}; use a smaller scale, a lower order, or a scale-invariant normaliser."
        )


def _blank(x: Tensor, valid: Tensor | None) -> Tensor:
    """Zeros where a token is not there, so that whatever stands in the padding cannot leak, not even NaN."""
    return x if valid is None else x.masked_fill(~valid[:, None, :, None], 0)


def _pairs(
    call: Call, own: Tokens, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None, State | None]:
    """Numerator, denominator if needed, the log factor ``[B, Hq, Lq]`` that was taken out of rows if any, and state."""
    past = None
    if call.state is not None:
        assert isinstance(call.state, CacheState)
        past = _checked_cache(call, call.state, key, value)
        key, value = torch.cat((past.keys, key), 2), torch.cat((past.values, value), 2)
    view = layout(call.merged, own, None if past is None else past.past())
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    denominator = peak = row_factor = None
    if call.backend == "numba":
        numerator = causal_softmax(query.to(precision), key.to(precision), value.to(precision), call.scale)
    else:
        mapped_query = call.kernel.scaled_query(query.to(precision), call.scale)
        mapped_key = call.kernel.scaled_key(key.to(precision), call.scale)
        weighed = view
        if call.kernel.log_features:
            mapped_query, query_peak = log_features.lower(mapped_query)
            mapped_key, key_peak = log_features.lower(mapped_key)
            weighed, row_factor = log_features.weigh_pairs(view, key_peak, query_peak)
        mapped = (mapped_query, mapped_key, value.to(precision))
        if call.backend == "sdpa":
            numerator = sdpa(*mapped, weighed)
        else:
            form = {"dense": dense, "chunked": tiles, "recurrent": recurrent.pairs}[call.form]
            numerator, denominator, peak = form(*mapped, call.kernel, weighed, call.normalizer.needs_denominator)
    if call.backend != "torch" and call.normalizer.needs_denominator and not isinstance(call.normalizer, Sum):
        denominator = numerator.new_ones(()).expand(numerator.shape[:-1])  # those rows are divided already
    after = _cache(call, own, view, key, value) if call.return_state else None
    return numerator, denominator, peak if row_factor is None else row_factor, after


def _checked_cache(call: Call, state: CacheState, key: Tensor, value: Tensor) -> CacheState:
    for name, had, new in (("keys", state.keys, key), ("values", state.values, value)):
        if had.shape[:2] != new.shape[:2] or had.shape[3] != new.shape[3] or had.dtype != new.dtype:
            raise InvalidArgument(
                f"The cache holds {name} {list(had.shape)} {had.dtype}; this call's are {list(new.shape)} "
                f"{new.dtype}: batch, heads, dimension and dtype must agree."
            )
    if (state.log is None) != (call.merged.decay is None):
        raise InvalidArgument(
            "The cache was made " + ("without" if state.log is None else "with") + " Decay; continue it the same way."
        )
    kept = state.length.new_full((1,), state.keys.shape[2]) if state.valid is None else state.valid.sum(1)
    left = call.merged.left
    if bool(((kept < state.length) & (kept < (torch.inf if left is None else left))).any()):
        raise InvalidArgument(
            f"The cache was made under a window and keeps {int(kept.min())} tokens; this call would see "
            f"{'all' if left is None else f'{left} tokens'} before: continue with the window it was made under."
        )
    return state


def _cache(call: Call, own: Tokens, view: Layout, key: Tensor, value: Tensor) -> CacheState:
    batch, total = call.query.shape[0], key.shape[2]
    length = own.count.expand(batch).to(torch.int64)
    if call.state is not None:
        length = length + call.state.length
    valid, log = view.key_valid, view.key_log
    if log is not None and own.key_log is not None and own.key_log.shape[-1]:
        log = log - own.key_log[..., -1:]
    first = 0
    if call.merged.left is not None:  # what the next query can still see: the last `left` real tokens of every row
        if valid is None:
            first = max(0, total - call.merged.left)
        else:
            behind = valid.flip(1).cumsum(1).flip(1)
            first = int((behind > call.merged.left).sum(1).min())
    if (
        first or call.state is None
    ):  # a value of its own: neither the caller's tensors nor a view that keeps what was dropped
        key, value = key[:, :, first:].clone(), value[:, :, first:].clone()
    return CacheState(
        keys=key,
        values=value,
        length=length,
        valid=None if valid is None else valid.expand(batch, -1)[:, first:].clone(),
        log=None if log is None else log[..., first:].clone(),
    )


def _features(
    call: Call, own: Tokens, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None, State | None]:
    """As :func:`_pairs`."""
    batch, query_heads = query.shape[:2]
    precision = torch.float64 if query.dtype == torch.float64 else torch.float32
    key, value = (
        key.to(precision),
        value.to(precision),
    )  # first: so gradients of a group are summed unrounded
    mapped_query = call.kernel.scaled_query(query.to(precision), call.scale)
    mapped_key = call.kernel.scaled_key(key, call.scale)
    log, weight = _feature_log(call, own), _feature_weight(call, own)
    heads = key.shape[1]
    if log is not None and log.shape[1] == query_heads != heads:
        mapped_key = mapped_key.repeat_interleave(query_heads // heads, 1)
        value = value.repeat_interleave(query_heads // heads, 1)
        heads = query_heads
    value_dim = value.shape[-1]
    if call.normalizer.needs_denominator:  # the mass z is the state of a value that is 1 for every real token
        ones = value.new_ones(()).expand(*value.shape[:-1], 1)
        value = torch.cat((value, _blank(ones, own.key_valid)), -1)
    if weight is not None:
        value = value * weight.unsqueeze(-1).to(precision)
    state = _initial(call, batch, heads, value)
    causal = call.merged.causal
    running = query_peak = None
    steps = log
    if call.kernel.log_features:
        mapped_query, query_peak = log_features.lower(mapped_query)
        mapped_key, key_peak = log_features.lower(mapped_key)
        past = call.state.peak if isinstance(call.state, FeatureState) else None
        running = log_features.weigh_features(key_peak, log, own.key_valid, past, causal)
        log = running.log
        value = value * running.weight.unsqueeze(-1).to(precision)
        state = state * running.start[..., None, None].to(precision)
    form = scan.chunked if call.form == "chunked" else recurrent.features
    if causal:  # bottom-right: as many queries as keys, those in front read nothing or are not read
        lead = key.shape[2] - query.shape[2]
        if lead > 0:
            mapped_query = torch.nn.functional.pad(mapped_query, (0, 0, lead, 0))
        elif lead < 0:
            mapped_key, value = (torch.nn.functional.pad(x, (0, 0, -lead, 0)) for x in (mapped_key, value))
            log = None if log is None else torch.nn.functional.pad(log, (-lead, 0))
    carried, final = form(mapped_query, mapped_key, value, call.kernel, log, state, causal)
    if causal and carried.shape[2] != query.shape[2]:
        carried = carried[:, :, carried.shape[2] - query.shape[2] :]
    numerator, denominator = carried, None
    if call.normalizer.needs_denominator:
        numerator, denominator = carried[..., :value_dim], carried[..., value_dim]
    log_factor = None
    if running is not None and query_peak is not None:
        log_factor = query_peak + _row_peak(running, query_peak, causal)
    after = None
    if call.return_state:
        after = _feature_state(call, own, steps, final, value_dim, None if running is None else running.final)
    return numerator, denominator, log_factor, after


def _row_peak(running: log_features.Running, query_peak: Tensor, causal: bool) -> Tensor:
    """The keys' running maximum at each query, ``[B, Hq or Hk, Lq]`` (queries in front of all keys read the state)."""
    row, (batch, query_heads, queries) = running.row, query_peak.shape
    if causal:
        ahead = queries - row.shape[-1]
        early = running.first.unsqueeze(-1).expand(-1, -1, max(ahead, 0))
        row = torch.cat((early, row[..., max(-ahead, 0) :]), -1)
    return row.repeat_interleave(query_heads // row.shape[1], 1).expand(batch, query_heads, queries)


def _feature_weight(call: Call, own: Tokens) -> Tensor | None:
    """What each key's contribution is multiplied by, ``[b, h, Lk]`` with h as in :func:`_feature_log`."""
    weight = own.key_weight
    if weight is not None and call.merged.weight_heads(call.query.shape[1], call.key.shape[1]) == call.key.shape[1]:
        weight = weight[:, :: call.query.shape[1] // call.key.shape[1]] if weight.shape[1] > 1 else weight
    return weight


def _feature_log(call: Call, own: Tokens) -> Tensor | None:
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


def _feature_state(
    call: Call, own: Tokens, log: Tensor | None, final: Tensor, value_dim: int, peak: Tensor | None
) -> FeatureState:
    batch, heads = final.shape[:2]
    length = own.count.expand(batch).to(torch.int64)
    total = final.new_zeros(batch, heads, dtype=torch.float64)
    if log is not None and log.shape[-1]:
        total = total + log[..., -1]
    if call.state is not None:
        assert isinstance(call.state, FeatureState)
        length, total = length + call.state.length, total + call.state.log_decay
    mass = final[..., value_dim] if call.normalizer.needs_denominator else None
    return FeatureState(final[..., :value_dim], mass, length, total, call.kernel.state_tag(call.scale), peak)
