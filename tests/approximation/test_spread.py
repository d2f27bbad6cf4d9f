"""The variance of random features: theory beside draws, over pairs as softmax attends to them."""

from __future__ import annotations

import pytest
import torch

from mercer import approximation_error
from mercer.approximation import gaussian_inputs
from mercer.approximation.comparison import attended_pairs
from mercer.approximation.rows import Rows
from mercer.core.feature_variance import feature_mean, feature_variance
from mercer.core.merged import merge
from mercer.core.random_features import PositiveRandomFeatures, RandomFeatures, TrigonometricRandomFeatures
from mercer.core.structures import Causal, Padding


def test_pairs_are_drawn_as_softmax_attends() -> None:
    """Frequencies of 60,000 pairs of 6 queries and 6 keys. Each has a standard deviation of at most 0.002; one of 72
    beyond 5 of them has a chance of 4e-5."""
    q, k, v = gaussian_inputs(6, 4, 1.0, heads=2, dtype=torch.float64)
    mask = torch.ones(1, 6, dtype=torch.bool)
    mask[0, 2] = False
    rows = Rows(q, k, v, merge(Causal() & Padding(mask)), torch.arange(6))
    query, key = attended_pairs(rows, 0.5, 60_000, seed=0)
    score = (0.5 * q @ k.mT).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril() | ~mask, -torch.inf)
    expected = score.softmax(-1) / 10  # 2 heads of 5 rows that are there
    for h in range(2):
        for i in (0, 1, 3, 4, 5):
            here = (query == q[0, h, i]).all(-1)
            for j in range(6):
                found = float((here & (key == k[0, h, j]).all(-1)).double().mean())
                assert found == pytest.approx(float(expected[0, h, i, j]), abs=0.01)
    assert not bool((key == 0).all(-1).any())


@pytest.mark.parametrize(
    "kernel",
    [
        PositiveRandomFeatures(64),
        PositiveRandomFeatures(64, orthogonal=False),
        PositiveRandomFeatures(64, hyperbolic=True),
        PositiveRandomFeatures(64, norms="sqrt"),
        TrigonometricRandomFeatures(64, signed=True),
    ],
)
def test_theory_and_draws_agree_where_the_tail_is_light(kernel: RandomFeatures) -> None:
    inputs = gaussian_inputs(64, 8, 0.1, seed=1, dtype=torch.float64)
    found = approximation_error(*inputs, kernel, structure=Causal(), rows=None, draws=40, confidence=0.999)
    assert found.spread is not None
    assert (found.spread.draws, found.draws, found.spread.pairs) == (40, 40, 2048)
    assert found.spread.measured.low is not None
    assert found.spread.measured.high is not None
    assert found.spread.measured.low < found.spread.theory < found.spread.measured.high


def test_theory_is_the_mean_of_the_relative_variance() -> None:
    q, k, v = gaussian_inputs(20, 8, 0.1, seed=4, dtype=torch.float64)
    kernel = PositiveRandomFeatures(32)
    found = approximation_error(q, k, v, kernel, structure=Causal(), rows=None, draws=2, seed=9)
    pairs = attended_pairs(Rows(q, k, v, merge(Causal()), torch.arange(20)), 8**-0.5, 2048, 9)
    relative = feature_variance(kernel, *pairs) / feature_mean(kernel, *pairs).square()
    assert found.spread is not None
    assert found.spread.theory == pytest.approx(float(relative.mean()))
    # and that is what softmax's weights make of all pairs: mean over rows of sum_j p_ij var_ij
    every = feature_variance(kernel, q[0, 0, :, None], k[0, 0]) / feature_mean(kernel, q[0, 0, :, None], k[0, 0]) ** 2
    hidden = ~torch.ones(20, 20, dtype=torch.bool).tril()
    share = (q[0, 0] @ k[0, 0].T * 8**-0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    assert found.spread.theory == pytest.approx(float((share * every).sum(-1).mean()), rel=0.1)


def test_more_features_scatter_less() -> None:
    inputs = gaussian_inputs(64, 8, 0.3, seed=1)
    few, many = (
        approximation_error(*inputs, PositiveRandomFeatures(n, orthogonal=False), draws=2).spread for n in (16, 64)
    )
    assert few is not None
    assert many is not None
    assert few.theory == pytest.approx(4 * many.theory)
