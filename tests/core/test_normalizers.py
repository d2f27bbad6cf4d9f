"""Normalisers at the edges of the range, and their promise of scale invariance."""

import pytest
import torch

from mercer.core.normalizers import L2, RMS, Identity, Normalizer, Sum, unit


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
@pytest.mark.parametrize("norm", [Sum(), L2(), RMS(), Identity()], ids=str)
def test_scale_invariance_is_declared_truly(norm: Normalizer, factor: float, generator: torch.Generator):
    u = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    d = torch.rand(2, 3, 4, generator=generator, dtype=torch.float64) + 0.1
    before, after = norm.apply(u, d), norm.apply(u * factor, d * factor)
    assert torch.allclose(before, after, rtol=1e-12) == norm.scale_invariant


@pytest.mark.parametrize("norm", [Sum(), L2(), RMS(), Identity()], ids=str)
def test_an_empty_row_gives_zeros(norm: Normalizer):
    u, d = torch.zeros(1, 1, 2, 3, requires_grad=True), torch.zeros(1, 1, 2)
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
