"""Measured capacities: what theory says of them, and the record."""

import json

import pytest

from mercer import InvalidArgument
from mercer.core.kernels import Exp, Power, Taylor
from mercer.memory import Capacity, capacity


@pytest.mark.parametrize(
    ("kernel", "dim"), [(Power(1), 16), (Power(1), 32), (Power(2), 16), (Taylor(2), 16), (Exp(), 16)], ids=str
)
def test_measured_capacity_is_near_the_prediction(kernel, dim):
    found = capacity(kernel, dim, trials=5)
    assert found.measured is not None
    assert 0.75 < found.measured / found.predicted < 1.6
    assert max(abs(point.accuracy - point.predicted) for point in found.curve) < 0.2
    assert found.curve[-1].accuracy < 0.45 <= found.curve[-2].accuracy
    assert all(point.lowest <= point.accuracy <= point.highest for point in found.curve)


def test_more_features_hold_more_pairs():
    linear, square, exponential = (
        capacity(kernel, 8, scale=0.5, trials=4).measured for kernel in (Power(1), Power(2), Exp())
    )
    assert linear < square < exponential


def test_noise_costs_capacity():
    clean, noise = (capacity(Exp(), 12, noise=noise, trials=4) for noise in (0.0, 0.6))
    assert noise.measured < clean.measured
    assert noise.predicted < clean.predicted


def test_repeats_from_its_seed_and_reads_its_own_json():
    first, again, other = (capacity(Taylor(1), 8, trials=2, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert [p.accuracy for p in first.curve] != [p.accuracy for p in other.curve]
    assert Capacity.from_json(first.to_json()) == first
    assert json.loads(first.to_json())["curve"][0]["pairs"] == 2
    assert first.features == 9
    assert "Taylor(order=1" in str(first)


def test_says_so_when_recall_did_not_fail():
    found = capacity(Exp(), 8, scale=1.0, trials=1, limit=50)
    assert found.measured is None
    assert found.curve[-1].pairs == 50
    assert found.features is None
    assert found.path == "pairs"
    assert "more than 50 pairs" in str(found)


def test_refusals():
    for options, said in [
        ({"value_dim": 1}, "value_dim must be 2 or more"),
        ({"trials": 0}, "trials must be 1 or more"),
        ({"threshold": 1.0}, "threshold must lie between"),
        ({"noise": -0.1}, "noise"),
        ({"limit": 1}, "limit must be 2"),
    ]:
        with pytest.raises(InvalidArgument, match=said):
            capacity(Exp(), 8, **options)
