"""How far random features scatter about what they estimate, in theory and as drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mercer.approximation.intervals import Estimate, estimate
from mercer.core.feature_variance import feature_mean, feature_variance
from mercer.core.random_features import RandomFeatures


@dataclass(frozen=True)
class Spread:
    """The relative variance Var K / (E K)^2 of single kernel values, its mean over pairs that softmax attends to.

    Attributes:
        theory: by :func:`mercer.core.feature_variance.feature_variance`; may be infinite.
        median: the same, the median over the pairs: far below the mean where few pairs make the mean.
        measured: the mean of (K / E K - 1)^2 over the draws, with its interval over them. With few draws of a heavy
            tail it lies below the theory more often than above.
        pairs: how many: a measured row at random, then a visible key with the probability that softmax gives it.
        draws: how many independent draws of the directions.
    """

    theory: float
    median: float
    measured: Estimate
    pairs: int
    draws: int


def spread(
    kernels: Sequence[RandomFeatures], query: Tensor, key: Tensor, scale: float | None, confidence: float
) -> Spread:
    """Of ``kernels``, draws of one another, at the pairs ``query``, ``key`` ``[P, D]``."""
    kernel = kernels[0]
    mean = feature_mean(kernel, query, key, scale)
    relative = feature_variance(kernel, query, key, scale) / mean.square()
    squares = torch.stack([(_values(drawn, query, key, scale) / mean - 1).square().mean() for drawn in kernels])
    whole = squares.new_ones(1)
    return Spread(
        theory=float(relative.mean()),
        median=float(relative.median()),
        measured=estimate(squares.unsqueeze(1), whole, 1, confidence, root=False),
        pairs=len(query),
        draws=len(kernels),
    )


def _values(kernel: RandomFeatures, query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    """K(q, k) of each pair, ``[P]``."""
    scale = kernel.default_scale(query.shape[-1]) if scale is None else scale
    phi_query, phi_key = kernel.scaled_query(query[None, None], scale), kernel.scaled_key(key[None, None], scale)
    if kernel.log_features:
        return torch.logsumexp(phi_query + phi_key, -1).exp()[0, 0]
    return (phi_query * phi_key).sum(-1)[0, 0]
