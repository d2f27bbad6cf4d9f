"""The page of ``mercer study positions``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mercer.studies.records.common import Interval
from mercer.studies.records.positions import PositionsArm, PositionsRecord, PositionsSummary
from mercer.studies.report import numbers
from mercer.studies.report.blocks import Cell, Figure, Page, Section, Table
from mercer.studies.report.figures import Plot
from mercer.studies.report.position_marks import position_label, position_mark

SHOWN_RESTART = "rotary+restart"
"""Of the models that start over, the one whose line is shown at first, if it is there."""


def build(record: PositionsRecord) -> Page:
    """The page, from the record alone."""
    trained, evaluated = record.trained_length, record.evaluated_length
    sections = (
        Section(
            "Loss against position",
            f"Every model was trained on sequences of {trained:,} bytes and reads the same held-out windows of "
            f"{evaluated:,}. What it could do without reading on is the measure: starting over, with a context that "
            f"begins anew every {record.bucket:,} bytes, so that each byte is predicted from the last "
            f"{trained - record.bucket + 1:,} to {trained:,} and at positions the model knows.",
            (*_losses(record), *_excess(record), _table(record)),
        ),
        Section(
            "Within the trained length",
            f"The mean loss at the first {trained:,} positions, and the held-out loss while training.",
            (*_inside(record), *_curves(record)),
        ),
    )
    return Page(
        title="What happens beyond the trained length?",
        summary=_summary(record),
        facts=_facts(record),
        sections=tuple(section for section in sections if section.parts),
        method=_method(record),
    )


def _arms(record: PositionsRecord) -> dict[str, PositionsArm]:
    return {arm.name: arm for arm in record.arms}


def _summary(record: PositionsRecord) -> str:
    schemes = len({arm.position for arm in record.arms})
    seeds = len(record.provenance.seeds)
    steps = max((run.steps for run in record.runs), default=0)
    return (
        f"{schemes} position schemes in one decoder, trained on the same text at {record.trained_length:,} bytes and "
        f"read to {record.evaluated_length:,}, in {len(record.arms)} ways. {steps:,} steps each, {seeds} "
        f"seed{'s' if seeds > 1 else ''}."
    )


def _facts(record: PositionsRecord) -> tuple[tuple[str, str], ...]:
    arms = _arms(record)
    going = [s for s in record.summaries if s.beyond is not None and arms[s.arm].reading != "restart"]
    best = min(going, key=lambda s: s.beyond or 0.0, default=None)
    return (
        (
            "Lowest loss beyond",
            f"{position_label(best.arm)}, {numbers.decimal(best.beyond)}" if best else numbers.MISSING,
        ),
        ("Trained length", f"{record.trained_length:,} bytes"),
        ("Read to", f"{record.evaluated_length:,} bytes"),
        ("Budget", record.provenance.budget),
        ("Working time", numbers.duration(record.provenance.seconds)),
    )


def _centres(record: PositionsRecord, buckets: int) -> list[float]:
    return [(bucket + 0.5) * record.bucket for bucket in range(buckets)]


def _plot(record: PositionsRecord, y_title: str, y_axis: dict[str, object] | None = None) -> Plot:
    marks, value = [record.trained_length], record.trained_length
    while value // 2 >= record.bucket:
        value //= 2
        marks.insert(0, value)
    value = record.trained_length
    while value * 2 <= record.evaluated_length:
        value *= 2
        marks.append(value)
    ends = [math.log10(record.bucket / 2) - 0.01, math.log10(record.evaluated_length) + 0.05]
    x_axis = {"tickvals": marks, "ticktext": [f"{mark:,}" for mark in marks], "dtick": None, "range": ends}
    plot = Plot("position, bytes (logarithmic)", y_title, x_log=True, x_axis=x_axis, y_axis=y_axis or {})
    plot.upright("trained to here", record.trained_length)
    return plot


def _draw(plot: Plot, record: PositionsRecord, s: PositionsSummary, curve: Sequence[Interval], hover: str) -> None:
    mark = position_mark(s.arm)
    x = _centres(record, len(curve))
    arms = _arms(record)
    shown = arms[s.arm].reading != "restart" or s.arm == SHOWN_RESTART
    plot.line(position_label(s.arm), x, [point.mean for point in curve], mark, hover=hover, shown=shown)
    plot.ribbon(x, curve, mark)


def _ordered(record: PositionsRecord) -> list[PositionsSummary]:
    """Schemes as they were asked for, those that start over last."""
    arms = _arms(record)
    return sorted(record.summaries, key=lambda s: arms[s.arm].reading == "restart")


def _interval_words(record: PositionsRecord) -> str:
    if len(record.provenance.seeds) > 1:
        return "Bands are 95 % intervals over seeds."
    return (
        "Bands are 95 % intervals of the difference to starting over, over blocks of held-out text; they say nothing "
        "about another seed."
    )


def _losses(record: PositionsRecord) -> list[Figure]:
    if not record.summaries:
        return []
    plot = _plot(record, "held-out loss, nats per byte")
    said: list[str] = []
    for s in _ordered(record):
        _draw(plot, record, s, s.curve, "position %{x:.0f}: %{y:.3f} nats")
        if s.beyond is None:
            said.append(
                f"{position_label(s.arm)} {numbers.decimal(s.curve[-1].mean)} where it ends, at the trained length"
            )
        else:
            said.append(f"{position_label(s.arm)} {numbers.decimal(s.curve[-1].mean)}")
    return [
        plot.figure(
            "losses",
            "Loss against position",
            f"Held-out loss in nats per byte against position, to {record.evaluated_length:,}. At the last position: "
            + "; ".join(said)
            + ".",
            "Different positions of a window hold different text, so each loss is shown as the mean loss of starting "
            "over plus the difference to starting over on the same bytes; starting over is a level line by that. "
            f"A learned table has no positions beyond the trained length. {_interval_words(record)} Press a name to "
            "show or hide its line.",
            height=460,
        )
    ]


def _excess(record: PositionsRecord) -> list[Figure]:
    arms = _arms(record)
    chosen = [s for s in _ordered(record) if arms[s.arm].reading != "restart"]
    if not chosen:
        return []
    top = 10 * record.margin
    plot = _plot(record, "nats per byte above starting over", {"range": [-top / 2, top], "zeroline": True})
    plot.band(-record.margin, record.margin, vertical=False)
    said: list[str] = []
    for s in chosen:
        _draw(plot, record, s, s.excess_curve, "position %{x:.0f}: %{y:+.3f} nats")
        if s.last:
            said.append(f"{position_label(s.arm)} {numbers.interval(s.last, sign=True)}")
    return [
        plot.figure(
            "excess",
            "The same, close to starting over",
            f"Loss minus that of starting over on the same bytes, over the last {record.trained_length:,} positions: "
            + "; ".join(said)
            + ".",
            f"Within the grey band, ±{record.margin:g} nats, a loss counts as holding. Above it, the model would do "
            "better to forget; below the line, it makes use of more context than it was trained with. Lines that leave "
            "the figure are in the one above.",
            height=460,
        )
    ]


def _table(record: PositionsRecord) -> Table:
    arms = _arms(record)
    chosen = [s for s in record.summaries if arms[s.arm].reading != "restart"]
    best = min((s for s in chosen if s.beyond is not None), key=lambda s: s.beyond or 0.0, default=None)
    inside = min((s for s in chosen if arms[s.arm].reading == "plain"), key=lambda s: s.inside.mean, default=None)
    rows = [
        (
            Cell(position_label(s.arm), position_mark(s.arm).colour),
            Cell(numbers.decimal(s.inside.mean), strong=s is inside),
            Cell(numbers.decimal(s.restart)),
            Cell(numbers.decimal(s.beyond), strong=s is best),
            Cell(numbers.interval(s.excess, sign=True)),
            Cell(_reach(record, s)),
        )
        for s in sorted(chosen, key=lambda s: (s.beyond is None, s.beyond or 0.0))
    ]
    over = "seeds" if len(record.provenance.seeds) > 1 else "blocks of held-out text"
    return Table(
        "All of them, the lowest loss beyond the trained length first",
        ("positions", f"up to {record.trained_length:,}", "starting over", "beyond", "difference", "holds up to"),
        tuple(rows),
        caption=f"Nats per byte: the mean loss within the trained length, that of starting over, that of reading on "
        f"from position {record.trained_length:,} to {record.evaluated_length:,}, and the difference of the last two, "
        f"mean ± half the width of the 95 % interval over {over}. A loss holds up to the first {record.bucket:,} "
        f"positions whose mean is more than {record.margin:g} nats above that of starting over, and nowhere if the "
        "last within the trained length are.",
    )


def _reach(record: PositionsRecord, s: PositionsSummary) -> str:
    if s.reach is None:
        return f"{record.trained_length:,}, its end"
    if s.reach == 0:
        return "nowhere"
    return f"{s.reach:,} or more" if s.reach == record.evaluated_length else f"{s.reach:,}"


def _inside(record: PositionsRecord) -> list[Figure]:
    arms = _arms(record)
    chosen = sorted((s for s in record.summaries if arms[s.arm].reading == "plain"), key=lambda s: -s.inside.mean)
    if not chosen:
        return []
    several = len(record.provenance.seeds) > 1
    plot = Plot("nats per byte", "", y_axis={"type": "category", "ticklabelstandoff": 6})
    said: list[str] = []
    for s in chosen:
        # blocks of text differ far more than schemes do, so with one seed only the means are shown
        value = s.inside if several else s.inside.model_copy(update={"low": None, "high": None})
        name = position_label(s.arm)
        plot.whisker(name, name, value, position_mark(s.arm), f"{numbers.interval(value)} nats")
        said.append(f"{name} {numbers.interval(value)}")
    return [
        plot.figure(
            "inside",
            "Loss within the trained length",
            "Mean held-out loss in nats per byte at the positions of the trained length: "
            + "; ".join(reversed(said))
            + ".",
            "Models read as they were trained, on the same bytes."
            + (" Bars are 95 % intervals over seeds." if several else ""),
            height=90 + 34 * len(chosen),
        )
    ]


def _curves(record: PositionsRecord) -> list[Figure]:
    plot = Plot("step", "held-out loss, nats per byte")
    first = record.provenance.seeds[0] if record.provenance.seeds else 0
    lowest, highest = float("inf"), 0.0
    ends: list[str] = []
    for run in (r for r in record.runs if r.seed == first and r.heldout_curve):
        steps, values = [p.step for p in run.heldout_curve], [p.loss for p in run.heldout_curve]
        name = position_label(run.position)
        plot.line(name, steps, values, position_mark(run.position), hover="step %{x}: %{y:.3f} nats")
        lowest = min(lowest, *values)
        highest = max(highest, next((y for x, y in zip(steps, values, strict=True) if x > 0), values[-1]))
        ends.append(f"{name} from {numbers.decimal(values[0])} to {numbers.decimal(values[-1])}")
    if not plot.traces:
        return []
    room = 0.05 * max(highest - lowest, 0.05)
    plot.y_axis["range"] = [lowest - room, highest + room]
    return [
        plot.figure(
            "curves",
            "Held-out loss while training",
            f"Held-out loss in nats per byte, at {record.trained_length:,} bytes, by training step. "
            + "; ".join(ends)
            + ".",
            f"Seed {first}. Curves that are still falling at the right edge have not answered what a longer training "
            "would do.",
            height=400,
        )
    ]


def _method(record: PositionsRecord) -> tuple[tuple[str, str], ...]:
    corpus = record.corpus
    factors = [(f"factor · {position_label(a.name)}", f"{a.factor:g}") for a in record.arms if a.factor is not None]
    rows = [
        ("text", corpus.name),
        ("SHA-256", corpus.sha256),
        ("files", f"{corpus.train_files:,} for training, {corpus.heldout_files:,} held out"),
        ("tokens", f"{corpus.train_tokens:,} for training, {corpus.heldout_tokens:,} held out"),
        ("windows", f"{record.windows:,} of {record.evaluated_length:,} held-out tokens, the same for all"),
        ("bucket", f"{record.bucket:,} positions"),
        *factors,
    ]
    rows += [
        (f"model · {key.replace('_', ' ')}", str(value)) for key, value in record.model.items() if value is not None
    ]
    rows += [
        (f"training · {key.replace('_', ' ')}", str(value))
        for key, value in record.training.items()
        if value is not None
    ]
    rows += [
        (f"calibration · {position_label(name)}", f"{numbers.duration(value)} a step")
        for name, value in record.calibration.items()
    ]
    return tuple(rows)
