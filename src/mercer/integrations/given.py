"""Masks that are given as tensors, by users or by models that make their own: what structure they are."""

from __future__ import annotations

import torch
from torch import Tensor

from mercer.core.structures import Causal, Full, Padding, Structure
from mercer.errors import InvalidArgument, Unsupported


def structure_of(mask: Tensor) -> Structure:
    """The structure of a mask `[B or 1, H or 1, Lq, Lk]`: boolean, True where a query sees a key, or added to scores.

    What is added hides a key if it is half the least number of its dtype or less, as minus infinity is.
    """
    if mask.dtype == torch.bool:
        return _visibility(mask)
    if not mask.is_floating_point():
        raise InvalidArgument(f"A mask is boolean, or floating-point numbers to add to scores, not {mask.dtype}.")
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    if bool(((mask != 0) & ~hidden).any()) or mask.requires_grad:
        raise Unsupported("A mask that adds other numbers than 0 and minus infinity is no structure of mercer.")
    return _visibility(~hidden)


def _visibility(mask: Tensor) -> Structure:
    """The cheapest structure that shows exactly what a boolean mask shows."""
    if bool(mask.all()):
        return Full()
    queries, keys = mask.shape[-2:]
    first = mask[:1, :1]
    if queries == keys and bool((mask == torch.ones_like(first).tril()).all()):
        return Causal()
    if bool((mask == mask[:, :1, :1]).all()):
        return Padding(mask[:, 0, 0])
    raise Unsupported("A mask that is neither causal nor a padding of keys is no structure of mercer.")
