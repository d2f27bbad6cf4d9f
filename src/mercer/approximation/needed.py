"""What order, or how many features, bring an error down to a target."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from mercer.approximation.dials import dial, draws_of, with_count, with_order
from mercer.approximation.intervals import Estimate
from mercer.approximation.state_cost import StateCost
from mercer.approximation.truncation import truncation_order
from mercer.core.kernels import Kernel
from mercer.core.random_features import RandomFeatures
from mercer.core.student import t_quantile

ORDER_LIMIT = 64
"""Highest Taylor order that is measured in search of a target."""
FEATURE_LIMIT = 2**20
"""Largest number of features that is proposed."""
CHECK_LIMIT = 4096
"""Largest number of features at which the law's proposal is measured."""
STEPS = 5
"""Numbers of features, each twice the one before, that the law is fitted to."""
ROOM = 0.1
"""How far from 1/2 the measured exponent may lie for the law to be used, and each end of its interval twice as far."""

Errors = Callable[[Sequence[Kernel]], Tensor]
Costs = Callable[[Kernel], StateCost]


@dataclass(frozen=True)
class NeededOrder:
    """The Taylor order that reaches a target.

    Attributes:
        target: the relative error asked for.
        order: the smallest order whose measured error, and that of the next one, is at most the target; None if it is
            above ``limit``.
        error: what was measured at ``order``, or at the highest order tried.
        pointwise: the smallest order that truncates exp with this relative error at every score seen (which the
            outputs need not), None if it is above 200.
        even_only: odd orders were left out, since under this normaliser they need ``signed=True``.
        limit: highest order tried.
        cost: what ``order`` costs as a state, here; None where there is none.
    """

    target: float
    order: int | None
    error: float
    pointwise: int | None
    even_only: bool
    limit: int
    cost: StateCost | None = None

    def __str__(self) -> str:
        kind = "even order" if self.even_only else "order"
        beyond = "above 200" if self.pointwise is None else f"{self.pointwise}"
        tail = f"to truncate exp so well at every score seen, order {beyond}"
        if self.order is None:
            return (
                f"no {kind} up to {self.limit} brings the error down to {self.target:g}: at the last it is "
                f"{self.error:.3g}; {tail}"
            )
        return (
            f"for an error of {self.target:g}, {kind} {self.order} (measured there: {self.error:.2g})"
            f"{'' if self.cost is None else f', {self.cost.features:,} features, {self.cost}'}; {tail}"
        )


@dataclass(frozen=True)
class NeededFeatures:
    """The number of random features that reaches a target, by the law error = c m^(-1/2).

    Attributes:
        target: the relative error asked for.
        counts: numbers of features measured, each twice the one before; orthogonal ones from a full block on.
        errors: the mean error over the draws at each.
        exponent: b of error ~ m^(-b), fitted to all draws by least squares, with its interval over draws.
        holds: whether b lies within 0.1 of 1/2, its interval within 0.2, and the last error below 1 (a scatter that is
            not small against what it scatters about follows no such law); only then is the law used beyond what was
            measured.
        count: the number of features; None if the law does not hold and no measured count was enough, or if it is above
            ``limit``.
        predicted: c^2 / target^2, not rounded, with its interval: c is the geometric mean over all that was measured.
        checked: the error measured at ``count`` itself, where that is at most 4,096.
        limit: largest number proposed.
        cost: what ``count`` features cost as a state, here; None where there is no such number, and in studies.
    """

    target: float
    counts: tuple[int, ...]
    errors: tuple[float, ...]
    exponent: Estimate
    holds: bool
    count: int | None
    predicted: Estimate
    checked: float | None
    limit: int
    cost: StateCost | None = None

    def __str__(self) -> str:
        law = f"errors fall as m^(-b), b = {self.exponent}, from m = {self.counts[0]} to {self.counts[-1]}"
        if self.count is not None:
            measured = "" if self.checked is None else f" (measured there: {self.checked:.2g})"
            cost = "" if self.cost is None else f", {self.cost}"
            return f"for an error of {self.target:g}, {self.count:,} features{measured}{cost}; {law}"
        if self.holds:
            return (
                f"an error of {self.target:g} would need about {self.predicted.value:.2g} features, above the limit "
                f"of {self.limit:,}; {law}"
            )
        return (
            f"none of {self.counts[-1]:,} features or fewer reaches {self.target:g}, and {law}, which is not the "
            "law m^(-1/2): how many would be enough cannot be said"
        )


def needed_order(
    kernel: Kernel, errors: Errors, cost: Costs, low: float, high: float, target: float, even: bool
) -> NeededOrder:
    """Orders from 0 up, until two in a row reach the target.

    Args:
        kernel: of the kind that was asked about.
        errors: relative errors ``[kernels]``.
        cost: of a kernel.
        low, high: ends of the scores seen.
        target: wanted relative error.
        even: only even orders.
    """
    step = 2 if even else 1
    orders = list(range(0, ORDER_LIMIT + 1 + step, step))  # the last one only confirms the one before
    found: list[float] = []
    place: int | None = None
    for start in range(0, len(orders), 8):
        tried = [with_order(kernel, order) for order in orders[start : start + 8]]
        found += errors(tried).tolist()
        place = next((i for i, pair in enumerate(pairwise(found)) if max(pair) <= target), None)
        if place is not None:
            break
    return NeededOrder(
        target=target,
        order=None if place is None else orders[place],
        error=found[-2 if place is None else place],
        pointwise=truncation_order(low, high, target),
        even_only=even,
        limit=ORDER_LIMIT,
        cost=None if place is None else cost(with_order(kernel, orders[place])),
    )


def least_count(kernel: RandomFeatures, dim: int) -> int:
    """From how many features on errors can fall as m^(-1/2).

    Orthogonal directions start at a whole block of ``dim``: until it is full, errors fall faster.
    """
    return kernel.features_per_direction * (max(8, dim) if kernel.orthogonal else 8)


def ladder(kernel: RandomFeatures, dim: int) -> list[int]:
    """The numbers of features that the law is fitted to: up to three halvings of the kernel's own, and doublings."""
    step, count, least = kernel.features_per_direction, kernel.count, least_count(kernel, dim)
    for _ in range(3):
        if count % (2 * step) == 0 and count // 2 >= least:
            count //= 2
    count = max(count, least)
    return [count * 2**step for step in range(STEPS)]


def needed_features(
    kernel: Kernel, dim: int, errors: Errors, cost: Costs, draws: int, target: float, confidence: float
) -> NeededFeatures:
    """Fit the law on the ladder, use it if it holds, and measure what it proposes.

    ``errors`` gives the relative errors of draws, ``[draws]``; ``cost`` that of a kernel.
    """
    part = dial(kernel)
    assert isinstance(part, RandomFeatures)
    counts = ladder(part, dim)
    found = torch.stack([errors(draws_of(with_count(kernel, count), draws)) for count in counts])
    law = fitted_law(counts, found, part.features_per_direction, target, confidence)
    if law.count is None:
        return law
    proposed = with_count(kernel, law.count)
    checked = law.checked
    if checked is None and law.count <= CHECK_LIMIT:
        checked = float(errors(draws_of(proposed, draws)).mean())
    return replace(law, checked=checked, cost=cost(proposed))


def fitted_law(counts: Sequence[int], errors: Tensor, step: int, target: float, confidence: float) -> NeededFeatures:
    """The law from relative errors ``[counts, draws]`` and what it proposes, a multiple of ``step``; measured only if
    it is one of ``counts``.
    """
    exponent = fitted_exponent(counts, errors, confidence)
    predicted = _predicted(counts, errors, target, confidence)
    means = errors.mean(1).tolist()
    ends = [0.5 if end is None else end for end in (exponent.low, exponent.high)]
    near = abs(exponent.value - 0.5) <= ROOM and all(abs(end - 0.5) <= 2 * ROOM for end in ends)
    holds = near and means[-1] < 1
    count = next((c for c, error in zip(counts, means, strict=True) if error <= target), None)
    checked = None if count is None else means[counts.index(count)]
    if count is None and holds and predicted.value <= FEATURE_LIMIT:
        count = max(step, math.ceil(predicted.value / step) * step)
    return NeededFeatures(
        target, tuple(counts), tuple(means), exponent, holds, count, predicted, checked, FEATURE_LIMIT
    )


def fitted_exponent(counts: Sequence[int], errors: Tensor, confidence: float) -> Estimate:
    """b of error ~ m^(-b): least squares of log error on log m over all draws ``[counts, draws]``, and Student's t."""
    x = torch.tensor(counts, dtype=torch.float64).log().unsqueeze(1).expand_as(errors).flatten()
    y = errors.double().clamp(min=torch.finfo(torch.float64).tiny).log().flatten()
    away = x - x.mean()
    slope = float((away * y).sum() / away.square().sum())
    rest = y - y.mean() - slope * away
    freedom = len(x) - 2
    error = math.sqrt(float(rest.square().sum()) / freedom / float(away.square().sum()))
    half = t_quantile(confidence, freedom) * error
    return Estimate(-slope, -slope - half, -slope + half, confidence, "draws")


def _predicted(counts: Sequence[int], errors: Tensor, target: float, confidence: float) -> Estimate:
    """(c / target)^2 with log c the mean of log(error) + log(m) / 2."""
    roots = torch.tensor(counts, dtype=torch.float64).log().unsqueeze(1) / 2
    logs = (errors.double().clamp(min=torch.finfo(torch.float64).tiny).log() + roots).flatten()
    half = t_quantile(confidence, len(logs) - 1) * float(logs.std()) / math.sqrt(len(logs))
    middle = float(logs.mean()) - math.log(target)
    value, low, high = (math.exp(min(2 * (middle + side * half), 700.0)) for side in (0, -1, 1))
    return Estimate(value, low, high, confidence, "draws")
