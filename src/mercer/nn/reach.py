"""How long a sequence may be before positions leave the range that a model was trained on."""

from __future__ import annotations

import torch
from torch import Tensor

from mercer.errors import InvalidArgument


def longest(length: int, padding: Tensor | None = None, offset: Tensor | None = None) -> int:
    """Real tokens of the longest sequence of a call: `length` new ones, less padding, after `offset` earlier ones.

    Under torch.compile only new tokens are counted: a compiled graph cannot depend on what a tensor holds.
    """
    if (padding is None and offset is None) or torch.compiler.is_compiling():
        return length
    counts = torch.tensor([length]) if padding is None else padding.sum(1)
    if offset is not None:
        counts = offset + counts.to(offset.device)
    return int(counts.max()) if counts.numel() else 0


def refuse_longer(what: str, length: int, reach: int, fix: str) -> None:
    """Raise, in one sentence with the way out, if `length` tokens do not fit in `reach`."""
    if length > reach:
        raise InvalidArgument(f"a sequence of {length} tokens is longer than the {reach} that {what}; {fix}")
