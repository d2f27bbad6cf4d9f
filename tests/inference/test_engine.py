"""The engine against the model it was made of: the model's own forward over the whole sequence, in float64."""

import copy

import pytest
import torch

from mercer.core.state import CacheState, FeatureState
from mercer.errors import InvalidArgument, Unsupported
from mercer.inference.engine import Engine, prepare
from mercer.inference.generate import complete
from mercer.inference.packed_model import PackedLinear
from mercer.inference.sampler import Sampling
from mercer.mixers.names import mixer_names
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM

pytest.importorskip("numba")

STEPPED = {
    "llama": {"heads": 6, "kv_heads": 2},
    "gpt2": {"norm": "layer", "bias": True, "position": "learned", "feedforward": "gelu_tanh"},
    "bloom": {
        "norm": "layer",
        "bias": True,
        "position": "alibi",
        "embedding_norm": True,
        "feedforward": "gelu_tanh",
    },
    "neox": {"norm": "layer", "bias": True, "parallel": "own_norms", "rope_turned": 4, "feedforward": "gelu"},
    "gptj": {
        "norm": "layer",
        "bias": ("feedforward", "norm"),
        "parallel": "one_norm",
        "tie_embeddings": False,
        "head_bias": True,
    },
    "gemma2": {
        "heads": 6,
        "kv_heads": 3,
        "norm_offset": 1.0,
        "norm_position": "both",
        "embedding_scale": 6.9,
        "logit_cap": 3.0,
        "feedforward": "geglu_tanh",
        "attention": "softcap2-sum",
        "attention_scale": 0.3,
    },
    "original": {
        "norm": "layer",
        "bias": True,
        "norm_position": "post",
        "position": "sinusoidal",
        "feedforward": "relu",
    },
    "windowed": {"window": 7, "feedforward": "reglu", "position": "none"},
    "windowed alibi": {"window": 7, "feedforward": "silu", "position": "alibi", "bias": ("qkv",)},
    "scaled": {"feedforward": "geglu", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "odd sizes": {"dim": 50, "heads": 2, "head_dim": 10, "hidden": 37, "vocab_size": 41},
}


def build(**fields: object) -> DecoderLM:
    """Large initial weights, and norms and biases that are not 1 and 0, so that every part shows."""
    config = {"vocab_size": 97, "dim": 48, "layers": 2, "heads": 4, "hidden": 70, "init_std": 0.3, "max_length": 64}
    model = DecoderLM(ModelConfig(**{**config, **fields})).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def tokens_of(model: DecoderLM, *shape: int) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(2))


def unpacked(engine: Engine, model: DecoderLM) -> DecoderLM:
    """The model in float64 with the weights that the engine holds."""
    twin = copy.deepcopy(model).double()
    held = dict(engine.model.named_modules())
    with torch.no_grad():
        for name, module in twin.named_modules():
            other = held.get(name)
            if isinstance(other, PackedLinear):
                module.weight.copy_(other.weight.plain())
            elif name == "embedding":
                module.weight.copy_(engine.model.embedding(torch.arange(len(module.weight))))
    return twin


def assert_near(actual: torch.Tensor, expected: torch.Tensor, allowed: float, what: str = "") -> None:
    assert actual.shape == expected.shape
    error = float((actual.double() - expected).abs().max() / expected.abs().max())
    assert error <= allowed, f"{what}: {error:.2e} of the largest logit, allowed {allowed:.0e}"


@pytest.mark.parametrize("name", STEPPED)
@torch.no_grad()
def test_steps_are_the_models_own(name: str) -> None:
    model = build(**STEPPED[name])
    engine, tokens = prepare(model), tokens_of(model, 1, 23)
    assert engine.reason is None
    expected = copy.deepcopy(model).double()(tokens)
    assert_near(engine(tokens), expected, 1e-5, "whole")
    for first in (0, 1, 12):  # from nothing, after one token, after a prompt
        states, at = None, first
        if first:
            out, states = engine(tokens[:, :first], return_states=True)
            assert_near(out, expected[:, :first], 1e-5, "prompt")
        while at < 23:
            out, states = engine(tokens[:, at : at + 1], states=states, return_states=True)
            assert_near(out, expected[:, at : at + 1], 1e-5, f"token {at} after {first}")
            at += 1


@torch.no_grad()
def test_long_caches_grow_and_are_cut_into_ranges() -> None:
    for fields in ({"kv_heads": 2}, {"window": 300}):
        model = build(max_length=1200, **fields)
        engine, tokens = prepare(model), tokens_of(model, 1, 900)
        expected = copy.deepcopy(model).double()(tokens)
        _, states = engine(tokens[:, :700], return_states=True)
        for at in range(700, 900):
            out, states = engine(tokens[:, at : at + 1], states=states, return_states=True)
            assert_near(out, expected[:, at : at + 1], 1e-5, f"token {at}")
        if "window" in fields:
            assert states[0].keys.shape[2] < 700


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bloom", "windowed alibi", "gpt2", "windowed"])
@pytest.mark.parametrize("batch", [2, 3, 5])
@torch.no_grad()
def test_padded_rows_are_as_if_alone(name: str, batch: int) -> None:
    model = build(**STEPPED[name])
    engine, tokens = prepare(model), tokens_of(model, batch, 20)
    real = torch.rand(batch, 20, generator=torch.Generator().manual_seed(3)) < 0.7
    real[0], real[-1, :6] = True, False
    wide = copy.deepcopy(model).double()
    states, found = None, torch.full((batch, 20, model.config.vocab_size), torch.nan)
    for start, stop in ((0, 9), (9, 10), (10, 11), (11, 15), *((i, i + 1) for i in range(15, 20))):
        part = slice(start, stop)
        padding = real[:, part]
        found[:, part], states = engine(tokens[:, part], padding=padding, states=states, return_states=True)
    for row in range(batch):
        alone = wide(tokens[row, real[row]][None])[0]
        assert_near(found[row, real[row]], alone, 1e-5, f"row {row}")
    assert states[0].length.tolist() == real.sum(1).tolist()


@torch.no_grad()
def test_states_are_values_and_go_both_ways() -> None:
    model = build(kv_heads=2)
    engine, tokens = prepare(model), tokens_of(model, 1, 16)
    expected = copy.deepcopy(model).double()(tokens)
    _, states = engine(tokens[:, :8], return_states=True)
    _, ours = engine(tokens[:, 8:9], states=states, return_states=True)
    kept = [state.clone() for state in ours]
    other = (tokens[:, 9:10] + 1) % 97
    engine(other, states=ours)  # takes the next place of the buffer
    for _ in range(2):  # two continuations of one state
        out, after = engine(tokens[:, 9:10], states=ours, return_states=True)
        assert_near(out, expected[:, 9:10], 1e-5)
    for state, copied in zip(ours, kept, strict=True):
        assert torch.equal(state.keys, copied.keys)
        assert torch.equal(state.values, copied.values)
        assert state.length.tolist() == [9]
    out, theirs = model(tokens[:, 10:12], states=list(after), return_states=True)
    assert_near(out, expected[:, 10:12], 1e-5, "the model after the engine")
    assert all(isinstance(state, CacheState) for state in theirs)
    assert_near(engine(tokens[:, 12:13], states=theirs), expected[:, 12:13], 1e-5, "the engine after the model")
    both = [state.select(torch.tensor([0, 0])) for state in after]
    out = engine(tokens[:, 10:11].repeat(2, 1), states=both)
    assert_near(out, expected[:, 10:11].repeat(2, 1, 1), 1e-5, "two rows of one")


@torch.no_grad()
def test_hidden_and_score_make_the_call() -> None:
    model = build(logit_cap=2.0)
    engine, tokens = prepare(model), tokens_of(model, 1, 9)
    _, states = engine.hidden(tokens[:, :8], return_states=True)
    hidden, after = engine.hidden(tokens[:, 8:], states=states, return_states=True)
    assert hidden.shape == (1, 1, 48)
    assert after[0].length.tolist() == [9]
    torch.testing.assert_close(engine.score(hidden), engine(tokens[:, 8:], states=states), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize(("name", "batch"), [("llama", 1), ("gemma2", 1), ("llama", 3), ("gpt2", 2)])
@torch.no_grad()
def test_packed_weights_are_the_only_large_error(weights: str, name: str, batch: int) -> None:
    """Against the model with the same packed weights in float64: what is left are keys and values of bfloat16, and in
    products with many inputs these, rounded to 2^-9. Scores of size 1, since what is rounded stands in an exponent.
    """
    model = build(**{**STEPPED[name], "init_std": 0.1})
    engine, tokens = prepare(model, weights), tokens_of(model, batch, 12)
    exact = unpacked(engine, model)
    expected = exact(tokens)
    states = None
    for at in range(12):
        out, states = engine(tokens[:, at : at + 1], states=states, return_states=True)
        assert_near(out, expected[:, at : at + 1], 0.02, f"token {at}")
    assert states[0].keys.dtype == torch.bfloat16
    assert_near(engine(tokens), expected, 0.02, "at once")
    assert engine.reason is None


@pytest.mark.slow
@torch.no_grad()
def test_a_bfloat16_model() -> None:
    model = build(kv_heads=2, norm_position="both", init_std=0.1).bfloat16()
    engine, tokens = prepare(model), tokens_of(model, 1, 12)
    expected = copy.deepcopy(model).double()(tokens)
    states = None
    for at in range(12):
        out, states = engine(tokens[:, at : at + 1], states=states, return_states=True)
        assert_near(out, expected[:, at : at + 1], 0.02, f"token {at}")
    out = model(tokens[:, :1], states=engine.states_for(states, torch.bfloat16))
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"attention": "elu-sum"}, "neither softmax"),
        ({"attention": ["softmax", "taylor2-l2"]}, "layer 1"),
        ({"position": "t5"}, "t5"),
        ({"attention": "exp-l2", "gain": "head"}, "neither softmax"),
        ({"attention": "elu-sum", "recency": True}, "neither softmax"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "depend on the length"),
        (
            {"experts": {"count": 4, "chosen": 2}},
            "layer 0: it has experts in the place of a feed-forward; its modules run one by one, with packed weights",
        ),
    ],
)
@torch.no_grad()
def test_what_has_no_compiled_step_is_computed_module_by_module(fields: dict, reason: str) -> None:
    model = build(**fields)
    engine, tokens = prepare(model), tokens_of(model, 2, 12)
    assert reason in str(engine.reason)
    assert reason in repr(engine)
    expected = copy.deepcopy(model).double()(tokens)
    out, states = engine(tokens[:, :8], return_states=True)
    assert_near(out, expected[:, :8], 1e-5)
    for at in range(8, 12):
        out, states = engine(tokens[:, at : at + 1], states=states, return_states=True)
        assert_near(out, expected[:, at : at + 1], 1e-5)
    if model.config.attention == "elu-sum":
        assert isinstance(states[0], FeatureState)


def test_generation_takes_an_engine_for_a_model() -> None:
    model = build(kv_heads=2)
    prompts = [tokens_of(model, 9).tolist(), tokens_of(model, 4).tolist()]
    sampling = Sampling(temperature=0)
    found = [complete(m, prompts, 8, sampling=sampling) for m in (model, prepare(model))]
    assert [c.tokens for c in found[0]] == [c.tokens for c in found[1]]


@torch.no_grad()
def test_threads_do_not_change_digits() -> None:
    model = build(kv_heads=2, max_length=600)
    engine, tokens = prepare(model), tokens_of(model, 1, 500)
    _, states = engine(tokens, return_states=True)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(engine(tokens[:, :1], states=states))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@torch.no_grad()
def test_the_model_stays_as_it_is() -> None:
    model = build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = tokens_of(model, 1, 5)
    expected = model(tokens)
    prepare(model, "int4")(tokens)
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(model(tokens), expected)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    "fields", [{}, {"tie_embeddings": False, "head_bias": True}, {"experts": {"count": 3, "chosen": 2}}]
)
@torch.no_grad()
def test_a_model_that_is_not_kept_leaves_its_matrices(fields: dict) -> None:
    model = build(**fields)
    tokens = tokens_of(model, 1, 5)
    expected = prepare(model)(tokens)
    engine = prepare(model, keep=False)
    assert torch.equal(engine(tokens), expected)
    left = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.ndim > 1}
    assert set(left) <= {"embedding.weight", *(f"blocks.{i}.feedforward.router.weight" for i in range(2))}, left
    assert ("embedding.weight" in left) == (not model.config.tie_embeddings)  # rows of it are read as they are


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", mixer_names())
def test_mixers_are_packed_and_continue_each_others_states(name: str, dtype: torch.dtype) -> None:
    channels = {"rwkv4": "rwkv4", "rwkv7": "rwkv7", "mamba": "none"}.get(name)
    config = ModelConfig(
        vocab_size=97, dim=64, heads=2, layers=2, init_std=0.2, feedforward=channels or "swiglu",
        attention=name if channels else [name, "softmax"],
    )  # fmt: skip
    model = DecoderLM(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    model = model.to(dtype)
    exact = copy.deepcopy(model).double()
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = torch.randint(0, 97, (2, 40), generator=generator)
    bound = 1e-5 if dtype == torch.float32 else 0.04

    def near(found: torch.Tensor, where: slice) -> None:
        wanted = expected[:, where]
        assert float((found.double() - wanted).norm() / wanted.norm()) < bound

    with torch.no_grad():
        expected = exact(tokens)
        engine = prepare(model)
        assert engine.reason is not None
        assert "its modules run one by one, with packed weights" in engine.reason
        out, states = engine(tokens[:, :37], return_states=True)
        near(out, slice(37))
        for t in (37, 38, 39):
            out, states = engine(tokens[:, t : t + 1], states=states, return_states=True)
            near(out, slice(t, t + 1))
        _, states = model(tokens[:, :38], return_states=True)
        out, states = engine(tokens[:, 38:39], states=states, return_states=True)
        near(out, slice(38, 39))
        near(model(tokens[:, 39:], states=engine.states_for(states, dtype)), slice(39, 40))
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, kept[key])


def test_what_is_refused() -> None:
    model = build()
    with pytest.raises(InvalidArgument, match="as_is, bfloat16, int8, int4"):
        prepare(model, "int3")
    with pytest.raises(Unsupported, match="float64"):
        prepare(build().double())
    other = build()
    other.blocks[1] = torch.nn.Identity()
    with pytest.raises(Unsupported, match="weights of a Identity cannot be packed yet"):
        prepare(other)
    engine = prepare(model)
    with pytest.raises(InvalidArgument, match="tokens must be integers"):
        engine(torch.zeros(1, 1))
    with pytest.raises(InvalidArgument, match="a state for each of its 2 layers"):
        engine(torch.zeros(1, 1, dtype=torch.int64), states=[])
    with pytest.raises(IndexError, match="0 to 96"):
        engine(torch.tensor([[97]]))
    _, states = engine(torch.zeros(1, 64, dtype=torch.int64), return_states=True)
    with pytest.raises(InvalidArgument, match="max_length"):
        engine(torch.zeros(1, 1, dtype=torch.int64), states=states)
    with pytest.raises(InvalidArgument, match=r"bool tensor \[1, 1\]"):
        engine(torch.zeros(1, 1, dtype=torch.int64), padding=torch.ones(1, 1))
    with pytest.raises(InvalidArgument, match="do not fit 2 rows"):
        engine(torch.zeros(2, 1, dtype=torch.int64), states=states)
