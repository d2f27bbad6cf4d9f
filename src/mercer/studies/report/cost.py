"""The page of ``mercer study cost``."""

from __future__ import annotations

from mercer.studies.records.cost import CostPoint, CostRecord, Phase, Where
from mercer.studies.report import numbers
from mercer.studies.report.blocks import Cell, Figure, Page, Section, Table
from mercer.studies.report.figures import Plot
from mercer.studies.report.marks import Mark, label, mark

_FORM_DASH = {"dense": "solid", "chunked": "dash", "recurrent": "dot"}


def build(record: CostRecord) -> Page:
    """The page, from the record alone."""
    sections = (
        Section(
            "Reading a context (prefill)",
            "Time for one token when a whole context is read at once. Scoring every pair costs time in proportion to "
            "the context; a feature state costs the same for every token.",
            tuple(_time(record, "prefill")),
        ),
        Section(
            "Writing the next token (decode)",
            "Time for one more token after a context of this length. A cache is read whole for every token; a feature "
            "state has one size.",
            tuple(_time(record, "decode")),
        ),
        Section("Memory", "Bytes that must be kept between tokens, for one layer.", tuple(_state(record))),
        Section(
            "Where they cross",
            "The context length from which the second is cheaper than the first, interpolated between measured "
            "lengths, and where the plan's model of this machine puts it.",
            (_crossings(record),) if record.crossings else (),
        ),
        Section("Everything measured", f"{len(record.points)} measurements, each beside its plan.", (_table(record),)),
    )
    shape = record.shape
    return Page(
        title="Where does one attention become cheaper than another?",
        summary=f"Time and memory of {len(_names(record))} attentions in their forms, at contexts of "
        f"{min(shape.lengths):,} to {max(shape.lengths):,} tokens, beside what the plan predicts before anything runs.",
        facts=(
            ("Heads × width", f"{shape.heads} × {shape.head_dim}"),
            ("Type", shape.dtype),
            ("Products", numbers.short(record.rates.flops_per_second, "FLOP/s")),
            ("Reads", numbers.short(record.rates.bytes_per_second, "B/s")),
            ("Working time", numbers.duration(record.provenance.seconds)),
        ),
        sections=tuple(section for section in sections if section.parts),
        method=tuple(
            (key.replace("_", " "), ", ".join(str(v) for v in value) if isinstance(value, list) else str(value))
            for key, value in shape.model_dump().items()
        ),
    )


def _names(record: CostRecord) -> list[str]:
    return list(dict.fromkeys(p.attention for p in record.points))


def way(point: CostPoint) -> str:
    """An attention with the way it was computed."""
    return f"{label(point.attention)}, {point.form} {point.path}"


def _ways(record: CostRecord, phase: Phase) -> dict[str, list[CostPoint]]:
    ways: dict[str, list[CostPoint]] = {}
    for point in record.points:
        if point.phase == phase and point.seconds_per_token is not None:
            ways.setdefault(way(point), []).append(point)
    return {name: sorted(points, key=lambda p: p.length) for name, points in ways.items()}


def _mark(point: CostPoint) -> Mark:
    found = mark(point.attention)
    return found._replace(
        dash=_FORM_DASH.get(point.form, "longdash"), symbol="circle" if point.path == "pairs" else "diamond"
    )


def _lengths(record: CostRecord) -> dict[str, object]:
    return {"tickvals": record.shape.lengths, "ticktext": [_tokens(n) for n in record.shape.lengths], "dtick": None}


def _tokens(count: float) -> str:
    return f"{count / 1024:g}k" if count >= 1024 and count % 1024 == 0 else f"{count:,.0f}"


def _finite(record: CostRecord) -> set[str]:
    """The attentions with a feature state."""
    return {p.attention for p in record.points if p.path == "features" and p.status == "measured"}


def _time(record: CostRecord, phase: Phase) -> list[Figure]:
    plot = Plot(
        "context, tokens",
        "time per token",
        x_log=True,
        y_log=True,
        x_axis=_lengths(record),
        y_axis=numbers.ticks(
            (p.seconds_per_token or 0 for p in record.points if p.phase == phase), 10, numbers.duration
        ),
    )
    said: list[str] = []
    finite = _finite(record)
    for name, points in _ways(record, phase).items():
        seconds = [p.seconds_per_token for p in points]
        plot.line(
            name,
            [p.length for p in points],
            seconds,
            _mark(points[0]),
            mode="lines+markers",
            hover="%{x:,} tokens: %{text}",
            text=[numbers.duration(value) for value in seconds],
            shown=points[0].path == "features" or points[0].attention not in finite,
        )
        if all(p.low is not None and p.high is not None for p in points):
            plot.traces[-1].error_y = {
                "type": "data",
                "symmetric": False,
                "color": _mark(points[0]).colour,
                "thickness": 1,
                "width": 3,
                "array": [((p.high or 0) - (p.seconds_per_token or 0)) for p in points],
                "arrayminus": [((p.seconds_per_token or 0) - (p.low or 0)) for p in points],
            }
        last = points[-1]
        said.append(f"{name} {numbers.duration(last.seconds_per_token)} at {_tokens(last.length)} tokens")
    if not plot.traces:
        return []
    return [
        plot.figure(
            phase,
            "Time per token",
            f"Time per token in {phase} against the context length, both on logarithmic scales: {'; '.join(said)}.",
            "Medians of interleaved repeats; bars span the quartiles. Solid lines are dense, dashed chunked, dotted "
            "recurrent; circles score pairs, diamonds keep features. Attentions that have features can also score "
            "pairs: press their names.",
            height=460,
        )
    ]


def _state(record: CostRecord) -> list[Figure]:
    plot = Plot(
        "context, tokens",
        "bytes of state",
        x_log=True,
        y_log=True,
        x_axis=_lengths(record),
        y_axis=numbers.ticks((p.state_bytes or 0 for p in record.points), 4, numbers.size),
    )
    said: list[str] = []
    seen: set[tuple[str, str]] = set()
    for points in _ways(record, "decode").values():
        first = points[0]
        cached = first.path == "pairs" and first.attention in _finite(record)  # the same cache as softmax's
        if (first.attention, first.path) in seen or first.state_bytes is None or cached:
            continue
        seen.add((first.attention, first.path))
        name = f"{label(first.attention)}, {'cache' if first.path == 'pairs' else 'features'}"
        plot.line(
            name,
            [p.length for p in points],
            [p.state_bytes for p in points],
            _mark(first)._replace(dash="solid"),
            mode="lines+markers",
            hover="%{x:,} tokens: %{text}",
            text=[numbers.size(p.state_bytes) for p in points],
        )
        said.append(f"{name} {numbers.size(points[-1].state_bytes)} at {_tokens(points[-1].length)} tokens")
    if not plot.traces:
        return []
    return [
        plot.figure(
            "state",
            "State against context",
            f"Bytes of state against the context length, both on logarithmic scales: {'; '.join(said)}.",
            "Measured from the tensors of the state, one layer, all sequences of the batch.",
            height=420,
        )
    ]


def _crossing(where: Where, lengths: list[int]) -> str:
    return {
        "at": f"{where.length or 0:,.0f}",
        "always": f"already at {_tokens(min(lengths))}",
        "never": f"not up to {_tokens(max(lengths))}",
        "unknown": numbers.MISSING,
    }[where.kind]


def _crossings(record: CostRecord) -> Table:
    return Table(
        "Crossing points",
        ("first", "second", "what", "phase", "measured, tokens", "planned, tokens"),
        tuple(
            (
                Cell(label(c.incumbent), mark(c.incumbent).colour),
                Cell(label(c.challenger), mark(c.challenger).colour),
                Cell(c.quantity),
                Cell(c.phase),
                Cell(_crossing(c.measured, record.shape.lengths)),
                Cell(_crossing(c.planned, record.shape.lengths)),
            )
            for c in record.crossings
        ),
        words=4,
    )


def _table(record: CostRecord) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for p in record.points:
        spread = numbers.MISSING if p.low is None else f"{numbers.duration(p.low)} – {numbers.duration(p.high)}"
        rows.append(
            (
                Cell(label(p.attention), mark(p.attention).colour),
                Cell(f"{p.form}, {p.path}"),
                Cell(p.phase),
                Cell(_tokens(p.length)),
                Cell(numbers.duration(p.seconds_per_token) if p.status == "measured" else p.reason or "skipped"),
                Cell(spread),
                Cell(numbers.duration(p.planned_seconds_per_token)),
                Cell(numbers.size(p.state_bytes)),
                Cell(numbers.size(p.planned_state_bytes)),
                Cell(numbers.short(p.planned_flops)),
                Cell(numbers.size(p.planned_bytes)),
            )
        )
    return Table(
        "Measured and planned",
        (
            "attention",
            "form",
            "phase",
            "context",
            "time per token",
            "quartiles",
            "planned",
            "state",
            "planned state",
            "planned operations",
            "planned traffic",
        ),
        tuple(rows),
        words=3,
        folded=True,
        caption="Planned time is that of the model of mercer.advise, with this machine's numbers of the same day.",
    )
