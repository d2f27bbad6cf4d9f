"""Conclusions are computed: each falls either way with the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from mercer.studies.approximation_arms import parse_arms
from mercer.studies.approximation_summary import conclude
from mercer.studies.records.approximation import ApproximationInputs, ApproximationNeed, ApproximationPoint
from mercer.studies.records.common import Finding, Interval

NAMES = [
    "taylor2-sum", "taylor3-signed-sum", "taylor4-sum", "favor256-sum", "favor256-sum+independent", "elu-sum"
]  # fmt: skip
ARMS = [arm.record for arm in parse_arms(NAMES)]
INPUTS = [
    ApproximationInputs(
        name=name, kind="model" if name.startswith("layer") else "random", dim=8, batch=1, heads=1, length=8, rows=4,
        spread=None if name.startswith("layer") else 1.0, layer=int(name[5:]) if name.startswith("layer") else None,
        score_low=-1, score_mean=0, score_deviation=deviation, score_high=1,
    )
    for name, deviation in (("random-D8-sd1", 1.0), ("layer0", 0.5), ("layer1", 2.0))
]  # fmt: skip


def points(error: Callable[[str], float], theory: float = 0.05, measured: float = 0.05) -> list[ApproximationPoint]:
    return [
        ApproximationPoint(
            inputs=at.name, arm=arm.name, error=Interval(mean=error(arm.name), count=4, over="rows"), by_head=[],
            negative=0, not_positive=0.25 if arm.parity == "odd" else 0,
            theory=theory if arm.count else None,
            measured=Interval(mean=measured, low=measured / 2, high=measured * 2, count=4, over="draws")
            if arm.count else None,
        )
        for at in INPUTS for arm in ARMS
    ]  # fmt: skip


def laws(exponent: float, holds: bool) -> list[ApproximationNeed]:
    return [
        ApproximationNeed(
            inputs=at.name, series="favor-sum", kind="features", number=None, holds=holds, text="",
            exponent=Interval(mean=exponent, count=3, over="draws"),
        )
        for at in INPUTS
    ]  # fmt: skip


def verdicts(found: list[Finding]) -> dict[str, str]:
    words = {
        "even Taylor": "even", "odd Taylor": "odd", r"m^(-1/2)": "law", "what theory": "theory", "as many": "equal",
        "orthogonal": "orthogonal", "stand in": "model",
    }  # fmt: skip
    return {short: f.verdict for f in found for word, short in words.items() if word in f.question}


GOOD = {"taylor2-sum": 0.2, "taylor3-signed-sum": 0.1, "taylor4-sum": 0.05, "favor256-sum": 0.3}
BAD = {"taylor2-sum": 0.5, "taylor3-signed-sum": 3.0, "taylor4-sum": 0.6, "favor256-sum": 0.3}


def test_they_can_all_be_supported() -> None:
    found = conclude(ARMS, INPUTS, points(lambda name: GOOD.get(name, 0.4)), laws(0.48, True), 0.1)
    assert verdicts(found) == dict.fromkeys(
        ("even", "odd", "law", "theory", "equal", "orthogonal", "model"), "supported"
    )


def test_they_can_all_be_refuted() -> None:
    errors = points(lambda name: BAD.get(name, 0.25), theory=0.05, measured=3.0)
    found = conclude(ARMS, INPUTS, errors, laws(0.1, False), 0.1)
    assert verdicts(found) == dict.fromkeys(("even", "odd", "law", "theory", "equal", "orthogonal", "model"), "refuted")


def test_the_sentences_hold_the_numbers() -> None:
    found = {
        f.question: f.text
        for f in conclude(ARMS, INPUTS, points(lambda name: BAD.get(name, 0.25), 80.0, 3.0), laws(0.1, False), 0.1)
    }
    law = next(text for question, text in found.items() if "m^(-1/2)" in question)
    assert "It does in 0 of 3 cases" in law
    assert "standard deviation is 0.5 to 2" in law
    assert "least exponent is 0.1 for 0.5" in law
    odd = next(text for question, text in found.items() if "odd Taylor" in question)
    assert "In 0 of 3 cases" in odd
    assert "up to 6 times as large" in odd
    assert "up to 25.0% of the rows" in odd
    theory = next(text for question, text in found.items() if "what theory" in question)
    assert "Of the 18 with more" not in theory
    assert "Of the 6 with more, 6 measure less than the theory" in theory
    equal = next(text for question, text in found.items() if "as many" in question)
    # order 2 at D = 8 has 45 features; order 4 has 495, more than any random features here
    assert math.comb(10, 2) == 45
    assert "In 0 of 3 cases" in equal
    assert "with 45 features 0.5" in equal
    model = next(text for question, text in found.items() if "stand in" in question)
    assert "reached in 0 of 2 layers" in model
    assert "; in layer 2 FAVOR+ 256 · sum + independent with an error of 0.25." in model or (
        "; in layer 2 elu · sum with an error of 0.25." in model
    )


@pytest.mark.parametrize(
    ("deviations", "steps", "verdict"),
    [
        ((0.49, 0.01), 3, "undecided"),
        ((0.49, 2.0), 1, "undecided"),  # half of the layers
        ((0.51, 0.51), 3, "supported"),
        ((0.49, 0.01), None, "supported"),  # a model that was given is what it is
    ],
)
@pytest.mark.parametrize("reached", [True, False])
def test_a_model_hardly_trained_decides_nothing(
    deviations: tuple[float, float], steps: int | None, verdict: str, reached: bool
) -> None:
    places = dict(zip(("layer0", "layer1"), deviations, strict=True))
    inputs = [at.model_copy(update={"score_deviation": places.get(at.name, 1.0)}) for at in INPUTS]
    found = conclude(ARMS, inputs, points(lambda _: 0.05 if reached else 0.5), [], 0.1, steps)
    if not reached and verdict == "supported":
        verdict = "refuted"
    assert verdicts(found)["model"] == verdict
    text = next(f.text for f in found if "stand in" in f.question)
    assert ("this is left undecided; train for more steps" in text) == (verdict == "undecided")
    if verdict == "undecided":
        short = sum(deviation < 0.5 for deviation in deviations)
        assert f"after {'1 training step' if steps == 1 else '3 training steps'} the scores have" in text
        assert f"in {short} of 2 layers less than 0.5" in text


def test_orders_of_layers_are_words() -> None:
    needs = [
        ApproximationNeed(inputs=name, series="taylor-sum", kind="order", number=number, text="")
        for name, number in (("layer1", None), ("layer0", 0))
    ]
    found = conclude(ARMS, INPUTS, points(lambda _: 0.05), needs, 0.1)
    text = next(f.text for f in found if "stand in" in f.question)
    assert "The Taylor series reaches it with order 0 in layer 1, no order up to 64 in layer 2." in text


def test_nothing_measured_concludes_nothing() -> None:
    assert conclude(ARMS, INPUTS[:0], [], [], 0.1) == []


@pytest.mark.parametrize("name", NAMES)
def test_one_arm_alone_is_no_error(name: str) -> None:
    arms = [arm.record for arm in parse_arms([name])]
    chosen = [p for p in points(lambda _: 0.05) if p.arm == name]
    found = conclude(arms, INPUTS, chosen, [], 0.1)
    assert "model" in verdicts(found)
