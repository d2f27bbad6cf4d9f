"""An estimate with its interval: over sampled rows, over independent draws, or both."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from mercer.core.student import t_quantile


@dataclass(frozen=True)
class Estimate:
    """A positive number and how well it is known.

    Attributes:
        value: the estimate.
        low, high: the interval; None where nothing was sampled (the value is then that of these inputs, up to
            rounding) or where one sample gives none.
        confidence: its level.
        over: what varies: ``"rows"``, ``"draws"``, ``"rows and draws"``, or ``"nothing"``.
    """

    value: float
    low: float | None = None
    high: float | None = None
    confidence: float = 0.95
    over: str = "nothing"

    def __str__(self) -> str:
        text = f"{self.value:.3g}"
        if self.low is None or self.high is None:
            return text
        return f"{text} [{self.low:.3g}, {self.high:.3g}]"


def estimate(part: Tensor, whole: Tensor, population: int, confidence: float, *, root: bool) -> Estimate:
    r"""Mean over draws of the ratio $e_d = (\sum_r a_{dr} / \sum_r b_r)^{1/2}$ (or without the root) and its interval.

    The variance is that of the draws, $s^2(e_d)/n_d$, plus that of the rows: with the ratio linearised, a row moves it
    by $z_r$, and $n$ of $N$ rows without replacement give $(1 - n/N)\, s^2(z)/n$. The interval is
    $e\, e^{\pm t \sigma/e}$, Student's t with the fewer degrees of freedom of the two, on the scale of logarithms: an
    error is positive and its distribution leans to the right. All rows (n = N) add nothing.

    Args:
        part: a, ``[draws, rows]``, 0 or more.
        whole: b, ``[rows]``, 0 or more.
        population: N.
        confidence: level of the interval.
        root: whether to take the root of the ratio.
    """
    draws, rows = part.shape
    sampled = [name for name, many in (("rows", rows < population), ("draws", draws > 1)) if many]
    over = " and ".join(sampled) or "nothing"
    total = float(whole.sum())
    if total == 0:
        return Estimate(0.0, confidence=confidence, over=over)
    ratios = part.sum(1) / total
    values = ratios.sqrt() if root else ratios
    value = float(values.mean())
    if not sampled or not math.isfinite(value) or (rows < population and rows < 2):
        return Estimate(value, confidence=confidence, over=over)
    if value == 0:
        return Estimate(0.0, 0.0, 0.0, confidence, over)
    variance, freedom = 0.0, []
    if rows < population:
        moved = (part - ratios.unsqueeze(1) * whole) * (rows / total)
        if root:
            moved = moved / (2 * values.masked_fill(values == 0, 1).unsqueeze(1))
        variance += (1 - rows / population) * float(moved.mean(0).var()) / rows
        freedom.append(rows - 1)
    if draws > 1:
        variance += float(values.var()) / draws
        freedom.append(draws - 1)
    half = t_quantile(confidence, min(freedom)) * math.sqrt(variance) / value
    low, high = value * math.exp(-half), value * math.exp(min(half, 700.0))
    return Estimate(value, low, high, confidence, over)
