"""Prompts of many tokens through the engine: the products that torch makes with plain matrices from packed weights."""

import copy

import pytest
import torch
from tests.inference.test_engine import STEPPED, assert_near, build, tokens_of, unpacked

from mercer.inference import packed_model
from mercer.inference.engine import prepare

pytest.importorskip("numba")

GATED = {**STEPPED, "biased gates": {"feedforward": "swiglu", "bias": True}}


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "windowed", "biased gates", "odd sizes"])
@torch.no_grad()
def test_prompts_are_the_models_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of 40 tokens, gates and values of 7 of them at a time, with padding and without."""
    monkeypatch.setattr(packed_model, "AT_ONCE", 7)
    model = build(**GATED[name])
    engine, tokens = prepare(model), tokens_of(model, 2, 40)
    exact = copy.deepcopy(model).double()
    assert_near(engine(tokens), exact(tokens), 1e-5)
    real = torch.rand(2, 40, generator=torch.Generator().manual_seed(3)) < 0.8
    found = engine(tokens, padding=real)
    for row in range(2):
        assert_near(found[row, real[row]], exact(tokens[row, real[row]][None])[0], 1e-5, f"row {row}")


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "biased gates", "gpt2"])
@torch.no_grad()
def test_packed_prompts_round_as_bfloat16_does(weights: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64 with the weights that are held: as near as the model in bfloat16 is with its own, twice over."""
    monkeypatch.setattr(packed_model, "AT_ONCE", 16)
    model = build(**{**GATED[name], "init_std": 0.1})
    engine, tokens = prepare(model, weights), tokens_of(model, 1, 48)
    rounded = copy.deepcopy(model).bfloat16()
    plain = (rounded(tokens).double() - copy.deepcopy(rounded).double()(tokens)).abs().max()
    expected = unpacked(engine, model)(tokens)
    assert_near(engine(tokens), expected, float(2 * plain / expected.abs().max()))


@torch.no_grad()
def test_a_prompt_in_pieces_is_the_prompt() -> None:
    """Of more and of fewer tokens than packed weights are multiplied for as they are."""
    model = build(**STEPPED["llama"], max_length=200)
    engine, tokens = prepare(model), tokens_of(model, 1, 150)
    expected = copy.deepcopy(model).double()(tokens)
    states = None
    for start, stop in ((0, 100), (100, 140), (140, 149), (149, 150)):
        out, states = engine(tokens[:, start:stop], states=states, return_states=True)
        assert_near(out, expected[:, start:stop], 1e-5, f"from {start}")
