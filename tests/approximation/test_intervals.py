"""Intervals hold what they promise: checked by drawing again and again from something known."""

import math

import pytest
import torch

from mercer.approximation.intervals import estimate


def test_one_row_population_and_one_draw_have_no_interval() -> None:
    found = estimate(torch.tensor([[1.0, 3.0]]), torch.tensor([2.0, 2.0]), 2, 0.95, root=True)
    assert (found.value, found.low, found.high, found.over) == (1.0, None, None, "nothing")
    alone = estimate(torch.tensor([[1.0]]), torch.tensor([4.0]), 10, 0.95, root=True)
    assert (alone.value, alone.low, alone.over) == (0.5, None, "rows")


def test_an_interval_over_draws_by_hand() -> None:
    # ratios 1, 4, 9: errors 1, 2, 3, mean 2, standard deviation 1, t(2) = 4.302653
    found = estimate(torch.tensor([[1.0], [4.0], [9.0]], dtype=torch.float64), torch.ones(1), 1, 0.95, root=True)
    half = 4.302653 / math.sqrt(3) / 2
    assert found.value == pytest.approx(2)
    assert found.low == pytest.approx(2 * math.exp(-half), rel=1e-6)
    assert found.high == pytest.approx(2 * math.exp(half), rel=1e-6)
    assert found.over == "draws"


def test_nothing_wrong_is_zero() -> None:
    found = estimate(torch.zeros(1, 5), torch.ones(5), 10, 0.95, root=True)
    assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)
    assert estimate(torch.zeros(1, 5), torch.zeros(5), 10, 0.95, root=True).value == 0.0


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_rows_drawn_again_cover_the_whole(root: bool, confidence: float) -> None:
    """400 samples of 60 of 200 rows with lognormal errors. At the level promised, fewer than its coverage less 4 % or
    more than it plus 4 % would happen by chance about once in 20,000 runs (binomial, 4 % being 2 to 3.7 deviations);
    the seed is fixed."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.rand(200, generator=generator, dtype=torch.float64) + 0.5
    part = whole * (0.6 * torch.randn(200, generator=generator, dtype=torch.float64)).exp()
    truth = float(part.sum() / whole.sum()) ** (0.5 if root else 1.0)
    inside = 0
    for _ in range(400):
        chosen = torch.randperm(200, generator=generator)[:60]
        found = estimate(part[None, chosen], whole[chosen], 200, confidence, root=root)
        assert found.low is not None
        assert found.high is not None
        inside += found.low <= truth <= found.high
    assert abs(inside / 400 - confidence) < 0.04 + (0.02 if confidence < 0.9 else 0)


def test_rows_and_draws_together_cover_the_mean() -> None:
    """Errors of a draw vary by a factor of the draw and one of the row; the truth is over all of both."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.ones(300, dtype=torch.float64)
    row = (0.5 * torch.randn(300, generator=generator, dtype=torch.float64)).exp()
    truth = math.sqrt(float(row.mean())) * math.exp(0.3**2 / 2)
    inside = 0
    for _ in range(300):
        chosen = torch.randperm(300, generator=generator)[:50]
        draw = (0.6 * torch.randn(6, 1, generator=generator, dtype=torch.float64)).exp()
        found = estimate(draw * row[chosen], whole[chosen], 300, 0.95, root=True)
        assert found.over == "rows and draws"
        assert found.low is not None
        assert found.high is not None
        inside += found.low <= truth <= found.high
    assert 0.91 < inside / 300 <= 1
