import pytest
import torch
import torch.nn.functional as F

from mercer.errors import InvalidArgument
from mercer.nn import FeedForward
from mercer.nn.activations import ACTIVATIONS, KINDS
from mercer.nn.feedforward import gated_linear

FORMULAS = {
    "relu": lambda x: x.clamp_min(0),
    "gelu": lambda x: x * torch.special.ndtr(x),
    "gelu_tanh": lambda x: x * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_follows_its_formula(kind, bias):
    layer = FeedForward(6, 10, kind=kind, bias=bias).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    h = F.linear(x, layer.input.weight, layer.input.bias)
    gates = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
    inner = FORMULAS[gates[kind]](h[..., :10]) * h[..., 10:] if kind in gates else FORMULAS[kind](h)
    torch.testing.assert_close(layer(x), F.linear(inner, layer.output.weight, layer.output.bias), rtol=0, atol=1e-12)
    assert (layer.input.bias is None) == (layer.output.bias is None) == (not bias)


@pytest.mark.parametrize("gate", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_the_gated_product_passes_gradcheck(bias, gate):
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    shift = torch.randn(6, dtype=torch.float64, requires_grad=True) if bias else None
    assert torch.autograd.gradcheck(lambda *tensors: gated_linear(*tensors, gate=gate), (x, weight, shift))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_derivatives_are_those_of_the_formulas(name):
    x = torch.linspace(-6, 6, 41, dtype=torch.float64)[:-1].requires_grad_()  # without 0, where relu has none
    g = torch.randn_like(x)
    (expected,) = torch.autograd.grad(FORMULAS[name](x), x, g)
    torch.testing.assert_close(ACTIVATIONS[name].apply(x), FORMULAS[name](x), rtol=0, atol=1e-13)
    torch.testing.assert_close(ACTIVATIONS[name].backward(g, x.detach()), expected, rtol=0, atol=1e-13)


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
    assert [FeedForward(96, kind=kind).output.in_features for kind in ("geglu", "silu")] == [256, 384]
    with pytest.raises(InvalidArgument, match="swiglu"):
        FeedForward(8, kind="tanh")
    with pytest.raises(InvalidArgument):
        FeedForward(8, 0)


def _agree(ours, theirs, rename, *, dim=12):
    """Equal outputs and gradients to 1e-5 after the weights of `theirs` were drawn again and copied to `ours`."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.3)
        ours.load_state_dict(rename(theirs.state_dict()))
    x = torch.randn(2, 5, dim, requires_grad=True)
    upstream = torch.randn(2, 5, dim)
    outs = [layer(x) for layer in (ours, theirs)]
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(out, x, upstream)[0] for out in outs]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


@pytest.mark.peers
@pytest.mark.parametrize(("kind", "act"), [("swiglu", "silu"), ("geglu_tanh", "gelu_pytorch_tanh"), ("geglu", "gelu")])
def test_gated_kinds_equal_transformers(kind, act):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    theirs = llama.LlamaMLP(
        llama.LlamaConfig(hidden_size=12, intermediate_size=20, num_attention_heads=2, hidden_act=act)
    )
    _agree(
        FeedForward(12, 20, kind=kind),
        theirs,
        lambda w: {
            "input.weight": torch.cat((w["gate_proj.weight"], w["up_proj.weight"])),
            "output.weight": w["down_proj.weight"],
        },
    )


@pytest.mark.peers
def test_t5s_gated_gelu_is_geglu_tanh():
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    theirs = t5.T5DenseGatedActDense(t5.T5Config(d_model=12, d_ff=20, feed_forward_proj="gated-gelu", dropout_rate=0))
    _agree(
        FeedForward(12, 20, kind="geglu_tanh"),
        theirs,
        lambda w: {
            "input.weight": torch.cat((w["wi_0.weight"], w["wi_1.weight"])),
            "output.weight": w["wo.weight"],
        },
    )


@pytest.mark.peers
@pytest.mark.parametrize(
    ("kind", "act"), [("gelu", "gelu"), ("gelu_tanh", "gelu_new"), ("silu", "swish"), ("relu", "relu")]
)
def test_plain_kinds_equal_transformers(kind, act):
    neox = pytest.importorskip("transformers.models.gpt_neox.modeling_gpt_neox")
    config = neox.GPTNeoXConfig(hidden_size=12, num_attention_heads=2, intermediate_size=20, hidden_act=act)
    theirs = neox.GPTNeoXMLP(config)
    names = {"dense_h_to_4h": "input", "dense_4h_to_h": "output"}
    _agree(
        FeedForward(12, 20, kind=kind, bias=True),
        theirs,
        lambda w: {f"{names[n.partition('.')[0]]}.{n.partition('.')[2]}": t for n, t in w.items()},
    )
