"""Symmetric monomials against explicit tensor powers, and what a feature state costs."""

import math

import pytest
import torch
from torch import Tensor

from mercer.core import cost
from mercer.core.features import monomial_count, monomials
from mercer.core.kernels import Cosine, Elu, Exp, Gaussian, Kernel, Power, Relu, Taylor
from mercer.core.merged import merge
from mercer.core.structures import Causal
from mercer.core.support import FEATURE_MEMORY_LIMIT, Sizes
from mercer.errors import InvalidArgument, Unsupported
from mercer.ops import attention, plan

ALL: list[Kernel] = [Exp(), Gaussian(), Taylor(0), Taylor(1), Taylor(4), Power(1), Power(3), Elu(), Relu(), Cosine()]


def tensor_power(x: Tensor, degree: int) -> Tensor:
    """x (x) ... (x) x, flattened: ``[..., D^degree]``."""
    out = torch.ones_like(x[..., :1])
    for _ in range(degree):
        out = (out.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)
    return out


@pytest.mark.parametrize("dim", [1, 2, 3, 5])
@pytest.mark.parametrize("degree", [0, 1, 2, 3, 4])
def test_monomials_are_tensor_powers_without_repetitions(dim: int, degree: int, generator: torch.Generator):
    x, y = (torch.randn(7, dim, generator=generator, dtype=torch.float64) for _ in range(2))
    blocks_x, blocks_y = monomials(x, degree), monomials(y, degree)
    assert len(blocks_x) == degree + 1
    for n, (a, b) in enumerate(zip(blocks_x, blocks_y, strict=True)):
        assert a.shape == (7, math.comb(dim + n - 1, n)) == (7, monomial_count(dim, n))
        full = (tensor_power(x, n) * tensor_power(y, n)).sum(-1) / math.factorial(n)
        torch.testing.assert_close((a * b).sum(-1), full, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close((a * b).sum(-1), (x * y).sum(-1) ** n / math.factorial(n), rtol=1e-12, atol=1e-12)
        # Each distinct entry of the tensor power appears once, weighted by the root of how often it is repeated.
        squares = torch.cat([tensor_power(x, n).square() / math.factorial(n)], -1).sum(-1)
        torch.testing.assert_close(a.square().sum(-1), squares, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", [k for k in ALL if k.feature_dim(1) is not None], ids=str)
@pytest.mark.parametrize("dim", [1, 3, 8])
def test_features_reproduce_the_profile(kernel: Kernel, dim: int, generator: torch.Generator):
    a, b = (torch.randn(5, dim, generator=generator, dtype=torch.float64) for _ in range(2))
    a, b = kernel.map_query(a), kernel.map_key(b)
    phi = kernel.features(a)
    assert phi.shape[-1] == kernel.feature_dim(dim)
    torch.testing.assert_close(
        (phi * kernel.features(b)).sum(-1), kernel.profile((a * b).sum(-1)), rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize("kernel", [k for k in ALL if not isinstance(k, Taylor)], ids=str)
def test_profiles_know_their_derivatives(kernel: Kernel):
    """Taylor's, which works in place, has a test of its own."""
    s = torch.linspace(-3, 3, 25, dtype=torch.float64)
    by_autograd = Kernel.derivative(kernel, s)
    torch.testing.assert_close(kernel.derivative(s), by_autograd, rtol=1e-12, atol=1e-12)
    profile, slope = kernel.profile_and_derivative(s.clone())
    torch.testing.assert_close(profile, kernel.profile(s), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.ones_like(s) if slope is None else slope, by_autograd, rtol=1e-12, atol=1e-12)


def test_a_constant_profile_has_derivative_zero():
    class Mean(Exp):
        def profile(self, score: Tensor) -> Tensor:
            return torch.ones_like(score)

    assert not Kernel.derivative(Mean(), torch.randn(4)).any()


@pytest.mark.parametrize("kernel", ALL, ids=str)
def test_positive_kernels_are_not_negative(kernel: Kernel, generator: torch.Generator):
    a, b = (torch.randn(2000, 2, generator=generator, dtype=torch.float64) * 2 for _ in range(2))
    value = kernel.profile((kernel.map_query(a) * kernel.map_key(b)).sum(-1))
    assert bool((value >= 0).all()) == kernel.positive


@pytest.mark.parametrize(("dim", "counts"), [(64, (2080, 45_760, 766_480)), (16, (136, 816, 3876))], ids=["64", "16"])
def test_feature_counts(dim: int, counts: tuple[int, ...]):
    assert tuple(monomial_count(dim, p) for p in (2, 3, 4)) == counts
    assert tuple(Power(p).feature_dim(dim) for p in (2, 3, 4)) == counts
    assert Taylor(4).feature_dim(dim) == 1 + dim + sum(counts) == math.comb(dim + 4, 4)


@pytest.mark.parametrize(("dim", "tokens"), [(8, 93), (16, 515), (64, 24_300)])
def test_where_a_state_is_smaller_than_a_cache(dim: int, tokens: int):
    """Orders 0..3: the number of tokens at which keys and values take as much memory as S and z."""
    sizes = Sizes(1, 1, 1, tokens, tokens, dim, dim)
    state = cost.feature_state_bytes(Taylor(3), merge(Causal()), sizes, mass=True)
    cache = cost.cache_bytes(merge(Causal()), sizes)
    assert state / cache == pytest.approx(1, abs=0.01)


def test_too_many_features_are_refused_with_their_size():
    q = torch.zeros(1, 8, 16, 64)
    with pytest.raises(Unsupported, match=r"766,480|814,385.*features.*GiB.*limit 1 GiB.*path='pairs'"):
        attention(q, q, q, kernel=Taylor(4), structure=Causal(), form="chunked", path="features")
    assert plan(q, q, q, kernel=Taylor(4), structure=Causal()).path == "pairs"
    assert FEATURE_MEMORY_LIMIT < 4 * 8 * 814_385 * 65
    # Densely any order works.
    x = torch.linspace(-1, 1, 16 * 64).view(1, 1, 16, 64)
    for order in (20, 79, 80):
        out = attention(x, x, x, kernel=Taylor(order, signed=True), structure=Causal(), path="pairs")
        torch.testing.assert_close(out, attention(x, x, x, structure=Causal()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [-1, 1.5, "2", True, None])
def test_orders_are_integers(bad: object):
    with pytest.raises(InvalidArgument, match="Taylor: order must be an integer of 0 or more"):
        Taylor(bad)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidArgument, match="Power: degree must be an integer of 1 or more"):
        Power(bad)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidArgument, match="Power: degree"):
        Power(0)
