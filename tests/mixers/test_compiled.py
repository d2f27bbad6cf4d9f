"""Mixers under torch.compile: one graph, forwards and backwards, with the digits of the layer that was compiled.

fullgraph=True raises at anything that cannot be traced. Nothing here needs a C++ compiler.
"""

import pytest
import torch
from tests.mixers.cases import build, inputs
from tests.tolerance import assert_close
from torch import Tensor, nn

from mercer.core.kernels import Taylor
from mercer.core.log_weights import Alibi, Decay, RelativeBias
from mercer.core.structures import Causal
from mercer.errors import InvalidArgument
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.ops import attention

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings("ignore:.*functools.lru_cache.*:UserWarning"),  # what is cached here are constants
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
]


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def gradients(module: nn.Module, out: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Of a fixed sum of the outputs, for the parameters that were used and the inputs."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    found: tuple[Tensor | None, ...] = torch.autograd.grad(
        (weights * out).sum(), [*module.parameters(), *inputs], allow_unused=True
    )
    return [grad for grad in found if grad is not None]


def test_a_model_is_one_graph():
    """Both mixers that are configurations of `mercer.attention`."""
    torch.manual_seed(0)
    options = {"mamba2": {"state": 4, "head_dim": 8}}
    config = ModelConfig(
        vocab_size=7, dim=16, heads=2, layers=2, attention=("retnet", "mamba2"), mixers=options, feedforward="none"
    )
    model = DecoderLM(config).double()
    tokens = torch.arange(10).view(2, 5) % 7
    expected = model(tokens)
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(tokens)
    assert_close(out, expected, 64)
    for found, right in zip(gradients(model, out), gradients(model, expected), strict=True):
        assert_close(found, right, 64)


def test_a_kernel_of_features_is_one_graph_with_its_gradients():
    """The gradients of features were found by a backward pass within the backward pass, which is not traced."""
    q, k, v = (x.view(2, 2, 5, 4).requires_grad_() for x in inputs(3, 5).view(3, 80).unbind())

    def linear(*given: Tensor) -> Tensor:
        return attention(*given, kernel=Taylor(2), structure=Causal(), path="features")

    expected = attention(q, k, v, kernel=Taylor(2), structure=Causal(), form="dense")
    out = torch.compile(linear, backend="eager", fullgraph=True)(q, k, v)
    assert_close(out, expected, 64)
    found, right = (torch.autograd.grad(x.cos().sum(), (q, k, v)) for x in (out, expected))
    for a, b in zip(found, right, strict=True):
        assert_close(a, b, 64)


LAYERS = ["mamba", "gla", "gated-deltanet", "rg-lru", "rwkv4", "rwkv6", "rwkv7", "s4d", "s4d, convolution", "s4"]
"""One of each operator and what differs around it."""


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_is_one_graph(case: str):
    mixer, x = build(case), inputs(2, 10).requires_grad_()
    expected = mixer(x)
    out = torch.compile(mixer, backend="eager", fullgraph=True)(x)
    assert_close(out, expected, 64)
    for found, right in zip(gradients(mixer, out, x), gradients(mixer, expected, x), strict=True):
        assert_close(found, right, 64)


@pytest.mark.parametrize("case", ["mamba2", "rwkv4"])
def test_a_padded_layer_is_one_graph(case: str):
    """How many tokens are real is not known then, so rows stay as wide as they came."""
    mixer, x = build(case), inputs(2, 6)
    padding = torch.tensor([[True, True, False, True, True, False], [False, True, True, False, False, False]])
    with torch.no_grad():
        expected, state = mixer(x, padding=padding, return_state=True)
        out, same = torch.compile(mixer, backend="eager", fullgraph=True)(x, padding=padding, return_state=True)
    assert_close(out, expected, 64)
    assert not out[~padding].any()
    assert torch.equal(same.length, state.length)
    for name, part in state.parts.items():
        assert_close(same.parts[name], part, 64, name)


def test_a_step_of_a_layer_is_one_graph():
    mixer, x = build("s4"), inputs(2, 6)
    with torch.no_grad():
        whole = mixer(x)
        _, state = mixer(x[:, :5], return_state=True)
        out = torch.compile(mixer, backend="eager", fullgraph=True)(x[:, 5:], state=state)
    assert_close(out, whole[:, 5:], 64)


def test_sizes_that_change_are_one_graph_too():
    """The second batch and length are symbols to the compiler, and so is all that is planned from them."""
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=7, dim=16, heads=2, layers=2, attention=("elu-sum", "softmax"))
    model = DecoderLM(config).double()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        for batch, length in ((2, 5), (3, 9), (2, 12)):
            tokens = torch.arange(batch * length).view(batch, length) % 7
            assert_close(compiled(tokens), model(tokens), 64)


def test_what_a_compiler_does_not_look_at_is_still_refused_without_one():
    for wrong in (
        lambda: Decay(log_rate=torch.tensor([0.5])),
        lambda: Decay(rate=torch.tensor([0.0])),
        lambda: Alibi(torch.tensor([-1.0])),
        lambda: RelativeBias(torch.tensor([[torch.nan]])),
    ):
        with pytest.raises(InvalidArgument):
            wrong()
