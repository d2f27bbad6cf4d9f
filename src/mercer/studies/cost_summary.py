"""From timings to crossing points and conclusions of ``mercer study cost``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mercer.studies.records.common import Finding, Verdict
from mercer.studies.records.cost import CostPoint, Crossing, Phase, Where
from mercer.studies.report.marks import label
from mercer.studies.report.numbers import short

FACTOR = 2.0
"""A planned crossing within this factor of the measured one counts as right."""
TIE = 1e-3
"""A logarithm of a ratio this near 0 is no difference: two caches of one size, or two plans of one count."""

Value = Callable[[CostPoint], float | None]


def best_curve(points: Sequence[CostPoint], attention: str, phase: Phase, value: Value) -> dict[int, float]:
    """The least value over an attention's forms at each length; with a feature state where the attention has one."""
    chosen = [p for p in points if (p.attention, p.phase, p.status) == (attention, phase, "measured")]
    if any(p.path == "features" for p in chosen):
        chosen = [p for p in chosen if p.path == "features"]
    curve: dict[int, float] = {}
    for point in chosen:
        found = value(point)
        if found is not None:
            curve[point.length] = min(curve.get(point.length, math.inf), found)
    return curve


def crossing(incumbent: dict[int, float], challenger: dict[int, float]) -> Where:
    """Where the challenger's curve falls below the incumbent's for good, straight lines between lengths in log-log."""
    lengths = sorted(incumbent.keys() & challenger.keys())
    if not lengths:
        return Where(kind="unknown")
    gaps = [math.log(challenger[n] / incumbent[n]) for n in lengths]
    if gaps[-1] >= -TIE:
        return Where(kind="never")
    place = len(gaps) - 1
    while place > 0 and gaps[place - 1] < -TIE:
        place -= 1
    if place == 0:
        return Where(kind="always")
    share = max(gaps[place - 1], 0.0) / (max(gaps[place - 1], 0.0) - gaps[place])
    before, after = math.log(lengths[place - 1]), math.log(lengths[place])
    return Where(kind="at", length=math.exp(before + share * (after - before)))


def crossings(points: Sequence[CostPoint], incumbent: str = "softmax") -> list[Crossing]:
    """Each other attention against ``incumbent``: time of both phases at their best forms, and bytes of state."""
    others = [name for name in dict.fromkeys(p.attention for p in points) if name != incumbent]
    quantities: tuple[tuple[str, Phase, Value, Value], ...] = (
        ("time", "prefill", lambda p: p.seconds_per_token, lambda p: p.planned_seconds_per_token),
        ("time", "decode", lambda p: p.seconds_per_token, lambda p: p.planned_seconds_per_token),
        ("state", "decode", lambda p: p.state_bytes, lambda p: p.planned_state_bytes),
    )
    rows: list[Crossing] = []
    for quantity, phase, measured, plan in quantities:
        for other in others:
            pair = [
                crossing(best_curve(points, incumbent, phase, v), best_curve(points, other, phase, v))
                for v in (measured, plan)
            ]
            if pair[0].kind != "unknown":
                rows.append(
                    Crossing(
                        quantity="time" if quantity == "time" else "state",
                        phase=phase,
                        incumbent=incumbent,
                        challenger=other,
                        measured=pair[0],
                        planned=pair[1],
                    )
                )
    return rows


def conclude(points: Sequence[CostPoint], rows: Sequence[Crossing]) -> list[Finding]:
    """What the numbers say."""
    lengths = sorted({p.length for p in points})
    questions: tuple[tuple[str, Phase, str], ...] = (
        ("time", "prefill", "Does another attention read a context faster than softmax?"),
        ("time", "decode", "Does another attention write the next token faster than softmax?"),
        ("state", "decode", "Does another attention need less memory than softmax's cache?"),
    )
    findings: list[Finding] = []
    for quantity, phase, question in questions:
        chosen = [row for row in rows if (row.quantity, row.phase) == (quantity, phase)]
        if chosen:
            won = [row for row in chosen if row.measured.kind in ("at", "always")]
            findings.append(
                Finding(
                    question=question,
                    verdict="supported" if won else "refuted",
                    text="; ".join(_sentence(row, lengths) for row in chosen) + ".",
                )
            )
    return [*findings, *_plan(rows)]


def _sentence(row: Crossing, lengths: Sequence[int]) -> str:
    words = {
        "at": f"from about {row.measured.length or 0:,.0f} tokens",
        "always": f"already at {lengths[0]:,} tokens",
        "never": f"not up to {lengths[-1]:,} tokens",
        "unknown": "not measured",
    }
    return f"{label(row.challenger)} {words[row.measured.kind]}"


def _plan(rows: Sequence[Crossing]) -> list[Finding]:
    compared = [row for row in rows if row.planned.kind != "unknown"]
    if not compared:
        return []
    right = [row for row in compared if _agree(row)]
    verdict: Verdict = "undecided"
    if len(right) == len(compared):
        verdict = "supported"
    elif len(right) < len(compared) / 2:
        verdict = "refuted"
    wrong = [row for row in compared if not _agree(row)]
    tail = ""
    if wrong:
        listed = [f"{label(row.challenger)} ({row.quantity}, {row.phase}: {_both(row)})" for row in wrong]
        tail = " Elsewhere: " + "; ".join(listed) + "."
    return [
        Finding(
            question="Does the plan put the crossings where the measurements do?",
            verdict=verdict,
            text=f"In {len(right)} of {len(compared)} cases, to within a factor of {FACTOR:g}.{tail}",
        )
    ]


def _agree(row: Crossing) -> bool:
    if row.measured.kind != row.planned.kind:
        return False
    if row.measured.length is None or row.planned.length is None:
        return True
    return abs(math.log(row.measured.length / row.planned.length)) <= math.log(FACTOR)


def _both(row: Crossing) -> str:
    return " against planned ".join(
        short(where.length) if where.length is not None else where.kind for where in (row.measured, row.planned)
    )
