"""The page of ``mercer study orders``."""

from __future__ import annotations

from collections.abc import Iterable

from mercer.studies.records.common import Interval
from mercer.studies.records.orders import Arm, ArmSummary, OrdersRecord
from mercer.studies.report import numbers
from mercer.studies.report.blocks import Cell, Figure, Page, Section, Table
from mercer.studies.report.figures import Plot
from mercer.studies.report.marks import GUIDE, label, mark


def build(record: OrdersRecord) -> Page:
    """The page, from the record alone."""
    arms = {arm.name: arm for arm in record.arms}
    done = [s for s in record.summaries if s.loss is not None]
    sections = [
        Section(
            "Final loss",
            _equal(record),
            (*_by_order(record, arms, done), *_gaps(record, done), _table(record, arms)),
        ),
        Section(
            "Learning curves",
            "The held-out loss while training. Curves that are still apart and falling at the right edge have not "
            "answered what a longer training would do.",
            tuple(_curves(record)),
        ),
        Section("Speed", "Training speed on this machine, evaluation not counted.", tuple(_speed(record))),
    ]
    return Page(
        title="What do kernel and normaliser do to a language model?",
        summary=_summary(record),
        facts=_facts(record),
        sections=tuple(section for section in sections if section.parts),
        method=_method(record),
    )


def _steps(record: OrdersRecord) -> int:
    return max((trial.steps for trial in record.trials), default=0)


def _layered(record: OrdersRecord) -> bool:
    """Whether the study compares more than the kernel and the normaliser of attentions."""
    return any(arm.family in ("mixer", "pattern") for arm in record.arms)


def _parameters(record: OrdersRecord) -> dict[str, str]:
    """Of each arm its parameters as shown, by size; a gain adds too few to be seen."""
    by_size = sorted((trial.parameters, trial.arm) for trial in record.trials if trial.parameters)
    return {arm: numbers.short(parameters) for parameters, arm in by_size}


def _differ(record: OrdersRecord) -> bool:
    return _layered(record) and len(set(_parameters(record).values())) > 1


def _equal(record: OrdersRecord) -> str:
    if not _layered(record):
        return (
            "Every model has the same size, text, order of batches and first weights. Only the kernel and the "
            "normaliser of its attention differ."
        )
    same = "Every model has the same width, depth, text and order of batches. What its layers have as attention differs"
    return same + (", and with it the number of parameters." if _differ(record) else ".")


def _summary(record: OrdersRecord) -> str:
    seeds = len(record.provenance.seeds)
    question = (
        f"{len(record.arms)} choices of attentions and mixers, one decoder around them, the same text."
        if _layered(record)
        else f"{len(record.arms)} attentions, one decoder, the same text: softmax's exponential, its Taylor series cut "
        "off at increasing orders, and what happens when a norm replaces the denominator."
    )
    return f"{question} {_steps(record):,} steps each, {seeds} seed{'s' if seeds > 1 else ''}."


def _facts(record: OrdersRecord) -> tuple[tuple[str, str], ...]:
    shown = list(_parameters(record).values()) or [numbers.short(0)]
    best = min((s for s in record.summaries if s.loss), key=lambda s: s.loss.mean, default=None)
    return (
        (
            "Lowest loss",
            f"{label(best.arm)}, {numbers.decimal(best.loss.mean)}" if best and best.loss else numbers.MISSING,
        ),
        ("Parameters", f"{shown[0]} to {shown[-1]}" if _differ(record) else shown[-1]),
        ("Trained on", f"{numbers.size(record.corpus.train_tokens)} of text"),
        ("Budget", record.provenance.budget),
        ("Working time", numbers.duration(record.provenance.seconds)),
    )


def _shown(value: Interval | None) -> Interval | None:
    """A loss as it is shown. Blocks of text differ far more than attentions do, so their spread stays with the paired
    differences, where it cancels."""
    if value is None or value.over == "seeds":
        return value
    return value.model_copy(update={"low": None, "high": None})


def _reach(values: Iterable[ArmSummary]) -> tuple[float, float]:
    """A range of y that holds every loss and its interval, with room for names above the lines."""
    losses = [loss for s in values if (loss := _shown(s.loss))]
    low = min(loss.mean if loss.low is None else loss.low for loss in losses)
    high = max(loss.mean if loss.high is None else loss.high for loss in losses)
    room = max(high - low, 0.02) * 0.12
    return low - room, high + room


def _by_order(record: OrdersRecord, arms: dict[str, Arm], done: list[ArmSummary]) -> list[Figure]:
    taylor = [s for s in done if arms[s.arm].order is not None and arms[s.arm].gain_init is None]
    if not taylor:
        return []
    orders = sorted({arms[s.arm].order for s in taylor})
    plot = Plot(
        "Taylor order",
        "held-out loss, nats per byte",
        x_axis={"dtick": 1, "range": [min(orders) - 0.4, max(orders) + 0.4]},
        y_axis={"range": list(_reach(done))},
    )
    sentences: list[str] = []
    for normalizer in ("l2", "sum", "rms"):
        chosen = sorted(
            (s for s in taylor if arms[s.arm].normalizer == normalizer), key=lambda s: arms[s.arm].order or 0
        )
        if not chosen:
            continue
        odd = [bool((arms[s.arm].order or 0) % 2) for s in chosen]
        name = {"l2": "Taylor · L2", "sum": "Taylor · sum", "rms": "Taylor · RMS"}[normalizer]
        plot.line(
            name,
            [arms[s.arm].order or 0 for s in chosen],
            [s.loss.mean if s.loss else None for s in chosen],
            mark(chosen[0].arm)._replace(colour=GUIDE, width=1.5),
            mode="lines+markers",
            spread=[_shown(s.loss) for s in chosen],
            symbols=["diamond-open" if o else "circle" for o in odd],
            colours=[mark(s.arm).colour for s in chosen],
            hover="order %{x}: %{y:.3f} nats",
            size=12,
        )
        listing = ", ".join(f"order {arms[s.arm].order} {numbers.interval(_shown(s.loss))}" for s in chosen)
        sentences.append(f"{name}: {listing}")
    for s in done:
        arm = arms[s.arm]
        if arm.order is None and arm.gain_init is None and s.loss:
            plot.level(label(s.arm), s.loss.mean, mark(s.arm))
            sentences.append(f"{label(s.arm)} {numbers.interval(_shown(s.loss))}")
    return [
        plot.figure(
            "orders",
            "Loss against Taylor order",
            "Held-out loss in nats per byte. " + "; ".join(sentences) + ".",
            "Filled circles are even orders, whose kernel is positive everywhere; hollow diamonds are odd orders, "
            "whose kernel turns negative. Horizontal lines are attentions without an order. A colour means the same "
            "attention in every figure."
            + (" Bars are 95 % intervals over seeds." if len(record.provenance.seeds) > 1 else ""),
            height=430,
        )
    ]


def _gaps(record: OrdersRecord, done: list[ArmSummary]) -> list[Figure]:
    with_gap = sorted((s for s in done if s.gap), key=lambda s: -s.gap.mean)
    if not with_gap:
        return []
    margin, compared = record.equivalence_margin, label(record.reference)
    plot = Plot(f"nats per byte above {compared}", "", y_axis={"type": "category", "ticklabelstandoff": 6})
    plot.band(-margin, margin, vertical=True)
    for s in with_gap:
        if s.gap:
            text = f"{numbers.interval(s.gap, sign=True)} nats"
            plot.whisker(label(s.arm), label(s.arm), s.gap, mark(s.arm), text)
    over = (
        "training runs with the same seed"
        if with_gap[0].gap and with_gap[0].gap.over == "seeds"
        else "the same blocks of held-out text"
    )
    return [
        plot.figure(
            "gaps",
            f"Distance to {compared}",
            f"Loss minus that of {compared}, nats per byte: "
            + "; ".join(f"{label(s.arm)} {numbers.interval(s.gap, sign=True)}" for s in reversed(with_gap))
            + ".",
            f"{_why(record)}Differences are paired over {over}; bars are 95 % intervals. Within the grey band, "
            f"±{numbers.decimal(margin)} nats, a difference counts as none."
            + (
                f" One seed says nothing about the next, so each bar is taken {record.seed_allowance:g} nats longer on "
                "both sides before anything is concluded from it."
                if with_gap[0].gap and with_gap[0].gap.over == "blocks"
                else ""
            ),
            height=90 + 34 * len(with_gap),
        )
    ]


def _why(record: OrdersRecord) -> str:
    """A sentence that says what differences are to, where that is not softmax."""
    if record.reference == "softmax":
        return ""
    return f"No model here has softmax alone, so all are compared with the first, {label(record.reference)}. "


def _table(record: OrdersRecord, arms: dict[str, Arm]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    minus = "minus softmax" if record.reference == "softmax" else "minus reference"
    parameters = _parameters(record) if _differ(record) else {}
    done = sorted((s for s in record.summaries if s.loss), key=lambda s: s.loss.mean)
    rest = [s for s in record.summaries if not s.loss]
    for place, s in enumerate([*done, *rest]):
        arm = arms[s.arm]
        order = numbers.MISSING if arm.order is None else f"{arm.order} ({arm.parity})"
        note = f"{s.diverged} diverged" if s.diverged else None
        rows.append(
            (
                Cell(label(s.arm), mark(s.arm).colour, note=note),
                Cell(order),
                Cell(numbers.interval(_shown(s.loss)), strong=place == 0 and s.loss is not None),
                Cell(numbers.decimal(s.bits_per_byte)),
                Cell("reference" if s.arm == record.reference else numbers.interval(s.gap, sign=True)),
                Cell(numbers.short(s.tokens_per_second)),
                *((Cell(parameters.get(s.arm, numbers.MISSING)),) if parameters else ()),
            )
        )
    return Table(
        "All attentions, best first",
        ("attention", "order", "loss, nats per byte", "bits per byte", minus, "tokens/s")
        + (("parameters",) if parameters else ()),
        tuple(rows),
        words=2,
        caption=f"{_why(record)}Mean ± half the width of the 95 % interval"
        + (" over seeds." if len(record.provenance.seeds) > 1 else " over blocks of held-out text, for differences."),
    )


def _curves(record: OrdersRecord) -> list[Figure]:
    plot = Plot("step", "held-out loss, nats per byte")
    lowest, highest = float("inf"), 0.0
    first = record.provenance.seeds[0] if record.provenance.seeds else 0
    ends: list[str] = []
    for trial in (t for t in record.trials if t.seed == first and t.heldout_curve):
        steps, losses = [p.step for p in trial.heldout_curve], [p.loss for p in trial.heldout_curve]
        plot.line(label(trial.arm), steps, losses, mark(trial.arm), hover="step %{x}: %{y:.3f} nats", mode="lines")
        lowest = min(lowest, *losses)
        highest = max(highest, next((loss for step, loss in zip(steps, losses, strict=True) if step > 0), losses[-1]))
        ends.append(f"{label(trial.arm)} from {numbers.decimal(losses[0])} to {numbers.decimal(losses[-1])}")
    if not plot.traces:
        return []
    room = 0.05 * max(highest - lowest, 0.05)
    plot.y_axis["range"] = [lowest - room, highest + room]
    return [
        plot.figure(
            "curves",
            "Held-out loss while training",
            "Held-out loss in nats per byte by training step. " + "; ".join(ends) + ".",
            f"Seed {first}. Press a name to hide or show its curve. Dashes tell normalisers apart: L2 solid, sum "
            "dashed, RMS dotted, a learned gain dash-dotted"
            + (", mixers solid, patterns of layers with long dashes." if _layered(record) else "."),
            height=440,
        )
    ]


def _speed(record: OrdersRecord) -> list[Figure]:
    known = sorted((s for s in record.summaries if s.tokens_per_second), key=lambda s: s.tokens_per_second or 0)
    if not known:
        return []
    plot = Plot("tokens per second", "", y_axis={"type": "category", "ticklabelstandoff": 6})
    plot.x_axis["rangemode"] = "tozero"
    for s in known:
        plot.line(
            label(s.arm),
            [s.tokens_per_second or 0],
            [label(s.arm)],
            mark(s.arm),
            mode="markers",
            hover=f"{numbers.short(s.tokens_per_second)} tokens/s",
            size=11,
            legend=False,
        )
    return [
        plot.figure(
            "speed",
            "Training speed",
            "Tokens per second in training: "
            + "; ".join(f"{label(s.arm)} {numbers.short(s.tokens_per_second)}" for s in reversed(known))
            + ".",
            "Median over the steps and seeds. At this context length "
            + ("attentions score every pair of tokens" if _layered(record) else "every pair of tokens is scored")
            + "; what the forms cost at other lengths is the subject of mercer study cost.",
            height=90 + 30 * len(known),
        )
    ]


def _method(record: OrdersRecord) -> tuple[tuple[str, str], ...]:
    corpus = record.corpus
    rows = [
        ("text", corpus.name),
        ("SHA-256", corpus.sha256),
        ("files", f"{corpus.train_files:,} for training, {corpus.heldout_files:,} held out"),
        ("tokens", f"{corpus.train_tokens:,} for training, {corpus.heldout_tokens:,} held out"),
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
        (f"calibration · {label(arm)}", f"{numbers.duration(value)} a step")
        for arm, value in record.calibration.items()
    ]
    return tuple(rows)
