"""What is proposed to reach a target does reach it, and what is unreachable is said to be."""

from __future__ import annotations

import math

import pytest
import torch

from mercer import approximation_error
from mercer.approximation import NeededFeatures, NeededOrder, gaussian_inputs, needed
from mercer.approximation.needed import fitted_exponent, ladder
from mercer.core.kernels import Taylor
from mercer.core.normalizers import L2
from mercer.core.random_features import PositiveRandomFeatures, RandomFeatures, TrigonometricRandomFeatures
from mercer.core.structures import Causal


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("target", [0.1, 1e-4])
def test_the_order_is_the_first_that_reaches_the_target(target: float, signed: bool) -> None:
    inputs = gaussian_inputs(96, 8, 1.5, seed=2)
    found = approximation_error(*inputs, Taylor(2, signed=signed), structure=Causal(), rows=None, target=target)
    wanted = found.needed
    assert isinstance(wanted, NeededOrder)
    assert wanted.even_only is not signed
    assert wanted.order is not None
    step = 1 if signed else 2

    def error(order: int) -> float:
        return approximation_error(*inputs, Taylor(order, signed=signed), structure=Causal(), rows=None).error.value

    assert error(wanted.order) == pytest.approx(wanted.error)
    assert error(wanted.order) <= target
    assert error(wanted.order + step) <= target
    below = [error(order) for order in range(0, wanted.order, step)]
    assert all(a > target or b > target for a, b in zip(below, [*below[1:], wanted.error], strict=True))
    assert wanted.pointwise is not None
    assert wanted.order <= wanted.pointwise
    assert f"order {wanted.order}" in str(found)


def test_a_target_beyond_every_order_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needed, "ORDER_LIMIT", 6)
    found = approximation_error(*gaussian_inputs(64, 8, 4.0), Taylor(2), target=1e-3)
    assert isinstance(found.needed, NeededOrder)
    assert found.needed.order is None
    assert found.needed.error > 1e-3
    assert "no even order up to 6 brings the error down to 0.001: at the last it is" in str(found)
    free = approximation_error(*gaussian_inputs(64, 8, 4.0), Taylor(1), normalizer=L2(), target=1e-3)
    assert isinstance(free.needed, NeededOrder)
    assert not free.needed.even_only


@pytest.mark.parametrize(
    "kernel",
    [
        PositiveRandomFeatures(128, orthogonal=False),
        PositiveRandomFeatures(128),
        PositiveRandomFeatures(128, hyperbolic=True),
        TrigonometricRandomFeatures(128, signed=True),
    ],
)
def test_small_scores_follow_the_law_and_the_proposal_is_measured(kernel: RandomFeatures) -> None:
    inputs = gaussian_inputs(128, 8, 0.1, seed=1)
    first = approximation_error(*inputs, kernel, structure=Causal(), rows=None, target=0.4)
    assert isinstance(first.needed, NeededFeatures)
    law = first.needed
    assert law.holds
    assert law.exponent.low is not None
    assert law.exponent.high is not None
    assert law.exponent.low < law.exponent.value < law.exponent.high
    assert law.count == law.counts[0]  # already there
    # a target that only more features than were measured can reach
    target = law.errors[-1] / 1.3
    found = approximation_error(*inputs, kernel, structure=Causal(), rows=None, target=target).needed
    assert isinstance(found, NeededFeatures)
    assert found.count is not None
    assert found.count > found.counts[-1]
    assert found.count % kernel.features_per_direction == 0
    assert found.count == pytest.approx(found.predicted.value, abs=kernel.features_per_direction)
    assert found.checked == pytest.approx(target, rel=0.25)


def test_long_scores_do_not_follow_the_law_and_nothing_is_proposed() -> None:
    found = approximation_error(
        *gaussian_inputs(96, 16, 3.0), PositiveRandomFeatures(64), structure=Causal(), rows=None, target=0.05
    )
    law = found.needed
    assert isinstance(law, NeededFeatures)
    assert (law.holds, law.count, law.checked) == (False, None, None)
    assert "which is not the law m^(-1/2): how many would be enough cannot be said" in str(found)


def test_too_many_features_are_said_to_be_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needed, "FEATURE_LIMIT", 2000)
    inputs = gaussian_inputs(96, 8, 0.1)
    found = approximation_error(*inputs, PositiveRandomFeatures(64), rows=None, target=1e-3)
    assert isinstance(found.needed, NeededFeatures)
    assert found.needed.holds
    assert found.needed.count is None
    assert "features, above the limit of 2,000" in str(found)


def test_the_exponent_is_fitted_to_all_draws() -> None:
    counts = [16, 32, 64, 128]
    m = torch.tensor(counts, dtype=torch.float64).unsqueeze(1)
    generator = torch.Generator().manual_seed(0)
    noise = (0.1 * torch.randn(4, 5, generator=generator, dtype=torch.float64)).exp()
    exact = fitted_exponent(counts, (3 * m**-0.5).expand(4, 5), 0.95)
    assert exact.value == pytest.approx(0.5)
    assert exact.low == pytest.approx(0.5)
    found = fitted_exponent(counts, 3 * m**-0.3 * noise, 0.95)
    x, y = m.log().expand(4, 5).flatten(), (3 * m**-0.3 * noise).log().flatten()
    fit = torch.linalg.lstsq(torch.stack((x, torch.ones_like(x)), 1), y.unsqueeze(1)).solution
    assert found.value == pytest.approx(-float(fit[0]))
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.3 < found.high
    assert found.high < 0.4


def test_the_ladder_doubles_from_a_whole_block() -> None:
    assert ladder(PositiveRandomFeatures(256, orthogonal=False), 64) == [32, 64, 128, 256, 512]
    assert ladder(PositiveRandomFeatures(256), 64) == [64, 128, 256, 512, 1024]
    assert ladder(TrigonometricRandomFeatures(64), 64) == [128, 256, 512, 1024, 2048]
    assert ladder(PositiveRandomFeatures(100, orthogonal=False), 4) == [25, 50, 100, 200, 400]
    assert ladder(PositiveRandomFeatures(7, orthogonal=False), 4) == [8, 16, 32, 64, 128]
    assert math.prod(ladder(PositiveRandomFeatures(9, orthogonal=False), 4)) == 9**5 * 2**10


def test_the_highest_order_counts_if_the_next_confirms_it(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = gaussian_inputs(64, 8, 1.0)
    whole = approximation_error(*inputs, Taylor(2), target=1e-3).needed
    assert isinstance(whole, NeededOrder)
    assert whole.order is not None
    monkeypatch.setattr(needed, "ORDER_LIMIT", whole.order)
    last = approximation_error(*inputs, Taylor(2), target=1e-3).needed
    assert isinstance(last, NeededOrder)
    assert (last.order, last.error) == (whole.order, whole.error)
    monkeypatch.setattr(needed, "ORDER_LIMIT", whole.order - 2)
    short = approximation_error(*inputs, Taylor(2), target=1e-3).needed
    assert isinstance(short, NeededOrder)
    assert short.order is None
    order = approximation_error(*inputs, Taylor(whole.order - 2)).error.value
    assert short.error == pytest.approx(order)
