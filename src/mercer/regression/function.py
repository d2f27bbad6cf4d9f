"""Kernel regression as one function."""

from __future__ import annotations

from typing import Any

from mercer.core.kernels import Gaussian, Kernel
from mercer.errors import InvalidArgument
from mercer.regression.average import average
from mercer.regression.inputs import checked_kernel, checked_scale, floating, give_back, matrix, sample_weights, targets


def kernel_regression(
    X: Any, y: Any, queries: Any, *, kernel: Kernel | None = None, scale: float | None = None, sample_weight: Any = None
) -> Any:
    """Nadaraya-Watson regression, m(x) = sum_i w_i K(x, x_i) y_i / sum_i w_i K(x, x_i), at the points ``queries``.

    Computed in float64. Tensors give a tensor, differentiable in all of X, y, queries and sample_weight; anything else
    a numpy array. The dtype is that of y if it is a floating one, else float64.

    Args:
        X: training points ``[n, D]``.
        y: targets ``[n]`` or ``[n, outputs]``.
        queries: points to predict at, ``[m, D]``.
        kernel: K. Default ``Gaussian()``, for which X is centred first: differences of squares would cancel.
        scale: the kernel's scale, positive; default its own. For ``Gaussian`` it is 1 / bandwidth^2 (1 by default): K =
            exp(-scale |x - x_i|^2 / 2), twice scikit-learn's ``gamma``.
        sample_weight: w, ``[n]``, 0 or more; default 1.

    Returns:
        Predictions ``[m]`` or ``[m, outputs]``.

    Raises:
        InvalidArgument: shapes or values that are wrong in themselves.
        Unsupported: a kernel whose weights do not form an average (odd Taylor orders without ``signed=True``).
        NonFinite: weights of a query sum to 0 (possible under ``Relu`` and ``Power``), or sums left float64's range.

    >>> import mercer
    >>> mercer.kernel_regression([[0.0], [1.0], [2.0]], [0.0, 1.0, 4.0], [[1.0], [1000.0]]).round(4).tolist()
    [1.5481, 4.0]

    Source: Nadaraya 1964; Watson 1964; as attention, Tsai et al. 2019, arXiv 1908.11775.
    """
    keys, points = matrix(X), matrix(queries, "queries")
    if keys.shape[1] != points.shape[1]:
        raise InvalidArgument(f"queries has {points.shape[1]} features, but X has {keys.shape[1]}; they must agree.")
    chosen = checked_kernel(kernel)
    factor = checked_scale(chosen, scale, keys.shape[1])
    values = targets(y, len(keys)).to(keys.device)
    weights = sample_weights(sample_weight, len(keys), keys.device)
    weights = weights / weights.detach().max()
    kept = weights > 0
    if not bool(kept.all()):
        keys, values, weights = keys[kept], values[kept], weights[kept]
    points = points.to(keys.device)
    if isinstance(chosen, Gaussian):
        centre = keys.detach().mean(0)
        keys, points = keys - centre, points - centre
    out = average(chosen, factor, points, keys, values.reshape(len(values), -1), weights)
    return give_back(out.reshape(-1, *values.shape[1:]), queries, floating(y))
