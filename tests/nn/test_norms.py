import pytest
import torch
import torch.nn.functional as F

from mercer.errors import InvalidArgument
from mercer.nn import LayerNorm, RMSNorm


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7)])
def test_rms_norm_equals_the_formula_with_its_gradients(shape):
    norm = RMSNorm(7, eps=1e-3).double()
    norm.weight.data.normal_()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(shape, dtype=torch.float64)
    y = norm(x)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-13)
    got = torch.autograd.grad(y, (x, norm.weight), upstream)
    wanted = torch.autograd.grad(expected, (x, norm.weight), upstream)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_rms_norm_passes_gradcheck_and_skips_what_needs_no_gradient():
    norm = RMSNorm(5).double()
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, x)
    norm.weight.requires_grad_(False)
    norm(x).sum().backward()
    assert norm.weight.grad is None
    assert x.grad is not None


@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_equals_torch(bias):
    norm = LayerNorm(6, eps=1e-4, bias=bias)
    norm.weight.data.normal_()
    if norm.bias is not None:
        norm.bias.data.normal_()
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (6,), norm.weight, norm.bias, 1e-4))
    assert (norm.bias is None) == (not bias)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_statistics_of_bfloat16_are_taken_in_float32(kind):
    x = (100 + torch.randn(4, 512)).bfloat16()
    norm = kind(512).bfloat16()
    torch.testing.assert_close(norm(x), kind(512)(x.float()).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_a_zero_row_stays_zero_with_finite_gradients(kind):
    x = torch.zeros(2, 4, requires_grad=True)
    y = kind(4)(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 4))
    assert x.grad.isfinite().all()
    with pytest.raises(InvalidArgument):
        kind(0)
    with pytest.raises(InvalidArgument):
        kind(4, eps=-1.0)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_a_backward_pass_inside_autocast_keeps_float32_statistics(kind):
    norm, x = kind(64), torch.randn(3, 64, requires_grad=True)
    inputs, factor = (x, *norm.parameters()), torch.randn(3, 64)
    expected = torch.autograd.grad(norm(x), inputs, factor)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(norm(x), inputs, factor)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
