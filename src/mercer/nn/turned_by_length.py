"""Attention under rotary positions whose rates depend on the length of the sequence.

A key that was turned by the rates of one length is of no use at another, so the state of such a layer holds keys as
they were before turning. Each call turns the cached keys and its own anew, by their true positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mercer.core.log_weights import Decay
from mercer.core.merged import merge
from mercer.core.normalizers import Normalizer
from mercer.core.pairwise import Bias, Mask
from mercer.core.state import CacheState, State
from mercer.core.structures import Documents, Full, Padding, Structure
from mercer.errors import Unsupported
from mercer.nn.positions import token_positions
from mercer.nn.rope_scaling import LengthScaling
from mercer.nn.rotary import Rotary
from mercer.ops import attention


def attend(
    rotary: Rotary,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    padding: Tensor | None,
    structure: Structure,
    normalizer: Normalizer,
    state: State | None,
    return_state: bool,
    path: str,
    **options: Any,
) -> tuple[Tensor, State | None]:
    """:func:`mercer.attention` of queries and keys that are turned here; [B, L, H, D] in, [B, H, L, Dv] out.

    padding: bool [B, L], also a part of `structure`. The state is a CacheState of unturned keys.

    Raises:
        Unsupported: a state of features; documents with a state; per token documents, or a structure that is not
            causal.
    """
    scaling = rotary.scaling
    assert isinstance(scaling, LengthScaling)
    documents = next((part for part in structure.parts if isinstance(part, Documents)), None)
    past = _checked(scaling, state, return_state, path, documents)
    batch, length = query.shape[:2]
    if padding is not None:  # what stands there must not leak from the cache, not even NaN
        key = key.masked_fill(~padding[:, :, None, None], 0)
    bounds = None if documents is None else documents.bounds(length)
    offset = None if past is None else past.length
    positions = token_positions(batch, length, padding=padding, bounds=bounds, offset=offset, device=query.device)
    value = value.transpose(1, 2)
    if past is not None or return_state:
        path = "pairs"

    def run(start: int, stop: int, lengths: Tensor) -> tuple[Tensor, State | None]:
        """Rows start..stop-1 against all keys before stop, turned by the rates of `lengths`, [B or 1, L or 1]."""
        q = rotary.turn(query[:, start:stop], positions[:, start:stop], _cut(lengths, start, stop))
        k = rotary.turn(key[:, :stop], positions[:, :stop], _cut(lengths, 0, stop))
        before = None
        if past is not None:
            turned = rotary.turn(past.keys.transpose(1, 2), past.past().position, lengths)
            before = replace(past, keys=turned.transpose(1, 2))
        result = attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            value[:, :, :stop],
            normalizer=normalizer.map_tokens(lambda x: x[:, :, start:stop]),
            structure=_cut_out(structure, start, stop, length),
            state=before,
            return_state=return_state and stop == length,
            path=path,
            **options,
        )
        return result if isinstance(result, tuple) else (result, None)

    if scaling.per_token:
        _orders_tokens(scaling, structure, documents)
    if not scaling.per_token or not length:
        rows, after = run(0, length, _totals(length, padding, bounds, offset, query.device))
    else:
        served = scaling.effective(positions + 1)
        parts = [run(start, stop, served[:, start : start + 1]) for start, stop in _alike(served)]
        rows, after = torch.cat([part for part, _ in parts], 2), parts[-1][1]
    return rows, None if after is None else _unturned(after, past, key.transpose(1, 2))


def turned(rotary: Rotary, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys [B, L, H, D] of whole unpadded sequences, turned by one set of rates."""
    length = query.shape[1]
    positions = torch.arange(length, device=query.device)[None]
    assert isinstance(rotary.scaling, LengthScaling)
    if rotary.scaling.per_token and len(_alike(rotary.scaling.effective(positions + 1))) > 1:
        raise Unsupported(
            f"{rotary.scaling} turns keys anew for every token, so {length} tokens have no one set of turned keys: "
            "use per_token=False or a shorter sequence."
        )
    return rotary.turn(query, positions), rotary.turn(key, positions)


def _checked(
    scaling: LengthScaling, state: State | None, return_state: bool, path: str, documents: Documents | None
) -> CacheState | None:
    if state is None and not return_state:
        return None
    if path == "features":
        raise Unsupported(
            f"A feature state cannot be turned anew when {scaling} changes its rates: use path='pairs', or a scaling "
            "that does not depend on the length, such as YaRN."
        )
    if documents is not None:
        raise Unsupported(
            f"{scaling} changes its rates with the length, and the states of packed documents cannot follow: pad the "
            "documents instead of packing them, or use a scaling that does not depend on the length, such as YaRN."
        )
    if state is not None and not isinstance(state, CacheState):
        raise Unsupported(
            f"{scaling} changes its rates with the length, and a {type(state).__name__} cannot be turned anew: "
            "continue a state of this layer, which keeps keys, or use a scaling that does not depend on the length."
        )
    return state


def _orders_tokens(scaling: LengthScaling, structure: Structure, documents: Documents | None) -> None:
    if documents is not None:
        raise Unsupported(
            f"{scaling} with per_token=True serves one sequence a row: pad the documents instead of packing them, or "
            "use per_token=False."
        )
    merged = merge(structure)
    if not merged.causal:
        raise Unsupported(
            f"{scaling} with per_token=True counts the tokens up to each query, so it needs a causal structure; use "
            "per_token=False for others."
        )
    for pattern in merged.patterns:
        if pattern.ends is not None:  # queries are computed some at a time, before the rest of the keys is there
            raise Unsupported(f"{scaling} with per_token=True: {pattern} {pattern.ends}; use per_token=False.")


def _totals(
    length: int, padding: Tensor | None, bounds: Sequence[int] | None, offset: Tensor | None, device: torch.device
) -> Tensor:
    """Lengths of the sequences after the call, [B or 1, L or 1]; of packed documents that of each token's own."""
    if bounds is not None:
        sizes = torch.tensor(bounds, device=device).diff()
        return sizes.repeat_interleave(sizes)[None]
    total = torch.full((1, 1), length, device=device) if padding is None else padding.sum(1, keepdim=True)
    return total if offset is None else total + offset.to(device)[:, None]


def _alike(served: Tensor) -> list[tuple[int, int]]:
    """Runs of tokens whose lengths are served by the same rates, in every row."""
    length = served.shape[1]
    changes = ((served[:, 1:] != served[:, :-1]).any(0).nonzero().squeeze(1) + 1).tolist() if served.numel() else []
    edges = [0, *changes, length]
    return list(pairwise(edges))


def _cut(lengths: Tensor, start: int, stop: int) -> Tensor:
    return lengths if lengths.shape[1] == 1 else lengths[:, start:stop]


def _cut_out(structure: Structure, start: int, stop: int, length: int) -> Structure:
    """The structure of a call of the queries start..stop-1, which ends before key `stop`."""
    if (start, stop) == (0, length):
        return structure
    cut: Structure = Full()
    for part in structure.parts:
        if isinstance(part, Padding):
            lengths = None if part.lengths is None else part.lengths.clamp(max=stop)
            part = Padding(None if part.mask is None else part.mask[:, :stop], lengths)
        elif isinstance(part, Decay) and part.per_token:
            rate, log_rate = (None if t is None else t[..., :stop] for t in (part.rate, part.log_rate))
            part = Decay(rate, log_rate, part.complement)
        elif isinstance(part, Mask | Bias) and part.tensor.shape[2:] == (length, length):
            part = replace(part, tensor=part.tensor[:, :, start:stop, :stop])
        cut = cut & part
    return cut


def _unturned(after: State, past: CacheState | None, key: Tensor) -> CacheState:
    """The state after a call, with the keys it keeps as they were before turning."""
    assert isinstance(after, CacheState)
    every = key if past is None else torch.cat((past.keys, key), 2)
    return replace(after, keys=every[:, :, every.shape[2] - after.keys.shape[2] :].clone())
