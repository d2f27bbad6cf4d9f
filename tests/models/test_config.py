import math
import re

import pytest

from mercer.core.patterns import Global, Strided
from mercer.core.structures import Window
from mercer.errors import InvalidArgument
from mercer.models.config import ModelConfig


def test_a_pattern_is_repeated_over_the_layers():
    config = ModelConfig(vocab_size=10, layers=6, attention=["elu-sum", "elu-sum", "softmax"])
    assert config.attentions == ("elu-sum", "elu-sum", "softmax") * 2
    assert ModelConfig(vocab_size=10, layers=2, attention="exp-l2").attentions == ("exp-l2", "exp-l2")


def test_json_round_trip_and_hash():
    config = ModelConfig(vocab_size=10, attention=["exp-l2", "softmax"], gain="head", gain_init=0.1, window=7)
    again = ModelConfig.model_validate_json(config.model_dump_json())
    assert again == config
    assert hash(again) == hash(config)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("window( 4 )|global( first=1 )", "window(4) | global"),
        (Window.last(4) | Global((0, 1)), "window(4) | global(first=2)"),
        ([Strided(4), "causal & window(3)"], ("strided(4)", "causal & window(3)")),
    ],
)
def test_structures_are_kept_by_name(given, name):
    config = ModelConfig(vocab_size=10, layers=3, structure=given)
    assert config.structure == name
    names = (name,) if isinstance(name, str) else name
    assert config.structures == (names * 3)[:3]
    again = ModelConfig.model_validate_json(config.model_dump_json())
    assert again == config
    assert hash(again) == hash(config)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "vocab_size must be given"),
        ({"vocab_size": 10, "widht": 3}, "'widht' is unknown"),
        ({"vocab_size": 10, "heads": 3}, "dim 128 is not a multiple of 3 heads"),
        ({"vocab_size": 10, "kv_heads": 3}, "kv_heads 3 does not divide heads 8"),
        ({"vocab_size": 10, "head_dim": 5}, "even head_dim, not 5"),
        ({"vocab_size": 10, "dim": 5, "heads": 1, "position": "sinusoidal"}, "even dim, not 5"),
        ({"vocab_size": 10, "attention": "hardmax"}, "hardmax"),
        ({"vocab_size": 10, "attention": ["softmax", "hardmax"]}, "hardmax"),
        ({"vocab_size": 10, "attention": []}, "at least one name"),
        ({"vocab_size": 10, "layers": 1, "attention": ["softmax", "exp-l2"]}, "2 names for 1 layer; name at most"),
        ({"vocab_size": 10, "attention": "taylor3-sum"}, "use taylor3-l2, taylor3-rms, an even order such as taylor4"),
        ({"vocab_size": 10, "attention": ["softmax", "power1-sum"]}, "or power1-signed-sum"),
        ({"vocab_size": 10, "attention": "cosine-sum"}, "use cosine-l2, cosine-rms, or cosine-signed-sum"),
        ({"vocab_size": 10, "structure": "sparse"}, "structure: .*'sparse' is unknown; write causal, window"),
        ({"vocab_size": 10, "structure": ["causal", "window"]}, "window needs its width; write window"),
        ({"vocab_size": 10, "structure": []}, "structure has 0 names for 4 layers; name 1 to 4"),
        ({"vocab_size": 10, "layers": 1, "structure": ["causal", "global"]}, "structure has 2 names for 1 layer"),
        ({"vocab_size": 10, "structure": 3}, "structure"),
        ({"vocab_size": 10, "structure": Window(3, 2)}, "Window\\(left=3, right=2\\) has no registered name"),
        ({"vocab_size": 10, "structure": "strided(4)", "attention": "exp@8:elu-sum"}, "window of its own: leave"),
        ({"vocab_size": 10, "window": 4, "attention": "exp@8:elu-sum"}, "under window 4: .* leave Window out"),
        ({"vocab_size": 10, "structure": "bigbird(4, heads=2)"}, "is for 2 heads, but the model has 8"),
        ({"vocab_size": 10, "seed": -1}, "seed must be 0 or more"),
        ({"vocab_size": 10, "gain": "head"}, "normaliser is L2, RMS or layernorm"),
        ({"vocab_size": 10, "gain_init": 0.5}, "gain_init needs gain"),
        ({"vocab_size": 10, "layers": 0}, "layers"),
        ({"vocab_size": 10, "position": "polar"}, "position"),
        ({"vocab_size": 10, "attention_scale": float("nan")}, "attention_scale must be a finite number"),
        ({"vocab_size": 10, "init_std": float("inf")}, "init_std must be a finite number"),
    ],
)
def test_bad_configurations_are_one_sentence(values, sentence):
    with pytest.raises(InvalidArgument, match=sentence) as caught:
        ModelConfig(**values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["gain_init", "attention_scale", "rope_base", "norm_eps", "init_std"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(name, value):
    with pytest.raises(InvalidArgument, match=f"{name} must be a finite number"):
        ModelConfig(**{"vocab_size": 10, "attention": "exp-l2", "gain": "head", name: value})


@pytest.mark.parametrize("name", ["taylor3-signed-sum", "taylor3-l2", "taylor4-sum", "cosine-signed-sum", "power2-sum"])
def test_what_the_message_offers_is_accepted(name):
    assert ModelConfig(vocab_size=10, attention=name).attentions == (name,) * 4


@pytest.mark.parametrize(
    "name", ["taylor3-sum", "cosine-sum", "trig8-sum", "rfa8-detached", "power3-detached", "exp@3:taylor3-sum"]
)
def test_every_name_in_a_refusal_is_a_way_out(name):
    with pytest.raises(InvalidArgument, match="takes negative values") as refusal:
        ModelConfig(vocab_size=10, attention=name)
    offered = re.findall(r"[a-z0-9@:-]+-(?:sum|l2|rms|detached)", str(refusal.value).partition("; use ")[2])
    assert len(offered) >= 3
    for way in offered:
        assert ModelConfig(vocab_size=10, attention=way).attentions == (way,) * 4
