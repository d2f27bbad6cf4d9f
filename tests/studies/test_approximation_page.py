"""What the page of ``mercer study approximation`` draws where errors leave the plot."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.studies import examples

from mercer.studies.records import ApproximationRecord
from mercer.studies.report import approximation
from mercer.studies.report.approximation import HIGHEST
from mercer.studies.report.blocks import Figure


def figures(record: ApproximationRecord) -> dict[str, Figure]:
    parts = [part for section in approximation.build(record).sections for part in section.parts]
    return {part.name: part for part in parts if isinstance(part, Figure)}


def changed(record: ApproximationRecord, at: tuple[str, str], **values: float) -> ApproximationRecord:
    """With other numbers for the error of one arm on one set of inputs."""
    points = [
        p.model_copy(update={"error": p.error.model_copy(update=values)})
        if (p.inputs, p.arm) == at and p.error is not None
        else p
        for p in record.points
    ]
    return record.model_copy(update={"points": points})


def measured(record: ApproximationRecord, inputs: str, series: str) -> list[float]:
    arms = sorted((arm for arm in record.arms if arm.series == series), key=lambda arm: arm.order or arm.count or 0)
    points = {(p.inputs, p.arm): p.error for p in record.points}
    found = [points[inputs, arm.name] for arm in arms]
    return [error.mean for error in found if error is not None]


def traces(figure: Figure) -> dict[str, Any]:
    return {trace["name"]: trace for trace in figure.spec["data"]}


@pytest.mark.parametrize("largest", [150.0, 1e5])
def test_what_is_above_the_plot_is_an_arrow_and_said(largest: float) -> None:
    record = examples.approximation()
    for at in (("random-D16-sd1", "favor16-sum"), ("random-D16-sd4", "taylor3-signed-sum")):
        record = changed(record, at, mean=largest, low=120.0, high=2 * largest)
    found = figures(record)
    drawn = traces(found["features-d-16-random"])
    points = drawn["D 16, spread 1"]
    assert points["y"] == pytest.approx([HIGHEST, *measured(record, "random-D16-sd1", "favor-sum")[1:]])
    assert points["marker"]["symbol"][0] == "arrow-up"
    assert "arrow-up" not in points["marker"]["symbol"][1:]
    assert f"{largest:.3g} [120, {2 * largest:.3g}], above the plot's end at 100" in points["text"][0]
    assert "above the plot" not in points["text"][1]
    # the law starts from the first error that is drawn where it belongs
    law = drawn["D 16, spread 1, as m^(-1/2)"]
    assert law["x"] == [64, 256]
    assert law["y"] == pytest.approx([points["y"][1], points["y"][1] / 2])
    assert drawn["D 16, spread 0.5, as m^(-1/2)"]["x"] == [16, 64, 256]
    order = found["orders-d-16-random-taylor-sum"]
    assert traces(order)["D 16, spread 4"]["marker"]["symbol"] == ["diamond-open", "circle", "arrow-up", "circle"]
    for figure in (found["features-d-16-random"], order):
        assert (
            "Arrows at 100, 1 here, are errors above it, whose size the hover and the last table give" in figure.caption
        )
        assert figure.spec["layout"]["yaxis"]["ticktext"][-1] == "≥ 100"


def test_only_what_was_cut_is_said_to_be() -> None:
    record = examples.approximation()
    record = record.model_copy(update={"points": [p for p in record.points if "trig" not in p.arm]})
    for figure in figures(record).values():
        assert "100" not in figure.caption
        assert "arrow" not in re.sub("showarrow", "", str(figure.spec))
    record = changed(record, ("layer0", "elu-sum"), high=300.0)
    layers = figures(record)["layers"]
    assert layers.caption.endswith(" Bars end at 100.")
    assert "arrow-up" not in str(layers.spec)


def test_a_series_above_the_plot_has_no_law() -> None:
    record = examples.approximation()
    assert min(measured(record, "layer1", "trig-signed-sum")) > HIGHEST
    variants = figures(record)["variants-trained-model"]
    drawn = traces(variants)
    trig = next(name for name in drawn if name.startswith("Trigonometric"))
    assert drawn[trig]["y"] == [HIGHEST] * 3
    assert f"{trig}, as m^(-1/2)" not in drawn
    entry = next(entry for entry in variants.legend if entry.label == trig)
    assert len(entry.traces) == 1


def test_how_far_the_model_was_trained_stands_at_the_top() -> None:
    page = approximation.build(examples.approximation())
    words = (
        "The model is a small one with softmax, trained here for 300 steps to a held-out loss of 1.900 nats per byte."
    )
    assert words in page.summary
    assert words in next(section.text for section in page.sections if "layer by layer" in section.title)
    assert {("Model", "trained here"), ("Training steps", "300"), ("Held-out loss", "1.900")} <= set(page.facts)
    begun = examples.approximation(finished=False).model_copy(update={"heldout_loss": None})
    assert "trained here for 300 steps; its held-out loss is not known yet." in approximation.build(begun).summary
    given = begun.model_copy(update={"training": {}, "model_source": "mine"})
    assert approximation.build(given).summary.endswith("The model was given: mine.")
    assert "Training steps" not in dict(approximation.build(given).facts)
