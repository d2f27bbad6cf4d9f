"""What the benchmarks count and compute from their measurements, against numbers worked out by hand."""

import math

import pytest
import torch
from benchmarks._clock import Spread, interleave, ratios
from benchmarks._machine import Limits
from benchmarks._work import Shape, least_bytes, least_flops, pair_flops, state_flops, taylor_features

from mercer import Causal, Taylor, plan
from mercer.core.kernels import Elu


def test_operations_of_the_state():
    """16k tokens, 8 heads of 64: S += k v^T and q S are 2 * 64 * 64 operations each a token and head."""
    shape = Shape(1, 8, 16_384, 64)
    products = 16_384 * 8 * (2 * 64 * 64 + 2 * 64 * 64)
    denominators = 16_384 * 8 * (2 * 64 + 2 * 64)
    assert state_flops(shape, 64, backward=False) == products + denominators
    assert products == pytest.approx(2.15e9, rel=0.01)
    # Backward: S again, dq = S do, dk = G v, dv = G^T k, G += q do^T; as many for the denominator's column.
    assert state_flops(shape, 64, backward=True) == (products + denominators) * (2 + 5) // 2


def test_operations_of_pairs():
    """3 tokens see 6 pairs; a pair is D multiplications and additions for its score and as many for its value."""
    shape = Shape(2, 5, 3, 4)
    assert pair_flops(shape, backward=False) == 2 * 5 * 6 * (2 * 4 + 2 * 4)
    assert pair_flops(shape, backward=True) == 2 * 5 * 6 * (4 * 4 + 5 * 2 * 4)


@pytest.mark.parametrize("length", [1, 64, 1000])
def test_operations_of_pairs_are_the_plan_s(length: int):
    shape = Shape(2, 3, length, 8)
    x = torch.empty(2, 3, length, 8, device="meta")
    assert plan(x, x, x, structure=Causal(), form="chunked", path="pairs").flops == pair_flops(shape, backward=False)


@pytest.mark.parametrize(("kernel", "features"), [(Elu(), 64), (Taylor(2), taylor_features(64, 2))])
def test_the_cheaper_way_is_counted(kernel: Elu | Taylor, features: int):
    assert kernel.feature_dim(64) == features
    short, long = Shape(1, 1, 16, 64), Shape(1, 1, 100_000, 64)
    assert least_flops(short, features, False) == pair_flops(short, False) < state_flops(short, features, False)
    assert least_flops(long, features, True) == state_flops(long, features, True) < pair_flops(long, True)
    assert least_flops(long, None, True) == pair_flops(long, True)


def test_bytes():
    """Queries, keys, values and outputs once: 67 MB at 16k tokens, 8 heads of 64 in bfloat16, 134 in float32."""
    shape = Shape(1, 8, 16_384, 64)
    assert least_bytes(shape, 2, backward=False) == 4 * 16_384 * 8 * 64 * 2 == 67_108_864
    assert least_bytes(shape, 4, backward=False) == 134_217_728
    assert least_bytes(shape, 4, backward=True) == 3 * 134_217_728


def test_the_limit_is_the_slower_of_products_and_memory():
    limits = Limits({"float32": {"a": 1e9, "b": 2e9}}, copy=10.0, read=30.0)
    assert limits.least_seconds(4e9, 3.0, "float32") == 2.0
    assert limits.least_seconds(4e9, 90.0, "float32") == 3.0
    better = limits.merge(Limits({"float32": {"a": 4e9}}, copy=40.0, read=20.0))
    assert (better.flops("float32"), better.copy, better.read) == (4e9, 40.0, 30.0)
    assert better.products["float32"]["b"] == 2e9


def test_spreads_and_ratios():
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0)
    assert ratios([1.0, 2.0, 4.0], [3.0, 4.0, 4.0]).median == 2.0


def test_contestants_take_turns_and_slow_ones_sit_out():
    said: list[str] = []
    calls = {name: lambda name=name: said.append(name) for name in "abc"}
    times = interleave(calls, 4, budget=math.inf, device=torch.device("cpu"))
    assert said[3:] == list("abc" + "cba") * 2  # after one untimed call each
    assert {name: len(spent) for name, spent in times.items()} == {"a": 4, "b": 4, "c": 4}
    assert all(len(spent) == 3 for spent in interleave(calls, 9, budget=0.0, device=torch.device("cpu")).values())
