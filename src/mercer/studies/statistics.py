r"""Confidence intervals by Student's t-distribution, for a mean and for a paired difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from mercer.errors import InvalidArgument
from mercer.studies.records.common import Interval


def t_probability(t: float, freedom: int) -> float:
    r"""$P(|T| < t)$ for Student's t with an integer number of degrees of freedom.

    The finite sums of Abramowitz and Stegun 26.7.3 (odd) and 26.7.4 (even), with $\theta = \arctan(t/\sqrt\nu)$.
    """
    if freedom < 1:
        raise InvalidArgument(f"freedom is {freedom}; a t-distribution needs at least 1 degree of freedom.")
    theta = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(theta), math.cos(theta) ** 2
    odd = freedom % 2
    term = math.cos(theta) if odd else 1.0
    total = 0.0
    for index in range(1 + odd, freedom, 2):  # the powers of the cosine up to freedom - 2
        total += term
        term *= square * index / (index + 1)
    return 2 / math.pi * (theta + sine * total) if odd else sine * total


def t_quantile(confidence: float, freedom: int) -> float:
    """The t with ``t_probability(t, freedom) == confidence``, by bisection to the last digits of a double."""
    if not 0 < confidence < 1:
        raise InvalidArgument(f"confidence is {confidence}; it lies strictly between 0 and 1.")
    low, high = 0.0, 1.0
    while t_probability(high, freedom) < confidence:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if t_probability(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def mean_interval(
    samples: Sequence[float], over: Literal["seeds", "blocks"] = "seeds", confidence: float = 0.95
) -> Interval:
    r"""Mean of the samples and its interval $\bar x \pm t\, s / \sqrt n$; one sample has a mean and no interval."""
    count = len(samples)
    if count == 0:
        raise InvalidArgument("an interval needs at least one sample.")
    mean = math.fsum(samples) / count
    if count == 1:
        return Interval(mean=mean, count=1, over=over, confidence=confidence)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in samples) / (count - 1))
    half = t_quantile(confidence, count - 1) * deviation / math.sqrt(count)
    return Interval(mean=mean, low=mean - half, high=mean + half, count=count, over=over, confidence=confidence)


def paired_interval(
    samples: Sequence[float],
    baseline: Sequence[float],
    over: Literal["seeds", "blocks"] = "seeds",
    confidence: float = 0.95,
) -> Interval:
    """Interval of the mean of ``samples[i] - baseline[i]``: what both share by their pairing cancels."""
    if len(samples) != len(baseline):
        raise InvalidArgument(
            f"{len(samples)} samples cannot be paired with {len(baseline)}; the counts must be equal."
        )
    return mean_interval([x - y for x, y in zip(samples, baseline, strict=True)], over, confidence)
