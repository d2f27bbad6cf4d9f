"""Masks that are given as tensors, by users or by models that make their own: what structure they are."""

from __future__ import annotations

import torch
from torch import Tensor

from mercer.core.pairwise import Bias, Mask
from mercer.core.structures import Causal, Full, Padding, Structure
from mercer.errors import InvalidArgument


def structure_of(mask: Tensor, batch: int) -> Structure:
    """The cheapest structure that says exactly what a mask says.

    Args:
        mask: `[B or 1, H or 1, Lq, Lk]`: boolean, True where a query sees a key, or numbers added to scores. Half the
            least number of the dtype or less hides a key, as minus infinity does; gradients flow into all others.
        batch: B.
    """
    alike = mask.shape[2] > 1 and mask.stride(2) == 0  # broadcast over queries: one row says it all
    rows, queries = mask[:, :, :1] if alike else mask, mask.shape[2]
    if rows.dtype == torch.bool:
        return _visibility(rows, batch, queries)
    if not rows.is_floating_point():
        raise InvalidArgument(f"A mask is boolean, or floating-point numbers to add to scores, not {mask.dtype}.")
    hidden = rows <= torch.finfo(rows.dtype).min / 2
    seen = _visibility(~hidden, batch, queries)
    numbers = rows.masked_fill(hidden, 0)
    if not rows.requires_grad and not bool(numbers.any()):
        return seen
    return seen & Bias(numbers.expand(-1, -1, queries, -1))


def _visibility(rows: Tensor, batch: int, queries: int) -> Structure:
    """The structure of a boolean mask, of which there is one row where all are alike."""
    if bool(rows.all()):
        return Full()
    if rows.shape[1] == 1 and bool((rows == rows[:, :, :1]).all()):
        return Padding(rows[:, 0, 0].expand(batch, -1))
    if rows.shape[2] == rows.shape[3] and bool((rows == torch.ones_like(rows[:1, :1]).tril()).all()):
        return Causal()
    return Mask(rows.expand(-1, -1, queries, -1))
