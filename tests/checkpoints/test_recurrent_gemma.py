"""What RecurrentGemma's format can say, and what it cannot."""

import pytest
import torch
from tests.checkpoints.test_hub_configs import HUB, read
from tests.checkpoints.zoo import DECODERS, make, tokens

from mercer import checkpoints
from mercer.checkpoints.family import find_family
from mercer.checkpoints.keys import Keys
from mercer.errors import Unsupported

PUBLISHED = HUB["recurrentgemma-2b"]


def test_the_published_model_is_griffin():
    config, _ = read(PUBLISHED)
    assert config.attentions == ("rg-lru", "rg-lru", "softmax")
    assert (config.window, config.rope_turned, config.hidden, config.logit_cap) == (8, 4, 32, 30.0)
    assert config.mixers == {"rg-lru": {"width": 32, "blocks": 4, "conv": 4}}
    assert config.embedding_scale == 5.65625  # sqrt(32) = 5.65685 in bfloat16
    assert config.reach is None


@pytest.mark.parametrize("name", [name for name in DECODERS if name.startswith("recurrent_gemma")])
def test_what_is_written_is_read_again(name):
    family = find_family("recurrent_gemma")
    config, _ = read(PUBLISHED | DECODERS[name][1] | {"rope_theta": 500.0, "max_position_embeddings": 8192})
    keys = Keys(family.write_config(config), "config.json")
    assert family.read_config(keys, "RecurrentGemmaForCausalLM") == config
    keys.finish()


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"block_types": ["recurrent", "mamba"]}, "block_types is .*; known are 'recurrent' and 'attention'"),
        ({"block_types": []}, "block_types is"),
        ({"_block_types": ["attention"]}, "_block_types is .*; it is block_types again"),
        ({"head_dim": 16}, "head_dim is 16, and only 8"),
        ({"intermediate_size": 65}, "intermediate_size is 65; half of it"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters has another type"),
    ],
)
def test_what_cannot_be_read(keys, sentence):
    with pytest.raises(Unsupported, match=sentence):
        read(PUBLISHED | keys)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"attention": ("rg-lru", "taylor2-sum")}, "attention = "),
        ({"window": None}, "attention has no window"),
        ({"embedding_scale": 32**0.5}, "embedding_scale = "),
        ({"logit_cap": None}, "logits have no cap"),
        ({"mixers": {"rg-lru": {"blocks": 2}}}, "mixers = "),
        ({"mixers": {"rg-lru": {"bias": False}}}, "mixers = "),
    ],
)
def test_what_cannot_be_written(changes, sentence):
    config, _ = read(PUBLISHED)
    other = type(config)(**config.model_dump() | changes)
    with pytest.raises(Unsupported, match=f"recurrent_gemma has no way to say.*{sentence}"):
        find_family("recurrent_gemma").write_config(other)


@pytest.mark.peers
def test_their_own_decoding_is_ours(tmp_path):
    """Token by token with their states, which are kept in the layers; ours are values."""
    theirs = make(*DECODERS["recurrent_gemma"], tmp_path)
    ours, ids = checkpoints.load(tmp_path), tokens(length=12)
    with torch.no_grad():
        wanted = theirs.generate(ids, max_new_tokens=15, do_sample=False, eos_token_id=None, pad_token_id=2)
        states, piece, found = None, ids, [ids]
        for _ in range(15):
            logits, states = ours(piece, states=states, return_states=True)
            piece = logits[:, -1:].argmax(-1)
            found.append(piece)
    assert torch.equal(torch.cat(found, 1), wanted)
