r"""Confidence intervals by Student's t-distribution, for a mean and for a paired difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from mercer.core.student import t_quantile
from mercer.errors import InvalidArgument
from mercer.studies.records.common import Interval


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
