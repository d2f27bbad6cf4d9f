"""The conclusions must be able to fall either way."""

from __future__ import annotations

import pytest

from mercer.studies.arms import parse_arms
from mercer.studies.orders_summary import conclude, difference, judge_equal, judge_lower, summarize
from mercer.studies.records.common import Finding, Interval
from mercer.studies.records.orders import OrdersTrial, Point

NOISE = (0.0, 0.004, -0.003)


def runs(losses: dict[str, float], seeds: int = 3, jitter: float = 1.0) -> list[OrdersTrial]:
    """Runs whose seeds move all arms together and each a little by itself."""
    return [
        OrdersTrial(
            arm=name, seed=seed, parameters=1, steps=1, train_curve=[], heldout_curve=[], seconds=1,
            loss=loss + 0.5 * seed + jitter * NOISE[(seed + place) % 3], bits_per_byte=1.0, tokens_per_second=1.0,
            heldout_blocks=[loss + 0.1 * block + jitter * NOISE[(block + place) % 3] for block in range(9)],
        )
        for place, (name, loss) in enumerate(losses.items()) for seed in range(seeds)
    ]  # fmt: skip


def verdicts(losses: dict[str, float], **options: float) -> dict[str, Finding]:
    found = conclude(runs(losses, **options), parse_arms(losses))  # type: ignore[arg-type]
    return {finding.question: finding for finding in found}


NORM = "Can an L2 norm replace softmax's denominator?"
HELP = "Do higher orders of the Taylor series help?"
REACH = "Does a finite order reach the whole exponential?"
GAIN = "Does a learned gain per head bring Exp · L2 to softmax?"
SUM = "Is the sum the better normaliser for Taylor 2?"


@pytest.mark.parametrize(
    ("l2", "verdict"), [(2.0, "supported"), (1.9, "supported"), (2.1, "refuted"), (2.02, "undecided")]
)
def test_the_norm(l2: float, verdict: str) -> None:
    found = verdicts({"softmax": 2.0, "exp-l2": l2})[NORM]
    assert found.verdict == verdict
    gap = f"{l2 - 2.0:+.3f}".replace("-", "\u2212") if round(l2 - 2.0, 3) else " 0.000"  # what rounds to 0 has no sign
    assert gap in found.text


@pytest.mark.parametrize(
    ("fourth", "helps", "reaches"),
    [(2.0, "supported", "supported"), (2.1, "supported", "refuted"), (2.3, "undecided", "refuted"),
     (2.5, "refuted", "refuted")],
)  # fmt: skip
def test_the_orders(fourth: float, helps: str, reaches: str) -> None:
    found = verdicts({"exp-l2": 2.0, "taylor1-l2": 2.3, "taylor4-l2": fourth})
    assert found[HELP].verdict == helps
    assert found[REACH].verdict == reaches
    assert "from 1 (odd) to 4 (even)" in found[HELP].text


def test_the_gain_and_what_it_closes() -> None:
    found = verdicts({"softmax": 2.0, "exp-l2": 2.2, "exp-l2+gain": 2.05})[GAIN]
    assert found.verdict == "refuted"
    assert "closes 7" in found.text  # three quarters, give or take the noise
    assert verdicts({"softmax": 2.0, "exp-l2": 2.2, "exp-l2+gain": 2.0})[GAIN].verdict == "supported"


def test_sum_against_norm() -> None:
    assert verdicts({"taylor2-l2": 2.2, "taylor2-sum": 2.0})[SUM].verdict == "supported"
    assert verdicts({"taylor2-l2": 2.0, "taylor2-sum": 2.2})[SUM].verdict == "refuted"
    assert verdicts({"taylor2-l2": 2.0, "taylor2-sum": 2.0})[SUM].verdict == "undecided"


def test_one_seed_decides_only_what_is_beyond_luck() -> None:
    assert verdicts({"softmax": 2.0, "exp-l2": 2.2}, seeds=1)[NORM].verdict == "refuted"
    assert verdicts({"softmax": 2.0, "exp-l2": 2.04}, seeds=1)[NORM].verdict == "undecided"
    equal = verdicts({"softmax": 2.0, "exp-l2": 2.0}, seeds=1)[NORM]
    assert equal.verdict == "undecided"  # an equality within luck cannot be shown by one seed
    assert "one seed" in equal.text


@pytest.mark.parametrize(("last", "verdict"), [(2.0, "supported"), (1.9, "refuted"), (2.093, "refuted")])
def test_whether_training_had_settled(last: float, verdict: str) -> None:
    curve = [Point(step=step, loss=loss) for step, loss in ((0, 5.0), (4, 2.3), (8, 2.01), (12, last))]
    trials = [t.model_copy(update={"heldout_curve": curve}) for t in runs({"exp-l2": 3.0, "softmax": last})]
    found = conclude(trials, parse_arms(["exp-l2", "softmax"]))[0 if verdict == "refuted" else -1]
    assert found.question == "Had training settled when this was measured?"
    assert found.verdict == verdict
    change = {2.0: "fell by 0.010", 1.9: "fell by 0.110", 2.093: "rose by 0.083"}[last]
    assert f"From step 8 to step 12 the held-out loss of softmax {change} nats. " in found.text
    assert "above" not in found.text  # it may be the first or the only finding


def test_pairing_uses_the_seeds_both_have() -> None:
    trials = [t for t in runs({"softmax": 2.0, "exp-l2": 2.1}) if (t.arm, t.seed) != ("exp-l2", 1)]
    gap = difference(trials, "exp-l2", "softmax")
    assert gap is not None
    assert (gap.count, gap.over) == (2, "seeds")
    assert gap.mean == pytest.approx(0.1, abs=0.01)
    assert difference(trials, "exp-l2", "elu-sum") is None


def test_summaries_of_nothing_are_nothing() -> None:
    arms = parse_arms(["softmax", "exp-l2"])
    assert summarize([], arms) == []
    assert conclude([], arms) == []


def test_a_mean_without_an_interval_decides_nothing() -> None:
    alone = Interval(mean=5.0, count=1)
    assert judge_equal(alone) == judge_lower(alone) == "undecided"
