"""Kernel regression as an estimator, by scikit-learn's conventions but without importing it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mercer.core.kernels import Gaussian, Kernel
from mercer.core.merged import merge
from mercer.core.normalizers import Identity
from mercer.core.state import FeatureState
from mercer.core.structures import Full
from mercer.core.support import PATHS, Sizes, unsupported
from mercer.errors import InvalidArgument, Unsupported
from mercer.regression.average import absorb, average, read
from mercer.regression.inputs import checked_kernel, checked_scale, floating, give_back, matrix, sample_weights, targets
from mercer.regression.scale import choose_scale


class KernelRegression:
    """Nadaraya-Watson regression, m(x) = sum_i w_i K(x, x_i) y_i / sum_i w_i K(x, x_i), as an estimator.

    It follows scikit-learn's conventions (``clone``, pipelines and searches work) and computes in float64. Arrays give
    arrays, tensors tensors; predictions have the dtype of y if that is a floating one, else float64.

    What is kept of the samples: the samples themselves (``path="pairs"``), or, for a finite kernel, the fixed-size
    feature state sum_i phi(x_i) [w_i y_i, w_i] (``path="features"``); by default whichever is smaller. Both give the
    same predictions; at high Taylor orders far below zero the samples are the more accurate.

    Args:
        kernel: K. Default (None) ``Gaussian()``, for which X is centred: differences of squares would cancel.
        scale: the kernel's scale, a positive number; None for its own; ``"loo"`` for the one with the smallest
            leave-one-out error, found at ``fit`` in O(n^2) operations. For ``Gaussian`` it is 1 / bandwidth^2, twice
            scikit-learn's ``gamma``.
        path: ``"auto"``, ``"pairs"`` or ``"features"``.

    Attributes:
        n_features_in_: D.
        feature_names_in_: names of the columns, if X was a data frame with string names.
        scale_: the scale used.
        loo_scales_, loo_errors_: with ``scale="loo"``, the scales tried and their mean squared leave-one-out errors.
        state_: the :class:`~mercer.FeatureState`, or None while samples are kept.

    >>> import numpy as np
    >>> from mercer import KernelRegression, Taylor
    >>> x = np.linspace(0, 1, 50).reshape(-1, 1)
    >>> y = np.sin(6 * x[:, 0])
    >>> model = KernelRegression(scale=400.0).fit(x, y)
    >>> round(model.score(x, y), 4)
    0.9941
    >>> model.predict([[0.5], [1e6]]).round(3).tolist()
    [0.135, -0.279]
    >>> whole = KernelRegression(Taylor(2)).fit(x, y)
    >>> halves = KernelRegression(Taylor(2)).partial_fit(x[:20], y[:20]).partial_fit(x[20:], y[20:])
    >>> bool(np.allclose(whole.predict(x), halves.predict(x)))
    True

    Source: Nadaraya 1964; Watson 1964; as attention, Tsai et al. 2019, arXiv 1908.11775.
    """

    def __init__(self, kernel: Kernel | None = None, *, scale: float | str | None = None, path: str = "auto") -> None:
        self.kernel = kernel
        self.scale = scale
        self.path = path

    def __repr__(self) -> str:
        set_to = [f"{name}={value!r}" for name, value in self.get_params().items() if value not in (None, "auto")]
        return f"KernelRegression({', '.join(set_to)})"

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments of the constructor, by name."""
        return {"kernel": self.kernel, "scale": self.scale, "path": self.path}

    def set_params(self, **params: Any) -> KernelRegression:
        """Change arguments of the constructor; takes effect at the next ``fit``."""
        allowed = self.get_params()
        for name, value in params.items():
            if name not in allowed:
                raise InvalidArgument(f"KernelRegression has no parameter {name!r}; it has {', '.join(allowed)}.")
            setattr(self, name, value)
        return self

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> KernelRegression:
        """Learn from samples X ``[n, D]`` and y ``[n]`` or ``[n, outputs]``, forgetting earlier ones.

        ``sample_weight`` ``[n]`` is 0 or more; a weight of 0 leaves the sample out, a weight of 2 counts it twice.
        """
        self._forget()
        self._begin(X, y)
        return self._learn(X, y, sample_weight)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> KernelRegression:
        """Learn from further samples: finite kernels add them to the feature state, others keep them.

        The result is that of one ``fit`` with all samples (up to rounding, whatever the batches).
        """
        if isinstance(self.scale, str):
            raise Unsupported("scale='loo' needs all samples at once: use fit, or give the scale as a number.")
        if not self.__sklearn_is_fitted__():
            self._forget()
            self._begin(X, y)
        return self._learn(X, y, sample_weight)

    def predict(self, X: Any) -> Any:
        """m at the points X ``[m, D]``: ``[m]`` or ``[m, outputs]``, as y was."""
        if not self.__sklearn_is_fitted__():
            raise _not_fitted()
        queries = self._points(X) - self._centre
        if self.state_ is not None:
            out = read(self._kernel, self.scale_, queries, self.state_)
        else:
            assert self._samples is not None
            out = average(self._kernel, self.scale_, queries, *self._samples)
        return give_back(out.reshape(-1, *self._outputs), X, self._dtype)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R^2 = 1 - sum_i w_i (y_i - m(x_i))^2 / sum_i w_i (y_i - mean y)^2, averaged over outputs; 1 is perfect.

        An output that does not vary counts 1 if it is predicted exactly, otherwise 0.
        """
        predicted = torch.as_tensor(self.predict(X)).double()
        truth = targets(y, len(predicted)).to(predicted.device)
        if truth.shape != predicted.shape:
            raise InvalidArgument(
                f"y must be {list(predicted.shape)}, as the predictions are, not {list(truth.shape)}."
            )
        weight = sample_weights(sample_weight, len(truth), truth.device).unsqueeze(-1)
        predicted, truth = predicted.reshape(len(weight), -1), truth.reshape(len(weight), -1)
        residual = (weight * (truth - predicted).square()).sum(0)
        total = (weight * (truth - (weight * truth).sum(0) / weight.sum()).square()).sum(0)
        constant = (residual != 0).double()  # one minus what a constant output counts
        return float((1 - torch.where(total == 0, constant, residual / torch.where(total == 0, 1.0, total))).mean())

    def _forget(self) -> None:
        self._samples: tuple[Tensor, Tensor, Tensor] | None = None
        self.state_: FeatureState | None = None
        for name in ("scale_", "loo_scales_", "loo_errors_", "n_features_in_", "feature_names_in_"):
            self.__dict__.pop(name, None)

    def _begin(self, X: Any, y: Any) -> None:
        keys = matrix(X)
        values = targets(y, len(keys))
        if self.path not in ("auto", *PATHS):
            raise InvalidArgument(f"path must be 'auto', 'pairs' or 'features', not {self.path!r}.")
        self._kernel = checked_kernel(self.kernel)
        if self.scale != "loo":
            self.scale_ = checked_scale(self._kernel, self.scale, keys.shape[1])
        self._outputs = tuple(values.shape[1:])
        self._dtype = floating(y)
        self._refusal = self._features_refused(keys.shape[1], values[:1].numel())
        if self.path == "features" and self._refusal is not None:
            raise Unsupported(self._refusal)
        # Any fixed centre will do for the Gaussian; that of the first samples is as good as theirs all.
        gaussian = isinstance(self._kernel, Gaussian)
        self._centre = (
            keys.detach().mean(0) if gaussian else torch.zeros(keys.shape[1], dtype=torch.float64, device=keys.device)
        )
        self.n_features_in_ = keys.shape[1]
        names = _column_names(X)
        if names is not None:
            self.feature_names_in_ = names

    def _learn(self, X: Any, y: Any, sample_weight: Any) -> KernelRegression:
        keys = self._points(X).detach() - self._centre
        values = targets(y, len(keys)).detach().to(keys.device)
        if tuple(values.shape[1:]) != self._outputs:
            raise InvalidArgument(
                f"y must be {[len(keys), *self._outputs]} as in the first samples, not {list(values.shape)}."
            )
        weights = sample_weights(sample_weight, len(keys), keys.device).detach()
        kept = weights > 0
        new = (keys[kept], values.reshape(len(keys), -1)[kept], weights[kept])
        if self.scale == "loo":
            self.scale_, scales, errors = choose_scale(self._kernel, *new)
            self.loo_scales_, self.loo_errors_ = np.array(scales), np.array(errors)
        if self.state_ is not None:
            self.state_ = absorb(self._kernel, self.scale_, self.state_, *new)
            return self
        if self._samples is not None:
            old = self._samples
            new = (torch.cat((old[0], new[0])), torch.cat((old[1], new[1])), torch.cat((old[2], new[2])))
        self._samples = new
        if self._prefers_state(new):
            self._samples, self.state_ = None, absorb(self._kernel, self.scale_, None, *new)
        return self

    def _prefers_state(self, samples: tuple[Tensor, Tensor, Tensor]) -> bool:
        if self.path != "auto" or self._refusal is not None:
            return self.path == "features"
        keys, values, _ = samples
        features = self._kernel.feature_dim(keys.shape[1])
        assert features is not None
        return features * (values.shape[1] + 1) < sum(t.numel() for t in samples)

    def _features_refused(self, dim: int, outputs: int) -> str | None:
        sizes = Sizes(1, 1, 1, 0, 1, dim, outputs + 1, itemsize=8)
        return unsupported(self._kernel, Identity(), merge(Full()), "chunked", "features", sizes, stateful=True)

    def _points(self, X: Any) -> Tensor:
        points = matrix(X)
        if points.shape[1] != self.n_features_in_:
            raise InvalidArgument(
                f"X has {points.shape[1]} features, but KernelRegression is expecting {self.n_features_in_} features "
                "as input."
            )
        return points.to(self._centre.device)

    def __sklearn_is_fitted__(self) -> bool:
        return getattr(self, "_samples", None) is not None or getattr(self, "state_", None) is not None

    def __sklearn_tags__(self) -> Any:
        utils = sys.modules["sklearn.utils"]  # only scikit-learn asks, so it is there
        required = utils.TargetTags(required=True, multi_output=True)
        return utils.Tags(estimator_type="regressor", target_tags=required, regressor_tags=utils.RegressorTags())


def _column_names(X: Any) -> np.ndarray | None:
    columns = getattr(X, "columns", None)
    if columns is None or not all(isinstance(name, str) for name in columns):
        return None
    return np.asarray(columns, dtype=object)


def _not_fitted() -> InvalidArgument:
    message = "This KernelRegression is not fitted yet: call fit with samples before predict or score."
    peer = sys.modules.get("sklearn.exceptions")
    if peer is None:
        return InvalidArgument(message)
    # Where scikit-learn is in use its callers catch its own error; this is both.
    return type("NotFittedError", (InvalidArgument, peer.NotFittedError), {})(message)
