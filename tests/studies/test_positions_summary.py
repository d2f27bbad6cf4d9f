"""Numbers and conclusions of the study of positions; each conclusion must be able to fall either way."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from mercer.errors import InvalidArgument
from mercer.studies.position_arms import parse_position_arm, parse_position_arms
from mercer.studies.positions_findings import conclude
from mercer.studies.positions_summary import Measured, summarize
from mercer.studies.records.common import Finding
from mercer.studies.records.orders import Point
from mercer.studies.records.positions import PositionsMeasurement, PositionsRun, PositionsSummary
from mercer.studies.report.position_marks import position_label

INSIDE, BUCKETS, BLOCKS, BUCKET = 2, 8, 6, 16


def measured(excess: Mapping[str, float | list[float]], seeds: int = 3, level: Mapping[str, float] = {}) -> Measured:
    """Losses over text of very different difficulty: ``excess`` nats above starting over at each bucket beyond, or a
    list of one number for each bucket."""
    arms = parse_position_arms(excess, BUCKETS / INSIDE)
    found: list[PositionsMeasurement] = []
    for place, arm in enumerate(arms):
        for seed in range(seeds):
            above = excess.get(arm.name, 0.0)
            curve = above if isinstance(above, list) else [0.0] * INSIDE + [above] * (BUCKETS - INSIDE)
            rows = [
                [
                    2.0 + level.get(arm.position, 0.0) + 0.1 * seed + math.sin(5 * block + 3 * b) + curve[b]
                    + (0 if arm.reading == "restart" else 0.002 * math.cos(place + 2 * block + seed))
                    for b in range(INSIDE if arm.bounded else BUCKETS)
                ]
                for block in range(BLOCKS)
            ]  # fmt: skip
            found.append(PositionsMeasurement(arm=arm.name, seed=seed, losses=rows, seconds=1))
    return Measured(arms, found, INSIDE)


def summaries(excess: Mapping[str, float | list[float]], **options: int) -> dict[str, PositionsSummary]:
    return {s.arm: s for s in summarize(measured(excess, **options), BUCKET)}


def questions(
    excess: Mapping[str, float | list[float]], runs: tuple[PositionsRun, ...] = (), **options: object
) -> dict[str, Finding]:
    all_of_it = measured(excess, **options)  # type: ignore[arg-type]
    found = conclude(all_of_it, summarize(all_of_it, BUCKET), runs, INSIDE * BUCKET, BUCKETS * BUCKET)
    return {finding.question: finding for finding in found}


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_difficulty_of_the_text_does_not_reach_the_curve(seeds: int) -> None:
    found = summaries({"rotary": [0.3, 0.0, 0.1, 0.1, 0.2, 0.2, 0.4, 0.4]}, seeds=seeds)["rotary"]
    over = "blocks" if seeds == 1 else "seeds"
    assert [round(point.mean - found.restart, 2) for point in found.curve] == [0.3, 0.0, 0.1, 0.1, 0.2, 0.2, 0.4, 0.4]
    assert [point.mean + found.restart for point in found.excess_curve] == pytest.approx([p.mean for p in found.curve])
    assert all(p.high - p.low < 0.03 for p in found.excess_curve)  # type: ignore[operator]
    assert all((p.high - p.low > 0.4) == (seeds > 1) for p in found.curve)  # type: ignore[operator]
    assert {(point.over, point.count) for point in found.curve} == {(over, BLOCKS if seeds == 1 else seeds)}
    assert found.excess is not None
    assert found.last is not None
    assert found.excess.mean == pytest.approx(1.4 / 6, abs=0.005)
    assert found.last.mean == pytest.approx(0.4, abs=0.005)
    assert found.excess.high - found.excess.low < 0.02  # type: ignore[operator]
    assert found.beyond == pytest.approx(found.restart + found.excess.mean)


def test_the_loss_inside_is_that_of_the_positions_inside() -> None:
    all_of_it = measured({"alibi": [0.3, 0.0, *[9.0] * 6]}, seeds=1)
    (found,) = (s for s in summarize(all_of_it, BUCKET) if s.arm == "alibi")
    (rows,) = all_of_it.losses["alibi"].values()
    assert found.inside.mean == pytest.approx(sum(sum(row[:INSIDE]) for row in rows) / INSIDE / BLOCKS)


@pytest.mark.parametrize(
    ("beyond", "reach"),
    [([0.06] * 6, 32), ([0.04] * 6, 128), ([0.0, 0.04, 0.06, 0.0, 0.0, 0.0], 64), ([0.0] * 5 + [0.06], 112)],
)
def test_how_far_a_loss_holds(beyond: list[float], reach: int) -> None:
    assert summaries({"rotary": [0.5, 0.0, *beyond]})["rotary"].reach == reach
    assert summaries({"rotary": [0.5, 0.06, *beyond]})["rotary"].reach == 0


def test_a_learned_table_ends_and_nothing_is_made_up_for_it() -> None:
    found = summaries({"learned": 0.0})
    ended = found["learned"]
    assert len(ended.curve) == INSIDE
    assert (ended.beyond, ended.excess, ended.last, ended.reach) == (None, None, None, None)
    assert len(found["learned+restart"].curve) == BUCKETS
    assert not any("learned" in q for q in questions({"learned": 0.0}))


def test_an_arm_whose_restart_is_missing_is_left_out() -> None:
    all_of_it = measured({"rotary": 0.0, "alibi": 0.0})
    kept = [m for m in all_of_it.measurements if m.arm != "alibi+restart"]
    found = summarize(Measured(all_of_it.arms, kept, INSIDE), BUCKET)
    assert [s.arm for s in found] == ["rotary", "rotary+restart"]
    assert summarize(Measured(all_of_it.arms, [], INSIDE), BUCKET) == []


@pytest.mark.parametrize(
    ("excess", "seeds", "verdict"),
    [(0.0, 3, "supported"), (-0.4, 3, "supported"), (0.2, 3, "refuted"), (0.05, 3, "undecided"),
     (0.2, 1, "refuted"), (0.01, 1, "supported"), (0.04, 1, "undecided"), (0.07, 1, "undecided")],
)  # fmt: skip
def test_whether_a_scheme_reads_on(excess: float, seeds: int, verdict: str) -> None:
    found = questions({"none": excess}, seeds=seeds)[
        "Does a model with no positions read on beyond its trained length?"
    ]
    assert found.verdict == verdict
    assert "From position 32 to 128" in found.text


@pytest.mark.parametrize(
    ("curve", "words"),
    [
        ([0.0] * 8, "Nowhere up to position 128 is it more than 0.05 nats above."),
        ([0.0] * 2 + [0.3] * 6, "It is more than 0.05 nats above at once."),
        ([0.0] * 4 + [0.3] * 4, "It is more than 0.05 nats above from position 64 on."),
        ([0.3] * 8, "Even at the end of the trained length it is more than 0.05 nats above."),
    ],
)
def test_from_where_a_loss_exceeds_is_said(curve: list[float], words: str) -> None:
    assert (
        words
        in questions({"rotary": curve})["Does a model with rotary positions read on beyond its trained length?"].text
    )


SCALING = "Does a scaling carry rotary positions on without training for it?"


@pytest.mark.parametrize(
    ("yarn", "ntk", "verdict", "best"),
    [(0.0, 0.5, "supported", "Rotary · YaRN"), (0.3, 0.02, "supported", "Rotary · NTK"), (0.3, 0.5, "refuted", "YaRN")],
)
def test_the_best_of_the_scalings(yarn: float, ntk: float, verdict: str, best: str) -> None:
    found = questions({"rotary": 2.0, "rotary+yarn": yarn, "rotary+ntk": ntk})[SCALING]
    assert found.verdict == verdict
    assert best in found.text.partition(" comes closest")[0]
    assert "The others: rotary · " in found.text


@pytest.mark.parametrize(
    ("alibi", "seeds", "verdict"),
    [
        (-0.1, 3, "supported"),
        (0.1, 3, "refuted"),
        (0.0, 3, "undecided"),
        (-0.02, 1, "undecided"),
        (-0.1, 1, "supported"),
    ],
)
def test_whether_more_context_is_of_use(alibi: float, seeds: int, verdict: str) -> None:
    found = questions({"alibi": alibi, "rotary": 1.0}, seeds=seeds)
    answer = found["Is context beyond 32 tokens of any use to a model trained with 32?"]
    assert answer.verdict == verdict
    assert answer.text.startswith("ALiBi comes out best")


@pytest.mark.parametrize(("none", "verdict"), [(0.2, "supported"), (0.0, "refuted"), (-0.2, "refuted")])
def test_whether_positions_are_needed_inside(none: float, verdict: str) -> None:
    found = questions({"none": 0.0, "alibi": 0.0, "rotary": 0.0}, level={"none": none, "rotary": 0.1})
    answer = found["Does a causal model need positions within its trained length of 32?"]
    assert answer.verdict == verdict
    assert "the best there, ALiBi" in answer.text


@pytest.mark.parametrize(("excess", "verdict"), [(0.0, "supported"), (0.3, "refuted")])
def test_whether_a_window_is_enough(excess: float, verdict: str) -> None:
    assert questions({"rotary+window": excess})["Is a window of 32 tokens enough for rotary?"].verdict == verdict


def one_run(position: str, last: float = 2.0, **changes: object) -> PositionsRun:
    curve = [Point(step=step, loss=loss) for step, loss in ((0, 5.0), (4, 2.3), (8, 2.01), (12, last))]
    run = PositionsRun(position=position, seed=0, parameters=1, steps=12, heldout_curve=curve, loss=last, seconds=1)
    return run.model_copy(update=changes)


@pytest.mark.parametrize(("last", "verdict"), [(2.0, "supported"), (1.9, "refuted")])
def test_whether_training_had_settled(last: float, verdict: str) -> None:
    found = questions({"rotary": 0.0, "alibi": 0.0}, (one_run("alibi", 1.0), one_run("rotary", last)))
    answer = found["Had training settled when this was measured?"]
    assert answer.verdict == verdict
    assert "of rotary fell by" in answer.text
    assert (next(iter(found)) == answer.question) == (verdict == "refuted")  # what limits all comes first


def test_what_went_wrong_is_said() -> None:
    lost = one_run("t5", status="diverged", reason="step 3: the loss is nan", heldout_curve=[], loss=None)
    found = questions({"rotary": 0.0}, (one_run("rotary"), lost))
    assert found["Does a model with the T5 bias train at all?"].text.endswith("diverged: step 3: the loss is nan")
    all_of_it = measured({"rotary": 0.0})
    bad = [m.model_copy(update={"losses": [], "reason": "not finite"}) if m.arm == "rotary" else m
           for m in all_of_it.measurements]  # fmt: skip
    said = conclude(Measured(all_of_it.arms, bad, INSIDE), [], [], 32, 128)
    assert "With seed 0 it cannot: not finite." in [finding.text for finding in said]


def test_arms_by_name() -> None:
    arms = parse_position_arms(["rotary", "rotary+yarn", "rotary+dynamic", "rotary+linear=4", "learned", "rotary"], 8)
    assert [(a.name, a.position, a.reading, a.factor, a.bounded) for a in arms] == [
        ("rotary", "rotary", "plain", None, False),
        ("rotary+yarn", "rotary", "yarn", 8, False),
        ("rotary+dynamic", "rotary", "dynamic", 1, False),
        ("rotary+linear=4", "rotary", "linear", 4, False),
        ("learned", "learned", "plain", None, True),
        ("rotary+restart", "rotary", "restart", None, False),
        ("learned+restart", "learned", "restart", None, False),
    ]
    assert [position_label(a.name) for a in arms] == [
        "rotary", "rotary · YaRN", "rotary · dynamic NTK", "rotary · linear scaling × 4", "learned",
        "rotary · starting over", "learned · starting over",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rotori", "'rotori' are unknown; use none, sinusoidal, learned, rotary, alibi or t5"),
        ("rotary+plain", "what follows the plus sign must be linear, ntk, dynamic, yarn, window or restart"),
        ("alibi+yarn", r"yarn scales the angles of rotary positions; use rotary\+yarn"),
        ("learned+window", r"use learned\+restart"),
        ("rotary+window=4", "only a scaling has a factor"),
        ("rotary+yarn=0.5", "the factor must be a number of at least 1"),
        ("rotary+yarn=", "the factor must be a number of at least 1"),
        ("rotary+yarn=inf", "the factor must be a number of at least 1"),
    ],
)
def test_names_that_mean_nothing_are_refused(name: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        parse_position_arm(name, 8)


def test_a_study_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least one position scheme"):
        parse_position_arms([], 8)
