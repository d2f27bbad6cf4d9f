"""The capacity of a memory, measured: random pairs are stored until recall fails, and theory stands beside it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch

from mercer.core.kernels import Kernel
from mercer.core.normalizers import L2
from mercer.errors import InvalidArgument
from mercer.memory.associative import AssociativeMemory
from mercer.memory.theory import noisy, on_sphere, overlaps, predicted_accuracy, predicted_capacity


@dataclass(frozen=True)
class Point:
    """Recall at one number of pairs.

    Attributes:
        pairs: n.
        accuracy: fraction of recalled values whose nearest stored value is the right one, mean over trials.
        lowest, highest: over trials.
        predicted: P(right | n) of :mod:`mercer.memory.theory`.
    """

    pairs: int
    accuracy: float
    lowest: float
    highest: float
    predicted: float


@dataclass(frozen=True)
class Capacity:
    """What :func:`capacity` measured.

    Attributes:
        kernel, dim, value_dim, scale, noise, threshold, trials, seed: what was asked.
        path: ``features`` (a state of fixed size) or ``pairs`` (a cache).
        features: length of phi, or None for a cache.
        effective_features: F = K_ii^2 / E[K^2] (see :mod:`mercer.memory.theory`), at most ``features`` without noise.
        method: how F was found, ``quadrature`` or ``sampled``.
        state_bytes: of the memory at the last point.
        measured: number of pairs at which accuracy falls through the threshold, interpolated in log n; None if it had
            not at ``limit``.
        predicted: the same by theory; None above 2^40.
        limit: largest number of pairs tried.
        curve: the points, at rising numbers of pairs.
    """

    kernel: str
    dim: int
    value_dim: int
    scale: float
    noise: float
    threshold: float
    trials: int
    seed: int
    path: str
    features: int | None
    effective_features: float
    method: str
    state_bytes: int
    measured: float | None
    predicted: int | None
    limit: int
    curve: tuple[Point, ...]

    def to_json(self) -> str:
        """As JSON text; :meth:`from_json` reads it."""
        return json.dumps(asdict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> Capacity:
        """Read what :meth:`to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        values["curve"] = tuple(Point(**point) for point in values["curve"])
        return Capacity(**values)

    def __str__(self) -> str:
        measured = f"more than {self.limit:,}" if self.measured is None else f"{self.measured:,.0f}"
        predicted = "more than 2^40" if self.predicted is None else f"{self.predicted:,}"
        size = "a cache" if self.features is None else f"{self.features:,} features"
        return (
            f"{self.kernel}, D={self.dim}, Dv={self.value_dim}: {measured} pairs (theory {predicted}) at accuracy "
            f"{self.threshold:g}; {size}, {self.effective_features:,.1f} effective"
        )


def capacity(
    kernel: Kernel,
    dim: int,
    *,
    value_dim: int | None = None,
    scale: float | None = None,
    noise: float = 0.0,
    threshold: float = 0.9,
    trials: int = 10,
    queries: int = 256,
    limit: int = 2**14,
    seed: int = 0,
) -> Capacity:
    """Store random pairs, sqrt(2) times as many each time, until recall by their keys has failed.

    Keys are uniform on the sphere of radius sqrt(D) (the length that layer normalisation gives), values on the unit
    sphere. A recalled value counts as right if, of all stored values, the one with the largest inner product is that of
    the key. A positive factor on what is recalled changes nothing, so the normaliser does not matter; ``L2`` is used.
    Float64.

    Args:
        kernel: K. Finite kernels are measured on their feature state, others on a cache.
        dim: D.
        value_dim: Dv; default D.
        scale: the kernel's scale; default its own.
        noise: Gaussian noise added to the key before recall, as a fraction of the key's length; the sum is brought back
            to that length.
        threshold: the accuracy that counts as recall, in (0, 1).
        trials: independent draws.
        queries: stored pairs recalled at each point, at most, drawn among all stored.
        limit: pairs at which to stop even if recall has not failed.
        seed: of all draws.

    Returns:
        A :class:`Capacity`, with the accuracy at every number of pairs up to the first where it is below half the
        threshold.

    >>> from mercer import Power
    >>> found = capacity(Power(1), 16)
    >>> round(found.measured), found.predicted, round(found.effective_features)
    (14, 12, 16)

    Source: Krotov and Hopfield 2016, arXiv 1606.01164 (polynomial memories); Demircigil et al. 2017, arXiv 1702.01929,
    and Ramsauer et al. 2020, arXiv 2008.02217 (exponential ones); Cabannes et al. 2023, arXiv 2310.02984 (outer
    products in language models).
    """
    value_dim = dim if value_dim is None else value_dim
    for name, value, least in (
        ("dim", dim, 1),
        ("value_dim", value_dim, 2),
        ("trials", trials, 1),
        ("queries", queries, 1),
        ("limit", limit, 2),
    ):
        if value < least:
            raise InvalidArgument(f"{name} must be {least} or more, not {value}.")
    if not 0 < threshold < 1 or noise < 0:
        raise InvalidArgument(
            f"threshold must lie between 0 and 1 and noise be 0 or more, not {threshold} and {noise}."
        )
    factor = kernel.default_scale(dim) if scale is None else scale
    runs = [_Trial(kernel, dim, value_dim, factor, noise, seed, number) for number in range(trials)]
    found = overlaps(kernel, dim, factor, noise, seed)
    curve: list[Point] = []
    pairs = 2.0
    while not curve or (curve[-1].pairs < limit and curve[-1].accuracy >= threshold / 2):
        count = min(round(pairs), limit)
        rates = [run.accuracy(count, queries) for run in runs]
        curve.append(
            Point(count, sum(rates) / trials, min(rates), max(rates), predicted_accuracy(found, value_dim, count))
        )
        pairs *= math.sqrt(2)
    memory = runs[0].memory
    return Capacity(
        kernel=str(kernel),
        dim=dim,
        value_dim=value_dim,
        scale=factor,
        noise=noise,
        threshold=threshold,
        trials=trials,
        seed=seed,
        path=memory.path,
        features=kernel.feature_dim(dim),
        effective_features=found.effective_features,
        method=found.method,
        state_bytes=memory.nbytes,
        measured=_crossing(curve, threshold),
        predicted=predicted_capacity(found, value_dim, threshold),
        limit=limit,
        curve=tuple(curve),
    )


class _Trial:
    """One draw of pairs, extended and stored as it is asked for; more pairs never change the earlier ones."""

    def __init__(
        self, kernel: Kernel, dim: int, value_dim: int, scale: float, noise: float, seed: int, number: int
    ) -> None:
        self.memory = AssociativeMemory(kernel, dim, value_dim, normalizer=L2(), scale=scale, dtype=torch.float64)
        self.noise = noise
        self.pairs, self.asked = (
            torch.Generator().manual_seed(2**32 * kind + 2**16 * seed + number) for kind in (0, 1)
        )
        self.keys = torch.empty(0, dim, dtype=torch.float64)
        self.values = torch.empty(0, value_dim, dtype=torch.float64)

    def accuracy(self, count: int, queries: int) -> float:
        more = count - len(self.keys)
        keys = on_sphere(more, self.keys.shape[1], self.pairs, math.sqrt(self.keys.shape[1]))
        values = on_sphere(more, self.values.shape[1], self.pairs)
        self.memory.store(keys, values)
        self.keys, self.values = torch.cat((self.keys, keys)), torch.cat((self.values, values))
        index = torch.randperm(count, generator=self.asked)[:queries]
        recalled = self.memory.recall(noisy(self.keys[index], self.noise, self.asked))
        return float(((recalled @ self.values.T).argmax(-1) == index).double().mean())


def _crossing(curve: list[Point], threshold: float) -> float | None:
    """Where accuracy first falls below the threshold, by linear interpolation in log n."""
    for before, after in pairwise(curve):
        if after.accuracy < threshold <= before.accuracy:
            share = (before.accuracy - threshold) / (before.accuracy - after.accuracy)
            return before.pairs * (after.pairs / before.pairs) ** share
    return float(curve[0].pairs) if curve[0].accuracy < threshold else None
