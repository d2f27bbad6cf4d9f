"""A few queries against a cache by the fused decoding kernel: what they see, as ranges of keys.

Where no token is padding the place of a key is its position, and nothing of the length of the cache is made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mercer.backends.decode import decode_checked
from mercer.core.growth import Joined, fixed
from mercer.core.layout import Layout, Tokens
from mercer.core.work import FEW, FEW_ROWS
from mercer.forms.call import Call


def decodes(call: Call, every: Joined) -> bool:
    """Whether the decoding kernel is what serves a call of the fused backend: few queries, and no gradient."""
    queries, rows = call.query.shape[2], call.query.shape[1] * call.query.shape[2] // call.key.shape[1]
    if not 0 < queries <= FEW or rows > FEW_ROWS or not every.keys.shape[2] or not call.query.shape[0]:
        return False
    if call.merged.patterns:
        return False
    weights = () if call.merged.alibi is None else (call.merged.alibi.slopes,)
    return not fixed(call.query, every.keys, every.values, *weights)


def plain(call: Call, own: Tokens) -> bool:
    """Whether every token is real, so that keys and queries stand where they stand."""
    cached = getattr(call.state, "valid", None)
    return own.key_valid is None and own.query_valid is None and cached is None


def few(call: Call, query: Tensor, every: Joined, view: Layout | None) -> tuple[Tensor, Tensor]:
    """Rows, divided by their sums, ``[B, Hq, L, Dv]`` float32, and the logarithms of these, ``[B, Hq, L]``; ``view`` is
    the layout where tokens are not plain.
    """
    slopes = None if call.merged.alibi is None else call.merged.alibi.slopes
    if view is None:
        left, right = call.merged.left, call.merged.right
        return decode_checked(query, every.keys, every.values, call.scale, left=left, right=right, slopes=slopes)
    position = None if slopes is None else view.key_position
    return decode_checked(
        query, every.keys, every.values, call.scale, bounds=_seen(view), valid=view.key_valid, slopes=slopes,
        position=position,
    )  # fmt: skip


def _seen(view: Layout) -> Tensor:
    """The first key that each query sees, the first after them, and its position, ``[b, L, 3]``: real keys stand in the
    order of their positions, others may not.
    """
    here = view.query_position.unsqueeze(2)
    there = view.key_position.unsqueeze(1)
    seen = torch.ones((), dtype=torch.bool)
    if view.left is not None:
        seen = seen & (there >= here - view.left)
    if view.right is not None:
        seen = seen & (there <= here + view.right)
    if view.key_valid is not None:
        seen = seen & view.key_valid.unsqueeze(1)
    if view.query_valid is not None:
        seen = seen & view.query_valid.unsqueeze(2)
    batch = max(x.shape[0] for x in (here, there, seen.view(1) if not seen.dim() else seen))
    seen = seen.expand(batch, here.shape[1], there.shape[2]).to(torch.uint8)
    keys = seen.shape[2]
    some = seen.amax(2)
    first = torch.where(some > 0, seen.argmax(2), 0)
    stop = torch.where(some > 0, keys - seen.flip(2).argmax(2), 0)
    return torch.stack((first, stop, here.squeeze(2).expand(batch, -1)), 2)
