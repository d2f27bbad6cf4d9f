"""How many keys each query sees, from positions alone: real tokens stand at 0, 1, 2, ... in every row or document."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mercer.core.layout import Tokens
from mercer.core.merged import Merged


def keys_seen(merged: Merged, own: Tokens, past: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The number of keys that each query sees, ``[b, 1, Lq]`` with b 1 or the batch size, 0 for queries not there.

    A query at position p sees the real keys at max(0, p - left) .. min(p + right, T - 1), T tokens being there in all,
    or in its document. Weights do not count.

    Args:
        merged: the structure, whose documents are counted apart.
        own: its tokens, from :func:`~mercer.core.layout.tokens`.
        past: ``[B]``, how many real tokens a state has absorbed; None without a state.
        dtype: of the result.
    """
    position, total = own.query_rank, own.count.unsqueeze(1)
    if merged.documents is not None:
        sizes = torch.tensor(np.diff(merged.documents.bounds(position.shape[1])), device=position.device)
        total = sizes.repeat_interleave(sizes).unsqueeze(0)
    if past is not None:
        position, total = position + past.unsqueeze(1), total + past.unsqueeze(1)
    first = torch.zeros_like(position) if merged.left is None else (position - merged.left).clamp(min=0)
    stop = total if merged.right is None else torch.minimum(position + merged.right + 1, total)
    count = (stop - first).clamp(min=0)
    if own.query_valid is not None:
        count = count.masked_fill(~own.query_valid, 0)
    return count.unsqueeze(1).to(dtype)
