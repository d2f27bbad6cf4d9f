"""One set of inputs of the study of approximation: every arm measured on it, and what each series needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from mercer.approximation import ApproximationError, Estimate, NeededFeatures, NeededOrder, approximation_error
from mercer.approximation.dials import is_drawn
from mercer.approximation.needed import fitted_law, least_count
from mercer.core.random_features import RandomFeatures
from mercer.errors import NonFinite
from mercer.studies.approximation_arms import Arm
from mercer.studies.approximation_inputs import Inputs
from mercer.studies.records.approximation import ApproximationInputs, ApproximationNeed, ApproximationPoint
from mercer.studies.records.common import Interval, Over, Record

LEAST_COUNTS, MOST_COUNTS = 3, 5
"""Numbers of features that a law is fitted to, at least and at most: the largest, since it is one of large numbers."""
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Sizes:
    """Sizes of the inputs and of the samples.

    Attributes:
        length, heads: of random inputs.
        rows: positions measured.
        draws: of random features.
        windows: of held-out text that a model reads.
    """

    length: int
    heads: int
    rows: int
    draws: int
    windows: int


class Cell(Record):
    """What one set of inputs gave; kept between calls."""

    inputs: ApproximationInputs
    points: list[ApproximationPoint]
    needs: list[ApproximationNeed]


def measure(
    inputs: Inputs,
    arms: Sequence[Arm],
    sizes: Sizes,
    target: float,
    device: torch.device,
    show: Callable[[int, str], None],
) -> Cell:
    """Every arm at the same rows. ``show(arms done, name)`` is called before each."""
    query, key, value = (x.to(device) for x in inputs.make())
    seeking = _seekers(arms)
    found: dict[str, ApproximationError] = {}
    lost: list[Arm] = []
    for place, arm in enumerate(arms):
        show(place, arm.record.name)
        drawn = is_drawn(arm.kernel)
        try:
            found[arm.record.name] = approximation_error(
                query, key, value, arm.kernel, normalizer=arm.normalizer, structure=inputs.structure,
                scale=inputs.scale, rows=sizes.rows, draws=sizes.draws if drawn else None, seed=0,
                confidence=CONFIDENCE, target=target if arm.record.name in seeking else None,
            )  # fmt: skip
        except NonFinite:
            lost.append(arm)
    if not found:
        raise NonFinite(f"on {inputs.name} every attention left the range of float64; take others.")
    first = next(iter(found.values()))
    scores = first.scores
    return Cell(
        inputs=ApproximationInputs(
            name=inputs.name, kind=inputs.kind, dim=first.dim, batch=first.batch, heads=first.heads, length=first.keys,
            rows=first.rows, spread=inputs.spread, layer=inputs.layer, score_low=scores.low, score_mean=scores.mean,
            score_deviation=scores.deviation, score_high=scores.high,
        ),
        points=[
            *(_point(inputs.name, name, result) for name, result in found.items()),
            *(_lost(inputs.name, arm.record.name) for arm in lost),
        ],
        needs=[
            *(_order(inputs.name, a, found[a.record.name]) for a in arms if a.record.name in seeking & found.keys()),
            *_features(inputs.name, arms, found, first.dim, target),
        ],
    )  # fmt: skip


def _seekers(arms: Iterable[Arm]) -> set[str]:
    """One Taylor arm of each series, an even one if there is: the order that it needs stands for the series."""
    chosen: dict[str, Arm] = {}
    for arm in arms:
        if arm.record.family == "taylor":
            old = chosen.setdefault(arm.record.series, arm)
            if old.record.parity == "odd" and arm.record.parity == "even":
                chosen[arm.record.series] = arm
    return {arm.record.name for arm in chosen.values()}


def _point(inputs: str, name: str, found: ApproximationError) -> ApproximationPoint:
    spread = found.spread
    return ApproximationPoint(
        inputs=inputs,
        arm=name,
        error=_interval(found.error, found),
        by_head=[_finite(head.value) for head in found.by_head],
        by_draw=[kept for value in found.by_draw if (kept := _finite(value)) is not None],
        variation=None if found.variation is None else _interval(found.variation, found),
        negative=found.negative,
        not_positive=found.not_positive,
        theory=None if spread is None else _finite(spread.theory),
        median=None if spread is None else _finite(spread.median),
        measured=None if spread is None else _interval(spread.measured, found),
    )


def _lost(inputs: str, name: str) -> ApproximationPoint:
    """An arm whose outputs left the range of float64."""
    return ApproximationPoint(inputs=inputs, arm=name, error=None, by_head=[], negative=None, not_positive=None)


def _order(inputs: str, arm: Arm, found: ApproximationError) -> ApproximationNeed:
    needed = found.needed
    assert isinstance(needed, NeededOrder)
    return ApproximationNeed(
        inputs=inputs, series=arm.record.series, kind="order", number=needed.order, error=_finite(needed.error),
        pointwise=needed.pointwise, text=str(needed),
    )  # fmt: skip


def _features(
    inputs: str, arms: Sequence[Arm], found: dict[str, ApproximationError], dim: int, target: float
) -> list[ApproximationNeed]:
    """The law of each series of random features, from the draws of its arms."""
    needs: list[ApproximationNeed] = []
    for series in dict.fromkeys(arm.record.series for arm in arms if arm.record.family == "features"):
        chosen = [arm for arm in arms if arm.record.series == series]
        kernels = {arm.record.name: arm.kernel for arm in chosen}
        errors: dict[int, tuple[float, ...]] = {}
        step = least = 1
        for name, kernel in sorted(kernels.items(), key=lambda item: getattr(item[1], "count", 0)):
            assert isinstance(kernel, RandomFeatures)
            if name not in found:
                continue
            step = kernel.features_per_direction
            if all(map(math.isfinite, found[name].by_draw)):
                errors[kernel.count] = found[name].by_draw
                least = least_count(kernel, dim)
        last = [(number, values) for number, values in errors.items() if number >= least][-MOST_COUNTS:]
        if len(last) >= LEAST_COUNTS:
            table = torch.tensor([values for _, values in last], dtype=torch.float64)
            law = fitted_law([number for number, _ in last], table, step, target, CONFIDENCE)
            means = {number: sum(values) / len(values) for number, values in errors.items()}
            needs.append(_law(inputs, series, law, means))
    return needs


def _law(inputs: str, series: str, law: NeededFeatures, means: dict[int, float]) -> ApproximationNeed:
    """``means``: of every number of features that was measured; the fit may leave the smallest out."""
    exponent = _interval(law.exponent, None)
    number = next((count for count, error in means.items() if error <= law.target), law.count)
    return ApproximationNeed(
        inputs=inputs,
        series=series,
        kind="features",
        number=number,
        error=None if number is None or number not in means else _finite(means[number]),
        exponent=None if exponent is None else exponent.model_copy(update={"count": len(law.counts)}),
        holds=law.holds,
        predicted=_finite(law.predicted.value),
        text=str(law),
    )


def _interval(found: Estimate, of: ApproximationError | None) -> Interval | None:
    mean = _finite(found.value)
    if mean is None:
        return None
    low, high = (None if end is None else _finite(end) for end in (found.low, found.high))
    if low is None or high is None:
        low = high = None
    rows, draws = (1, 1) if of is None else (of.rows, of.draws or 1)
    sampled = {"rows": rows, "draws": draws, "rows and draws": min(rows, draws), "nothing": 1}
    over: Over = "nothing"
    for known in ("rows", "draws", "rows and draws"):
        over = known if found.over == known else over
    return Interval(
        mean=mean, low=low, high=high, count=sampled[over], over=over, confidence=found.confidence
    )  # fmt: skip


def _finite(value: float) -> float | None:
    """Eight digits are kept: more only make the record longer."""
    return float(f"{value:.8g}") if math.isfinite(value) else None
