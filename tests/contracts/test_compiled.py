"""A step under torch.compile: one graph, and the answers of the library that was compiled."""

import os
import shutil
import warnings

import pytest
import torch
from tests.tolerance import assert_close
from torch import Tensor
from torch._dynamo.utils import counters

from mercer.core.bigbird import RandomBlocks
from mercer.core.kernels import Elu, Kernel, Relu, Taylor
from mercer.core.log_weights import Decay
from mercer.core.normalizers import L2, Normalizer, Standardize, Sum
from mercer.core.patterns import PrefixLM, Strided, Visible
from mercer.core.state import FeatureState, State
from mercer.core.structures import Causal, Padding, Structure, Window
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.ops import attention

COMPILER = next(
    (found for name in (os.environ.get("CXX"), "g++", "clang++") if name and (found := shutil.which(name))), None
)

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings("ignore:.*functools.lru_cache.*:UserWarning"),  # what is cached here are constants
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
]

PARTS: dict[str, tuple[Kernel, Normalizer, Structure]] = {
    "elu": (Elu(), Sum(), Causal()),
    "taylor2": (Taylor(2), Sum(), Causal()),
    "relu-l2": (Relu(), L2(), Causal()),
    "elu-layernorm": (Elu(), Standardize(), Causal()),
    "taylor2-decay": (Taylor(2), Sum(), Causal() & Decay(torch.tensor([0.9, 0.5]))),
}


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compare(parts: tuple[Kernel, Normalizer, Structure], backend: str, generator: torch.Generator):
    kernel, normalizer, structure = parts
    tokens = [[torch.randn(2, 2, 1, 4, generator=generator) for _ in range(3)] for _ in range(3)]

    def step(q: Tensor, k: Tensor, v: Tensor, state: State | None) -> tuple[Tensor, State]:
        return attention(
            q, k, v, kernel=kernel, normalizer=normalizer, structure=structure, state=state, return_state=True
        )

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    with torch.no_grad():
        _, state = step(*tokens[0], None)
        other = state
        for token in tokens[1:]:
            expected, state = step(*token, state)
            out, other = compiled(*token, other)
            assert_close(out, expected, 3)
    assert isinstance(state, FeatureState)
    assert isinstance(other, FeatureState)
    for name, a, b in zip(state.tensors(), other.tensors().values(), state.tensors().values(), strict=True):
        assert a.dtype == b.dtype, name
        assert_close(a.double(), b.double(), 3, name, dtype=torch.float32)


@pytest.mark.parametrize("parts", PARTS)
def test_a_step_is_one_graph(parts: str, generator: torch.Generator):
    """Traced and run as it is, which needs no compiler; fullgraph=True raises at anything that cannot be traced."""
    compare(PARTS[parts], "eager", generator)


PATTERNS = {
    "strided": Strided(4),
    "random": RandomBlocks(8, 2, heads=2) | Window(3, 3),
    "dilated": Window(5, 0, dilation=3),
    "prefix": PrefixLM(torch.tensor([5, 9])) & Padding(lengths=torch.tensor([70, 50])),
    "asked": Visible(lambda row, head, query, key: (query + key + head) % 3 == 0) & Causal(),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_computed_between_two_graphs(name: str, generator: torch.Generator):
    """The making of schedules was traced, for a minute, with a warning that their cache was not read."""
    tokens = [torch.randn(2, 2, 70, 4, generator=generator).requires_grad_() for _ in range(3)]

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 2 * attention(q + 1, k, v, structure=PATTERNS[name], form="chunked").tanh()

    expected = whole(*tokens)
    wanted = torch.autograd.grad(expected.sum(), tokens)
    counters.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        out = torch.compile(whole, backend="eager")(*tokens)
    assert not [str(one.message) for one in told if "Dynamo" in str(one.message)]
    assert len(counters["graph_break"]) == 1
    assert "disable" in next(iter(counters["graph_break"]))
    assert_close(out, expected, 70)
    for got, want in zip(torch.autograd.grad(out.sum(), tokens), wanted, strict=True):
        assert_close(got, want, 70)


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="torch.compile makes C++ here, and there is no C++ compiler")
@pytest.mark.parametrize("parts", ["elu", "taylor2"])
def test_a_compiled_step_is_the_same(parts: str, generator: torch.Generator):
    compare(PARTS[parts], "inductor", generator)


def test_a_step_of_a_model_is_one_graph():
    model = DecoderLM(ModelConfig(vocab_size=17, dim=16, layers=2, heads=2, attention="elu-sum", max_length=32)).eval()
    with torch.no_grad():
        _, states = model(torch.tensor([[1, 2, 3]]), return_states=True)
        token = torch.tensor([[4]])
        expected, after = model(token, states=states, return_states=True)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        out, again = compiled(token, states=states, return_states=True)
    assert_close(out, expected, 16)
    for a, b in zip(again, after, strict=True):
        assert_close(a.features, b.features, 16)
