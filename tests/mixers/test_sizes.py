"""A model's configuration refuses what its mixers cannot be built of, and nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mercer.errors import InvalidArgument
from mercer.mixers.names import mixer_config, mixer_names
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.models.shared_hybrid import SharedHybridLM
from mercer.models.shared_hybrid_config import SharedHybridConfig

few = st.integers(1, 9)
share = st.sampled_from([0.25, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0])
OPTIONS: dict[str, dict[str, st.SearchStrategy[object]]] = {
    "retnet": {"value_expand": share},
    "mamba": {"expand": few, "inner": st.none() | few, "heads": few, "state": few, "rank": few},
    "mamba2": {
        "expand": few,
        "head_dim": few,
        "groups": few,
        "norm_groups": st.none() | few,
        "step_least": st.sampled_from([0.0, 0.1, 1.0]),
        "step_most": st.none() | st.sampled_from([0.01, 0.1, 2.0]),
    },
    "gla": {"heads": st.none() | few, "key_expand": share, "value_expand": share},
    "deltanet": {"heads": st.none() | few, "key_expand": share, "value_expand": share},
    "gated-deltanet": {"heads": st.none() | few, "key_expand": share, "value_expand": share},
    "rg-lru": {"width": st.none() | few, "blocks": st.none() | few},
    "rwkv4": {"width": st.none() | few},
    "rwkv5": {"heads": st.none() | few},
    "rwkv6": {"heads": st.none() | few, "mix_rank": few},
    "rwkv7": {"heads": st.none() | few, "gate_rank": few},
    "s4d": {"state": few, "init": st.sampled_from(["lin", "real", "legs"])},
    "s4": {"state": few},
}


def test_every_mixer_is_here():
    assert set(OPTIONS) == set(mixer_names())


@pytest.mark.parametrize("name", OPTIONS)
@given(data=st.data())
@settings(max_examples=40)
def test_a_configuration_is_refused_where_its_mixer_is(name: str, data: st.DataObject):
    """What the class itself refuses, with the same sentence; and what is accepted is built."""
    options = {key: data.draw(values, key) for key, values in OPTIONS[name].items() if data.draw(st.booleans(), key)}
    dim, heads = data.draw(st.integers(1, 24), "dim"), data.draw(few, "heads")
    try:
        config = ModelConfig(vocab_size=3, dim=dim, heads=heads, layers=1, attention=name, mixers={name: options})
    except InvalidArgument as error:
        refused = str(error)
        unchecked = type(mixer_config(name)).model_construct(**{**mixer_config(name).model_dump(), **options})
        with pytest.raises(InvalidArgument) as found, torch.device("meta"):
            unchecked.build(dim, heads, layer=0, layers=1)
        assert str(found.value) in refused
    else:
        with torch.device("meta"):
            DecoderLM(config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"attention": "mamba2", "dim": 48},
            "model configuration: mixers: mamba2 has 2 * 48 channels inside, which heads of 64 do not divide",
        ),
        ({"attention": "retnet", "dim": 24}, "retnet needs an even number of key channels in each head, not 24 / 8"),
        ({"attention": "mamba", "mixers": {"mamba": {"heads": 3}}}, "3 heads do not divide the 256 channels inside"),
        ({"attention": "rg-lru", "dim": 20}, "rg-lru needs a width that its blocks divide, not 20 in 8 blocks"),
        ({"attention": ["softmax", "gla"], "mixers": {"gla": {"heads": 3}}}, "whole number of key channels in each"),
        ({"attention": "rwkv7", "dim": 20}, "rwkv7 needs a whole number of key channels in each head"),
        ({"attention": "s4", "mixers": {"s4": {"state": 3}}}, "the options of s4: s4 keeps pairs of conjugate numbers"),
    ],
)
def test_the_sentence_is_plain(fields: dict[str, object], message: str):
    with pytest.raises(InvalidArgument) as found:
        ModelConfig(vocab_size=3, **{"layers": 2, **fields})
    assert message in str(found.value)
    assert "\n" not in str(found.value)


def test_shared_blocks_ask_their_mixer_too():
    sizes = {"vocab_size": 8, "dim": 24, "heads": 2, "layers": 2, "shared_at": (1,)}
    with pytest.raises(InvalidArgument, match="mixer: mamba2 has 2 \\* 24 channels inside, which heads of 64 do not"):
        SharedHybridConfig(**sizes)
    with torch.device("meta"):
        SharedHybridLM(SharedHybridConfig(**sizes, mixers={"mamba2": {"head_dim": 16}}))
