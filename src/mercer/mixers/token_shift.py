"""The token shift: beside every token the one before it, across calls."""

from __future__ import annotations

import torch
from torch import Tensor


def token_shift(x: Tensor, lengths: Tensor | None = None, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x_{t-1} for every x_t, and the last real token, which a later call begins with.

    x: [B, L, dim], L at least 1. lengths: int64 [B], how many tokens of each row are real, the first ones; None: all.
    past: [B, dim], what an earlier call returned as the last token; None: zeros, before the first token.

    Returns [B, L, dim] and [B, dim] in the dtype of x; a row without real tokens keeps its past.

    Source: Peng et al. 2023, arXiv 2305.13048.
    """
    past = x.new_zeros(x.shape[0], x.shape[2]) if past is None else past.to(x.dtype)
    if lengths is None and x.shape[1] == 1:
        return past.unsqueeze(1), x.squeeze(1)
    known = torch.cat((past.unsqueeze(1), x), 1)
    if lengths is None:
        return known[:, :-1], x[:, -1]
    return known[:, :-1], known[torch.arange(x.shape[0], device=x.device), lengths]
