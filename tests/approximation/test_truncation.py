import math

import pytest
import torch

from mercer.approximation import approximation_error, gaussian_inputs, truncation_error, truncation_order
from mercer.core.kernels import Taylor
from mercer.core.structures import Causal
from mercer.errors import InvalidArgument


@pytest.mark.parametrize(("score", "order"), [(2, 8), (5, 13), (8, 18), (12, 24), (-2, 10), (-5, 21), (-8, 31)])
def test_the_smallest_order_within_a_thousandth(score: float, order: int) -> None:
    assert truncation_order(score, score, 1e-3) == order
    assert truncation_order(min(score, 0), max(score, 0), 1e-3) == order


def test_a_range_needs_what_its_worse_end_needs() -> None:
    assert truncation_order(-5, 8, 1e-3) == 21
    assert truncation_order(-2, 8, 1e-3) == 18
    assert truncation_order(0, 0, 1e-3) == 0
    assert truncation_order(-300, 0, 1e-3) is None


@pytest.mark.parametrize("order", [0, 1, 4, 7, 12])
@pytest.mark.parametrize("score", [-9.0, -1.5, -0.01, 0.3, 6.0])
def test_the_error_is_that_of_the_series(score: float, order: int) -> None:
    # summed as integers over a common denominator, so that nothing cancels
    from fractions import Fraction

    exact = sum(Fraction(score) ** n / math.factorial(n) for n in range(order + 1))
    expected = abs(float(exact) * math.exp(-score) - 1)
    found = truncation_error(torch.tensor([score]), order)
    assert float(found) == pytest.approx(expected, rel=1e-6, abs=1e-13)


def test_the_error_grows_away_from_zero() -> None:
    for order in range(8):
        for side in (-1, 1):
            error = truncation_error(side * torch.linspace(0, 20, 400, dtype=torch.float64), order)
            assert bool((error.diff() > -1e-12).all())


def test_total_variation_stays_below_its_bound() -> None:
    inputs = gaussian_inputs(64, 8, 1.0, heads=2, seed=3)
    for order in (16, 18, 20, 24):
        found = approximation_error(*inputs, Taylor(order), structure=Causal(), rows=None)
        ends = torch.tensor([found.scores.low, found.scores.high])
        worst = float(truncation_error(ends, order).max())
        assert worst < 1
        assert found.variation is not None
        assert 0 < found.variation.value <= worst / (1 - worst)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"low 1 and high 0 must be finite and in order"):
        truncation_order(1, 0, 1e-3)
    with pytest.raises(InvalidArgument, match="tolerance must be above 0, not 0"):
        truncation_order(0, 1, 0)
    with pytest.raises(InvalidArgument, match="order must be an integer of 0 or more, not -1"):
        truncation_error(torch.zeros(1), -1)
