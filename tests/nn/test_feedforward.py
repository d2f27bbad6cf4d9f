import pytest
import torch
import torch.nn.functional as F

from mercer.errors import InvalidArgument
from mercer.nn import FeedForward
from mercer.nn.feedforward import gated_linear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["relu", "gelu", "gelu_tanh", "swiglu"])
def test_each_kind_follows_its_formula(kind, bias):
    layer = FeedForward(6, 10, kind=kind, bias=bias).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    h = F.linear(x, layer.input.weight, layer.input.bias)
    inner = {
        "relu": lambda: h.clamp_min(0),
        "gelu": lambda: h * torch.special.ndtr(h),
        "gelu_tanh": lambda: h * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3))),
        "swiglu": lambda: h[..., :10] * torch.sigmoid(h[..., :10]) * h[..., 10:],
    }[kind]()
    torch.testing.assert_close(layer(x), F.linear(inner, layer.output.weight, layer.output.bias), rtol=0, atol=1e-12)
    assert (layer.input.bias is None) == (layer.output.bias is None) == (not bias)


@pytest.mark.parametrize("bias", [True, False])
def test_the_gated_product_passes_gradcheck(bias):
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    shift = torch.randn(6, dtype=torch.float64, requires_grad=True) if bias else None
    assert torch.autograd.gradcheck(gated_linear, (x, weight, shift))


def test_the_gated_product_differentiates_only_what_asks():
    x, weight = torch.randn(3, 4), torch.randn(6, 4, requires_grad=True)
    gated_linear(x, weight).sum().backward()
    expected = torch.autograd.grad((F.silu(x @ weight[:3].t()) * (x @ weight[3:].t())).sum(), weight)[0]
    torch.testing.assert_close(weight.grad, expected)
    assert x.grad is None


def test_under_autocast_the_gated_product_is_in_bfloat16_with_float32_gradients():
    layer, x = FeedForward(8, 16), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), rtol=0.05, atol=0.02)
    y.float().sum().backward()
    assert layer.input.weight.grad.dtype == torch.float32


def test_autocast_leaves_float64_as_it_leaves_linear_layers():
    layer, x = FeedForward(4, 8, kind="swiglu").double(), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(layer(x).sum(), x)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_default_widths_and_refusals():
    assert FeedForward(128).output.in_features == 352  # 341.3 rounded up to a multiple of 32
    assert FeedForward(96).output.in_features == 256
    assert FeedForward(12, kind="gelu").output.in_features == 48
    with pytest.raises(InvalidArgument, match="swiglu"):
        FeedForward(8, kind="tanh")
    with pytest.raises(InvalidArgument):
        FeedForward(8, 0)
