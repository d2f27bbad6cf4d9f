"""Leave-one-out choice of the scale."""

import numpy as np
import pytest
import torch

from mercer import InvalidArgument, KernelRegression, Unsupported, kernel_regression
from mercer.core.feature_maps import Dpfp
from mercer.core.kernels import Elu, Exp, Gaussian, Power, Taylor
from mercer.core.random_features import PositiveRandomFeatures
from mercer.regression import scale as module
from mercer.regression.scale import choose_scale, leave_one_out


def data(samples=40):
    rng = np.random.default_rng(6)
    X = np.sort(rng.uniform(-2, 2, (samples, 1)), 0)
    return X, np.sin(3 * X[:, 0]) + 0.1 * rng.normal(size=samples), rng.uniform(0.5, 2, samples)


@pytest.mark.parametrize("kernel", [Gaussian(), Exp(), Taylor(2), Taylor(6)], ids=str)
def test_errors_are_those_of_refitting_without_each(kernel, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 40 * 7)  # blocks of seven rows
    X, y, w = data()
    scales = [0.1, 2.0, 500.0]
    got = leave_one_out(kernel, *(torch.tensor(a) for a in (X, y[:, None], w)), scales)
    for scale, error in zip(scales, got, strict=True):
        others = [np.arange(len(X)) != i for i in range(len(X))]
        out = [
            kernel_regression(X[o], y[o], X[~o], kernel=kernel, scale=scale, sample_weight=w[o]).item() for o in others
        ]
        assert error == pytest.approx(float((w * (np.array(out) - y) ** 2).sum() / w.sum()), rel=1e-8)


def test_chooses_the_smallest_error_it_reports():
    X, y, w = data()
    model = KernelRegression(scale="loo").fit(X, y, sample_weight=w)
    assert model.scale_ == model.loo_scales_[model.loo_errors_.argmin()]
    assert (np.diff(model.loo_scales_) > 0).all()
    best = model.loo_errors_.min()
    # A dense grid finds nothing much better, and the unscaled kernel is much worse.
    dense = leave_one_out(
        Gaussian(), *(torch.tensor(a) for a in (X, y[:, None], w)), np.geomspace(0.01, 1e5, 400).tolist()
    )
    assert best <= 1.001 * min(dense)
    assert best < 0.2 * leave_one_out(Gaussian(), *(torch.tensor(a) for a in (X, y[:, None], w)), [1.0])[0]


@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e6])
def test_adapts_to_the_units_of_the_features(factor):
    X, y, _ = data()
    reference = KernelRegression(scale="loo").fit(X, y)
    model = KernelRegression(scale="loo").fit(X * factor, y)
    assert model.scale_ * factor**2 == pytest.approx(reference.scale_, rel=1e-6)


def test_a_narrow_kernel_tends_to_the_nearest_other_sample():
    X, y = torch.tensor([[0.0], [1.0], [3.0]]).double(), torch.tensor([[1.0], [2.0], [5.0]]).double()
    (error,) = leave_one_out(Gaussian(), X, y, torch.ones(3).double(), [1e6])
    assert error == pytest.approx((1 + 1 + 9) / 3)


def test_refuses_what_it_cannot_choose():
    X, y, _ = data()
    for kernel in (Elu(), Power(2), Dpfp()):
        with pytest.raises(Unsupported, match="cancels in the average"):
            KernelRegression(kernel, scale="loo").fit(X, y)
    with pytest.raises(Unsupported, match="depend on the scale"):
        KernelRegression(PositiveRandomFeatures(16), scale="loo").fit(X, y)
    with pytest.raises(InvalidArgument, match="at least 2 samples"):
        KernelRegression(scale="loo").fit(X[:1], y[:1])
    one = torch.ones(3, 1, dtype=torch.float64)
    chosen, _, errors = choose_scale(Gaussian(), one, one, one[:, 0])  # identical samples: any scale will do
    assert chosen > 0
    assert max(errors) == 0
