"""Mean and variance of what random features estimate, in closed form, for every setting.

With m directions w, P ordered pairs of different directions in the same orthogonal block, and a function g of one
direction, an estimate is c/m sum_w g(w.s), so

    E K   = c M,     Var K = c^2/m^2 [ m (M2 - M^2) + P (M11 - M^2) ],     M = E g,  M2 = E g^2,  M11 = E g(w.s) g(w'.s)

    positive                g = exp         s = q' + k'     c = exp(-(|q'|^2 + |k'|^2)/2), or 1 if plain
    positive, hyperbolic    g = cosh        s = q' + k'     the same c
    trigonometric           g = cos         s = q' - k'     c = exp(+(|q'|^2 + |k'|^2)/2)

An orthogonal block is a random rotation, so w.s/|s| and w'.s/|s| are two coordinates of a uniform unit vector, times
the norms of the rows. With t = |s|^2, and t negative for cos, which is exp at an imaginary argument, that gives

    norms chi     M = A(t) = exp(t/2)               M11 = B(t) = 1F1(D; D/2; t/2)
    norms sqrt    M = A(t) = 0F1(; D/2; D t/4)      M11 = B(t) = A(2 t)

and M2 = A(4 t) for exp, (1 + A(4 t))/2 for cosh and cos. For independent directions P = 0 (or M11 = M^2); with norms
chi that is what Choromanski et al. 2021 (arXiv 2009.14794) state. B holds since the sum of two orthogonal rows has a
uniform direction and a squared norm that is chi-squared with 2 D degrees of freedom, or is 2 D.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from mercer.core.kernels import Kernel
from mercer.core.normalizers import unit
from mercer.core.random_features import PositiveRandomFeatures, RandomFeatures, TrigonometricRandomFeatures
from mercer.errors import InvalidArgument

_NODES = 128
"""Points of the quadrature over a coordinate of a unit vector: exact for polynomials of twice that degree."""
_LARGEST = 1500.0
"""|s|^2 beyond which the second moment of an exponential is so large that the moment of a pair is nothing beside it."""


def feature_mean(kernel: Kernel, query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    """E K(q, k) over the drawing of directions, what ``kernel`` estimates: for norms chi exp(scale q.k), unless plain.

    Arguments and shapes as of :func:`feature_variance`.
    """
    drawn, log_factor, square, dim = _pairs(kernel, query, key, scale)
    if isinstance(drawn, TrigonometricRandomFeatures):
        if drawn.norms == "chi":
            return (log_factor - square / 2).exp()
        mean = _mean_cos(square, dim, drawn.norms)
        return mean.sign() * (log_factor + mean.abs().log()).exp()  # the factor alone may leave the range
    return (log_factor + _log_mean_exp(square, dim, drawn.norms)).exp()


def feature_variance(kernel: Kernel, query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    """Variance of K(q, k) over the drawing of directions.

    Args:
        kernel: :class:`~mercer.PositiveRandomFeatures` or :class:`~mercer.TrigonometricRandomFeatures`.
        query: ``[..., D]``.
        key: ``[..., D]``, broadcast with ``query``: a pair for every leading index.
        scale: as of :func:`mercer.attention`; default the kernel's own.

    Returns:
        ``[...]``, float64; ``inf`` where it leaves the range. The relative error of an estimate is its root over
        :func:`feature_mean`, and falls as the root of the number of directions.
    """
    drawn, log_factor, square, dim = _pairs(kernel, query, key, scale)
    count = drawn.direction_count
    blocks, rest = divmod(count, dim)
    together = blocks * dim * (dim - 1) + rest * (rest - 1) if drawn.orthogonal else 0
    if isinstance(drawn, TrigonometricRandomFeatures):
        mean = _mean_cos(square, dim, drawn.norms)
        spread = count * ((1 + _mean_cos(4 * square, dim, drawn.norms)) / 2 - mean.square())
        if together:
            pair = _pair_cos(square, dim) if drawn.norms == "chi" else _mean_cos(2 * square, dim, "sqrt")
            spread = spread + together * (pair - mean.square())
        return (2 * log_factor + spread.clamp(min=0).log() - 2 * math.log(count)).exp()
    mean = _log_mean_exp(square, dim, drawn.norms)
    second = _log_mean_exp(4 * square, dim, drawn.norms)
    if drawn.hyperbolic:
        second = torch.logaddexp(second, torch.zeros_like(second)) - math.log(2)
    less = 2 * mean - second  # M^2 / M2, as a logarithm; what is left of the bracket above is over m M2
    spread = -less.expm1()
    if together:
        pair = _log_pair_exp(square, dim) if drawn.norms == "chi" else _log_mean_exp(2 * square, dim, "sqrt")
        spread = spread + together / count * less.exp() * (pair - 2 * mean).expm1()
    return (2 * log_factor + second + spread.clamp(min=0).log() - math.log(count)).exp()


def _pairs(
    kernel: Kernel, query: Tensor, key: Tensor, scale: float | None
) -> tuple[PositiveRandomFeatures | TrigonometricRandomFeatures, Tensor, Tensor, int]:
    """The kernel, log c and |s|^2 of every pair, and D."""
    if not isinstance(kernel, PositiveRandomFeatures | TrigonometricRandomFeatures):
        raise InvalidArgument(f"Only random features have a mean and a variance over their drawing; {kernel} has none.")
    dim, pairs = query.shape[-1] if query.dim() else 0, zip(query.shape[::-1], key.shape[::-1], strict=False)
    if not dim or key.shape[-1:] != (dim,) or any(a != b and 1 not in (a, b) for a, b in pairs):
        raise InvalidArgument(
            f"query and key must be [..., D] with the same D of 1 or more, and broadcast otherwise, not "
            f"{list(query.shape)} and {list(key.shape)}."
        )
    kernel.check(dim, 1, 1)
    factor = kernel.default_scale(dim) if scale is None else scale
    a, b = (_shrunk(kernel, x.double(), factor) for x in (query, key))
    half = (a.square().sum(-1) + b.square().sum(-1)) / 2
    if isinstance(kernel, TrigonometricRandomFeatures):
        return kernel, half, (a - b).square().sum(-1), dim
    return kernel, torch.zeros_like(half) if kernel.plain else -half, (a + b).square().sum(-1), dim


def _shrunk(kernel: RandomFeatures, x: Tensor, scale: float) -> Tensor:
    return kernel.shrunk(unit(x) if isinstance(kernel, TrigonometricRandomFeatures) and kernel.unit else x, scale)


def _log_mean_exp(t: Tensor, dim: int, norms: str) -> Tensor:
    """log E exp(w.s) for |s|^2 = t: log A(t)."""
    if norms == "chi":
        return t / 2
    return _over_sphere(dim, t, lambda at, log_weight, total: torch.logaddexp(total, at + log_weight), -torch.inf)


def _mean_cos(t: Tensor, dim: int, norms: str) -> Tensor:
    """E cos(w.s) for |s|^2 = t: A(-t)."""
    if norms == "chi":
        return (-t / 2).exp()
    return _over_sphere(dim, t, lambda at, log_weight, total: total + at.cos() * math.exp(log_weight), 0.0)


def _over_sphere(dim: int, t: Tensor, add: Callable[[Tensor, float, Tensor], Tensor], start: float) -> Tensor:
    """A sum over the values sqrt(D t) u of w.s, where all rows have the norm sqrt(D)."""
    size, total = (dim * t).sqrt(), torch.full_like(t, start)
    for node, log_weight in zip(*_sphere(dim), strict=True):
        total = add(size * node, log_weight, total)
    return total


@lru_cache(maxsize=64)
def _sphere(dim: int) -> tuple[list[float], list[float]]:
    """Nodes and log-weights of Gauss's quadrature for a coordinate u of a uniform unit vector, whose density goes as
    (1 - u^2)^((D-3)/2): the eigenvalues of the Jacobi matrix of Gegenbauer's polynomials (Golub and Welsch 1969).
    """
    n = torch.arange(1, _NODES, dtype=torch.float64, device="cpu")
    order = (dim - 2) / 2
    squares = n * (n + 2 * order - 1) / (4 * (n + order) * (n + order - 1))
    squares[0] = 1 / dim  # the same, also where it is 0/0
    beside = squares.sqrt()
    nodes, vectors = torch.linalg.eigh(beside.diag(1) + beside.diag(-1))
    weights = vectors[0].square()
    kept = weights > 0
    return nodes[kept].tolist(), weights[kept].log().tolist()


def _log_pair_exp(t: Tensor, dim: int) -> Tensor:
    """log 1F1(D; D/2; t/2), by its series; all terms are positive."""
    t = t.clamp(max=_LARGEST)
    total = term = torch.zeros_like(t)
    terms = 64 + 3 * math.ceil(float(t.max())) if t.numel() else 0
    log = (t / 2).log()
    for n in range(terms):
        term = term + log + math.log((dim + n) / ((dim / 2 + n) * (n + 1)))
        total = torch.logaddexp(total, term)
    return total


def _pair_cos(t: Tensor, dim: int) -> Tensor:
    """1F1(D; D/2; -t/2) = exp(-t/2) 1F1(-D/2; D/2; t/2) (Kummer), whose terms are smaller than those of exp(t/2)."""
    t = t.clamp(max=_LARGEST / 2)  # beyond, it is 0
    total = term = (-t / 2).exp()
    for n in range(64 + 3 * math.ceil(float(t.max())) if t.numel() else 0):
        term = term * (t / 2) * ((n - dim / 2) / ((dim / 2 + n) * (n + 1)))
        total = total + term
    return total
