"""The prediction's parts against closed forms and direct draws."""

import math

import numpy as np
import pytest
import torch

from mercer.core.feature_maps import ExpFeatures
from mercer.core.kernels import Elu, Exp, Gaussian, Power, Taylor
from mercer.core.random_features import PositiveRandomFeatures, TrigonometricRandomFeatures
from mercer.core.reference import kernel_value
from mercer.memory.theory import noisy, on_sphere, overlaps, predicted_accuracy, predicted_capacity


@pytest.mark.parametrize("dim", [3, 16, 64])
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_effective_features_of_powers_have_a_closed_form(dim, degree):
    found = overlaps(Power(degree), dim, dim**-0.5)
    expected = math.prod(dim + 2 * k for k in range(degree)) / math.prod(range(1, 2 * degree, 2))
    assert found.effective_features == pytest.approx(expected, rel=1e-5)
    assert found.effective_features <= Power(degree).feature_dim(dim) * (1 + 1e-5)
    assert found.method == "quadrature"


@pytest.mark.parametrize(
    "kernel", [PositiveRandomFeatures(24), TrigonometricRandomFeatures(24), ExpFeatures()], ids=str
)
def test_overlaps_of_kernels_that_are_defined_by_features(kernel, generator):
    dim, scale = 6, 0.2
    keys, others = (on_sphere(20_000, dim, generator, math.sqrt(dim)) for _ in range(2))
    own, cross = (kernel_value(kernel, keys, k, scale) for k in (keys, others))
    found = overlaps(kernel, dim, scale)
    assert found.method == "sampled"
    assert (found.mean_square / found.signal**2) == pytest.approx(
        float(cross.square().mean() / own.mean() ** 2), rel=0.05
    )


@pytest.mark.parametrize("kernel", [Exp(), Gaussian(), Taylor(3), Elu()], ids=str)
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_overlaps_are_those_of_drawn_keys(kernel, noise, generator):
    dim, scale = 6, 0.2
    keys, others = (on_sphere(20_000, dim, generator, math.sqrt(dim)) for _ in range(2))
    queries = kernel.map_query(noisy(keys, noise, generator)) * scale
    own, cross = (kernel.profile((queries * kernel.map_key(k)).sum(-1)) for k in (keys, others))
    found = overlaps(kernel, dim, scale, noise)
    # The quadrature takes the noisy cosine at its typical value, so the signal is only near its mean then.
    assert (found.mean_square / found.signal**2) == pytest.approx(
        float(cross.square().mean() / own.mean() ** 2), rel=0.02 if not noise else 0.15
    )
    mean = float((found.weights * found.values).sum()) / found.signal
    assert mean == pytest.approx(float(cross.mean() / own.mean()), rel=0.02 if not noise else 0.1)
    assert found.weights.sum() == pytest.approx(1)


def test_exponential_memories_grow_exponentially_with_the_dimension():
    growth = [math.log(overlaps(Exp(), dim, 1.0).effective_features) / dim for dim in (8, 16, 32, 64)]
    assert all(rate > 0.85 for rate in growth)  # ln F ~ 0.91 D: the saddle point of 2t + ln(1 - t^2) / 2
    default = [math.log(overlaps(Exp(), dim, dim**-0.5).effective_features) for dim in (64, 256)]
    assert default == pytest.approx([2 * math.sqrt(64) - 2, 2 * math.sqrt(256) - 2], rel=0.02)


def test_prediction_falls_and_the_capacity_is_where():
    found = overlaps(Taylor(2), 16, 0.25)
    curve = [predicted_accuracy(found, 16, n) for n in (1, 2, 8, 32, 128, 512, 10_000)]
    assert curve[0] == 1
    assert (np.diff(curve) < 0).all()
    assert curve[-1] < 0.01
    n = predicted_capacity(found, 16, 0.9)
    assert predicted_accuracy(found, 16, n) >= 0.9 > predicted_accuracy(found, 16, n + 1)
    assert predicted_capacity(found, 16, 0.9, limit=4) is None


def test_noise_keeps_the_length(generator):
    keys = on_sphere(50, 7, generator, 3.0)
    moved = noisy(keys, 0.4, generator)
    torch.testing.assert_close(moved.norm(dim=-1), torch.full((50,), 3.0, dtype=torch.float64))
    assert noisy(keys, 0.0, generator) is keys
