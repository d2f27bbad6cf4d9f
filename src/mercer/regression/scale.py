"""Choosing the scale by leave-one-out cross-validation.

Every sample is predicted from all others, m_{-i}(x_i) = sum_{j != i} w_j K(x_i, x_j) y_j / sum_{j != i} w_j K(x_i,
x_j), and the scale with the smallest weighted mean squared error is kept. The sample itself is left out of the sums,
not subtracted afterwards: under a narrow kernel it is nearly all of them. Inner products are made once for all scales;
O(n^2) operations a scale, and memory for a block of rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mercer.core.kernels import Cosine, Kernel, LinearKernel, Power
from mercer.core.random_features import RandomFeatures
from mercer.errors import InvalidArgument, Unsupported
from mercer.regression.average import exponents

COARSE = tuple(2.0**power for power in range(-6, 21))
"""Scales tried first, relative to the reciprocal spread of the exponents: from nearly flat to nearest neighbours."""
FINE = tuple(2.0 ** (step / 4) for step in range(-3, 4) if step)
"""Scales tried next, relative to the best of the first."""
_BLOCK = 2**21
_HOMOGENEOUS = (Cosine, LinearKernel, Power)


def choose_scale(
    kernel: Kernel, keys: Tensor, targets: Tensor, weights: Tensor
) -> tuple[float, list[float], list[float]]:
    """The best scale, all scales tried in rising order, and their leave-one-out errors."""
    if isinstance(kernel, _HOMOGENEOUS):
        raise Unsupported(
            f"The scale of {kernel} cancels in the average, so scale='loo' has nothing to choose: leave scale=None."
        )
    if isinstance(kernel, RandomFeatures):
        raise Unsupported(
            f"The features of {kernel} depend on the scale, so scale='loo' cannot choose it from inner products: "
            "choose it with Exp(), which they estimate, or give a number."
        )
    if len(keys) < 2:
        raise InvalidArgument(
            "scale='loo' needs at least 2 samples with a positive weight; 1 sample cannot be predicted from the others."
        )
    base = 1 / _spread(kernel, keys)
    coarse = [base * factor for factor in COARSE]
    errors = leave_one_out(kernel, keys, targets, weights, coarse)
    best = coarse[min(range(len(coarse)), key=errors.__getitem__)]
    fine = [best * factor for factor in FINE]
    tried = sorted(zip(coarse + fine, errors + leave_one_out(kernel, keys, targets, weights, fine), strict=True))
    scales, errors = [scale for scale, _ in tried], [error for _, error in tried]
    return scales[min(range(len(scales)), key=errors.__getitem__)], scales, errors


def leave_one_out(kernel: Kernel, keys: Tensor, targets: Tensor, weights: Tensor, scales: list[float]) -> list[float]:
    """Weighted mean squared error of samples predicted from the others, summed over outputs; infinite if undefined."""
    totals = torch.zeros(len(scales), dtype=torch.float64, device=keys.device)
    log = weights.log()
    for start, inner in _blocks(kernel, keys):
        rows = torch.arange(len(inner), device=keys.device)
        for at, scale in enumerate(scales):
            score = inner * scale
            if kernel.exponential:
                score += log
                score[rows, start + rows] = -torch.inf
                predicted = score.softmax(-1) @ targets
            else:
                weight = kernel.profile(score) * weights
                weight[rows, start + rows] = 0
                predicted = weight @ targets / weight.sum(-1, keepdim=True)
            own = slice(start, start + len(inner))
            totals[at] += (weights[own] * (predicted - targets[own]).square().sum(-1)).sum()
    return [error if error == error else float("inf") for error in (totals / weights.sum()).tolist()]


def _blocks(kernel: Kernel, keys: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Blocks of rows: the first row, and the exponents of the rows against all keys."""
    queries, mapped, offset = exponents(kernel, keys, keys)
    rows = max(1, _BLOCK // len(keys))
    for start in range(0, len(keys), rows):
        inner = queries[start : start + rows] @ mapped.T
        yield start, inner if offset is None else inner + offset


def _spread(kernel: Kernel, keys: Tensor) -> float:
    """Standard deviation of a row's exponents, root mean square over a block of rows; 1 if they are all equal."""
    _, inner = next(_blocks(kernel, keys))
    spread = float(inner.var(-1, correction=0).mean().sqrt())
    return spread if spread > 0 else 1.0
