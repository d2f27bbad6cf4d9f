"""Mixed attention: one kernel within a window, another beyond it, added up before they are normalised.

By pairs both parts are pairs, one with the window's band and one with all that lies behind it. By features the far part
is a state that absorbs a key when it leaves the window: the key that stands ``window`` steps back. Its log-weight at
that moment, L_i - L_j, comes with it, and from then on it decays with the rest.

A window counts real tokens, so rows with padding are first packed to the left: then "window steps back" is an index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mercer.core import growth
from mercer.core.growth import Joined
from mercer.core.layout import Tokens, layout, tokens
from mercer.core.log_weights import Decay
from mercer.core.mixed import Mixed
from mercer.core.state import CacheState, FeatureState, MixedState
from mercer.core.structures import Padding
from mercer.errors import InvalidArgument
from mercer.forms import features, pairs
from mercer.forms.call import Call, Rows, blank


def rows(call: Call, own: Tokens, query: Tensor, key: Tensor, value: Tensor) -> Rows:
    """Rows of a call whose queries, keys and values (blanked where padded) are laid out by ``own``."""
    if call.path == "pairs":
        return _by_pairs(call, own, query, key, value)
    lead = key.shape[2] - query.shape[2]
    if lead < 0:  # the queries in front of all keys see nothing
        query = query[:, :, -lead:]
        call = replace(call, query=call.query[:, :, -lead:])
    elif lead and own.key_valid is not None:
        query = torch.nn.functional.pad(query, (0, 0, lead, 0))
        call = replace(call, query=query)
    packed = _packed(call, own)
    if packed is not None:
        query, key, value = (_take(x, packed.order) for x in (query, key, value))
        call = replace(packed.call, query=query, key=key, value=value)
    if packed is not None or lead < 0:
        own = _tokens(call)
    query = blank(query, own.query_valid)
    out = _by_features(call, own, query, key, value)
    if packed is not None:
        back = packed.order.argsort(1)
        back = back[:, max(lead, 0) :]
        out = _moved(out, lambda x: _take(x, back))
    if lead < 0:
        out = _moved(out, lambda x: _lead(x, -lead))
    return out


def _moved(rows: Rows, move: Callable[[Tensor], Tensor]) -> Rows:
    """The same rows elsewhere."""
    denominator, factor = (None if x is None else move(x) for x in (rows.denominator, rows.log_factor))
    return rows._replace(numerator=move(rows.numerator), denominator=denominator, log_factor=factor)


def _by_pairs(call: Call, own: Tokens, query: Tensor, key: Tensor, value: Tensor) -> Rows:
    kernel = _kernel(call)
    near = replace(call, kernel=kernel.near, merged=replace(call.merged, left=kernel.window - 1), return_state=False)
    far = replace(call, kernel=kernel.far, merged=replace(call.merged, right=-kernel.window))
    behind = _behind(call, own, kernel.window)
    return _join(kernel, pairs.rows(near, own, query, key, value), pairs.rows(far, own, query, key, value), behind)


def _by_features(call: Call, own: Tokens, query: Tensor, key: Tensor, value: Tensor) -> Rows:
    """Both parts of a call whose real tokens stand at the left."""
    kernel, window = _kernel(call), _kernel(call).window
    state = call.state
    cache = past = None
    if state is not None:
        assert isinstance(state, MixedState)
        cache, past = _settled(_checked_window(state.near, window)), state.far
    near = replace(
        call,
        kernel=kernel.near,
        merged=replace(call.merged, left=window - 1),
        path="pairs",
        backend="torch",
        state=cache,
        return_state=False,
    )
    far = replace(call, kernel=kernel.far, state=past, unnormalized=True)
    seen = pairs.rows(near, own, query, key, value)
    every = Joined(key, value, None)
    if cache is not None:
        every = growth.join((cache.keys, cache.values), cache.spot, key, value, call.return_state)
    stream = _leaving(far, own, cache, (query, every.keys, every.values), window)
    rest = features.read(far, stream)
    joined = _join(kernel, seen, rest, _behind(call, own, window))
    if not call.return_state:
        if cache is not None:
            growth.leave(every, key.shape[2])
        return joined
    holding = replace(near, merged=replace(call.merged, left=window))
    view = layout(holding.merged, own, None if cache is None else cache.past())
    held = pairs.cache(holding, own, view, every)
    if held.valid is not None:  # rows of different lengths: what has left the window of a row is not in its cache
        held = replace(held, valid=held.valid & (held.valid.flip(1).cumsum(1).flip(1) <= window))
    assert isinstance(rest.state, FeatureState)
    return joined._replace(state=MixedState(held, rest.state))


def _leaving(
    call: Call, own: Tokens, cache: CacheState | None, every: tuple[Tensor, Tensor, Tensor], window: int
) -> features.Stream:
    """The keys that leave the window at each step, ``window`` before it, and their weights at that moment."""
    query, key, value = every
    steps, total = own.key_rank.shape[1], key.shape[2]
    cached = total - steps
    there = own.key_valid
    if cache is not None and (cache.valid is not None or there is not None):
        new = query.new_ones(1, steps, dtype=torch.bool) if there is None else there
        there = torch.cat((cache.present, new.expand(cache.batch, -1)), 1)

    def delayed(x: Tensor, dim: int) -> Tensor:
        """The entries ``window`` steps before each new one, 0 before all."""
        missing = min(max(window - cached, 0), steps)
        part = x.narrow(dim, max(cached - window, 0), steps - missing)
        return torch.cat((part.new_zeros(*part.shape[:dim], missing, *part.shape[dim + 1 :]), part), dim)

    real = key.new_ones(1, total, dtype=torch.bool) if there is None else there
    valid = delayed(real, 1)
    if own.key_valid is not None:
        valid = valid & own.key_valid
    log = features.step_logs(call, own)
    weight = None
    if log is not None:
        leaving = delayed(_all_logs(call, own, cache, log), 2)
        weight = (log - leaving.masked_fill(~valid.unsqueeze(1), 0)).exp()
    return features.Stream(
        query=query,
        key=blank(delayed(key, 2), valid),
        value=blank(delayed(value, 2), valid),
        valid=valid,
        log=log,
        weight=weight,
        added=valid.sum(1),
        causal=True,
    )


def _all_logs(call: Call, own: Tokens, cache: CacheState | None, log: Tensor) -> Tensor:
    """Cumulative log-decay of cached and new keys less the log-weight of their own contribution, ``[b, h, Lc + L]``."""
    groups = call.query.shape[1] // call.key.shape[1]
    view = layout(call.merged, own, None if cache is None else cache.past())
    total = view.key_log
    if total is not None and 1 < log.shape[1] < call.query.shape[1] and total.shape[1] > 1:
        total = total[:, ::groups]
    if call.merged.alibi is not None:
        cached = view.key_length - own.key_rank.shape[1]
        steps = torch.arange(1 - cached, own.key_rank.shape[1] + 1, device=log.device)
        slope = -call.merged.alibi.slopes.double().view(1, -1, 1) * steps
        total = slope if total is None else slope + total
    assert total is not None
    return total


def _behind(call: Call, own: Tokens, window: int) -> Tensor:
    """Which queries have keys behind the window, ``[b, 1, Lq]``."""
    position = own.query_rank if call.state is None else own.query_rank + call.state.length.unsqueeze(1)
    return (position >= window).unsqueeze(1)


def _join(kernel: Mixed, near: Rows, far: Rows, behind: Tensor) -> Rows:
    """The sum of both parts, each put on the scale of the larger one."""
    if near.log_factor is None and far.log_factor is None and kernel.log_ratio is None:
        denominator = None
        if near.denominator is not None and far.denominator is not None:
            denominator = near.denominator + far.denominator
        return Rows(near.numerator + far.numerator, denominator, None, far.state)
    ratio = near.numerator.new_zeros(1) if kernel.log_ratio is None else kernel.log_ratio
    zero = near.numerator.new_zeros(near.numerator.shape[:-1], dtype=torch.float64)
    first = zero + (0 if near.log_factor is None else near.log_factor.detach()) + ratio.double().view(1, -1, 1)
    second = zero + (0 if far.log_factor is None else far.log_factor.detach())
    second = second.masked_fill(~behind, -torch.inf)
    top = torch.maximum(first, second).detach()
    one, other = ((x - top).exp().to(near.numerator.dtype) for x in (first, second))
    numerator = near.numerator * one.unsqueeze(-1) + far.numerator * other.unsqueeze(-1)
    denominator = None
    if near.denominator is not None and far.denominator is not None:
        denominator = near.denominator * one + far.denominator * other
    return Rows(numerator, denominator, top, far.state)


@dataclass(frozen=True, eq=False)
class _Packed:
    call: Call
    order: Tensor  # [B, L]: which token stands at each place


def _packed(call: Call, own: Tokens) -> _Packed | None:
    """The call with its real tokens at the left, or None if nothing is padded."""
    if own.key_valid is None:
        return None
    order = (~own.key_valid).long().argsort(dim=1, stable=True)
    decay = call.merged.decay
    if decay is not None and decay.per_token:
        decay = Decay(log_rate=_take(decay.logs().unsqueeze(-1), order).squeeze(-1), complement=decay.complement)
    merged = replace(call.merged, padding=Padding(lengths=own.count), decay=decay)
    return _Packed(replace(call, merged=merged), order)


def _checked_window(cache: CacheState, window: int) -> CacheState:
    """Keys that another window keeps are neither in this one nor in the far state, or in both."""
    kept = cache.keys.shape[2] if cache.valid is None else cache.valid.sum(1)
    if bool((cache.length.clamp(max=window) != kept).any()):
        raise InvalidArgument(
            f"The state keeps other tokens beside its sums than the last {window}, this call's window: continue with "
            "the window it was made under."
        )
    return cache


def _settled(cache: CacheState) -> CacheState:
    """The cache with its real tokens at the right, next to the new ones."""
    if cache.valid is None:
        return cache
    order = cache.valid.long().argsort(dim=1, stable=True)
    log = None if cache.log is None else _take(cache.log.unsqueeze(-1), order).squeeze(-1)
    return replace(
        cache,
        keys=_take(cache.keys, order),
        values=_take(cache.values, order),
        valid=cache.valid.gather(1, order),
        log=log,
    )


def _take(x: Tensor, order: Tensor) -> Tensor:
    """Tokens of ``[B, H, L]`` or ``[B, H, L, D]`` in another order, ``[B, L']``."""
    index = order.unsqueeze(1) if x.dim() == 3 else order[:, None, :, None]
    shape = (order.shape[0], x.shape[1], order.shape[1], *x.shape[3:])
    return x.expand(order.shape[0], *x.shape[1:]).gather(2, index.expand(shape))


def _lead(x: Tensor, count: int) -> Tensor:
    """``count`` empty rows in front."""
    return torch.cat((x.new_zeros(*x.shape[:2], count, *x.shape[3:]), x), 2)


def _tokens(call: Call) -> Tokens:
    batch, query_heads, queries, _ = call.query.shape
    return tokens(call.merged, batch, query_heads, call.key.shape[1], queries, call.key.shape[2], call.query.device)


def _kernel(call: Call) -> Mixed:
    if not isinstance(call.kernel, Mixed):
        raise InvalidArgument(f"{call.kernel} is not Mixed.")
    return call.kernel
