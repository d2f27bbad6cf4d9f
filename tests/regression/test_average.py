"""The kernel average against its formula in float64 and against scikit-learn's kernel functions."""

import numpy as np
import pytest
import torch

import mercer
from mercer import InvalidArgument, NonFinite, Unsupported, kernel_regression
from mercer.core.kernels import Cosine, Elu, Exp, Gaussian, Power, Relu, Taylor
from mercer.core.truncated_exp import truncated_exp

KERNELS = [
    Gaussian(),
    Exp(),
    Taylor(2),
    Taylor(4),
    Elu(),
    Relu(),
    Power(2),
    Taylor(3, signed=True),
    Cosine(signed=True),
]


def data(samples=40, features=3, outputs=2, queries=7):
    rng = np.random.default_rng(3)
    return (
        rng.normal(size=(samples, features)),
        rng.normal(size=(samples, outputs)),
        rng.normal(size=(queries, features)),
    )


def weight(kernel, x, z, scale):
    """K(x, z) of two vectors, from its textbook formula."""
    if isinstance(kernel, Gaussian):
        return np.exp(-scale * np.sum((x - z) ** 2) / 2)
    if isinstance(kernel, Elu):
        x, z = (np.where(v > 0, v + 1, np.exp(v)) for v in (x, z))
        return scale * x @ z
    if isinstance(kernel, Relu):
        return scale * np.maximum(x, 0) @ np.maximum(z, 0)
    if isinstance(kernel, Cosine):
        return scale * x @ z / np.sqrt((x @ x) * (z @ z))
    s = scale * x @ z
    if isinstance(kernel, Exp):
        return np.exp(s)
    if isinstance(kernel, Power):
        return s**kernel.degree
    return float(truncated_exp(torch.tensor(s), kernel.order))


def by_hand(kernel, X, y, queries, scale, w):
    table = np.array([[weight(kernel, q, x, scale) for x in X] for q in queries]) * w
    return table @ y / table.sum(1, keepdims=True)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("weighted", [False, True])
def test_is_the_formula(kernel, scale, weighted):
    X, y, queries = data()
    queries = np.abs(queries)  # so that no query is without weight under Relu
    w = np.random.default_rng(4).uniform(0, 2, len(X)) if weighted else np.ones(len(X))
    if weighted:
        w[::5] = 0
    got = kernel_regression(X, y, queries, kernel=kernel, scale=scale, sample_weight=w if weighted else None)
    used = kernel.default_scale(3) if scale is None else scale
    np.testing.assert_allclose(got, by_hand(kernel, X, y, queries, used, w), rtol=1e-10, atol=1e-12)


@pytest.mark.peers
def test_gaussian_scale_is_twice_gamma():
    from sklearn.metrics.pairwise import rbf_kernel

    X, y, queries = data()
    table = rbf_kernel(queries, X, gamma=0.35)
    expected = table @ y / table.sum(1, keepdims=True)
    np.testing.assert_allclose(kernel_regression(X, y, queries, scale=0.7), expected, rtol=1e-12)


def test_far_queries_take_the_nearest_target():
    X, y = [[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], [3.0, 5.0, 8.0]
    far = [[1e3, 0.0], [-40.0, 1e4], [1e9, -1e9], [-1e6, -1e6]]
    assert kernel_regression(X, y, far).tolist() == [5.0, 8.0, 5.0, 3.0]
    # Half way between two nearest samples, however far away, both count the same.
    assert kernel_regression([[0.0, 1.0], [0.0, -1.0]], [0.0, 1.0], [[1e8, 0.0]]) == pytest.approx(0.5)


def test_gaussian_far_from_the_origin_is_centred():
    X, y, queries = data()
    shift = 2.0**24  # exact in float64
    X, queries = np.round(X * 256) / 256, np.round(queries * 256) / 256
    near = kernel_regression(X, y, queries)
    np.testing.assert_allclose(kernel_regression(X + shift, y, queries + shift), near, rtol=1e-7)


def test_tiny_weights_are_not_lost():
    # The near sample has the weight 1e-300; at the far query it still is all that counts.
    got = kernel_regression([[0.0], [1.0]], [1.0, 2.0], [[-2000.0]], sample_weight=[1e-300, 1.0])
    assert got.tolist() == [1.0]


def test_tensors_in_tensors_out_with_gradients():
    X, y, queries = (torch.tensor(a, requires_grad=True) for a in data(samples=8, features=2, outputs=1, queries=3))
    w = torch.linspace(0.5, 1.5, 8, dtype=torch.float64, requires_grad=True)
    for kernel in (Gaussian(), Taylor(2)):

        def run(X, y, queries, w, kernel=kernel):
            return kernel_regression(X, y, queries, kernel=kernel, sample_weight=w)

        assert torch.autograd.gradcheck(run, (X, y, queries, w))


@pytest.mark.parametrize(
    ("target", "kind"), [(np.float32, np.float32), (np.float64, np.float64), (np.int64, np.float64), (bool, np.float64)]
)
def test_dtype_follows_the_targets(target, kind):
    X, y, queries = data(outputs=1)
    got = kernel_regression(X.astype(np.float32), (y[:, 0] > 0).astype(target), queries)
    assert isinstance(got, np.ndarray)
    assert got.dtype == kind
    tensor = kernel_regression(torch.tensor(X), torch.tensor(y).to(torch.bfloat16), torch.tensor(queries))
    assert tensor.dtype == torch.bfloat16


def test_shapes_follow_the_targets():
    X, y, queries = data(outputs=2)
    assert kernel_regression(X, y[:, 0], queries).shape == (7,)
    assert kernel_regression(X, y[:, :1], queries).shape == (7, 1)
    np.testing.assert_allclose(
        kernel_regression(X, y, queries)[:, 0], kernel_regression(X, y[:, 0], queries), rtol=1e-14
    )


def test_bad_input_is_one_sentence():
    X, y, queries = data()
    for arguments, said in [
        ((X, y, queries[:, :2]), "queries has 2 features, but X has 3"),
        ((X, y[:5], queries), "y must be"),
        ((X[0], y, queries), "Reshape your data"),
        ((X * np.nan, y, queries), "NaN"),
        ((X.astype(complex), y, queries), "Complex data not supported"),
        ((torch.tensor(X).to_sparse(), y, queries), "sparse"),
        (([["a"]], [1.0], queries), "numbers only"),
    ]:
        with pytest.raises(InvalidArgument, match=said):
            kernel_regression(*arguments)
    for bad in (0, -1.0, float("inf"), "loo", True):
        with pytest.raises(InvalidArgument, match="scale must be a positive finite number"):
            kernel_regression(X, y, queries, scale=bad)
    for bad in (-np.ones(40), np.zeros(40), np.ones(39), np.ones((40, 1))):
        with pytest.raises(InvalidArgument, match="sample_weight must be"):
            kernel_regression(X, y, queries, sample_weight=bad)
    with pytest.raises(InvalidArgument, match="kernel must be a mercer kernel"):
        kernel_regression(X, y, queries, kernel="rbf")


def test_undefined_averages_are_errors():
    with pytest.raises(NonFinite, match="1 of 2 queries sum to 0"):
        kernel_regression([[1.0], [2.0]], [1.0, 2.0], [[1.0], [-1.0]], kernel=Relu())
    with pytest.raises(NonFinite, match="left the range"):
        kernel_regression([[1.0], [2.0]], [1.0, 2.0], [[1e300]], kernel=Taylor(2))
    with pytest.raises(Unsupported, match="even order"):
        kernel_regression([[1.0]], [1.0], [[1.0]], kernel=Taylor(3))


def test_is_offered_at_the_top():
    assert mercer.kernel_regression is kernel_regression
