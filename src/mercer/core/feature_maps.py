"""Kernels that are defined by a fixed feature map, K(q, k) = scale <phi(q), phi(k)>: DPFP and exponential features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mercer.core.kernels import LinearKernel
from mercer.errors import InvalidArgument


@dataclass(frozen=True)
class Dpfp(LinearKernel):
    """Deterministic parameter-free projection, products of pairs of rectified coordinates,

        r = relu([x, -x]),     phi(x) = [r * roll(r, 1), ..., r * roll(r, nu)]

    with roll(r, i)_j = r_(j - i). Scale 1; not negative, and 0 for many pairs of vectors (a row whose every weight is 0
    gives zeros); 2 D nu features.

    Args:
        nu: how many shifts, from 1 to 2 D - 1.

    Source: Schlag et al. 2021 (linear transformers as fast weight programmers), arXiv 2102.11174.
    """

    nu: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.nu, bool) or not isinstance(self.nu, int) or self.nu < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"Dpfp: nu must be an integer of 1 or more, not {self.nu!r}.")

    @property
    def positive(self) -> bool:
        return True

    def map_query(self, query: Tensor) -> Tensor:
        both = torch.cat((query, -query), -1).relu()
        return torch.cat([both * both.roll(i, -1) for i in range(1, self.nu + 1)], -1)

    def map_key(self, key: Tensor) -> Tensor:
        return self.map_query(key)

    def feature_dim(self, dim: int) -> int:
        return 2 * dim * self.nu

    def check(self, dim: int, query_heads: int, key_heads: int) -> None:
        if self.nu > 2 * dim - 1:
            raise InvalidArgument(
                f"Dpfp: nu must be at most 2 D - 1 = {2 * dim - 1} at head dimension {dim}, not {self.nu}: further "
                "shifts repeat earlier ones."
            )


@dataclass(frozen=True)
class ExpFeatures(LinearKernel):
    """Exponential features, phi(x) = exp(x) coordinate by coordinate: K = scale sum_d exp(q_d + k_d).

    They are kept as logarithms, with the running maximum taken out, so no input overflows. Scale 1, above 0; positive;
    D features.

    Args:
        negation: also use exp(-x): K = scale sum_d 2 cosh(q_d + k_d) and 2 D features, so that a large negative
            coordinate counts as much as a large positive one.
    """

    negation: bool = False

    log_features: ClassVar[bool] = True

    @property
    def positive(self) -> bool:
        return True

    def scaled_query(self, query: Tensor, scale: float) -> Tensor:
        if scale <= 0:
            raise InvalidArgument(f"{self} needs a scale above 0, since its logarithm is kept, not {scale}.")
        return self.map_query(query) + math.log(scale)

    def map_query(self, query: Tensor) -> Tensor:
        """log phi."""
        return torch.cat((query, -query), -1) if self.negation else query

    def map_key(self, key: Tensor) -> Tensor:
        """log phi."""
        return self.map_query(key)

    def feature_dim(self, dim: int) -> int:
        return 2 * dim if self.negation else dim
