"""The chunked form over the pairs of sparse patterns.

A schedule wants tokens that stand one behind the other. So padding is moved behind them first, which changes no
position, and rows are put back where they were. Heads with patterns of their own get keys of their own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mercer.backends.sparse_softmax import sparse_attention
from mercer.core.kernels import Kernel, Taylor
from mercer.core.layout import Layout
from mercer.forms.tiles import forward_tiles, tiles


def sparse(
    query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, layout: Layout, needs_denominator: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Numerator, denominator and log row factor, as of :func:`mercer.forms.tiles.tiles`."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and any(p.per_head for p in layout.patterns):
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    layout, to_query, to_key = compact(layout)
    if to_key is not None:
        key, value = _gathered(key, to_key), _gathered(value, to_key)
    rows = tiles(
        query if to_query is None else _gathered(query, to_query), key, value, kernel, layout, needs_denominator
    )
    if to_query is None:
        return rows
    back = to_query.argsort(1)
    numerator, denominator, factor = (None if x is None else _gathered(x, back) for x in rows)
    assert numerator is not None
    return numerator, denominator, factor


def fused(
    query: Tensor, key: Tensor, value: Tensor, scale: float, layout: Layout, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Rows of softmax attention, in ``dtype``, and their log-sums, by the fused kernels."""
    layout, to_query, to_key = compact(layout)
    if to_key is not None:
        key, value = _gathered(key, to_key), _gathered(value, to_key)
    if to_query is None:
        return sparse_attention(query, key, value, scale, layout, dtype)
    back = to_query.argsort(1)
    out, log_sum = sparse_attention(_gathered(query, to_query), key, value, scale, layout, dtype)
    return _gathered(out, back), _gathered(log_sum, back)


def counts(layout: Layout, dtype: torch.dtype) -> Tensor:
    """How many keys each query sees, ``[b, h, Lq]``: the sums of weights of 1, which is what Taylor(0) gives."""
    if layout.query_document is not None:  # of the dense form alone: others run documents apart
        seen = layout.visible(slice(0, layout.query_length), slice(0, layout.key_length))
        assert seen is not None
        return seen.sum(-1).to(dtype)
    layout = replace(layout, slopes=None, query_log=None, key_log=None, pair_log=None, weighing=())
    layout, to_query, _ = compact(layout)
    by_head = layout.pair_mask is not None and layout.pair_mask.shape[1] > 1
    heads = layout.heads if by_head or any(p.per_head or p.asks for p in layout.patterns) else 1
    like = torch.zeros((layout.batch, heads, 1, 1), dtype=torch.float64, device=layout.query_position.device)
    query, key = like.expand(-1, -1, layout.query_length, -1), like.expand(-1, -1, layout.key_length, -1)
    found, _, _ = forward_tiles(query.contiguous(), key.contiguous(), key + 1, Taylor(0), layout, False)
    found = found if to_query is None else _gathered(found, to_query.argsort(1))
    return found.squeeze(-1).to(dtype)


def compact(layout: Layout) -> tuple[Layout, Tensor | None, Tensor | None]:
    """The layout with what is not there behind the rest, and the order of queries and keys in it, ``[b, L]``, or None
    where nothing moved.
    """
    to_query, to_key = _order(layout.query_valid), _order(layout.key_valid)
    if to_query is not None:
        layout = replace(
            layout,
            query_position=_taken(layout.query_position, to_query),
            query_valid=_taken(layout.query_valid, to_query),
            query_log=None if layout.query_log is None else _taken(layout.query_log, to_query),
        )
    if to_key is not None:
        layout = replace(
            layout,
            key_position=_taken(layout.key_position, to_key),
            key_valid=_taken(layout.key_valid, to_key),
            key_log=None if layout.key_log is None else _taken(layout.key_log, to_key),
        )
    if to_query is None and to_key is None:
        return layout, None, None
    pairs = (_pairs_taken(x, to_query, to_key) for x in (layout.pair_mask, layout.pair_log))
    mask, log = pairs
    return replace(layout, offset=None, pair_mask=mask, pair_log=log), to_query, to_key


def _order(valid: Tensor | None) -> Tensor | None:
    if valid is None or not valid.shape[1] or bool((valid[:, 1:] <= valid[:, :-1]).all()):
        return None
    return (~valid).to(torch.int8).argsort(dim=1, stable=True)


def _taken(x: Tensor | None, order: Tensor) -> Tensor:
    """A vector of tokens, ``[b, L]`` or ``[b, h, L]``, in another order."""
    assert x is not None
    lead = torch.broadcast_shapes(x.shape[:1], order.shape[:1])
    if x.dim() == 2:
        return x.expand(*lead, -1).gather(1, order.expand(*lead, -1))
    index = order.expand(*lead, -1).unsqueeze(1)
    return x.expand(*lead, -1, -1).gather(2, index.expand(-1, x.shape[1], -1))


def _pairs_taken(x: Tensor | None, to_query: Tensor | None, to_key: Tensor | None) -> Tensor | None:
    """What is said of pairs, ``[b, h, Lq, Lk]``, with queries and keys in another order."""
    for order, dim in ((to_query, 2), (to_key, 3)):
        if x is not None and order is not None:
            rows = max(x.shape[0], order.shape[0])
            index = order.expand(rows, -1).view(rows, 1, *((-1, 1) if dim == 2 else (1, -1)))
            size = [rows, x.shape[1], *x.shape[2:]]
            x = x.expand(rows, -1, -1, -1).gather(dim, index.expand(*size))
    return x


def _gathered(x: Tensor, order: Tensor) -> Tensor:
    """Tokens of ``[B, H, L]`` or ``[B, H, L, *]`` in another order."""
    index = order.unsqueeze(1).expand(x.shape[0], x.shape[1], -1)
    return x.gather(2, index if x.dim() == 3 else index.unsqueeze(-1).expand(-1, -1, -1, x.shape[3]))
