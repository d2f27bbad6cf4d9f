"""From training runs to the table and the conclusions of ``mercer study orders``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from mercer.studies.records.common import Finding, Interval, Verdict
from mercer.studies.records.orders import Arm, ArmSummary, OrdersTrial
from mercer.studies.report.marks import label
from mercer.studies.report.numbers import decimal, interval
from mercer.studies.statistics import mean_interval, paired_interval

MARGIN = 0.02
"""Nats per token that count as no difference: about one per cent of the loss of a small model of bytes."""
ONE_SEED = 0.03
"""With one seed the interval covers the text measured on and not the luck of a run. Every interval is then taken this
much wider on both sides, in nats, before anything is concluded from it."""


def _finished(trials: Sequence[OrdersTrial], arm: str) -> dict[int, OrdersTrial]:
    return {t.seed: t for t in trials if t.arm == arm and t.status == "finished" and t.loss is not None}


def loss_interval(trials: Sequence[OrdersTrial], arm: str) -> Interval | None:
    """Mean loss over seeds, or over blocks of held-out text if there is one seed."""
    runs = list(_finished(trials, arm).values())
    if not runs:
        return None
    if len(runs) > 1:
        return mean_interval([t.loss for t in runs if t.loss is not None])
    return mean_interval(runs[0].heldout_blocks, "blocks")


def difference(trials: Sequence[OrdersTrial], arm: str, other: str) -> Interval | None:
    """Loss of ``arm`` minus loss of ``other``, paired over the seeds both have, or over blocks if they share one."""
    ours, theirs = _finished(trials, arm), _finished(trials, other)
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    if len(seeds) > 1:
        return paired_interval([ours[s].loss or 0.0 for s in seeds], [theirs[s].loss or 0.0 for s in seeds])
    return paired_interval(ours[seeds[0]].heldout_blocks, theirs[seeds[0]].heldout_blocks, "blocks")


def reference(arms: Sequence[Arm]) -> str:
    """What every other arm is compared with: softmax, or the first arm if it is none of them."""
    return next((arm.name for arm in arms if arm.name == "softmax"), arms[0].name)


def summarize(trials: Sequence[OrdersTrial], arms: Sequence[Arm]) -> list[ArmSummary]:
    """One summary for each arm that has a run."""
    compared = reference(arms)
    summaries: list[ArmSummary] = []
    for arm in arms:
        runs = [t for t in trials if t.arm == arm.name]
        if not runs:
            continue
        bits = [t.bits_per_byte for t in runs if t.bits_per_byte is not None]
        speeds = [t.tokens_per_second for t in runs if t.tokens_per_second is not None]
        summaries.append(
            ArmSummary(
                arm=arm.name,
                loss=loss_interval(trials, arm.name),
                bits_per_byte=sum(bits) / len(bits) if bits else None,
                gap=None if arm.name == compared else difference(trials, arm.name, compared),
                tokens_per_second=median(speeds) if speeds else None,
                diverged=sum(t.status == "diverged" for t in runs),
            )
        )
    return summaries


def _bounds(value: Interval) -> tuple[float, float] | None:
    if value.low is None or value.high is None:
        return None
    wider = ONE_SEED if value.over == "blocks" else 0.0
    return value.low - wider, value.high + wider


def judge_equal(gap: Interval, margin: float = MARGIN) -> Verdict:
    """Whether a loss is at most ``margin`` above another one: supported, refuted or undecided by its interval."""
    bounds = _bounds(gap)
    if bounds is None:
        return "undecided"
    if bounds[1] <= margin:
        return "supported"
    return "refuted" if bounds[0] > margin else "undecided"


def judge_lower(gap: Interval) -> Verdict:
    """Whether a loss is below another one."""
    bounds = _bounds(gap)
    if bounds is None:
        return "undecided"
    if bounds[1] < 0:
        return "supported"
    return "refuted" if bounds[0] > 0 else "undecided"


def _caution(gap: Interval) -> str:
    if gap.over == "seeds":
        return f" ({gap.count} seeds, 95 % interval)." if gap.decided else " (one seed, no interval)."
    return " (one seed)."


def _so(verdict: Verdict, supported: str, refuted: str) -> str:
    return {"supported": supported, "refuted": refuted, "undecided": "The interval does not decide."}[verdict]


def conclude(trials: Sequence[OrdersTrial], arms: Sequence[Arm], margin: float = MARGIN) -> list[Finding]:
    """What the numbers say about the questions that the finished arms allow to ask."""
    have = {arm.name: arm for arm in arms if _finished(trials, arm.name)}
    l2 = sorted(
        (a for a in have.values() if a.order is not None and a.normalizer == "l2" and a.gain_init is None),
        key=lambda a: a.order or 0,
    )
    findings = [
        *_norm(trials, have, margin),
        *_gain(trials, have, margin),
        *_orders(trials, l2),
        *_reach(trials, have, l2, margin),
        *_sum_or_norm(trials, have, l2),
    ]
    settled = _settled(trials, have, margin)
    # what limits all the others comes first
    findings = settled + findings if any(f.verdict == "refuted" for f in settled) else findings + settled
    for arm in arms:
        lost = [t for t in trials if t.arm == arm.name and t.status == "diverged"]
        if lost:
            findings.append(
                Finding(
                    question=f"Does {label(arm.name)} train at all?",
                    verdict="refuted",
                    text=f"{len(lost)} of {sum(t.arm == arm.name for t in trials)} runs diverged: {lost[0].reason}",
                )
            )
    return findings


def _norm(trials: Sequence[OrdersTrial], have: dict[str, Arm], margin: float) -> list[Finding]:
    findings: list[Finding] = []
    for name, word in (("exp-l2", "an L2 norm"), ("exp-rms", "an RMS norm")):
        gap = difference(trials, name, "softmax") if name in have and "softmax" in have else None
        if gap:
            verdict = judge_equal(gap, margin)
            steps = max(t.steps for t in trials)
            findings.append(
                Finding(
                    question=f"Can {word} replace softmax's denominator?",
                    verdict=verdict,
                    text=f"With the same exponential, {word} ends {interval(gap, sign=True)} nats from softmax"
                    + _caution(gap)
                    + " "
                    + _so(
                        verdict,
                        f"So it can: at {steps} steps it is at most {margin} nats above.",
                        f"So it cannot: at {steps} steps it is more than {margin} nats above.",
                    ),
                )
            )
    return findings


def _gain(trials: Sequence[OrdersTrial], have: dict[str, Arm], margin: float) -> list[Finding]:
    findings: list[Finding] = []
    for name in ("exp-l2", "exp-rms"):
        if not {name, f"{name}+gain", "softmax"} <= have.keys():
            continue
        without, gap = difference(trials, name, "softmax"), difference(trials, f"{name}+gain", "softmax")
        if not without or not gap:
            continue
        verdict = judge_equal(gap, margin)
        closed = ""
        if without.mean > margin and gap.mean > 0:
            closed = f" It closes {100 * (1 - gap.mean / without.mean):.0f} % of the gap without one."
        findings.append(
            Finding(
                question=f"Does a learned gain per head bring {label(name)} to softmax?",
                verdict=verdict,
                text=f"With a gain that starts at {have[f'{name}+gain'].gain_init:g} the distance is "
                f"{interval(gap, sign=True)} nats{_caution(gap)}{closed} "
                + _so(verdict, "So it does.", "The rest of the gap has another cause."),
            )
        )
    return findings


def _orders(trials: Sequence[OrdersTrial], l2: list[Arm]) -> list[Finding]:
    if len(l2) < 2:
        return []
    low, high = l2[0], l2[-1]
    change = difference(trials, high.name, low.name)
    if not change:
        return []
    verdict = judge_lower(change)
    losses = [(arm, loss_interval(trials, arm.name)) for arm in l2]
    steps = [
        f"from {a.order} ({a.parity}) to {b.order} ({b.parity}) {decimal(y.mean - x.mean, 3, sign=True)}"
        for (a, x), (b, y) in pairwise(losses)
        if x and y
    ]
    return [
        Finding(
            question="Do higher orders of the Taylor series help?",
            verdict=verdict,
            text=f"With L2, order {high.order} ends {interval(change, sign=True)} nats from order {low.order}"
            f"{_caution(change)} {_so(verdict, 'Higher orders help', 'Higher orders do not help')}".rstrip(".")
            + f". Step by step: {', '.join(steps)}.",
        )
    ]


def _reach(trials: Sequence[OrdersTrial], have: dict[str, Arm], l2: list[Arm], margin: float) -> list[Finding]:
    if "exp-l2" not in have or not l2:
        return []
    best = min(l2, key=lambda a: (loss_interval(trials, a.name) or Interval(mean=1e9, count=1)).mean)
    gap = difference(trials, best.name, "exp-l2")
    if not gap:
        return []
    verdict = judge_equal(gap, margin)
    return [
        Finding(
            question="Does a finite order reach the whole exponential?",
            verdict=verdict,
            text=f"The best, order {best.order}, ends {interval(gap, sign=True)} nats from Exp with the same L2 norm"
            f"{_caution(gap)} "
            + _so(
                verdict,
                f"Within {margin} nats that is the exponential.",
                f"No order up to {l2[-1].order} comes within {margin} nats of it.",
            ),
        )
    ]


def _sum_or_norm(trials: Sequence[OrdersTrial], have: dict[str, Arm], l2: list[Arm]) -> list[Finding]:
    findings: list[Finding] = []
    for arm in l2:
        other = f"taylor{arm.order}-sum"
        gap = difference(trials, other, arm.name) if other in have else None
        if gap:
            verdict = judge_lower(gap)
            findings.append(
                Finding(
                    question=f"Is the sum the better normaliser for Taylor {arm.order}?",
                    verdict=verdict,
                    text=f"With the sum it ends {interval(gap, sign=True)} nats from the same kernel with L2"
                    f"{_caution(gap)} {_so(verdict, 'It is.', 'The norm is better.')}",
                )
            )
    return findings


def _settled(trials: Sequence[OrdersTrial], have: dict[str, Arm], margin: float) -> list[Finding]:
    """How much the reference, or else the first arm, still gained in the last third of its training."""
    name = "softmax" if "softmax" in have else next(iter(have), None)
    curves = [t.heldout_curve for t in trials if t.arm == name and t.status == "finished" and len(t.heldout_curve) > 2]
    if name is None or not curves:
        return []
    end = curves[0][-1].step
    start = max(p.step for p in curves[0] if p.step <= 2 * end / 3)
    fall = sum(next(p.loss for p in c if p.step == start) - c[-1].loss for c in curves) / len(curves)
    settled = abs(fall) <= margin
    return [
        Finding(
            question="Had training settled when this was measured?",
            verdict="supported" if settled else "refuted",
            text=f"From step {start} to step {end} the held-out loss of {label(name)} "
            f"{'fell' if fall >= 0 else 'rose'} by {decimal(abs(fall))} nats. "
            + (
                f"That is within {margin} nats."
                if settled
                else "So what this page says holds for this length of training; another one may say something else."
            ),
        )
    ]
