"""Attention by pairs over several processes: from a request to the ring and back."""

from __future__ import annotations

import torch
from torch import Tensor

from mercer.core.layout import tokens
from mercer.core.merged import merge
from mercer.core.normalizers import Sum
from mercer.distributed.blocks import Engine, Fused, Tiled
from mercer.distributed.links import Link
from mercer.distributed.planning import slabs
from mercer.distributed.request import Request, finish
from mercer.distributed.ring import ring
from mercer.distributed.scene import Scene
from mercer.distributed.sums import cumulative, whole_mask
from mercer.forms.call import blank
from mercer.forms.sparse import counts


def ring_rows(made: Request, link: Link, backend: str, overlap: bool) -> Tensor:
    """The output of this process's queries, ``[B, Hq, size, Dv]``."""
    sharding, merged = made.sharding, made.merged
    valid = real(made, link)
    scene = Scene.of(merged, sharding, valid, made.query.shape[0], made.query.shape[1])
    at = sharding.positions(link.rank, made.query.device)
    own = None if valid is None else valid[:, at]
    query_valid = own if merged.ordered else merged.padding.queries if merged.padding is not None else None
    query, key, value = blank(made.query, query_valid), blank(made.key, own), blank(made.value, own)
    engine: Engine = Fused(scene, made.scale) if backend == "numba" else Tiled(scene, made.kernel)
    if isinstance(engine, Tiled):
        query = made.kernel.scaled_query(query.to(made.precision), made.scale)
        if not made.keeps_keys:
            key = made.kernel.scaled_key(key.to(made.precision), made.scale)
    place = at.unsqueeze(0) if scene.position is None else scene.position[:, at]
    logs = (made.slopes, *_logs(made, link, own, place))
    numerator, denominator, factor = ring(query, key, value, logs, engine, link, made.precision, overlap, slabs(made))
    divisor: Tensor | None = denominator if made.normalizer.needs_denominator else None
    if isinstance(engine, Fused) and type(made.normalizer) is Sum:
        divisor = None  # rows are divided already, and their gradients go through that
    if made.normalizer.needs_count:
        divisor = (
            _shown(scene, link.rank, at.device, numerator.dtype)
            if scene.patterns
            else _counts(scene, place, query_valid, at, numerator.dtype)
        )
    return finish(made, numerator, divisor, factor, query_valid)


def real(made: Request, link: Link) -> Tensor | None:
    """Which tokens of the whole sequence are real, ``[B, length]``, or None for all."""
    padding = made.merged.padding
    if padding is None:
        return None
    if padding.mask is not None:
        return whole_mask(padding.mask.to(made.query.device), made.sharding, link)
    assert padding.lengths is not None
    places = torch.arange(made.sharding.length, device=made.query.device)
    return places < padding.lengths.to(made.query.device).unsqueeze(1)


def _logs(made: Request, link: Link, own: Tensor | None, place: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Logarithms of the weights of this process's queries and keys: cumulative over the whole sequence."""
    decay = made.merged.decay
    if decay is None:
        return None, None
    # Laid out as the process's tokens alone, for the checks and the heads; the sums before them come after.
    batch, query_heads, size, _ = made.query.shape
    alone = merge(made.local(slice(None), own))
    laid = tokens(alone, batch, query_heads, made.key.shape[1], size, size, made.query.device)
    steps = decay.logs()
    if steps.shape[1] not in (1, query_heads):
        steps = steps.repeat_interleave(query_heads // steps.shape[1], 1)
    if decay.per_token:
        steps = steps if own is None else torch.where(own.unsqueeze(1), steps, 0.0)
        query_log = cumulative(steps, made.sharding, link)
    else:
        query_log = steps * (place + 1).unsqueeze(1)
    key_log = query_log
    if laid.key_weight is not None:
        zero = laid.key_weight == 0
        key_log = key_log - laid.key_weight.masked_fill(zero, 1).log().masked_fill(zero, -torch.inf)
    return query_log, key_log


def _counts(scene: Scene, place: Tensor, query_valid: Tensor | None, at: Tensor, dtype: torch.dtype) -> Tensor:
    """How many keys each of this process's queries sees, ``[b, 1, size]``: see :func:`mercer.core.counts.keys_seen`."""
    bounds = torch.tensor(scene.bounds, device=at.device)
    document = torch.searchsorted(bounds, at, right=True) - 1
    start, total = bounds[document], (bounds[document + 1] - bounds[document]).unsqueeze(0)
    if scene.valid is not None:
        total = scene.valid.sum(1, keepdim=True)
    place = place - start
    first = torch.zeros_like(place) if scene.left is None else (place - scene.left).clamp(min=0)
    stop = total if scene.right is None else torch.minimum(place + scene.right + 1, total)
    count = (stop - first).clamp(min=0)
    if query_valid is not None:
        count = count.masked_fill(~query_valid, 0)
    return count.unsqueeze(1).to(dtype)


def _shown(scene: Scene, rank: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The same under patterns, ``[b, h, size]``: by asking them about the keys of every process."""
    total = torch.zeros(scene.rows, scene.heads, scene.sharding.size(rank), dtype=dtype, device=device)
    for source in range(scene.sharding.processes):
        for block in scene.blocks(rank, source):
            total[:, :, block.queries].add_(counts(scene.layout(block, None, None, None, device), dtype))
    return total
