"""The pairs path: scores of query-key pairs in any form, and the key/value cache that it leaves behind."""

from __future__ import annotations

import torch
from torch import Tensor

from mercer.backends import sdpa_tiles
from mercer.backends.flex import flex
from mercer.backends.sdpa import sdpa
from mercer.backends.softmax import Sight, softmax_attention
from mercer.core import growth
from mercer.core.growth import Joined
from mercer.core.layout import Layout, Tokens, layout
from mercer.core.normalizers import Sum
from mercer.core.state import CacheState
from mercer.errors import InvalidArgument
from mercer.forms import log_features, recurrent
from mercer.forms.call import Call, Rows
from mercer.forms.dense import dense
from mercer.forms.few import decodes, few, plain
from mercer.forms.sparse import fused, sparse
from mercer.forms.tiles import tiles


def rows(call: Call, own: Tokens, query: Tensor, key: Tensor, value: Tensor) -> Rows:
    """Rows of a call whose queries, keys and values (blanked where padded) are laid out by ``own``."""
    past, every = None, Joined(key, value, None)
    if call.state is not None:
        assert isinstance(call.state, CacheState)
        past = _checked_cache(call, call.state, key, value)
        every = growth.join((past.keys, past.values), past.spot, key, value, call.return_state)
        key, value = every.keys, every.values
    precision = call.precision
    denominator = peak = row_factor = log_sum = None
    decoding = call.backend == "numba" and decodes(call, every)
    view = None  # which only padding makes a step of decoding look at
    if not decoding or not plain(call, own):
        view = layout(call.merged, own, None if past is None else past.past())
    if decoding:
        numerator, log_sum = few(call, query, every, view)
    elif call.backend == "numba":
        assert view is not None
        # Rows are rounded once: here where the normaliser leaves them as they are, after it elsewhere.
        dtype = query.dtype if type(call.normalizer) is Sum else precision
        if view.patterns:
            numerator, log_sum = fused(query, key, value, call.scale, view, dtype)
        else:
            numerator, log_sum = softmax_attention(query, key, value, call.scale, Sight.under(view), dtype)
    elif call.backend == "flex":
        assert view is not None
        wide = precision if query.device.type == "cpu" else query.dtype
        numerator, log_sum = flex(query.to(wide), key.to(wide), value.to(wide), call.scale, view)
        numerator = numerator.to(precision)
    elif call.backend == "sdpa" and sdpa_tiles.serves(
        call.normalizer, call.merged, query.device.type, query.dtype, key.dtype, value.dtype
    ):
        assert view is not None
        numerator = sdpa_tiles.sdpa_tiles(query, key, value, call.scale, view)
    else:
        assert view is not None
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
            form = {"dense": dense, "chunked": sparse if weighed.patterns else tiles, "recurrent": recurrent.pairs}[
                call.form
            ]
            numerator, denominator, peak = form(*mapped, call.kernel, weighed, call.mass)
    if call.backend != "torch" and call.normalizer.needs_denominator and type(call.normalizer) is not Sum:
        denominator = numerator.new_ones(()).expand(numerator.shape[:-1])  # those rows are divided already
    after = cache(call, own, view, every) if call.return_state else None
    if past is not None and not call.return_state:
        growth.leave(every, call.key.shape[2])
    return Rows(numerator, denominator, peak if row_factor is None else row_factor, after, log_sum)


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
    left, shown = call.merged.left, state.keys.shape[2]
    if state.valid is None and (not state.batch or int(state.length.max()) <= shown):
        return state  # everything is there
    kept = state.length.new_full((1,), shown) if state.valid is None else state.valid.sum(1)
    if bool(((kept < state.length) & (kept < (torch.inf if left is None else left))).any()):
        raise InvalidArgument(
            f"The cache was made under a window and keeps {int(kept.min())} tokens; this call would see "
            f"{'all' if left is None else f'{left} tokens'} before: continue with the window it was made under."
        )
    return state


def cache(call: Call, own: Tokens, view: Layout | None, every: Joined) -> CacheState:
    """What the next call can see of all keys and values so far, its own ones included; without a layout where all
    tokens are real and there is no decay.
    """
    batch, total = call.query.shape[0], every.keys.shape[2]
    length = own.count.expand(batch).clone() if call.state is None else call.state.length + own.count
    valid, log = (None, None) if view is None else (view.key_valid, view.key_log)
    if log is not None and own.key_log is not None and own.key_log.shape[-1]:
        log = log - own.key_log[..., -1:]
    first = 0
    if call.merged.left is not None:  # what the next query can still see: the last `left` real tokens of every row
        if valid is None:
            first = max(0, total - call.merged.left)
        elif batch:
            behind = valid.flip(1).cumsum(1).flip(1)
            first = int((behind > call.merged.left).sum(1).min())
    return CacheState.of(
        growth.last(every, first, own=call.state is not None),
        length,
        None if valid is None else valid.expand(batch, -1)[:, first:].clone(),
        None if log is None else log[..., first:].clone(),
    )
