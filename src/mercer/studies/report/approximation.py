"""The page of ``mercer study approximation``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mercer.runtime.words import count
from mercer.studies.records.approximation import (
    ApproximationArm,
    ApproximationInputs,
    ApproximationPoint,
    ApproximationRecord,
)
from mercer.studies.records.common import Interval
from mercer.studies.report import numbers
from mercer.studies.report.approximation_tables import heads, needs, table
from mercer.studies.report.blocks import Figure, Page, Section
from mercer.studies.report.figures import Plot
from mercer.studies.report.marks import GUIDE, Mark, label, numbered

HIGHEST = 100.0
"""Errors above this are drawn as arrows here: a kernel that far off is of no use, and the others have to be told apart.
"""
LARGEST_VARIANCE = 1e6
"""Variances above this are left to the table: no draw shows them."""


def build(record: ApproximationRecord) -> Page:
    """The page, from the record alone."""
    look = _Look(record)
    sections = (
        Section(
            "Taylor orders",
            "The exponential's series cut off after a number of terms. It is exact near 0 and needs more terms the "
            "longer the scores are, below 0 three times as many as above.",
            tuple(_by_order(look)),
        ),
        Section(
            "Random features",
            "An average over m random directions whose mean is the exponential. Where single values scatter little, "
            "the error falls as m to the power of -1/2, the dotted line; where their tail is heavy, it does not.",
            tuple(_by_count(look)),
        ),
        Section(
            "The trained model, layer by layer",
            "Queries, keys and values of every layer on held-out text. Nothing was trained for the kernels: this is "
            f"what exchanging softmax for them would change at once. {_model_words(record)}",
            (*_by_layer(look), *heads(record)),
        ),
        Section(
            "Scatter in theory and as drawn",
            "The relative variance of a single kernel value, averaged over pairs of query and key as softmax attends "
            "to them.",
            tuple(_variance(look)),
        ),
        Section(
            "What a wanted error needs",
            f"For a relative error of {record.target:g}: the Taylor order, found by measuring, and the number of "
            "random features, by the law where it holds.",
            tuple(needs(record)),
        ),
        Section("Everything measured", f"{len(record.points)} measurements.", tuple(table(record))),
    )
    random = [at for at in record.inputs if at.kind == "random"]
    layers = len(record.inputs) - len(random)
    return Page(
        title="How far is each kernel from softmax attention?",
        summary=f"{len(record.arms)} attentions against the exponential under the same normaliser, on random inputs "
        f"of {len(random)} kinds and on {count(layers, 'layer')} of a trained model; and what order or how many "
        f"features an error of {record.target:g} needs. {_model_words(record)}",
        facts=(
            ("Wanted error", f"{record.target:g}"),
            ("Draws of features", str(record.draws)),
            *_model_facts(record),
            ("Budget", record.provenance.budget),
            ("Working time", numbers.duration(record.provenance.seconds)),
        ),
        sections=tuple(section for section in sections if section.parts),
        method=_method(record),
    )


def _model_words(record: ApproximationRecord) -> str:
    """How far the model was trained, or whose it is."""
    if record.model_source != "trained here":
        return f"The model was given: {record.model_source}."
    steps = record.training.get("steps")
    words = "The model is a small one with softmax, trained here" + (f" for {count(steps, 'step')}" if steps else "")
    if record.heldout_loss is None:
        return words + ("." if record.finished else "; its held-out loss is not known yet.")
    return f"{words} to a held-out loss of {numbers.decimal(record.heldout_loss)} nats per byte."


def _model_facts(record: ApproximationRecord) -> tuple[tuple[str, str], ...]:
    if record.model_source != "trained here":
        return (("Model", "given"),)
    steps = record.training.get("steps")
    return (
        ("Model", "trained here"),
        *((("Training steps", f"{steps:,}"),) if steps else ()),
        ("Held-out loss", numbers.decimal(record.heldout_loss)),
    )


def inputs_label(name: str) -> str:
    """Inputs in words: ``"random-D16-sd0.5"`` becomes ``"D 16, spread 0.5"``, ``"layer0"`` becomes ``"layer 1"``."""
    found = re.fullmatch(r"random-D(\d+)-sd([\d.e+-]+)", name)
    if found:
        return f"D {found[1]}, spread {found[2]}"
    return f"layer {int(name.removeprefix('layer')) + 1}" if name.startswith("layer") else name


class _Look:
    """The record, looked up by inputs and arm."""

    def __init__(self, record: ApproximationRecord) -> None:
        self.record = record
        self.point = {(p.inputs, p.arm): p for p in record.points}
        self.groups: dict[str, list[ApproximationInputs]] = {}
        for at in record.inputs:
            group = f"D = {at.dim}, random" if at.kind == "random" else "trained model"
            self.groups.setdefault(group, []).append(at)

    def series(self, family: str) -> list[str]:
        return list(dict.fromkeys(arm.series for arm in self.record.arms if arm.family == family))

    def members(self, series: str) -> list[ApproximationArm]:
        chosen = [arm for arm in self.record.arms if arm.series == series]
        return sorted(chosen, key=lambda arm: arm.order if arm.order is not None else arm.count or 0)

    def measured(self, at: ApproximationInputs, arms: Sequence[ApproximationArm]) -> list[ApproximationPoint]:
        found = [self.point.get((at.name, arm.name)) for arm in arms]
        return [p for p in found if p is not None and p.error is not None and p.error.mean > 0]


def _above(points: Sequence[ApproximationPoint]) -> bool:
    """Whether an error, or the upper end of its interval, lies above what is drawn."""
    return any(p.error is not None and max(p.error.mean, p.error.high or 0) > HIGHEST for p in points)


def _error_axis(values: Sequence[float], above: bool) -> dict[str, object]:
    """Logarithmic up to ``HIGHEST``, which is marked as the end where there are errors ``above``."""
    return numbers.ticks(
        [min(v, HIGHEST) for v in values], 10, lambda v: f"≥ {v:g}" if above and v == HIGHEST else f"{v:g}"
    )


def _cut_words(points: Sequence[ApproximationPoint]) -> str:
    """What the caption says of errors above ``HIGHEST``, after a blank; nothing if there are none."""
    if not _above(points):
        return ""
    cut = sum(1 for p in points if p.error is not None and p.error.mean > HIGHEST)
    if not cut:
        return f" Bars end at {HIGHEST:g}."
    return (
        f" Arrows at {HIGHEST:g}, {cut} here, are errors above it, whose size the hover and the last table give; bars "
        "end there too."
    )


@dataclass(frozen=True)
class _Drawn:
    """Errors for a figure, none above ``HIGHEST``: the intervals, the true numbers in words, and which were cut."""

    values: list[float]
    spread: list[Interval | None]
    words: list[str]
    cut: list[bool]

    def symbols(self, own: Sequence[str]) -> list[str]:
        """An arrow for each point that was cut, and its own symbol for every other."""
        return ["arrow-up" if cut else symbol for cut, symbol in zip(self.cut, own, strict=True)]


def _capped(points: Sequence[ApproximationPoint]) -> _Drawn:
    drawn = _Drawn([], [], [], [])
    for p in points:
        assert p.error is not None
        cut = p.error.mean > HIGHEST
        drawn.cut.append(cut)
        drawn.words.append(numbers.bounds(p.error) + (f", above the plot's end at {HIGHEST:g}" if cut else ""))
        drawn.values.append(min(p.error.mean, HIGHEST))
        high = p.error.high if p.error.high is None else min(p.error.high, HIGHEST)
        drawn.spread.append(None if cut else p.error.model_copy(update={"high": high}))
    return drawn


def _means(points: Sequence[ApproximationPoint]) -> list[float]:
    return [p.error.mean for p in points if p.error is not None]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _ends(name: str, points: Sequence[ApproximationPoint], numbers_of: Sequence[int]) -> str:
    first, last = points[0].error, points[-1].error
    assert first is not None
    assert last is not None
    return f"{name} {first.mean:.2g} at {numbers_of[0]} to {last.mean:.2g} at {numbers_of[-1]}"


def _by_order(look: _Look) -> list[Figure]:
    figures: list[Figure] = []
    for group, places in look.groups.items():
        for series in look.series("taylor"):
            arms = look.members(series)
            every = [p for at in places for p in look.measured(at, arms)]
            axis = _error_axis(_means(every), _above(every))
            plot = Plot("Taylor order", "relative error", y_log=True, x_axis={"dtick": 1}, y_axis=axis)
            said: list[str] = []
            for number, at in enumerate(places):
                points = look.measured(at, arms)
                if not points:
                    continue
                orders = [arm.order or 0 for arm in arms if look.point.get((at.name, arm.name)) in points]
                drawn = _capped(points)
                name = inputs_label(at.name)
                plot.line(
                    name, orders, drawn.values, numbered(number)._replace(dash="solid"), mode="lines+markers",
                    spread=drawn.spread,
                    symbols=drawn.symbols(["diamond-open" if order % 2 else "circle" for order in orders]),
                    hover="order %{x}: %{text}", text=drawn.words, size=9,
                )  # fmt: skip
                said.append(_ends(name, points, orders))
            if plot.traces:
                name = label(series)
                figures.append(
                    plot.figure(
                        f"orders-{_slug(group)}-{_slug(series)}",
                        f"{name}: {group}",
                        f"Relative error against the Taylor order, {group}, logarithmic: {'; '.join(said)}.",
                        "Filled circles are even orders, whose weights are positive; hollow diamonds are odd ones, "
                        "whose weights turn negative. Bars are 95 % intervals over the measured rows."
                        + _cut_words(every),
                        height=420,
                    )
                )
    return figures


def _count_axis(arms: Sequence[ApproximationArm]) -> dict[str, object]:
    counts = sorted({arm.count for arm in arms if arm.count})
    shown = counts if len(counts) < 8 else counts[::2]
    return {"tickvals": shown, "ticktext": [f"{n:,}" for n in shown], "dtick": None}


def _by_count(look: _Look) -> list[Figure]:
    figures: list[Figure] = []
    names = look.series("features")
    if not names:
        return []
    for group, places in look.groups.items():
        lines = [(inputs_label(at.name), at, names[0], numbered(n)) for n, at in enumerate(places)]
        figures += _count_figure(look, f"{label(names[0])}: {group}", f"features-{_slug(group)}", lines)
    for group, places in look.groups.items():
        if len(names) > 1:
            at = next((p for p in places if p.spread == 1), places[-1] if places[0].kind == "model" else places[0])
            lines = [(label(name), at, name, numbered(n)) for n, name in enumerate(names)]
            figures += _count_figure(
                look, f"Variants at {inputs_label(at.name)}", f"variants-{_slug(group)}", lines
            )  # fmt: skip
    return figures


def _count_figure(
    look: _Look, title: str, name: str, lines: Sequence[tuple[str, ApproximationInputs, str, Mark]]
) -> list[Figure]:
    arms = [arm for _, _, series, _ in lines for arm in look.members(series)]
    plot = Plot("features", "relative error", x_log=True, y_log=True, x_axis=_count_axis(arms))
    said: list[str] = []
    every: list[ApproximationPoint] = []
    for words, at, series, mark in lines:
        chosen = look.members(series)
        points = look.measured(at, chosen)
        if not points:
            continue
        every += points
        counts = [arm.count or 1 for arm in chosen if look.point.get((at.name, arm.name)) in points]
        drawn = _capped(points)
        plot.line(
            words, counts, drawn.values, mark._replace(dash="solid"), mode="lines+markers", spread=drawn.spread,
            symbols=drawn.symbols([mark.symbol] * len(counts)), hover="%{x} features: %{text}", text=drawn.words,
            size=8,
        )  # fmt: skip
        known = [(n, v) for n, v, cut in zip(counts, drawn.values, drawn.cut, strict=True) if not cut]
        if len(known) > 1:
            # the law, drawn from the first point that is where it belongs
            first, value = known[0]
            after = [n for n in counts if n >= first]
            plot.line(
                f"{words}, as m^(-1/2)", after, [value * (first / n) ** 0.5 for n in after],
                Mark(mark.colour, "dot", "circle", 1.2), hover="%{x}: %{y:.3g}", legend=False,
            )  # fmt: skip
            plot.legend[-1] = plot.legend[-1].with_trace(len(plot.traces) - 1)
        said.append(_ends(words, points, counts))
    if not plot.traces:
        return []
    plot.y_axis |= _error_axis([v for trace in plot.traces for v in trace.y if v], _above(every))
    plot.y_axis |= {"range": _range(plot)}
    return [
        plot.figure(
            name,
            title,
            f"Relative error against the number of random features, both logarithmic: {'; '.join(said)}.",
            "Means over the draws; bars are 95 % intervals over rows and draws. Dotted: what m to the power of -1/2 "
            "would give from the first point on that is no arrow." + _cut_words(every),
            height=440,
        )
    ]


def _range(plot: Plot) -> list[float]:
    """The logarithmic range of all lines, and of bars as far as a factor of 3 above them: the points matter more."""
    values = [v for trace in plot.traces for v in trace.y if v]
    bars = [v + up for t in plot.traces if t.error_y.array for v, up in zip(t.y, t.error_y.array, strict=True) if up]
    low, high = math.log10(min(values)), math.log10(max([*values, *(min(b, 3 * max(values)) for b in bars)]))
    room = max(0.06 * (high - low), 0.08)
    return [low - room, high + room]


def _by_layer(look: _Look) -> list[Figure]:
    places = look.groups.get("trained model", [])
    arms = [arm for arm in look.record.arms if arm.family == "other"]
    for series in look.series("taylor"):
        arms += [arm for arm in look.members(series) if arm.parity == "even"]
    for series in look.series("features")[:1]:
        arms += look.members(series)[-1:]
    every = [p for at in places for p in look.measured(at, arms)]
    plot = Plot(
        "layer", "relative error", y_log=True, y_axis=_error_axis(_means(every), _above(every)),
        x_axis={"dtick": 1, "range": [0.6, len(places) + 0.4]},
    )  # fmt: skip
    said: list[str] = []
    for number, arm in enumerate(arms):
        known = [(at, p) for at in places for p in look.measured(at, [arm])]
        if not known:
            continue
        points = [p for _, p in known]
        drawn, mark, values = _capped(points), numbered(number), _means(points)
        plot.line(
            label(arm.name), [(at.layer or 0) + 1 for at, _ in known], drawn.values, mark, mode="lines+markers",
            spread=drawn.spread, symbols=drawn.symbols([mark.symbol] * len(points)), hover="layer %{x}: %{text}",
            text=drawn.words, size=9,
        )  # fmt: skip
        said.append(f"{label(arm.name)} {min(values):.2g} to {max(values):.2g}")
    if not plot.traces:
        return []
    scores = "; ".join(f"layer {(at.layer or 0) + 1} {at.score_deviation:.2f}" for at in places)
    return [
        plot.figure(
            "layers",
            "Error by layer",
            f"Relative error by layer, logarithmic, least to largest: {'; '.join(said)}.",
            f"Standard deviation of the scores: {scores}. Bars are 95 % intervals over rows, and over draws for random "
            "features." + _cut_words(every),
            height=460,
        )
    ]


def _variance(look: _Look) -> list[Figure]:
    record = look.record
    plot = Plot("relative variance in theory", "as drawn", x_log=True, y_log=True)
    said: list[str] = []
    values: list[float] = []
    for number, series in enumerate(look.series("features")):
        chosen = [
            look.point[at.name, arm.name] for at in record.inputs for arm in look.members(series)
            if (at.name, arm.name) in look.point
        ]  # fmt: skip
        known = [
            p for p in chosen
            if p.theory and p.theory <= LARGEST_VARIANCE and p.measured is not None and p.measured.mean > 0
        ]  # fmt: skip
        if not known:
            continue
        theory = [p.theory or 0.0 for p in known]
        drawn = [p.measured.mean for p in known if p.measured is not None]
        plot.line(
            label(series), theory, drawn, numbered(number), mode="markers", size=7,
            hover="%{text}", symbols=[numbered(number).symbol] * len(known),
            text=[f"{inputs_label(p.inputs)}, {label(p.arm)}: {p.theory:.3g} in theory, {p.measured.mean:.3g} drawn"
                  for p in known if p.measured is not None],
        )  # fmt: skip
        values += theory + drawn
        said.append(f"{label(series)} from {min(theory):.2g} to {max(theory):.2g} in theory")
    if not plot.traces:
        return []
    low, high = min(values), max(values)
    plot.x_axis |= numbers.ticks(values, 100, numbers.short)
    plot.y_axis |= numbers.ticks(values, 100, numbers.short)
    plot.line(
        "equal", [low, high], [low, high], Mark(GUIDE, "dot", "circle", 1.5), hover="equal", legend=False
    )  # fmt: skip
    return [
        plot.figure(
            "variance",
            "Theory against draws",
            f"Relative variance as drawn against theory, both logarithmic; below the diagonal the draws show less than "
            f"theory: {'; '.join(said)}.",
            f"One point for each number of features and inputs, {record.draws} draws each. On the dotted line both are "
            f"equal. A variance far above 1 is made by events so rare that a few draws do not have them; those above "
            f"{numbers.short(LARGEST_VARIANCE)} are in the table only.",
            height=420,
        )
    ]


def _method(record: ApproximationRecord) -> tuple[tuple[str, str], ...]:
    corpus = record.corpus
    rows = [
        ("error", "|o - o*| / |o*| of outputs against exp under the same normaliser, all heads and measured rows"),
        ("interval", "95 %, Student's t on the logarithm, over sampled rows (finite population) and draws"),
        ("arithmetic", "float64"),
        ("text", corpus.name),
        ("SHA-256", corpus.sha256),
        ("model", record.model_source),
    ]
    if record.heldout_loss is not None:
        rows.append(("model · held-out loss", f"{numbers.decimal(record.heldout_loss)} nats per byte"))
    rows += [
        (f"model · {key.replace('_', ' ')}", str(value)) for key, value in record.model.items() if value is not None
    ]
    rows += [(f"training · {k.replace('_', ' ')}", str(v)) for k, v in record.training.items() if v is not None]
    return (*rows, *((inputs_label(at.name), _sizes(at)) for at in record.inputs))


def _sizes(at: ApproximationInputs) -> str:
    return (
        f"{at.batch} × {at.heads} heads of {at.dim}, {at.length} tokens, {at.rows} rows; scores "
        f"{at.score_low:.2f} to {at.score_high:.2f}, standard deviation {at.score_deviation:.2f}"
    )
