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


def test_an_offset_is_added_to_the_weight():
    norm = RMSNorm(7, eps=1e-3, offset=1.0).double()
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.equal(norm.weight, torch.zeros(7, dtype=torch.float64))
    torch.testing.assert_close(norm(x), RMSNorm(7, eps=1e-3).double()(x), rtol=0, atol=1e-13)
    norm.weight.data.normal_()
    torch.testing.assert_close(
        norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (1 + norm.weight), rtol=0, atol=1e-13
    )
    assert torch.autograd.gradcheck(norm, x)
    assert RMSNorm(2, offset=0.25).weight.tolist() == [0.75, 0.75]
    assert "offset=1.0" in repr(norm)
    assert "offset" not in repr(RMSNorm(2))
    for offset in (float("nan"), True, "1"):
        with pytest.raises(InvalidArgument, match="finite number"):
            RMSNorm(4, offset=offset)


@pytest.mark.peers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norms_of_gemma_and_llama_equal_transformers(dtype):
    gemma = pytest.importorskip("transformers.models.gemma2.modeling_gemma2").Gemma2RMSNorm(16)
    llama = pytest.importorskip("transformers.models.llama.modeling_llama").LlamaRMSNorm(16)
    x, g = torch.randn(3, 5, 16), torch.randn(3, 5, 16)
    for ours, theirs in ((RMSNorm(16, offset=1.0), gemma), (RMSNorm(16), llama)):
        with torch.no_grad():
            theirs.weight.normal_(0, 0.3)
            ours.weight.copy_(theirs.weight)
        found = []
        for norm in (ours.to(dtype), theirs.to(dtype)):
            at = x.to(dtype).requires_grad_()
            y = norm(at)
            found.append((y, *torch.autograd.grad(y, (at, norm.weight), g.to(dtype))))
        error = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(*found, **error)
