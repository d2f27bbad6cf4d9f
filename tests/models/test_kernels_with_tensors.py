"""Language models whose kernels carry tensors, and whose normalisers bring parts of their own."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mercer.core.random_features import RandomFeatures
from mercer.errors import InvalidArgument
from mercer.models import io
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.training.config import TrainConfig
from mercer.training.optim import decays, make_optimizer

CARRYING = ["favor8-sum", "rfa8-l2", "trig8-l2", "hedgehog-sum", "mlp6-sum"]
NORMALISED = ["exp-layernorm", "taylor2-gate", "elu-length", "taylor3-clamped", "exp-detached"]


def config(*attention: str, **changes) -> ModelConfig:
    return ModelConfig(vocab_size=20, dim=16, layers=2, heads=4, kv_heads=2, attention=attention, **changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*CARRYING, *NORMALISED])
def test_a_model_comes_back_with_its_kernels(tmp_path, name: str, dtype: torch.dtype):
    model = DecoderLM(config(name)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) / 8
    for block in model.blocks:
        if isinstance(block.attention.kernel, RandomFeatures):
            block.attention.redraw()
    io.save_model(model, tmp_path)
    again, tokens = io.load_model(tmp_path), torch.randint(0, 20, (2, 7))
    assert torch.equal(again(tokens), model(tokens))
    assert [b.dtype for b in again.buffers()] == [b.dtype for b in model.buffers()]
    logits, states = again(tokens[:, :4], return_states=True)
    rest = model(tokens[:, 4:], states=states)
    torch.testing.assert_close(
        torch.cat((logits, rest), 1).float(),
        model(tokens).float(),
        atol=1e-4 if dtype == torch.float32 else 0.1,
        rtol=0,
    )


@pytest.mark.parametrize("name", [n for n in CARRYING if n != "hedgehog-sum"])  # which begins as the identity
def test_kernels_are_drawn_from_the_seed_and_the_layer_only(name: str):
    def tensors(model: DecoderLM) -> list[torch.Tensor | None]:
        return [next(iter(block.attention.kernel.tensors().values()), None) for block in model.blocks]

    torch.manual_seed(1)
    one = tensors(DecoderLM(config(name)))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    two = tensors(DecoderLM(config("softmax", name)))
    assert torch.equal(torch.get_rng_state(), state)
    other = tensors(DecoderLM(config(name, seed=1)))
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one[0], other[0])
    assert torch.equal(one[1], two[1])


def test_a_kernels_maps_learn_and_do_not_decay():
    model = DecoderLM(config("hedgehog-sum", "mlp6-sum"))
    optimizer, _ = make_optimizer(model, TrainConfig(learning_rate=0.1, weight_decay=0.5), torch.device("cpu"))
    maps = {n: p for n, p in model.named_parameters() if "kernel_tensors" in n}
    assert len(maps) == 2 + 8
    assert not any(decays(n, p) for n, p in maps.items())
    before = {n: p.detach().clone() for n, p in maps.items()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert all(torch.equal(p, before[n]) for n, p in maps.items())
    optimizer.zero_grad()
    model.loss(torch.randint(0, 20, (2, 7)), torch.randint(0, 20, (2, 7))).backward()
    optimizer.step()
    assert not any(torch.equal(p, before[n]) for n, p in maps.items())


@pytest.mark.parametrize("name", ["rfa8-l2", "taylor2-sum", "exp@3:elu-sum"])
def test_a_model_with_recency_gates_decodes_and_comes_back(tmp_path, name: str):
    model = DecoderLM(config(name, recency=True))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) / 8
    tokens = torch.randint(0, 20, (2, 7))
    io.save_model(model, tmp_path)
    assert torch.equal(io.load_model(tmp_path)(tokens), model(tokens))
    states, rows = None, []
    for t in range(7):
        out, states = model(tokens[:, t : t + 1], states=states, return_states=True)
        rows.append(out)
    torch.testing.assert_close(torch.cat(rows, 1), model(tokens), atol=1e-4, rtol=0)
    model.loss(tokens, tokens).backward()
    for block in model.blocks:
        assert block.attention.recency.weight.grad.abs().max() > 0
    assert [b.attention.recency for b in DecoderLM(config(name)).blocks] == [None, None]


def test_a_model_of_a_version_without_a_key_is_read(tmp_path):
    """config.json and the weights' own metadata may lack what has a default."""
    model = DecoderLM(config("softmax"))
    io.save_model(model, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["recency"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"config": json.dumps(values)})
    assert io.load_model(tmp_path).config == model.config


def test_a_model_draws_all_of_its_layers_anew():
    model, again = (
        DecoderLM(config("favor8-sum", "exp@2:favor8-sum")),
        DecoderLM(config("favor8-sum", "exp@2:favor8-sum")),
    )
    tokens = torch.randint(0, 20, (1, 5))

    def drawn(model: DecoderLM) -> list[torch.Tensor]:
        return [t.clone() for n, t in model.state_dict().items() if n.endswith("directions")]

    first = drawn(model)
    for change in ({}, {"seed": 3}):
        model.redraw(**change)
        again.redraw(**change)
        assert torch.equal(model(tokens), again(tokens))
        assert not any(torch.equal(a, b) for a, b in zip(first, drawn(model), strict=True))
    one, two = drawn(model)
    assert one.shape == two.shape
    assert not torch.equal(one, two)
    with pytest.raises(InvalidArgument, match="no layer of this model has any"):
        DecoderLM(config("hedgehog-sum")).redraw()


def test_directions_are_no_parameters():
    model = DecoderLM(config("favor8-sum"))
    assert not any("kernel_tensors" in name for name, _ in model.named_parameters())
    assert sum("directions" in name for name in model.state_dict()) == 2


def test_a_learned_gain_goes_with_a_layer_norm():
    model = DecoderLM(config("exp-layernorm", gain="head", gain_init=0.5))
    assert [b.attention.gain.shape for b in model.blocks] == [(4,), (4,)]
