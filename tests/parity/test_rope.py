"""Rotary positions against `transformers`: every rope type it has, parts of heads, both pairings, whole models.

Rates are compared to a relative 1e-6 (theirs are float32), cos and sin to 1e-5 at positions up to 127, outputs of
layers and logits of models to a relative 1e-5.
"""

import math

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore::FutureWarning")]

from benchmarks.rope_errors import CASES, LENGTHS, measure  # noqa: E402
from tests.parity.test_transformers import assert_same, from_llama, llama  # noqa: E402
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

from mercer.nn import Attention, Rotary, rope_from_config  # noqa: E402
from mercer.nn.rope_config import ROPE_TYPES  # noqa: E402


def test_every_rope_type_is_known_and_compared():
    theirs = {"default", *ROPE_INIT_FUNCTIONS}
    assert theirs | {"ntk"} == set(ROPE_TYPES)
    assert {case["rope_type"] for case in CASES.values()} == theirs


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("case", CASES)
def test_a_layer_turns_as_theirs(case, length):
    errors = measure(case, length)
    assert errors.rates < 1e-6
    assert errors.turns < 1e-5
    assert errors.attention < 1e-5


@pytest.mark.parametrize("length", [40, 128])
@pytest.mark.parametrize("kind", [kind for kind in ROPE_TYPES if kind != "ntk"])
def test_the_logits_of_a_llama_are_theirs(kind, length):
    extra = {
        "default": {},
        "linear": {"factor": 2.0},
        "dynamic": {"factor": 2.0},
        "proportional": {"partial_rotary_factor": 0.5},
        "yarn": {"factor": 2.0, "original_max_position_embeddings": 64},
        "llama3": {
            "factor": 2.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        },
        "longrope": {
            "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0], "factor": 2.0,
            "original_max_position_embeddings": 64,
        },
    }[kind]  # fmt: skip
    longer = kind in ("yarn", "llama3", "longrope", "default")
    parameters = {"rope_type": kind, "rope_theta": 500.0} | extra
    theirs = llama("Llama", num_key_value_heads=2, rope_parameters=dict(parameters))
    theirs.config.max_position_embeddings = 128 if longer else 64
    if kind == "dynamic":
        theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
    del parameters["rope_theta"]
    if kind in ("dynamic", "longrope"):
        parameters["per_token"] = False
    scaling = None if kind == "default" else parameters
    ours = from_llama(theirs, max_length=128 if longer else 64, rope_scaling=scaling)
    if kind == "proportional":
        ours = ours.with_positions(rope_scaling=scaling, allow_longer=True)
    tokens = torch.randint(0, 96, (2, length))
    with torch.no_grad():
        assert_same(ours(tokens), theirs(tokens).logits)


def test_the_dictionary_of_a_hub_configuration_is_read_as_it_is():
    old = {"type": "linear", "factor": 2.0}
    config = transformers.PhiConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=128, rope_scaling=old
    )
    rotary = rope_from_config(config.to_dict()["rope_parameters"], head_dim=16, max_length=128)
    assert (rotary.turned, rotary.reach) == (8, 256)
    assert str(rotary.scaling) == "LinearScaling(factor=2.0)"


def test_gpt_neox_turns_the_first_channels():
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention, GPTNeoXRotaryEmbedding

    config = transformers.GPTNeoXConfig(
        hidden_size=64, num_attention_heads=4, rotary_pct=0.25, rotary_emb_base=300, attn_implementation="eager"
    )
    peer = drawn(GPTNeoXAttention(config, 0))
    x, hidden = inputs(20)
    with torch.no_grad():
        expected = peer(x, hidden, position_embeddings=GPTNeoXRotaryEmbedding(config)(x, torch.arange(20)[None]))[0]
        layer = Attention(64, 4, rotary=Rotary(16, base=300.0, turned=4), bias=True)
        for part in ("weight", "bias"):  # stored [head, q|k|v, channel]
            stored = getattr(peer.query_key_value, part).unflatten(0, (4, 3, 16)).transpose(0, 1).flatten(0, 2)
            getattr(layer.qkv, part).copy_(stored)
            getattr(layer.output, part).copy_(getattr(peer.dense, part))
        assert_same(layer(x), expected)


def test_gpt_j_turns_neighbouring_channels():
    from transformers.models.gptj.modeling_gptj import GPTJAttention, create_sinusoidal_positions

    config = transformers.GPTJConfig(n_embd=64, n_head=4, rotary_dim=8, attn_implementation="eager", n_positions=32)
    peer = drawn(GPTJAttention(config, 0))
    x, hidden = inputs(20)
    sin, cos = create_sinusoidal_positions(20, 8)[None].expand(2, -1, -1).chunk(2, -1)
    with torch.no_grad():
        expected = peer(x, (sin, cos), hidden)[0]
        layer = Attention(64, 4, rotary=Rotary(16, turned=8, pairing="interleaved"))
        layer.qkv.weight.copy_(torch.cat([getattr(peer, f"{name}_proj").weight for name in "qkv"]))
        layer.output.weight.copy_(peer.out_proj.weight)
        assert_same(layer(x), expected)


@pytest.mark.parametrize("heads", [1, 3, 4, 6, 8, 12, 13])
def test_alibi_slopes_are_those_of_bloom_and_mpt(heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    from mercer.nn import alibi_slopes

    ours = alibi_slopes(heads)
    bloom = build_alibi_tensor(torch.ones(1, 5, dtype=torch.int64), heads, torch.float32).view(heads, 5)
    torch.testing.assert_close(ours[:, None] * torch.arange(5), bloom, rtol=1e-6, atol=0)
    mpt = -build_mpt_alibi_tensor(heads, 2).view(heads, 2)[:, 0]
    torch.testing.assert_close(ours, mpt, rtol=1e-6, atol=0)


def drawn(layer):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return layer.eval()


def inputs(length):
    x = torch.randn(2, length, 64, generator=torch.Generator().manual_seed(1))
    return x, torch.full((length, length), -math.inf).triu(1)[None, None]
