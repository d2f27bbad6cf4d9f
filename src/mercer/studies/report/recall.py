"""The page of ``mercer study recall``."""

from __future__ import annotations

from mercer.studies.records.recall import RecallRecord, RecallSummary
from mercer.studies.report import numbers
from mercer.studies.report.blocks import Cell, Figure, Page, Section, Table
from mercer.studies.report.figures import Plot
from mercer.studies.report.marks import label, mark


def build(record: RecallRecord) -> Page:
    """The page, from the record alone."""
    sections = (
        Section(
            "Recall against the number of pairs",
            "A sequence lists keys with their values, then asks for the keys again at growing distances. A model that "
            "keeps every pair apart answers all of them; one with a state of fixed size must run out of room.",
            (*_by_pairs(record), _overview(record), _table(record)),
        ),
        Section(
            "Recall against the size of the state",
            "The same answers, against the bytes that the model carries from one token to the next.",
            tuple(_by_state(record)),
        ),
        Section(
            "What the memory view predicts",
            "A finite kernel stores the sum of φ(k)vᵀ, and pairs disturb each other as soon as φ has fewer effective "
            "dimensions than there are pairs. The prediction is the theory of such a memory for random keys and "
            "values, with as many heads as the last layer has, at the sharpness that suits it best. Training may "
            "find better keys than random ones; and it has to find the way to use the memory at all.",
            (*_prediction(record), *([_capacities(record)] if record.capacities else ())),
        ),
    )
    return Page(
        title="How much can an attention remember?",
        summary=f"Multi-query associative recall with {len({s.attention for s in record.summaries})} models and "
        f"up to {max(record.task.pairs)} pairs; accuracy of the best learning rate, beside what the "
        "theory of associative memories predicts.",
        facts=(
            ("Pairs", ", ".join(str(n) for n in record.task.pairs)),
            ("Vocabulary", f"{record.task.vocabulary:,}"),
            ("Trials", f"{len(record.trials)}"),
            ("Budget", record.provenance.budget),
            ("Working time", numbers.duration(record.provenance.seconds)),
        ),
        sections=tuple(section for section in sections if section.parts),
        method=_method(record),
    )


def _names(record: RecallRecord) -> list[str]:
    return list(dict.fromkeys(s.attention for s in record.summaries))


def _widths(record: RecallRecord) -> list[int]:
    return sorted({s.dim for s in record.summaries})


def _series(record: RecallRecord, name: str, dim: int) -> list[RecallSummary]:
    return sorted(
        (s for s in record.summaries if s.attention == name and s.dim == dim and s.accuracy), key=lambda s: s.pairs
    )


def _pairs_axis(record: RecallRecord) -> dict[str, object]:
    return {"tickvals": record.task.pairs, "ticktext": [str(n) for n in record.task.pairs], "dtick": None}


_SHARE = {"range": [-0.03, 1.05], "tickformat": ".0%"}


def _by_pairs(record: RecallRecord) -> list[Figure]:
    figures: list[Figure] = []
    for dim in _widths(record):
        plot = Plot("pairs", "queries answered rightly", x_log=True, x_axis=_pairs_axis(record), y_axis=dict(_SHARE))
        ends: list[str] = []
        for name in _names(record):
            series = _series(record, name, dim)
            if series:
                plot.line(
                    label(name),
                    [s.pairs for s in series],
                    [s.accuracy.mean if s.accuracy else None for s in series],
                    mark(name),
                    mode="lines+markers",
                    spread=[s.accuracy for s in series],
                    hover="%{x} pairs: %{y:.1%}",
                    size=9,
                )
                last = series[-1]
                ends.append(f"{label(name)} {_percent(last)} at {last.pairs} pairs")
        if plot.traces:
            figures.append(
                plot.figure(
                    f"pairs-{dim}",
                    f"Accuracy at width {dim}",
                    f"Share of queries answered rightly against the number of pairs, width {dim}: {'; '.join(ends)}.",
                    f"Guessing among the values would give {200 / record.task.vocabulary:.2g} %. Bars, where several "
                    "seeds ran, are 95 % intervals.",
                    height=420,
                )
            )
    return figures


def _percent(summary: RecallSummary) -> str:
    if summary.accuracy is None:
        return numbers.MISSING
    text = f"{100 * summary.accuracy.mean:.1f}"
    if summary.accuracy.low is not None and summary.accuracy.high is not None:
        text += f" ± {50 * (summary.accuracy.high - summary.accuracy.low):.1f}"
    return text + " %"


def _overview(record: RecallRecord) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name in _names(record):
        for dim in _widths(record):
            found = {s.pairs: s for s in _series(record, name, dim)}
            cells = [Cell(_percent(found[n]) if n in found else numbers.MISSING) for n in record.task.pairs]
            rows.append((Cell(label(name), mark(name).colour), Cell(str(dim)), *cells))
    return Table(
        "Accuracy by number of pairs", ("attention", "width", *(str(n) for n in record.task.pairs)), tuple(rows)
    )


def _table(record: RecallRecord) -> Table:
    rows = [
        (
            Cell(label(s.attention), mark(s.attention).colour),
            Cell(str(s.dim)),
            Cell(str(s.pairs)),
            Cell(_percent(s)),
            Cell(numbers.MISSING if s.predicted is None else f"{100 * s.predicted:.1f} %"),
            Cell(numbers.size(s.state_bytes)),
            Cell(numbers.MISSING if s.learning_rate is None else f"{s.learning_rate:g}"),
        )
        for name in _names(record)
        for dim in _widths(record)
        for s in _series(record, name, dim)
    ]
    return Table(
        "Every attention and number of pairs",
        ("attention", "width", "pairs", "accuracy", "random keys", "state", "best rate"),
        tuple(rows),
        caption="The best of the learning rates tried, chosen on the same held-out sequences that are reported, for "
        "all alike.",
        folded=True,
    )


def _by_state(record: RecallRecord) -> list[Figure]:
    x_axis = numbers.ticks((s.state_bytes for s in record.summaries), 4, numbers.size)
    plot = Plot("bytes of state", "queries answered rightly", x_log=True, x_axis=x_axis, y_axis=dict(_SHARE))
    largest = max(record.task.pairs)
    said: list[str] = []
    for name in _names(record):
        chosen = [s for dim in _widths(record) for s in _series(record, name, dim)]
        if chosen:
            plot.line(
                label(name),
                [s.state_bytes for s in chosen],
                [s.accuracy.mean if s.accuracy else None for s in chosen],
                mark(name),
                mode="markers",
                hover="%{text}: %{y:.1%}",
                size=10,
                text=[f"{s.pairs} pairs, {numbers.size(s.state_bytes)}" for s in chosen],
            )
            last = max(chosen, key=lambda s: (s.pairs, s.dim))
            said.append(f"{label(name)} {_percent(last)} with {numbers.size(last.state_bytes)}")
    if not plot.traces:
        return []
    return [
        plot.figure(
            "state",
            "Accuracy against state",
            f"Share of queries answered rightly against the bytes of state. At {largest} pairs: {'; '.join(said)}.",
            "One point for each number of pairs. The key-value cache of softmax grows with the sequence, so its points "
            "move right; a feature state has one size, so its points stand above each other.",
            height=400,
        )
    ]


def _prediction(record: RecallRecord) -> list[Figure]:
    plot = Plot(
        "predicted for random keys",
        "found by training",
        x_axis={"range": [-0.03, 1.05], "tickformat": ".0%"},
        y_axis=dict(_SHARE),
    )
    for name in _names(record):
        chosen = [s for dim in _widths(record) for s in _series(record, name, dim) if s.predicted is not None]
        if chosen:
            plot.line(
                label(name),
                [s.predicted for s in chosen],
                [s.accuracy.mean if s.accuracy else None for s in chosen],
                mark(name),
                mode="markers",
                hover="predicted %{x:.1%}, found %{y:.1%}",
                size=10,
            )
    if not plot.traces:
        return []
    plot.shapes.append(
        {
            "type": "line",
            "x0": 0,
            "y0": 0,
            "x1": 1,
            "y1": 1,
            "line": {"color": "#7a8494", "width": 1.5, "dash": "dot"},
            "layer": "below",
        }
    )
    told = [(s.accuracy.mean, s.predicted) for s in record.summaries if s.accuracy and s.predicted is not None]
    above, total = sum(1 for found, predicted in told if found > predicted), len(told)
    return [
        plot.figure(
            "prediction",
            "Training against the memory view",
            f"Accuracy found by training against accuracy predicted for random keys; {above} of {total} points lie "
            "above the diagonal.",
            "On the dotted line training finds what the memory view predicts; above it training does better than a "
            "memory of random keys, below it has not learned to use its memory.",
            height=420,
        )
    ]


def _capacities(record: RecallRecord) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for c in record.capacities:
        accuracy = [s.accuracy.mean for s in _series(record, c.attention, c.dim) if s.accuracy]
        found = f"more than {c.largest_tried}" if accuracy and accuracy[0] >= 0.5 else f"less than {c.smallest_tried}"
        rows.append(
            (
                Cell(label(c.attention), mark(c.attention).colour),
                Cell(str(c.dim)),
                Cell("no finite map" if c.feature_dim is None else f"{c.feature_dim:,}"),
                Cell(numbers.short(c.effective_features)),
                Cell("more than a million" if c.predicted is None else numbers.short(c.predicted)),
                Cell(found if c.found is None else numbers.short(c.found)),
            )
        )
    return Table(
        "Pairs at which half the answers are right",
        ("attention", "width", "features of a head", "effective", "predicted", "found"),
        tuple(rows),
        caption="Interpolated on a logarithmic scale; a limit where recall did not fall through a half within the "
        "numbers of pairs tried. Effective features are what counts for random keys: K(k, k)² / E[K(k, k')²].",
    )


def _method(record: RecallRecord) -> tuple[tuple[str, str], ...]:
    task = [(f"task · {key.replace('_', ' ')}", str(value)) for key, value in record.task.model_dump().items()]
    model = [
        (f"model · {key.replace('_', ' ')}", str(value)) for key, value in record.model.items() if value is not None
    ]
    training = [(f"training · {key.replace('_', ' ')}", str(value)) for key, value in record.training.items()]
    times = [(f"calibration · {label(k)}", f"{numbers.duration(v)} a step") for k, v in record.calibration.items()]
    return (*task, *model, *training, *times)
