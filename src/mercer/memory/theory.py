"""What signal and noise predict for the recall of random pairs.

Keys are uniform on the sphere of radius sqrt(D), values uniform on the unit sphere of dimension Dv. What is recalled
for key i is, up to a positive factor, u = K_ii v_i + sum_{j != i} K_ij v_j, and it is decoded as the stored value with
the largest inner product. With the right value that product is K_ii + s z, where s^2 = (n - 1) E[K^2] / Dv and z is
close to standard normal; then u has the mean square length L(z) = K_ii^2 + 2 K_ii s z + (n - 1) E[K^2]. With a wrong
value l it is K_il plus sqrt(L) times one coordinate c of a random unit vector, so that

    P(right | n) = E_z [ (1 - P( K_il + sqrt(L(z)) c > K_ii + s z ))^(n - 1) ].

The distribution of K_il between independent keys and that of c, of density proportional to (1 - c^2)^((Dv - 3)/2), are
used as they are: neither has Gaussian tails.

What counts is n / (Dv F) with F = K_ii^2 / E[K^2], the *effective* number of features: P falls near n ~ Dv F / (2 ln
n). For ``Power(p)``, F = D (D + 2) ... (D + 2p - 2) / (2p - 1)!! ~ D^p / (2p - 1)!!, the law of Krotov and Hopfield
(2016) for an energy of degree p + 1; it is at most the number C(D + p - 1, p) of features. For ``Exp`` at its default
scale the scores reach sqrt(D), and ln F ~ 2 sqrt(D) - 2; at a scale that does not fall with D they reach scale D and F
is exponential in D, the regime of Demircigil et al. (2017) and Ramsauer et al. (2020).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from mercer.core.kernels import Cosine, Exp, Gaussian, Kernel, Power, Taylor

_RADIAL = (Cosine, Exp, Gaussian, Power, Taylor)
_ANGLES = 2001
_SAMPLED = 2**14


@dataclass(frozen=True, eq=False)
class Overlaps:
    """The signal K_ii of one kernel at one dimension, and the distribution of K between independent keys.

    All in one unit, chosen so that nothing leaves float64's range. ``method`` says how the distribution was found:
    ``quadrature`` over the angle for kernels of the inner product alone, ``sampled`` (seeded) for others.
    """

    signal: float
    values: np.ndarray
    weights: np.ndarray
    method: str

    @property
    def mean_square(self) -> float:
        """E[K^2]."""
        return float((self.weights * self.values**2).sum())

    @property
    def effective_features(self) -> float:
        """F = K_ii^2 / E[K^2]."""
        return self.signal**2 / self.mean_square


def overlaps(kernel: Kernel, dim: int, scale: float, noise: float = 0.0, seed: int = 0) -> Overlaps:
    """The overlaps of ``kernel`` for keys on the sphere of radius sqrt(dim).

    Queries are keys with ``noise`` added, as in :func:`~mercer.memory.capacity`.
    """
    if isinstance(kernel, _RADIAL) and dim > 1:
        return _quadrature(kernel, dim, scale, 1 / math.sqrt(1 + noise**2))
    return _sampled(kernel, dim, scale, noise, seed)


def predicted_accuracy(found: Overlaps, value_dim: int, pairs: int) -> float:
    """P(right | n) for ``pairs`` = n and ``value_dim`` = Dv, at least 2."""
    if pairs < 2:
        return 1.0
    crosstalk = (pairs - 1) * found.mean_square
    deviation = math.sqrt(crosstalk / value_dim)
    z, weight = np.polynomial.hermite_e.hermegauss(40)
    product = found.signal + deviation * z
    length = found.signal**2 + 2 * found.signal * deviation * z + crosstalk
    length = np.sqrt(np.maximum(length, product**2))  # no vector is shorter than its part along v_i
    needed = (product[:, None] - found.values) / length[:, None]
    beaten = (_coordinate_above(needed, value_dim) * found.weights).sum(1).clip(max=1 - 1e-12)
    return float((weight * np.exp((pairs - 1) * np.log1p(-beaten))).sum() / weight.sum())


def _coordinate_above(level: np.ndarray, dim: int) -> np.ndarray:
    """P(c > level) for one coordinate c of a random unit vector."""
    angle, above = _cap_table(dim)
    return np.interp(np.arccos(level.clip(-1, 1)), angle, above)


@lru_cache(maxsize=8)
def _cap_table(dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Angles, and the share of the sphere within each angle of a pole; summed from the pole: small shares are exact."""
    angle = np.linspace(0, math.pi, 4 * _ANGLES)
    density = np.sin(angle).clip(min=0) ** (dim - 2)
    share = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))
    return angle, share / share[-1]


def predicted_capacity(found: Overlaps, value_dim: int, threshold: float, limit: int = 2**40) -> int | None:
    """The largest n with P(right | n) >= ``threshold``, or None if it is above ``limit``."""
    low, high = 1, 2
    while predicted_accuracy(found, value_dim, high) >= threshold:
        low, high = high, 2 * high
        if high > limit:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if predicted_accuracy(found, value_dim, middle) >= threshold else (low, middle)
    return low


def on_sphere(count: int, dim: int, generator: torch.Generator, radius: float = 1.0) -> Tensor:
    """``[count, dim]`` uniform on the sphere, float64."""
    x = torch.randn(count, dim, generator=generator, dtype=torch.float64)
    return x * (radius / x.norm(dim=-1, keepdim=True))


def noisy(keys: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """Keys with Gaussian noise of ``noise`` times their length added, brought back to their length."""
    if not noise:
        return keys
    moved = keys + noise * torch.randn(keys.shape, generator=generator, dtype=keys.dtype)
    return moved * (keys.norm(dim=-1, keepdim=True) / moved.norm(dim=-1, keepdim=True))


def _quadrature(kernel: Kernel, dim: int, scale: float, overlap: float) -> Overlaps:
    """The cosine t of two independent directions has density proportional to (1 - t^2)^((D - 3)/2)."""
    angle = torch.linspace(0, math.pi, _ANGLES, dtype=torch.float64)[1:-1]
    cosine = torch.cat((torch.tensor([overlap], dtype=torch.float64), angle.cos()))
    axis, other = torch.zeros(2, dim, dtype=torch.float64)
    axis[0], other[1] = math.sqrt(dim), math.sqrt(dim)
    key = cosine.unsqueeze(-1) * axis + (1 - cosine.square()).clamp(min=0).sqrt().unsqueeze(-1) * other
    value = _values(kernel, axis.unsqueeze(0), [key], scale)
    weight = torch.softmax((dim - 2) * angle.sin().log(), 0)
    return Overlaps(float(value[0]), value[1:].numpy(), weight.numpy(), "quadrature")


def _sampled(kernel: Kernel, dim: int, scale: float, noise: float, seed: int) -> Overlaps:
    generator = torch.Generator().manual_seed(seed)
    keys, others = (on_sphere(_SAMPLED, dim, generator, math.sqrt(dim)) for _ in range(2))
    own, cross = _values(kernel, noisy(keys, noise, generator), [keys, others], scale).chunk(2)
    return Overlaps(float(own.mean()), cross.numpy(), np.full(_SAMPLED, 1 / _SAMPLED), "sampled")


def _values(kernel: Kernel, queries: Tensor, keys: list[Tensor], scale: float) -> Tensor:
    """K of each query ``[N, D]`` and its key, for every set of keys ``[N, D]`` in turn, up to a common factor."""
    query = kernel.scaled_query(queries[None, None], scale)
    mapped = [kernel.scaled_key(k[None, None], scale) for k in keys]
    if kernel.log_features:
        logs = torch.cat([torch.logsumexp(query + k, -1) for k in mapped], -1).flatten()
        return (logs - logs.max()).exp()
    score = torch.cat([(query * k).sum(-1) for k in mapped], -1).flatten()
    return (score - score.max()).exp() if kernel.exponential else kernel.profile(score)
