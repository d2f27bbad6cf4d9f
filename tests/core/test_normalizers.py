"""Normalisers at the edges of the range, and their promise of scale invariance."""

import pytest
import torch

from mercer.core.denominators import Clamped, Detached, SigmoidGate
from mercer.core.normalizers import L2, RMS, Identity, Normalizer, Standardize, Sum, unit

GATE = torch.linspace(-2, 2, 60).view(1, 3, 4, 5).expand(2, -1, -1, -1)
NORMS = [Sum(), L2(), RMS(), Identity(), Standardize(), Detached(), Clamped(), SigmoidGate(GATE)]
NORMS += [SigmoidGate(GATE, Sum()), Standardize(gain=torch.ones(3))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_unit_vectors_of_every_size(dtype: torch.dtype):
    """From the smallest subnormal to the largest number, |u| = 1 and the direction is that of u."""
    info = torch.finfo(dtype)
    direction = torch.tensor([3.0, -4.0, 0.0], dtype=dtype)
    for size in (info.smallest_normal / 1024, info.smallest_normal, 1e-30, 1e-12, 1.0, 1e12, 1e30, info.max / 8):
        u = (direction * size).requires_grad_()
        out = unit(u)
        assert torch.allclose(out, direction / 5, rtol=1e-3 if size < info.smallest_normal else 1e-6), size
        (grad,) = torch.autograd.grad(out[0], u)
        assert not bool(torch.isnan(grad).any())
    mixed = torch.stack((direction * 0, direction, direction * 1e-30, direction * 1e30)).requires_grad_()
    out = unit(mixed)
    assert torch.allclose(out, torch.stack((direction * 0, *[direction / 5] * 3)))
    (grad,) = torch.autograd.grad(out.sum(), mixed)
    assert not grad[0].any()
    assert bool(torch.isfinite(grad).all())


@pytest.mark.parametrize("factor", [1e-20, 0.3, 1e20])
@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_scale_invariance_is_declared_truly(norm: Normalizer, factor: float, generator: torch.Generator):
    u = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    d = torch.rand(2, 3, 4, generator=generator, dtype=torch.float64) + 0.1
    before, after = norm.apply(u, d), norm.apply(u * factor, d * factor)
    assert torch.allclose(before, after, rtol=1e-12) == norm.scale_invariant


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_an_empty_row_gives_zeros(norm: Normalizer):
    u, d = torch.zeros(2, 3, 4, 5, requires_grad=True), torch.zeros(2, 3, 4)
    out = norm.apply(u, d)
    assert not out.any()
    (grad,) = torch.autograd.grad(out.sum(), u)
    assert bool(torch.isfinite(grad).all())


def test_rms_is_l2_times_the_root_of_the_dimension(generator: torch.Generator):
    u = torch.randn(1, 2, 3, 5, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(RMS().apply(u, None), L2().apply(u, None) * 5**0.5)
    torch.testing.assert_close(RMS().apply(u, None), torch.nn.functional.rms_norm(u, (5,), eps=0.0))
    gain = torch.rand(2, 5, dtype=torch.float64)
    torch.testing.assert_close(L2(gain).apply(u, None), L2().apply(u, None) * gain[:, None])
    torch.testing.assert_close(L2(gain[:, 0]).apply(u, None), L2().apply(u, None) * gain[:, :1, None])


@pytest.mark.parametrize("factor", [-200.0, 0.0, 3.0])
@pytest.mark.parametrize("norm", [n for n in NORMS if not n.scale_invariant], ids=str)
def test_a_factor_apart_is_a_factor_inside(norm: Normalizer, factor: float, generator: torch.Generator):
    u = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    d, log = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64), torch.full((2, 3, 4), factor).double()
    whole = norm.apply(u * log.exp()[..., None], d * log.exp())
    torch.testing.assert_close(norm.apply_factored(u, d, log), whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e-3, 1.0, 1e30, 3e38])
def test_layer_norm_of_every_size(size: float, generator: torch.Generator):
    u = torch.tensor([[3.0, -4.0, 0.0, 1.0], [1.0, 1.0, -1.0, -1.0]]) / 4
    expected = torch.nn.functional.layer_norm(u.double(), (4,), eps=0.0).float()
    at = (u * size).requires_grad_()
    out = Standardize().apply(at.view(1, 1, 2, 4), None)
    torch.testing.assert_close(out.view(2, 4), expected, rtol=0.3 if size < 1e-38 else 1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad((out * torch.arange(4)).sum(), at)
    assert size < 1e-38 or bool(torch.isfinite(grad).all()), "of subnormal rows the true gradient is out of range"
    if 1e-30 <= size <= 1e30:
        leaf = u.double().requires_grad_()
        plain = torch.nn.functional.layer_norm(leaf, (4,), eps=0.0)
        (wanted,) = torch.autograd.grad((plain * torch.arange(4)).sum(), leaf)
        torch.testing.assert_close(grad.double() * size, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [0.1, -3.3, 1e-40, 1e38])
@pytest.mark.parametrize("width", [1, 2, 3, 7, 64])
def test_equal_entries_have_no_direction(value: float, width: int):
    """The mean of 0.1, 0.1, 0.1 may round to something else; what is left of it must not be blown up to size 1."""
    u = torch.full((1, 1, 1, width), value, requires_grad=True)
    out = Standardize().apply(u, None)
    assert not out.any()
    (grad,) = torch.autograd.grad(out.sum(), u)
    assert not grad.any()
    bias = torch.tensor([2.0])
    seen, unseen = torch.ones(1, 1, 1), torch.zeros(1, 1, 1)
    assert bool((Standardize(bias=bias).apply(u, seen) == 2).all())
    assert not Standardize(bias=bias).apply(u * 0, unseen).any()


def test_layer_norm_with_gain_and_bias_is_torchs(generator: torch.Generator):
    u = torch.randn(2, 1, 3, 5, generator=generator, dtype=torch.float64)
    gain, bias = torch.randn(2, 1, 5, generator=generator, dtype=torch.float64)
    out = Standardize(gain, bias).apply(u, torch.ones(1, 1, 3))
    torch.testing.assert_close(out, torch.nn.functional.layer_norm(u, (5,), gain[0], bias[0], eps=0.0))
