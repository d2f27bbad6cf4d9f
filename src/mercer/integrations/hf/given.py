"""Masks that are given as tensors, by users or by models that make their own: what structure they are."""

import torch
from torch import Tensor

from mercer.core.structures import Causal, Full, Padding, Structure
from mercer.errors import Unsupported


def structure_of(mask: Tensor) -> Structure:
    """The structure of a mask `[B or 1, H or 1, Lq, Lk]`: boolean, True where a query sees a key, or added to scores.

    What is added may be half the least number of its dtype or less, which hides a key, or 0.
    """
    if mask.dtype != torch.bool:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if bool(((mask != 0) & ~hidden).any()):
            raise Unsupported(
                "A mask that adds other numbers than 0 and minus infinity is not one of mercer's structures."
            )
        mask = ~hidden
    queries, keys = mask.shape[-2:]
    if bool(mask.all()):
        return Full()
    one = mask[:, :1]
    if bool((mask == one).all()):
        seen = one[:, 0]
        if bool((seen == seen[:, :1]).all()):
            return Padding(seen[:, 0])
        if queries == keys:
            real = seen[:, -1]
            order = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
            if bool((seen == (order & real[:, None])).all()):
                return Causal() if bool(real.all()) else Causal() & Padding(real)
    raise Unsupported("A mask that is neither causal nor a padding of keys is not one of mercer's structures.")
