"""Tokens as a model takes them."""

import torch
from torch import Tensor

from mercer.errors import InvalidArgument


def token_ids(tokens: Tensor, what: str = "tokens") -> Tensor:
    """Tokens [B, T] of any integer dtype, such as the uint16 of `Vocabulary.encode`, in one that torch looks up with.

    Raises:
        InvalidArgument: it is no tensor of integers in two dimensions.
    """
    if not isinstance(tokens, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        kind = type(tokens).__name__
        raise InvalidArgument(f"{what} must be a tensor of integers [B, T], not of type {kind}; torch.tensor makes one")
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise InvalidArgument(f"{what} must be integers [B, T], got {tokens.dtype} of shape {list(tokens.shape)}")
    return tokens if tokens.dtype in (torch.int64, torch.int32) else tokens.to(torch.int64)
