"""Checkpoints of models whose layers are not all of one kind: what is written, swapped, repeated and refused."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints.zoo import tokens

from mercer import checkpoints
from mercer.checkpoints.family import family_of, find_family
from mercer.errors import InvalidArgument, Unsupported
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.models.shared_hybrid import SharedHybridLM
from mercer.models.shared_hybrid_config import SharedHybridConfig


def _jamba(*attention: str, **changes: object) -> ModelConfig:
    values = {
        "vocab_size": 96, "dim": 32, "heads": 4, "layers": len(attention), "attention": attention, "position": "none",
        "mixers": {"mamba": {"state": 4, "inner_norms": "learned"}} if "mamba" in attention else {},
    }  # fmt: skip
    return ModelConfig(**(values | changes))


def _zamba2(**changes: object) -> SharedHybridConfig:
    values = {
        "vocab_size": 96, "dim": 32, "heads": 4, "layers": 4, "shared_at": (0, 1, 3), "feedforward": "geglu",
        "position": "none", "attention_scale": 8**-0.5, "feedforward_rank": 3,
        "mixers": {"mamba2": {"state": 4, "head_dim": 8}},
    }  # fmt: skip
    return SharedHybridConfig(**(values | changes))


@pytest.mark.parametrize(
    ("attention", "period", "offset"),
    [
        (["mamba", "softmax", "mamba", "mamba", "softmax", "mamba"], 3, 1),
        (["mamba", "mamba", "softmax", "mamba"], 3, 2),
        (["softmax", "mamba", "mamba"], 3, 0),
        (["softmax"] * 3, 1, 0),
        (["mamba"] * 3, 4, 3),
    ],
)
def test_places_of_attention_become_a_period_and_an_offset(attention, period, offset):
    config = _jamba(*attention)
    said = find_family("jamba").write_config(config)
    assert (said["attn_layer_period"], said["attn_layer_offset"]) == (period, offset)
    again = find_family("jamba").read_config(checkpoints.keys.Keys(said, "here"), "JambaForCausalLM")
    assert again.attentions == tuple(attention)


def test_places_without_a_period_are_refused():
    with pytest.raises(Unsupported, match="an attention every so many layers, not in 1, 2"):
        find_family("jamba").write_config(_jamba("mamba", "softmax", "softmax", "mamba"))
    with pytest.raises(Unsupported, match="learned norms in its mixers"):
        find_family("jamba").write_config(_jamba("mamba", "softmax", mixers={}))


def test_one_name_swaps_the_attention_of_a_hybrid_that_is_read(tmp_path):
    model = DecoderLM(_jamba("mamba", "softmax", "mamba", "mamba"))
    checkpoints.save(model, tmp_path / "model")
    swapped = checkpoints.load(tmp_path / "model", attention="elu-sum")
    assert swapped.config.attentions == ("mamba", "elu-sum", "mamba", "mamba")
    ids = tokens()
    assert torch.equal(swapped(ids), model.eval().with_attention("elu-sum")(ids))
    assert torch.equal(checkpoints.load(tmp_path / "model")(ids), model(ids))


@pytest.mark.parametrize("rank", [None, 3])
def test_shared_blocks_are_written_once_and_read_from_files_that_repeat_them(rank, tmp_path):
    model = SharedHybridLM(_zamba2(shared=2, attention_rank=rank)).eval()
    assert family_of(model.config).name == "zamba2"
    checkpoints.save(model, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    stored = load_file(file)
    blocks = {name.split(".shared_transformer.")[0] for name in stored if "shared_transformer" in name}
    assert blocks == {"model.layers.0", "model.layers.1"}
    inside = "shared_transformer.self_attn.q_proj.weight"
    stored[f"model.layers.3.{inside}"] = stored[f"model.layers.0.{inside}"].clone()
    save_file(stored, file)
    ids = tokens()
    assert torch.equal(checkpoints.load(tmp_path / "model")(ids), model(ids))
    stored[f"model.layers.3.{inside}"] += 1
    save_file(stored, file)
    with pytest.raises(InvalidArgument, match=r"layers\.3\S* differs from .* are one \(layers_block_type\)"):
        checkpoints.load(tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"feedforward_rank": None}, "adapters of one rank"),
        ({"attention_rank": 2}, "adapters of one rank"),
        ({"attention_scale": None}, "heads of 2 dim / heads = 16 channels"),
        ({"bias": ("output",)}, "biases in its mixers and its feed-forwards or in neither"),
        ({"mixers": {"mamba2": {"head_dim": 8, "step_most": 1.0}}}, "mixers of one kind"),
        ({"mixer": "retnet", "mixers": {}}, "no way to say mixer = 'retnet'"),
        ({"attention": "elu-sum"}, "no way to say attention = 'elu-sum'"),
    ],
)
def test_what_zamba2_has_no_key_for(changes, said):
    with pytest.raises(Unsupported, match=said):
        find_family("zamba2").write_config(_zamba2(**changes))


def _zamba(**changes: object) -> SharedHybridConfig:
    values = {
        "vocab_size": 96, "dim": 32, "heads": 4, "layers": 3, "shared_at": (0, 2), "feedforward": "geglu",
        "position": "none", "attention_scale": 8**-0.5, "mixer": "mamba", "mixers": {"mamba": {"state": 4, "heads": 2}},
    }  # fmt: skip
    return SharedHybridConfig(**(values | changes))


def test_zamba_is_written_and_read_again(tmp_path):
    model = SharedHybridLM(_zamba()).eval()
    assert family_of(model.config).name == "zamba"
    checkpoints.save(model, tmp_path / "model")
    assert torch.equal(checkpoints.load(tmp_path / "model")(tokens()), model(tokens()))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mixers": {"mamba": {"heads": 1}}}, "mixers with two heads or more"),
        ({"shared": 2}, "no way to say shared = 2"),
        ({"feedforward_rank": 2}, "no way to say feedforward_rank = 2"),
        ({"feedforward": "gelu"}, "no way to say feedforward = 'gelu'"),
        ({"position": "rotary"}, "no way to say position = 'rotary'"),
    ],
)
def test_what_zamba_has_no_key_for(changes, said):
    with pytest.raises(Unsupported, match=said):
        find_family("zamba").write_config(_zamba(**changes))
