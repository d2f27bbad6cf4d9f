import math

import pytest

from mercer.core.student import t_probability, t_quantile
from mercer.errors import InvalidArgument
from mercer.studies.statistics import mean_interval, paired_interval


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (7, 2.36462), (30, 2.04227)]
)
def test_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert t_quantile(0.95, freedom) == pytest.approx(quantile, rel=1e-5)
    assert t_probability(t_quantile(0.8, freedom), freedom) == pytest.approx(0.8, abs=1e-10)


def test_an_interval_by_hand() -> None:
    # mean 2, standard deviation 1, t(2) = 4.30265
    found = mean_interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.low == pytest.approx(2 - 4.302653 / math.sqrt(3), rel=1e-6)
    assert found.high == pytest.approx(2 + 4.302653 / math.sqrt(3), rel=1e-6)


def test_one_sample_has_no_interval() -> None:
    found = mean_interval([1.5])
    assert (found.mean, found.low, found.high, found.decided) == (1.5, None, None, False)


def test_pairing_cancels_what_is_shared() -> None:
    shared = [1.0, 5.0, 9.0, 2.0]
    found = paired_interval([x + 0.25 for x in shared], shared)
    assert found.mean == pytest.approx(0.25)
    assert found.low == pytest.approx(0.25)
    assert found.high == pytest.approx(0.25)


def test_wrong_counts_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="2 samples cannot be paired with 1"):
        paired_interval([1.0, 2.0], [1.0])
    with pytest.raises(InvalidArgument, match="at least one sample"):
        mean_interval([])
    with pytest.raises(InvalidArgument, match="at least 1 degree"):
        t_probability(1.0, 0)
    with pytest.raises(InvalidArgument, match="between 0 and 1"):
        t_quantile(1.0, 3)
