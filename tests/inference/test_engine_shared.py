"""Packed decoders whose layers share a transformer block, against the model itself in float64."""

import copy

import pytest
import torch
from torch import Tensor, nn

from mercer.core.mixer_state import JoinedState
from mercer.inference.engine import WEIGHTS, Engine, prepare
from mercer.inference.generate import complete
from mercer.inference.packed_model import PackedLinear
from mercer.inference.sampler import Sampling
from mercer.models.shared_hybrid import SharedHybridLM
from mercer.models.shared_hybrid_config import SharedHybridConfig

pytest.importorskip("numba")

KINDS: dict[str, dict[str, object]] = {
    "zamba": {"mixer": "mamba", "mixers": {"mamba": {"heads": 2, "state": 4}}, "feedforward": "geglu"},
    "zamba2": {
        "mixers": {"mamba2": {"state": 8, "head_dim": 16}},
        "feedforward": "swiglu",
        "shared_at": (0, 1, 3),
        "shared": 2,
        "attention_rank": 3,
        "feedforward_rank": 5,
        "position": "rotary",
        "bias": ("feedforward",),
    },
    "plain": {"mixer": "gla", "feedforward": "gelu", "feedforward_rank": 2, "attention": "elu-sum"},
}


def build(kind: str, dtype: torch.dtype = torch.float32) -> SharedHybridLM:
    """Weights in which every part shows."""
    fields = {"layers": 4, "shared_at": (1, 3), "position": "none", "max_length": 64} | KINDS[kind]
    model = SharedHybridLM(SharedHybridConfig(vocab_size=61, dim=32, heads=2, init_std=0.1, **fields)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model.to(dtype)


def with_weights_of(engine: Engine, model: SharedHybridLM) -> SharedHybridLM:
    """The model in float64, with the weights that the engine holds; every matrix is one of these."""
    twin = copy.deepcopy(model).double()
    held, left = dict(engine.model.named_modules()), set(dict(twin.named_modules()))
    with torch.no_grad():
        for name, module in twin.named_modules():
            other = held.get(name)
            if isinstance(other, PackedLinear):
                assert isinstance(module, nn.Linear)
                module.weight.copy_(other.weight.plain())
                left.discard(name)
            elif name == "embedding":
                module.weight.copy_(engine.model.embedding(torch.arange(len(module.weight))))
    unpacked = [name for name in left if isinstance(twin.get_submodule(name), nn.Linear)]
    kept = {part for block in twin.blocks for part in block.mixer.unpacked}
    assert {name.rpartition(".")[2] for name in unpacked} <= kept
    return twin


def assert_near(found: Tensor, wanted: Tensor, bound: float) -> None:
    assert found.shape == wanted.shape
    assert float((found.double() - wanted).norm() / wanted.norm()) < bound


def tokens_of(rows: int, length: int) -> Tensor:
    return torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_packed_model_is_the_model(kind: str, weights: str) -> None:
    """What is left beside the weights' own rounding is that of float32, and of bfloat16 in products of many inputs."""
    model, tokens = build(kind), tokens_of(2, 24)
    engine = prepare(model, weights)
    assert "with packed weights" in str(engine.reason)
    exact = with_weights_of(engine, model)
    wanted = exact(tokens)
    many = 1e-5 if weights == "as_is" else 0.06
    padding = torch.ones(2, 24, dtype=torch.bool)
    padding[1, :5] = False
    assert_near(engine(tokens), wanted, many)
    assert_near(engine(tokens, padding=padding)[1, 5:], exact(tokens[1:, 5:])[0], many)
    out, states = engine(tokens[:1, :21], return_states=True)
    assert_near(out, wanted[:1, :21], 1e-5)  # few inputs: nothing is rounded to bfloat16
    for t in (21, 22, 23):
        out, states = engine(tokens[:1, t : t + 1], states=states, return_states=True)
        assert_near(out, wanted[:1, t : t + 1], 1e-5)
    given = complete(exact.float(), [tokens[0, :9].tolist()], 12, sampling=Sampling(temperature=0))
    written = complete(engine, [tokens[0, :9].tolist()], 12, sampling=Sampling(temperature=0))
    assert written[0].tokens == given[0].tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_engine_and_model_continue_each_others_states(dtype: torch.dtype) -> None:
    model, tokens = build("zamba2", dtype), tokens_of(1, 20)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    bound = 1e-5 if dtype == torch.float32 else 0.05
    wanted = copy.deepcopy(model).double()(tokens)
    engine = prepare(model)
    _, states = engine(tokens[:, :18], return_states=True)
    assert isinstance(states[0], JoinedState)
    assert states[0].parts["attention"].tensors()["keys"].dtype == dtype
    assert_near(model(tokens[:, 18:], states=engine.states_for(states, dtype)), wanted[:, 18:], bound)
    _, states = model(tokens[:, :18], return_states=True)
    assert_near(engine(tokens[:, 18:], states=states), wanted[:, 18:], bound)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, kept[name])
    packed = prepare(model, "int8")
    _, states = packed(tokens[:, :18], return_states=True)
    assert_near(packed(tokens[:, 18:], states=packed.states_for(states, torch.float32)), wanted[:, 18:], 0.2)


@torch.no_grad()
def test_a_model_that_is_not_kept_leaves_its_matrices() -> None:
    model, tokens = build("zamba2"), tokens_of(1, 5)
    expected = prepare(model)(tokens)
    engine = prepare(model, keep=False)
    assert torch.equal(engine(tokens), expected)
    left = {name for name, parameter in model.named_parameters() if parameter.ndim > 1 and parameter.numel()}
    assert left <= {"embedding.weight", *(f"blocks.{i}.mixer.convolution.weight" for i in range(4))}
