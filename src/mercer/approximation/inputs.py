"""Random inputs where no data is at hand."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mercer.errors import InvalidArgument


def gaussian_inputs(
    length: int,
    dim: int,
    spread: float = 1.0,
    *,
    batch: int = 1,
    heads: int = 1,
    value_dim: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key ``[B, H, L, D]`` and value ``[B, H, L, Dv]``, independent Gaussians, for a given spread of scores.

    Entries of queries and keys have variance ``spread``, so that the scores q.k / sqrt(D) have mean 0 and standard
    deviation ``spread``; entries of values have variance 1. The same for the same arguments on every machine.

    Raises:
        InvalidArgument: a size below 1, or a spread that is negative or not finite.
    """
    value_dim = dim if value_dim is None else value_dim
    for name, size in (("length", length), ("dim", dim), ("batch", batch), ("heads", heads), ("value_dim", value_dim)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"gaussian_inputs: {name} must be an integer of 1 or more, not {size!r}.")
    if not 0 <= spread < math.inf:
        raise InvalidArgument(f"gaussian_inputs: spread must be finite and 0 or more, not {spread!r}.")
    generator = torch.Generator().manual_seed(seed)

    def draw(size: int, variance: float) -> Tensor:
        x = torch.randn(batch, heads, length, size, generator=generator, dtype=torch.float64)
        return (x * math.sqrt(variance)).to(dtype)

    return draw(dim, spread), draw(dim, spread), draw(value_dim, 1.0)
