"""Packed documents, laid out as padded batches: documents of similar length run together, each at most doubled in
length.

The forms that carry a state then need no notion of a document, and every document has its own initial and final state.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from mercer.core.log_weights import Decay
from mercer.core.merged import Merged, merge
from mercer.core.state import CacheState, FeatureState, MixedState, State
from mercer.core.structures import Padding
from mercer.errors import InvalidArgument
from mercer.forms.call import Call
from mercer.forms.run import run


def run_documents(call: Call) -> tuple[Tensor, State | None, Tensor | None]:
    """Compute a call with :class:`~mercer.Documents`, document by document in batches of similar length."""
    kind = call.query.device.type
    if not torch.is_autocast_enabled(kind):
        return _run_documents(call)
    with torch.autocast(kind, enabled=False):  # it puts no rows of another half precision in their places
        return _run_documents(call)


def _run_documents(call: Call) -> tuple[Tensor, State | None, Tensor | None]:
    assert call.merged.documents is not None
    batch, length = call.query.shape[0], call.query.shape[2]
    if call.key.shape[2] != length:
        raise InvalidArgument(
            f"Documents: queries and keys must be the same tokens, but there are {length} and {call.key.shape[2]}."
        )
    bounds = call.merged.documents.bounds(length)
    sizes = [stop - start for start, stop in pairwise(bounds)]
    out = call.query.new_zeros(*call.query.shape[:3], call.value.shape[-1])
    dtype = call.precision
    log_sums = out.new_full(call.query.shape[:3], -torch.inf, dtype=dtype) if call.log_sums else None
    states: dict[int, State] = {}
    after: State | None = None
    for members in _by_length(sizes).values():
        width = max(sizes[d] for d in members)
        device = call.query.device
        lengths = torch.tensor([sizes[d] for d in members], device=device)
        starts = torch.tensor([bounds[d] for d in members], device=device)
        steps = torch.arange(width, device=device)
        real = steps < lengths.unsqueeze(1)  # [N, width]
        index = (starts.unsqueeze(1) + steps).masked_fill(~real, 0).flatten()
        rows = [b * len(sizes) + d for b in range(batch) for d in members]
        entries = torch.tensor(rows, dtype=torch.int64, device=device)
        part = replace(
            call,
            query=_gather(call.query, index, len(members)),
            key=_gather(call.key, index, len(members)),
            value=_gather(call.value, index, len(members)),
            normalizer=call.normalizer.map_tokens(partial(_gather, index=index, count=len(members))),
            merged=_merged(call.merged, Padding(mask=real.repeat(batch, 1)), index, len(members)),
            state=None if call.state is None else call.state.select(entries),
        )
        result, after, sums = run(part)
        keep = real.flatten().nonzero().squeeze(-1)
        out = _put(out, result, index, keep)
        log_sums = None if log_sums is None or sums is None else _put(log_sums, sums.to(dtype), index, keep)
        if after is not None:
            states |= {
                int(entry): after.select(torch.tensor([row], device=device))
                for row, entry in enumerate(entries.tolist())
            }
    if not call.return_state:
        return out, None, log_sums
    stacked = _stack([states[entry] for entry in range(batch * len(sizes))]) if batch else after
    return out, stacked, log_sums


def _by_length(sizes: list[int]) -> dict[int, list[int]]:
    """Documents grouped so that none is padded to more than twice its length."""
    groups: dict[int, list[int]] = {}
    for document, size in enumerate(sizes):
        groups.setdefault(size.bit_length(), []).append(document)
    return groups


def _gather(x: Tensor, index: Tensor, count: int) -> Tensor:
    """``[B, H, L, *] -> [B N, H, width, *]``: ``count`` = N documents, laid side by side in ``index``."""
    part = x.index_select(2, index).unflatten(2, (count, len(index) // count))
    return part.transpose(1, 2).flatten(0, 1)


def _put(x: Tensor, rows: Tensor, index: Tensor, keep: Tensor) -> Tensor:
    """``x`` ``[B, H, L, *]`` with the rows ``[B N, H, width, *]`` of N documents in their places."""
    if not x.shape[0]:
        return x
    flat = rows.unflatten(0, (x.shape[0], -1)).transpose(1, 2).flatten(2, 3)  # [B, H, N width, *]
    return x.index_copy(2, index[keep], flat.index_select(2, keep))


def _merged(merged: Merged, padding: Padding, index: Tensor, count: int) -> Merged:
    structure = merged.without_documents(padding)
    if merged.decay is None or not merged.decay.per_token:
        return merge(structure)
    return replace(
        merge(structure),
        decay=Decay(log_rate=_gather(merged.decay.logs(), index, count), complement=merged.decay.complement),
    )


def _stack(states: list[State]) -> State:
    """States of one batch entry each, as one state."""
    if isinstance(states[0], MixedState):
        both = [s for s in states if isinstance(s, MixedState)]
        near, far = _stack([s.near for s in both]), _stack([s.far for s in both])
        assert isinstance(near, CacheState)
        assert isinstance(far, FeatureState)
        return MixedState(near, far)
    if isinstance(states[0], FeatureState):
        parts = [s for s in states if isinstance(s, FeatureState)]
        masses = [s.mass for s in parts if s.mass is not None]
        peaks = [s.peak for s in parts if s.peak is not None]
        return FeatureState(
            features=torch.cat([s.features for s in parts]),
            mass=torch.cat(masses) if masses else None,
            length=torch.cat([s.length for s in parts]),
            log_decay=torch.cat([s.log_decay for s in parts]),
            kernel=parts[0].kernel,
            peak=torch.cat(peaks) if peaks else None,
        )
    caches = [s for s in states if isinstance(s, CacheState)]
    width = max(s.keys.shape[2] for s in caches)

    def widen(x: Tensor) -> Tensor:
        missing = width - (x.shape[2] if x.dim() > 2 else x.shape[1])
        return torch.nn.functional.pad(x, (0, 0, missing, 0) if x.dim() == 4 else (missing, 0))

    valid = [s.valid if s.valid is not None else s.keys.new_ones(1, s.keys.shape[2], dtype=torch.bool) for s in caches]
    logs = [s.log for s in caches if s.log is not None]
    return CacheState(
        keys=torch.cat([widen(s.keys) for s in caches]),
        values=torch.cat([widen(s.values) for s in caches]),
        length=torch.cat([s.length for s in caches]),
        valid=torch.cat([widen(v) for v in valid]),
        log=torch.cat([widen(log) for log in logs]) if logs else None,
    )
