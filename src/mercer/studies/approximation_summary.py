"""From measured errors to the conclusions of ``mercer study approximation``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from mercer.runtime.words import count
from mercer.studies.records.approximation import (
    ApproximationArm,
    ApproximationInputs,
    ApproximationNeed,
    ApproximationPoint,
)
from mercer.studies.records.common import Finding, Verdict
from mercer.studies.report.marks import label

MOST, FEW = 0.75, 0.25
"""From this share of the cases on a claim counts as supported, and up to that one as refuted."""
LIGHT = 0.1
"""A relative variance up to which a handful of draws can be expected to show it: above, few large values make it."""


SHORT = 0.5
"""Scores of a smaller standard deviation are those of a model that hardly tells its keys apart yet. They are short
enough for a low Taylor order, whatever the model would go on to learn."""


def conclude(
    arms: Sequence[ApproximationArm],
    inputs: Sequence[ApproximationInputs],
    points: Sequence[ApproximationPoint],
    needs: Sequence[ApproximationNeed],
    target: float,
    steps: int | None = None,
) -> list[Finding]:
    """What the numbers say. ``steps``: how many the model was trained for, if it was trained here."""
    found = _Found(arms, inputs, points, needs, target, steps)
    questions = (_orders, _odd, _law, _theory, _equal_features, _orthogonal, _model)
    return [finding for question in questions if (finding := question(found)) is not None]


class _Found:
    """The record's parts, looked up by name."""

    def __init__(
        self,
        arms: Sequence[ApproximationArm],
        inputs: Sequence[ApproximationInputs],
        points: Sequence[ApproximationPoint],
        needs: Sequence[ApproximationNeed],
        target: float,
        steps: int | None,
    ) -> None:
        self.arms, self.inputs, self.points, self.needs, self.target = arms, inputs, points, needs, target
        self.steps = steps
        self.arm = {arm.name: arm for arm in arms}
        self.place = {at.name: at for at in inputs}
        self.error = {(p.inputs, p.arm): p.error.mean for p in points if p.error is not None}

    def series(self, family: str) -> list[str]:
        return list(dict.fromkeys(arm.series for arm in self.arms if arm.family == family))

    def members(self, series: str, at: str) -> list[ApproximationArm]:
        """The arms of a series with a known error, by their number."""
        chosen = [arm for arm in self.arms if arm.series == series and (at, arm.name) in self.error]
        return sorted(chosen, key=lambda arm: arm.order if arm.order is not None else arm.count or 0)


def _share(part: int, whole: int) -> Verdict:
    if part >= MOST * whole:
        return "supported"
    return "refuted" if part <= FEW * whole else "undecided"


def inputs_words(at: ApproximationInputs) -> str:
    """Inputs as a sentence names them."""
    if at.kind == "model":
        return f"layer {(at.layer or 0) + 1} of the model"
    return f"D = {at.dim}, spread {at.spread:g}"


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low} to {high}"


def _orders(found: _Found) -> Finding | None:
    rows: list[tuple[float, float, str, ApproximationArm, ApproximationArm]] = []
    falls = total = 0
    for at in found.inputs:
        for series in found.series("taylor"):
            even = [arm for arm in found.members(series, at.name) if arm.parity == "even"]
            if len(even) < 2:
                continue
            errors = [found.error[at.name, arm.name] for arm in even]
            total += 1
            falls += all(later < earlier for earlier, later in pairwise(errors))
            rows.append((errors[0], errors[-1], inputs_words(at), even[0], even[-1]))
    if not total:
        return None
    best, worst = min(rows, key=lambda row: row[1]), max(rows, key=lambda row: row[1])
    return Finding(
        question="Does every higher even Taylor order come closer to softmax?",
        verdict=_share(falls, total),
        text=f"In {falls} of {total} cases each even order has a smaller error than the one before. "
        + " ".join(
            f"{side} at {words}: {first:.2g} at order {low.order}, {last:.2g} at order {high.order}."
            for side, (first, last, words, low, high) in (("Least", best), ("Most", worst))
        ),
    )


def _odd(found: _Found) -> Finding | None:
    closer = total = 0
    worst, negative = 0.0, 0.0
    for at in found.inputs:
        for series in found.series("taylor"):
            by_order = {arm.order: found.error[at.name, arm.name] for arm in found.members(series, at.name)}
            for order, error in by_order.items():
                if order and order % 2 and order > 1 and order - 1 in by_order:
                    total += 1
                    closer += error < by_order[order - 1]
                    worst = max(worst, error / by_order[order - 1])
    for point in found.points:
        if found.arm[point.arm].parity == "odd":
            negative = max(negative, point.not_positive or 0)
    if not total:
        return None
    return Finding(
        question="Does an odd Taylor order come closer than the even one below it?",
        verdict=_share(closer, total),
        text=f"In {closer} of {total} cases (order 3 against 2, 5 against 4, ...); where it does not, its error is up "
        f"to {worst:.3g} times as large. Odd orders turn negative: up to {negative:.1%} of the rows have weights that "
        "sum to 0 or less.",
    )


def _law(found: _Found) -> Finding | None:
    laws = [need for need in found.needs if need.kind == "features" and need.exponent is not None]
    if not laws:
        return None
    holding = [need for need in laws if need.holds]
    flattest = min(laws, key=lambda need: need.exponent.mean if need.exponent else 0)
    kept = [found.place[need.inputs].score_deviation for need in holding]
    lost = [found.place[need.inputs].score_deviation for need in laws if not need.holds]
    parts = [
        f"It does in {len(holding)} of {len(laws)} cases"
        + (f", with scores of standard deviation {_range(kept)}" if kept else "")
        + "."
    ]
    if lost:
        parts.append(
            f"It does not where the standard deviation is {_range(lost)}; the least exponent is "
            f"{flattest.exponent.mean if flattest.exponent else 0:.2g} for 0.5, {label(flattest.series)} at "
            f"{inputs_words(found.place[flattest.inputs])}."
        )
    counts = [arm.count for arm in found.arms if arm.count]
    parts.append(
        f"Numbers of features up to {max(counts):,} were measured; a law that does not hold there says nothing about "
        "how many would be enough."
    )
    return Finding(
        question="Does the error of random features fall as m^(-1/2)?",
        verdict=_share(len(holding), len(laws)),
        text=" ".join(parts),
    )


def _theory(found: _Found) -> Finding | None:
    light = [p for p in found.points if p.theory is not None and p.measured is not None and p.theory <= LIGHT]
    heavy = [p for p in found.points if p.measured is not None and (p.theory is None or p.theory > LIGHT)]
    if not light and not heavy:
        return None
    inside = sum(
        1
        for p in light
        if p.measured and p.measured.low is not None and p.measured.high is not None
        and p.measured.low <= (p.theory or 0) <= p.measured.high
    )  # fmt: skip
    below = sum(1 for p in heavy if p.measured and (p.theory is None or p.measured.mean < p.theory))
    parts: list[str] = []
    if light:
        parts.append(
            f"Of {len(light)} measurements whose relative variance is {LIGHT:g} or less in theory, the interval over "
            f"the draws holds the theory in {inside}."
        )
    if heavy:
        parts.append(
            f"Of the {len(heavy)} with more, {below} measure less than the theory: such a tail is so heavy that the "
            "draws which make the mean are hardly ever drawn."
        )
    verdict: Verdict = _share(inside, len(light)) if light else "undecided"
    return Finding(
        question="Is the variance of random features what theory says?", verdict=verdict, text=" ".join(parts)
    )


def _equal_features(found: _Found) -> Finding | None:
    """Taylor's even orders against the random features that have at least as many features."""
    closer = total = 0
    example = ""
    for at in found.inputs:
        for series in found.series("taylor"):
            for taylor in (arm for arm in found.members(series, at.name) if arm.parity == "even"):
                size = math.comb(at.dim + (taylor.order or 0), taylor.order or 0)
                rivals = [
                    next((a for a in found.members(name, at.name) if (a.count or 0) >= size), None)
                    for name in found.series("features")
                ]
                known = [a for a in rivals if a is not None]
                if not known:
                    continue
                best = min(known, key=lambda a: found.error[at.name, a.name])
                own, other = found.error[at.name, taylor.name], found.error[at.name, best.name]
                total += 1
                closer += own < other
                if not example or (own >= other and "Otherwise" not in example):
                    begin = "Otherwise" if own >= other else "For example"
                    example = (
                        f"{begin}, at {inputs_words(at)}: {label(taylor.name)} with {size:,} features {own:.2g}, "
                        f"{label(best.name)} {other:.2g}."
                    )
    if not total:
        return None
    return Finding(
        question="With as many features, is the Taylor series closer than random features?",
        verdict=_share(closer, total),
        text=f"In {closer} of {total} cases an even order is closer than the best random features with at least as "
        f"many. {example}",
    )


def _orthogonal(found: _Found) -> Finding | None:
    pairs = [
        (arm, found.arm[f"{arm.name}+independent"]) for arm in found.arms if f"{arm.name}+independent" in found.arm
    ]
    known = [
        (found.error[at.name, a.name], found.error[at.name, b.name])
        for at in found.inputs
        for a, b in pairs
        if (at.name, a.name) in found.error and (at.name, b.name) in found.error
    ]
    if not known:
        return None
    closer = sum(1 for own, other in known if own < other)
    ratio = math.exp(sum(math.log(own / other) for own, other in known if own > 0 < other) / len(known))
    return Finding(
        question="Do orthogonal directions come closer than independent ones?",
        verdict=_share(closer, len(known)),
        text=f"In {closer} of {len(known)} cases; the geometric mean of the ratio of errors is {ratio:.3f}.",
    )


def _model(found: _Found) -> Finding | None:
    layers = [at for at in found.inputs if at.kind == "model"]
    if not layers:
        return None
    best: dict[str, tuple[float, str]] = {}
    for at in layers:
        errors = [
            (found.error[at.name, arm.name], arm.name) for arm in found.arms if (at.name, arm.name) in found.error
        ]
        if errors:
            best[at.name] = min(errors)
    reached = [name for name, (error, _) in best.items() if error <= found.target]
    verdict: Verdict = "undecided"
    if len(reached) == len(layers):
        verdict = "supported"
    elif not reached:
        verdict = "refuted"
    parts = [f"An error of {found.target:g} or less is reached in {len(reached)} of {len(layers)} layers."]
    short = [at for at in layers if at.score_deviation < SHORT]
    if found.steps is not None and 2 * len(short) >= len(layers):
        verdict = "undecided"
        parts.append(
            f"That decides nothing: after {count(found.steps, 'training step')} the scores have a standard deviation "
            f"of {_range([at.score_deviation for at in layers])}, and in {len(short)} of {len(layers)} layers less "
            f"than {SHORT:g}: the model hardly tells its keys apart yet. If that is so in half of the layers or more, "
            "this is left undecided; train for more steps."
        )
    listed = [
        f"in layer {(found.place[name].layer or 0) + 1} {label(arm)} with an error of {error:.2g}"
        for name, (error, arm) in best.items()
    ]
    parts.append(f"Closest of all measured: {'; '.join(listed)}.")
    orders = sorted(
        (
            (found.place[need.inputs].layer or 0, need.number)
            for need in found.needs
            if need.kind == "order" and need.inputs in best
        ),
        key=lambda pair: pair[0],
    )
    if orders:
        words = ", ".join(
            f"{'no order up to 64' if n is None else f'order {n}'} in layer {layer + 1}" for layer, n in orders
        )
        parts.append(f"The Taylor series reaches it with {words}.")
    others = [arm for arm in found.arms if arm.family == "other"]
    known = [
        (found.error[at.name, arm.name], arm.name) for at in layers for arm in others
        if (at.name, arm.name) in found.error
    ]  # fmt: skip
    if known:
        least, name = min(known)
        parts.append(f"Kernels of no such series stay at {least:.2g} ({label(name)}) or more.")
    return Finding(
        question="Does a kernel here stand in for softmax in the trained model, without training for it?",
        verdict=verdict,
        text=" ".join(parts),
    )
