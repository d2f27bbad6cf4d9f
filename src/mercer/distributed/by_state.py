"""Attention by features over several processes: one state is sent instead of all keys.

Every process absorbs its tokens into a state from nothing, the states of what came before run along the sequence
(:mod:`mercer.distributed.chain`), and each process goes on from what arrived as a call in one process goes on from a
state. Without an order two states run, one each way, and every query reads both beside its own process's.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mercer.core.layout import tokens
from mercer.core.merged import merge
from mercer.core.state import FeatureState
from mercer.core.structures import Both, Documents, Padding, Structure
from mercer.core.support import sums_weights
from mercer.distributed.chain import Chain, crossing, stops
from mercer.distributed.links import Link, note
from mercer.distributed.request import Request
from mercer.forms import features, scan
from mercer.forms.call import Call, blank
from mercer.forms.log_features import lower
from mercer.ops import attention


def state_rows(made: Request, link: Link, backend: str) -> Tensor:
    """The output of this process's queries, ``[B, Hq, size, Dv]``."""
    sharding, merged = made.sharding, made.merged
    own = _own(made)
    bounds = [0, sharding.length] if merged.documents is None else merged.documents.bounds(sharding.length)
    made, before = _arriving(made, link, own, bounds, backwards=False)
    made, behind = (made, {}) if merged.causal else _arriving(made, link, own, bounds, backwards=True)
    parts: list[Tensor] = []
    first = 0
    for index, (start, stop) in zip(sharding.held(link.rank), sharding.pieces(link.rank), strict=True):
        at = slice(first, first + stop - start)
        first = at.stop
        inside = [0, *sorted({b - start for b in bounds if start < b < stop}), stop - start]
        note("compute", "state", index)
        if stop > start:
            parts.append(_piece(made, at, own, inside, before.get(index), behind.get(index), backend))
    if not parts:
        return made.query[..., :1].expand(-1, -1, -1, made.value.shape[-1])  # nothing, but with a backward pass
    return torch.cat(parts, 2)


def _own(made: Request) -> Tensor | None:
    """Which of this process's tokens are real, ``[B, size]``, or None for all."""
    padding = made.merged.padding
    if padding is None or padding.lengths is None:
        return None if padding is None else padding.mask
    at = made.sharding.positions(made.rank, made.query.device)
    return at < padding.lengths.to(made.query.device).unsqueeze(1)


def _piece(
    made: Request,
    at: slice,
    own: Tensor | None,
    inside: list[int],
    before: FeatureState | None,
    behind: FeatureState | None,
    backend: str,
) -> Tensor:
    """Rows of a run of tokens in which documents begin at ``inside``, after and before given states."""
    count = len(inside) - 1
    structure: Structure = made.local(at, own)
    if count > 1:
        structure = structure & Documents(torch.tensor(inside, device=made.query.device))
    state = None
    if count == 1 and before is not None and behind is not None:
        state = before.merge(behind)
    elif before is not None or behind is not None:
        nothing = _nothing(made)
        ends = [nothing if before is None else before, *[nothing] * (count - 2), nothing if behind is None else behind]
        state = _by_document(ends) if count > 1 else before or behind
    return attention(
        made.query[:, :, at],
        made.key[:, :, at],
        made.value[:, :, at],
        kernel=made.kernel,
        normalizer=made.normalizer.map_tokens(lambda x: x[:, :, at]),
        structure=structure,
        scale=made.given_scale,
        state=state,
        path="features",
        backend=backend,
    )


def _by_document(states: list[FeatureState]) -> FeatureState:
    """States of documents ``[B, ...]`` as one with an entry for each document of each row, ``[B N, ...]``."""
    masses = [s.mass for s in states if s.mass is not None]
    peaks = [s.peak for s in states if s.peak is not None]

    def stack(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts, 1).flatten(0, 1)

    return FeatureState(
        features=stack([s.features for s in states]),
        mass=stack(masses) if masses else None,
        length=stack([s.length for s in states]),
        log_decay=stack([s.log_decay for s in states]),
        kernel=states[0].kernel,
        peak=stack(peaks) if peaks else None,
    )


def _arriving(
    made: Request, link: Link, own: Tensor | None, bounds: list[int], backwards: bool
) -> tuple[Request, dict[int, FeatureState]]:
    """The request to go on with, and for each chunk at whose border a document stands open, the state of its tokens
    elsewhere.
    """
    sharding = made.sharding
    here = stops(sharding, bounds, link.rank, backwards)
    first = dict(zip(sharding.held(link.rank), _starts(made), strict=True))
    leaving: list[FeatureState] = []
    for stop in here:
        if not stop.leaves:
            continue
        start, end = sharding.chunk(stop.index)
        document = crossing(bounds, start if backwards else end)
        assert document is not None
        low, high = max(start, bounds[document]), min(end, bounds[document + 1])
        at = slice(first[stop.index] + low - start, first[stop.index] + high - start)
        leaving.append(_absorbed(made, at, own))
    chain = Chain(sharding, link, here, _nothing(made), backwards)
    query, arrived = chain.run(made.query, leaving)
    indices = (stop.index for stop in here if stop.arrives)
    return replace(made, query=query), dict(zip(indices, arrived, strict=True))


def _starts(made: Request) -> list[int]:
    """Where this process's chunks begin among its tokens."""
    found, first = [], 0
    for start, stop in made.sharding.pieces(made.rank):
        found.append(first)
        first += stop - start
    return found


def _sizes(made: Request) -> tuple[int, int, int, int]:
    """Batch, heads, features and value dimension of the state."""
    heads = made.merged.weight_heads(made.query.shape[1], made.key.shape[1])
    features_ = made.kernel.feature_dim(made.query.shape[-1])
    assert features_ is not None
    return made.query.shape[0], heads, features_, made.value.shape[-1]


def _nothing(made: Request) -> FeatureState:
    """The state of no token."""
    batch, heads, count, width = _sizes(made)
    zeros = made.value.new_zeros(batch, heads, count, width, dtype=made.precision)
    mass = zeros.new_zeros(batch, heads, count) if sums_weights(made.kernel, made.normalizer) else None
    empty = zeros.new_zeros(batch, heads, dtype=torch.float64)
    return FeatureState(
        features=zeros,
        mass=mass,
        length=torch.zeros(batch, dtype=torch.int64, device=zeros.device),
        log_decay=empty,
        kernel=made.kernel.state_tag(made.scale),
        peak=torch.full_like(empty, -torch.inf) if made.kernel.log_features else None,
    )


def _absorbed(made: Request, at: slice, own: Tensor | None) -> FeatureState:
    """The state of some tokens of this process after nothing: their keys and values, read by nobody.

    Each contribution is brought to the last token at once, by the decay between them, so that no order is needed.
    """
    nothing = _nothing(made)
    if at.stop <= at.start:
        return nothing
    query, key, value = (x[:, :, at] for x in (made.query, made.key, made.value))
    batch, heads, count, width = _sizes(made)
    merged = merge(_unread(made.local(at, own)))
    laid = tokens(merged, batch, query.shape[1], key.shape[1], key.shape[2], key.shape[2], key.device)
    mass = nothing.mass is not None
    call = Call(
        query, key, value, made.kernel, made.normalizer, merged, made.given_scale, None, True, "chunked", "features",
        "torch", mass,
    )  # fmt: skip
    log, weight = features.step_logs(call, laid), features.step_weights(call, laid)
    value = blank(value, laid.key_valid).to(made.precision)
    mapped = made.kernel.scaled_key(blank(key, laid.key_valid).to(made.precision), made.scale)
    if mapped.shape[1] != heads:
        mapped, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (mapped, value))
    fade = None if log is None else log[..., -1:] - log
    peak = None
    if made.kernel.log_features:
        mapped, highest = lower(mapped)
        reach = highest if fade is None else highest + fade.detach()
        if laid.key_valid is not None:
            reach = reach.masked_fill(~laid.key_valid.unsqueeze(1), -torch.inf)
        peak = reach.amax(-1)
        rise = highest - peak.masked_fill(peak == -torch.inf, 0).unsqueeze(-1)
        fade = rise if fade is None else rise + fade
        if laid.key_valid is not None:  # where nothing is it may be large
            fade = fade.masked_fill(~laid.key_valid.unsqueeze(1), 0)
    if mass:
        value = torch.cat((value, blank(value.new_ones(*value.shape[:-1], 1), laid.key_valid)), -1)
    if fade is not None:
        value = value * fade.exp().to(value.dtype).unsqueeze(-1)
    if weight is not None:
        value = value * weight.to(value.dtype).unsqueeze(-1)
    start = value.new_zeros(batch, heads, count, value.shape[-1])
    nobody = mapped.new_zeros(batch, heads, 0, mapped.shape[-1])
    _, sums = scan.chunked(nobody, mapped, value, made.kernel, None, start, causal=False)
    return FeatureState(
        features=sums[..., :width],
        mass=sums[..., width] if mass else None,
        length=laid.count.expand(batch).to(torch.int64),
        log_decay=nothing.log_decay if log is None else log[..., -1].expand(batch, heads),
        kernel=nothing.kernel,
        peak=peak,
    )


def _unread(structure: Structure) -> Structure:
    """A structure without what it says about queries alone."""
    return Both(
        tuple(Padding(p.mask) if isinstance(p, Padding) and p.queries is not None else p for p in structure.parts)
    )
