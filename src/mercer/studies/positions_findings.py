"""What ``mercer study positions`` concludes from its numbers; each conclusion can fall either way."""

from __future__ import annotations

from collections.abc import Sequence

from mercer.studies.orders_summary import judge_equal, judge_lower
from mercer.studies.position_arms import SCALINGS
from mercer.studies.positions_summary import INSIDE_MARGIN, MARGIN, Measured
from mercer.studies.records.common import Finding, Interval, Verdict
from mercer.studies.records.positions import PositionsRun, PositionsSummary
from mercer.studies.report.numbers import decimal, interval
from mercer.studies.report.position_marks import position_label as label


def conclude(
    measured: Measured,
    summaries: Sequence[PositionsSummary],
    runs: Sequence[PositionsRun],
    trained: int,
    evaluated: int,
    margin: float = MARGIN,
) -> list[Finding]:
    """What the numbers say about the questions that the measured arms allow to ask."""
    arms = {arm.name: arm for arm in measured.arms}
    plain = [s for s in summaries if arms[s.arm].reading == "plain"]
    scaled = [s for s in summaries if arms[s.arm].reading in SCALINGS]
    going = [s for s in summaries if arms[s.arm].reading != "restart" and s.excess]
    findings = [
        *_holds(plain, trained, evaluated, margin),
        *_scalings(scaled, trained, evaluated, margin),
        *_windows([s for s in summaries if arms[s.arm].reading == "window"], trained, margin),
        *_more_context(going, trained, evaluated),
        *_needed(measured, plain, trained),
    ]
    settled = _settled(runs)
    # what limits all the others comes first
    findings = settled + findings if any(f.verdict == "refuted" for f in settled) else findings + settled
    return findings + _diverged(runs) + _lost(measured)


def _caution(value: Interval) -> str:
    if value.over == "seeds":
        return f" ({value.count} seeds, 95 % interval)." if value.decided else " (one seed, no interval)."
    return " (one seed)."


def _so(verdict: Verdict, supported: str, refuted: str) -> str:
    return {"supported": supported, "refuted": refuted, "undecided": "The interval does not decide."}[verdict]


def _reached(summary: PositionsSummary, trained: int, evaluated: int, margin: float) -> str:
    if summary.reach == evaluated:
        return f"Nowhere up to position {evaluated:,} is it more than {margin:g} nats above."
    if summary.reach == 0:
        return f"Even at the end of the trained length it is more than {margin:g} nats above."
    if summary.reach == trained:
        return f"It is more than {margin:g} nats above at once."
    return f"It is more than {margin:g} nats above from position {summary.reach:,} on."


def _holds(plain: Sequence[PositionsSummary], trained: int, evaluated: int, margin: float) -> list[Finding]:
    findings: list[Finding] = []
    for s in plain:
        if s.excess is None:
            continue
        verdict = judge_equal(s.excess, margin)
        findings.append(
            Finding(
                question=f"Does a model with {_with(s.arm)} read on beyond its trained length?",
                verdict=verdict,
                text=f"From position {trained:,} to {evaluated:,} its loss is {interval(s.excess, sign=True)} nats "
                f"from that of starting over{_caution(s.excess)} {_reached(s, trained, evaluated, margin)} "
                + _so(verdict, "So it does.", "So it does not."),
            )
        )
    return findings


def _with(arm: str) -> str:
    name = label(arm)
    return name if arm in ("none", "alibi") else f"the {name}" if arm == "t5" else f"{name} positions"


def _scalings(scaled: Sequence[PositionsSummary], trained: int, evaluated: int, margin: float) -> list[Finding]:
    known = [(s, s.excess) for s in scaled if s.excess]
    if not known:
        return []
    best, excess = min(known, key=lambda pair: pair[0].beyond or 0.0)
    verdict = judge_equal(excess, margin)
    others = [f"{label(s.arm)} {interval(e, sign=True)}" for s, e in known if s is not best]
    return [
        Finding(
            question="Does a scaling carry rotary positions on without training for it?",
            verdict=verdict,
            text=f"{_capital(label(best.arm))} comes closest, {interval(excess, sign=True)} nats from starting over"
            f"{_caution(excess)} {_reached(best, trained, evaluated, margin)} "
            + _so(verdict, "So it does.", "So none does.")
            + (f" The others: {', '.join(others)}." if others else ""),
        )
    ]


def _windows(windowed: Sequence[PositionsSummary], trained: int, margin: float) -> list[Finding]:
    findings: list[Finding] = []
    for s in windowed:
        if s.excess is None:
            continue
        verdict = judge_equal(s.excess, margin)
        findings.append(
            Finding(
                question=f"Is a window of {trained:,} tokens enough for {label(s.arm.partition('+')[0])}?",
                verdict=verdict,
                text=f"With layers that see the last {trained:,} tokens and no more its loss is "
                f"{interval(s.excess, sign=True)} nats from that of starting over{_caution(s.excess)} "
                + _so(verdict, "So it is.", "So it is not."),
            )
        )
    return findings


def _more_context(going: Sequence[PositionsSummary], trained: int, evaluated: int) -> list[Finding]:
    known = [(s, s.excess) for s in going if s.excess]
    if not known:
        return []
    best, excess = min(known, key=lambda pair: pair[1].mean)
    verdict = judge_lower(excess)
    return [
        Finding(
            question=f"Is context beyond {trained:,} tokens of any use to a model trained with {trained:,}?",
            verdict=verdict,
            text=f"{_capital(label(best.arm))} comes out best: {interval(excess, sign=True)} nats from starting over, "
            f"from position {trained:,} to {evaluated:,}{_caution(excess)} "
            + _so(verdict, "So it is.", "So it is not, in any way tried."),
        )
    ]


def _needed(measured: Measured, plain: Sequence[PositionsSummary], trained: int) -> list[Finding]:
    others = [s for s in plain if s.arm != "none"]
    if not others or all(s.arm != "none" for s in plain):
        return []
    best = min(others, key=lambda s: s.inside.mean)
    gap = measured.difference("none", best.arm, 0, measured.inside)
    if gap is None:
        return []
    # the question asks for a difference, so an equality refutes it
    equal = judge_equal(gap, INSIDE_MARGIN)
    turned: dict[Verdict, Verdict] = {"supported": "refuted", "refuted": "supported", "undecided": "undecided"}
    verdict = turned[equal]
    return [
        Finding(
            question=f"Does a causal model need positions within its trained length of {trained:,}?",
            verdict=verdict,
            text=f"Without any it ends {interval(gap, sign=True)} nats from the best there, {label(best.arm)}"
            f"{_caution(gap)} "
            + _so(
                verdict,
                f"That is more than {INSIDE_MARGIN:g} nats.",
                f"That is no more than {INSIDE_MARGIN:g} nats.",
            ),
        )
    ]


def _settled(runs: Sequence[PositionsRun]) -> list[Finding]:
    """How much the rotary model, or else the first, still gained in the last third of its training."""
    whole = [run for run in runs if run.status == "finished" and len(run.heldout_curve) > 2]
    name = "rotary" if any(run.position == "rotary" for run in whole) else (whole[0].position if whole else None)
    curves = [run.heldout_curve for run in whole if run.position == name]
    if name is None or not curves:
        return []
    end = curves[0][-1].step
    start = max(p.step for p in curves[0] if p.step <= 2 * end / 3)
    fall = sum(next(p.loss for p in c if p.step == start) - c[-1].loss for c in curves) / len(curves)
    settled = abs(fall) <= INSIDE_MARGIN
    return [
        Finding(
            question="Had training settled when this was measured?",
            verdict="supported" if settled else "refuted",
            text=f"From step {start} to step {end} the held-out loss of {label(name)} "
            f"{'fell' if fall >= 0 else 'rose'} by {decimal(abs(fall))} nats. "
            + (
                f"That is within {INSIDE_MARGIN:g} nats."
                if settled
                else "So what this page says holds for this length of training; another one may say something else."
            ),
        )
    ]


def _diverged(runs: Sequence[PositionsRun]) -> list[Finding]:
    findings: list[Finding] = []
    for position in dict.fromkeys(run.position for run in runs):
        mine = [run for run in runs if run.position == position]
        lost = [run for run in mine if run.status == "diverged"]
        if lost:
            findings.append(
                Finding(
                    question=f"Does a model with {_with(position)} train at all?",
                    verdict="refuted",
                    text=f"{len(lost)} of {len(mine)} runs diverged: {lost[0].reason}",
                )
            )
    return findings


def _lost(measured: Measured) -> list[Finding]:
    return [
        Finding(
            question=f"Can a model with {_with(m.arm)} be read to the end?",
            verdict="refuted",
            text=f"With seed {m.seed} it cannot: {m.reason}.",
        )
        for m in measured.measurements
        if m.reason is not None
    ]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
