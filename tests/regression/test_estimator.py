"""KernelRegression by scikit-learn's conventions, and its learning in parts."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from mercer import FeatureState, InvalidArgument, KernelRegression, Unsupported, kernel_regression
from mercer.core.feature_maps import ExpFeatures
from mercer.core.kernels import Elu, Exp, Gaussian, Power, Taylor
from mercer.core.random_features import PositiveRandomFeatures


def data(samples=60, features=2):
    rng = np.random.default_rng(5)
    X = rng.normal(size=(samples, features))
    return X, np.sin(2 * X[:, 0]) + 0.1 * rng.normal(size=samples), rng.uniform(0.5, 2, samples)


def _checks():
    estimator_checks = pytest.importorskip("sklearn.utils.estimator_checks")
    # It does not inherit from scikit-learn's base classes, on purpose: the generator says so with a warning.
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = list(estimator_checks.estimator_checks_generator(KernelRegression()))
        # A parabola of the inner product cannot fit the check's data; that check asks for a good fit.
        found += [
            (e, c)
            for e, c in estimator_checks.estimator_checks_generator(KernelRegression(Taylor(2)))
            if _name(c) != "check_regressors_train"
        ]
    return found


def _name(check):
    return getattr(check, "func", check).__name__


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore:Estimator KernelRegression does not inherit:UserWarning")
def test_passes_the_checks_of_scikit_learn():
    from unittest import SkipTest

    checks = _checks()
    assert len(checks) > 80
    failed = []
    for estimator, check in checks:
        try:
            check(estimator)
        except SkipTest:  # needs pandas or an array API
            continue
        except Exception as error:  # noqa: BLE001 - whatever a check raises is reported, all together
            failed.append(f"{_name(check)} of {estimator}: {error!r}")
    assert not failed, "\n".join(failed)


@pytest.mark.peers
def test_clone_pipeline_and_search():
    from sklearn.base import clone, is_regressor
    from sklearn.model_selection import GridSearchCV, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    X, y, _ = data()
    model = KernelRegression(Taylor(4), scale=0.3)
    twin = clone(model)
    assert twin is not model
    assert twin.get_params() == model.get_params()
    assert is_regressor(model)
    pipeline = make_pipeline(StandardScaler(), KernelRegression())
    search = GridSearchCV(
        pipeline, {"kernelregression__kernel": [Gaussian(), Exp()], "kernelregression__scale": [0.01, 1.0, 20.0]}, cv=3
    ).fit(X, y)
    assert search.best_params_ == {"kernelregression__kernel": Gaussian(), "kernelregression__scale": 20.0}
    assert search.best_score_ > 0.6
    assert cross_val_score(pipeline, X, y, cv=3).shape == (3,)


@pytest.mark.peers
def test_score_is_r2():
    from sklearn.metrics import r2_score

    X, y, w = data()
    y = np.stack((y, X[:, 1], np.ones(len(y))), 1)
    model = KernelRegression(scale=3.0).fit(X, y)
    for weight in (None, w):
        expected = r2_score(y[:, :2], model.predict(X)[:, :2], sample_weight=weight, multioutput="raw_values")
        got = model.score(X, y, sample_weight=weight)
        assert got == pytest.approx(
            (expected.sum() + (1.0 if (model.predict(X)[:, 2] == 1).all() else 0.0)) / 3, rel=1e-10
        )


def test_does_not_import_scikit_learn():
    script = """
import sys, mercer
mercer.KernelRegression().fit([[0.0], [1.0]], [0.0, 1.0]).predict([[0.5]])
try:
    mercer.KernelRegression().predict([[0.5]])
except mercer.InvalidArgument:
    assert "sklearn" not in sys.modules
else:
    raise AssertionError("predicted without fit")
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    "kernel", [None, Exp(), Taylor(2), Taylor(4), Elu(), Power(2), PositiveRandomFeatures(8), ExpFeatures()], ids=str
)
@pytest.mark.parametrize("path", ["auto", "pairs"])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_parts_equal_the_whole(kernel, path, scale):
    X, y, w = data()
    queries = X[:9] + 0.3
    expected = kernel_regression(X, y, queries, kernel=kernel, sample_weight=w, scale=scale)
    whole = KernelRegression(kernel, path=path, scale=scale).fit(X, y, sample_weight=w)
    parts = KernelRegression(kernel, path=path, scale=scale)
    for at in (slice(0, 1), slice(1, 30), slice(30, 60)):
        parts.partial_fit(X[at], y[at], sample_weight=w[at])
    np.testing.assert_allclose(whole.predict(queries), expected, rtol=1e-10)
    np.testing.assert_allclose(parts.predict(queries), expected, rtol=1e-10)


def test_a_finite_kernel_keeps_a_state_of_fixed_size():
    X, y, _ = data(200)
    model = KernelRegression(Taylor(4)).partial_fit(X[:5], y[:5])
    assert model.state_ is None  # five samples are smaller than 15 features
    model.partial_fit(X[5:100], y[5:100])
    size = model.state_.nbytes
    before = model.state_
    assert isinstance(before, FeatureState)
    kept = before.features.clone()
    model.partial_fit(X[100:], y[100:])
    assert model.state_.nbytes == size
    assert torch.equal(before.features, kept)
    assert int(model.state_.length) == 200
    assert KernelRegression(Taylor(4), path="pairs").fit(X, y).state_ is None
    assert KernelRegression(Taylor(4), path="features").fit(X[:2], y[:2]).state_ is not None


def test_fit_forgets():
    X, y, _ = data()
    for kernel in (Gaussian(), Elu()):
        model = KernelRegression(kernel).fit(X, y)
        model.partial_fit(X, -y)
        np.testing.assert_array_equal(model.fit(X, y).predict(X), KernelRegression(kernel).fit(X, y).predict(X))


def test_a_failed_fit_leaves_nothing_half_learned():
    X, y, w = data()
    model = KernelRegression(scale="loo").fit(X, y)
    with pytest.raises(InvalidArgument, match="sample_weight"):
        model.set_params(scale=1.0).fit(X, y, sample_weight=-w)
    with pytest.raises(InvalidArgument, match="not fitted"):
        model.predict(X)
    assert not hasattr(model, "loo_scales_")
    np.testing.assert_array_equal(model.partial_fit(X, y).predict(X), KernelRegression(scale=1.0).fit(X, y).predict(X))
    with pytest.raises(InvalidArgument, match="sample_weight"):
        model.partial_fit(X, y, sample_weight=-w)
    np.testing.assert_array_equal(model.predict(X), KernelRegression(scale=1.0).fit(X, y).predict(X))


def test_names_of_columns_are_kept():
    class Frame:  # as much of a data frame as an estimator looks at
        columns = ("width", "height")

        def __array__(self, dtype=None, copy=None):
            return data()[0]

    model = KernelRegression().fit(Frame(), data()[1])
    assert model.feature_names_in_.tolist() == ["width", "height"]
    assert not hasattr(model.fit(*data()[:2]), "feature_names_in_")


def test_tensors_and_arrays_mix():
    X, y, _ = data()
    model = KernelRegression().fit(torch.tensor(X), torch.tensor(y, dtype=torch.float32))
    assert model.predict(torch.tensor(X)).dtype == torch.float32
    assert isinstance(model.predict(X), np.ndarray)
    assert model.predict(X).dtype == np.float32
    assert model.score(torch.tensor(X), torch.tensor(y)) == pytest.approx(model.score(X, y))


def test_errors():
    X, y, _ = data()
    with pytest.raises(InvalidArgument, match="not fitted"):
        KernelRegression().predict(X)
    with pytest.raises(InvalidArgument, match="no parameter 'bandwidth'; it has kernel, scale, path"):
        KernelRegression().set_params(bandwidth=1)
    with pytest.raises(InvalidArgument, match="path must be"):
        KernelRegression(path="dense").fit(X, y)
    with pytest.raises(Unsupported, match="no finite feature map"):
        KernelRegression(path="features").fit(X, y)
    with pytest.raises(InvalidArgument, match="3 features, but KernelRegression is expecting 2"):
        KernelRegression().fit(X, y).predict(np.ones((1, 3)))
    with pytest.raises(InvalidArgument, match="as in the first samples"):
        KernelRegression().fit(X, y).partial_fit(X, np.stack((y, y), 1))
    with pytest.raises(Unsupported, match="needs all samples at once"):
        KernelRegression(scale="loo").partial_fit(X, y)
    with pytest.raises(InvalidArgument, match="y must be"):
        KernelRegression().fit(X, y).score(X, np.stack((y, y), 1))


def test_repr_can_be_read_back():
    assert repr(KernelRegression()) == "KernelRegression()"
    assert repr(KernelRegression(Taylor(2), scale=0.5, path="pairs")).endswith("scale=0.5, path='pairs')")
