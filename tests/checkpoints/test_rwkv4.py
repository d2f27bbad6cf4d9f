"""What is particular to RWKV-4 as transformers has it."""

import pytest
import torch
from tests.checkpoints.measure import error, stepwise
from tests.checkpoints.zoo import DECODERS, make, tokens

from mercer import checkpoints
from mercer.checkpoints.family import find_family
from mercer.errors import Unsupported
from mercer.models.config import ModelConfig


@pytest.mark.peers
@pytest.mark.parametrize("every", [0, 1, 2])
def test_weights_are_read_as_they_were_saved_and_states_go_on(every, tmp_path):
    """In evaluation transformers halves what flows between layers, and the weights that add to it, every so many
    layers. The norms take it out again but for their epsilon, which is 4, 16 and 64 times as large beside a variance
    that was halved once, twice and three times; with such norms ours gives the same, and 4e-4 beside it without."""
    kind, settings = DECODERS["rwkv"]
    settings = settings | {"rescale_every": every, "num_hidden_layers": 4, "use_cache": True}
    theirs, ids = make(kind, settings, tmp_path / "model"), tokens()
    ours = checkpoints.load(tmp_path / "model")
    stored = theirs.rwkv.blocks[3].attention.output.weight.clone()
    with torch.no_grad():
        first = theirs(ids[:, :20])
        rest = theirs(ids[:, 20:], state=first.state)
        wanted = torch.cat((first.logits, rest.logits), 1)
        assert torch.equal(theirs.rwkv.blocks[3].attention.output.weight, stored / 2 ** (3 // every if every else 0))
        assert torch.equal(ours.blocks[3].mixer.output.weight, stored)
        if every:
            assert error(ours(ids), wanted) < 1e-3
            for i, block in enumerate(ours.blocks):
                block.mixer_norm.eps *= 4 ** (i // every)
                block.feedforward_norm.eps *= 4 ** (i // every)
            ours.norm.eps *= 4 ** (4 // every)
        assert error(ours(ids), wanted) < 1e-5
        assert error(stepwise(ours, ids, (20, 1, 3)), wanted) < 1e-5


@pytest.mark.peers
def test_decays_in_float32_make_no_other_tensor_wide(tmp_path):
    """As transformers saves a model in bfloat16, whose decays and bonuses it keeps in float32."""
    kind, settings = DECODERS["rwkv"]
    theirs = make(kind, settings, tmp_path / "made").bfloat16()
    for block in theirs.rwkv.blocks:
        for parameter in (block.attention.time_decay, block.attention.time_first):
            parameter.data = parameter.data.float()
    theirs.save_pretrained(tmp_path / "model")
    ours, ids = checkpoints.load(tmp_path / "model"), tokens()
    kinds = {name: parameter.dtype for name, parameter in ours.named_parameters()}
    wide = {name for name, dtype in kinds.items() if dtype == torch.float32}
    assert wide == {f"blocks.{i}.mixer.{name}" for i in range(3) for name in ("decay", "bonus")}
    assert kinds["blocks.0.mixer.key.weight"] == torch.bfloat16
    with torch.no_grad():
        exact = checkpoints.load(tmp_path / "model", dtype="float32")(ids)
        assert error(ours(ids).float(), exact) < 0.1


def config(**changes):
    values = {
        "vocab_size": 32, "dim": 16, "heads": 1, "layers": 2, "attention": "rwkv4", "feedforward": "rwkv4",
        "norm": "layer", "norm_eps": 1e-5, "bias": ("norm",), "position": "none", "embedding_norm": True,
    }  # fmt: skip
    return ModelConfig(**values | changes)


def test_what_the_format_cannot_say_is_refused():
    write = find_family("rwkv").write_config
    assert write(config(hidden=40))["intermediate_size"] == 40
    assert write(config(mixers={"rwkv4": {"width": 8}}))["attention_hidden_size"] == 8
    for changes, what in (
        ({"norm_eps": 1e-6}, "norm_eps"),
        ({"embedding_norm": False}, "embedding_norm"),
        ({"feedforward": "rwkv7"}, "feedforward"),
        ({"attention": ("rwkv4", "rwkv5")}, "attention"),
    ):
        with pytest.raises(Unsupported, match=f"rwkv has no way to say {what}"):
            write(config(**changes))
