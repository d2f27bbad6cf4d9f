"""Scalings of rotary positions: golden numbers, limits, refusals, and configurations as dictionaries."""

import math

import pytest
import torch

from mercer.errors import InvalidArgument
from mercer.nn import (
    NTK,
    DynamicNTK,
    LinearScaling,
    Llama3,
    LongRoPE,
    Proportional,
    Rotary,
    YaRN,
    rope_from_config,
)
from mercer.nn.rope_config import ROPE_TYPES, scaling_from_dict, scaling_to_dict
from mercer.nn.rope_scaling import plain_rates

CPU = {"device": torch.device("cpu"), "dtype": torch.float64}
EVERY = [
    LinearScaling(4.0),
    NTK(4.0),
    DynamicNTK(4.0, 64),
    DynamicNTK(2.0, 64, per_token=False, every=16),
    Proportional(0.5, 2.0),
    YaRN(4.0, 64),
    YaRN(4.0, 64, 16.0, 2.0, None, 0.7, 1.3, False),
    YaRN(4.0, 64, attention_factor=0.9),
    Llama3(4.0, 64),
    LongRoPE((1.0, 1.0, 1.5, 2.0), (1.0, 2.0, 4.0, 8.0), 64, 4.0),
]


def rates(scaling, dim=8, base=10000.0, length=None):
    return scaling.rates(dim, base, None if length is None else torch.tensor(length), **CPU)


def test_the_bases_of_ntk():
    assert NTK(2.0).base(128, 1e4) == pytest.approx(20221.26, abs=0.005)
    lengths = torch.tensor([1, 2048, 4096])
    assert DynamicNTK(2.0, 2048).base(128, 1e4, lengths).tolist() == pytest.approx([1e4, 1e4, 30527.74], abs=0.005)


def test_ntk_keeps_the_fastest_pair_and_divides_the_slowest_by_the_factor():
    plain, scaled = plain_rates(16, 1e4, **CPU), rates(NTK(8.0), 16)
    assert scaled[0] == plain[0]
    assert (plain[-1] / scaled[-1]).item() == pytest.approx(8)
    assert (torch.diff(plain / scaled) > 0).all()


@pytest.mark.parametrize(
    ("factor", "temperature"), [(1, 1.0), (4, 1.13863), (16, 1.27726), (40, 1.36889), (64, 1.41589)]
)
def test_the_temperature_of_yarn(factor, temperature):
    assert YaRN(factor, 4096).temperature == pytest.approx(temperature, abs=5e-6)
    turns = Rotary(8, scaling=YaRN(factor, 4096)).turns(torch.tensor([[0, 3]]))
    assert turns.cos[0, 0].tolist() == pytest.approx([temperature] * 8, abs=5e-6)
    length = (turns.cos[0, 1, 0] ** 2 + turns.behind[0, 1, 4] ** 2).sqrt().item()
    assert length == pytest.approx(temperature, abs=5e-6)


def test_an_explicit_factor_and_mscale_replace_the_temperature_of_yarn():
    assert YaRN(4, 4096, attention_factor=1.5).temperature == 1.5
    half = 1 + 0.05 * math.log(4)
    assert YaRN(4, 4096, mscale=0.5, mscale_all_dim=1.0).temperature == pytest.approx(half / (1 + 0.1 * math.log(4)))
    assert YaRN(4, 4096, mscale=0.5).temperature == YaRN(4, 4096).temperature


def test_the_ramp_of_yarn():
    assert YaRN(4, 4096).ramp(128, 1e4) == (20, 46)
    low, high = YaRN(4, 4096, truncate=False).ramp(128, 1e4)
    assert (math.floor(low), math.ceil(high)) == (20, 46)
    plain, scaled = plain_rates(128, 1e4, **CPU), rates(YaRN(4, 4096), 128)
    kept = plain / scaled
    assert torch.equal(kept[:21], torch.ones(21, dtype=torch.float64))
    torch.testing.assert_close(kept[46:], torch.full((18,), 4.0, dtype=torch.float64))
    assert ((kept[21:46] > 1) & (kept[21:46] < 4)).all()


def test_a_ramp_without_width_is_a_step():
    scaling = YaRN(4, 10, beta_fast=1.6, beta_slow=1.5)
    low, high = scaling.ramp(8, 1e4)
    assert (low, high) == (0, 1)
    narrow = YaRN(2, 3)
    assert narrow.ramp(8, 1e4) == (0, 0)
    plain = plain_rates(8, 1e4, **CPU)
    assert torch.equal(rates(narrow), torch.where(torch.arange(4) > 0, plain / 2, plain))


def test_llama_3_keeps_short_waves_and_divides_long_ones():
    plain, scaled = plain_rates(16, 100.0, **CPU), rates(Llama3(8.0, 64), 16, 100.0)
    waves = 2 * math.pi / plain
    assert torch.equal(scaled[waves < 16], plain[waves < 16])
    torch.testing.assert_close(scaled[waves > 64], plain[waves > 64] / 8)
    middle = (waves > 16) & (waves < 64)
    assert middle.any()
    assert ((scaled < plain) & (scaled > plain / 8))[middle].all()


def test_longrope_switches_after_the_trained_length():
    scaling = LongRoPE((1.0, 1.0, 1.5, 2.0), (1.0, 2.0, 4.0, 8.0), 64, 4.0)
    plain = plain_rates(8, 1e4, **CPU)
    both = rates(scaling, length=[64, 65])
    torch.testing.assert_close(plain / both[0], torch.tensor([1.0, 1.0, 1.5, 2.0], dtype=torch.float64))
    torch.testing.assert_close(plain / both[1], torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64))
    assert torch.equal(rates(scaling), both[0])
    assert scaling.temperature == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))


def test_dynamic_lengths_can_be_rounded_up():
    scaling = DynamicNTK(2.0, 8, every=4)
    lengths = torch.arange(1, 17)
    assert scaling.effective(lengths).tolist() == [8] * 8 + [12] * 4 + [16] * 4


def test_proportional_leaves_the_slow_pairs_alone():
    scaled, plain = rates(Proportional(0.5, 2.0)), plain_rates(8, 1e4, **CPU)
    assert scaled.tolist() == [plain[0] / 2, plain[1] / 2, 0, 0]


@pytest.mark.parametrize(
    "scaling", [LinearScaling(1), NTK(1), DynamicNTK(1, 64), YaRN(1, 64), Llama3(1, 64), Proportional()], ids=str
)
def test_a_factor_of_1_within_the_trained_length_changes_nothing(scaling):
    torch.testing.assert_close(rates(scaling), plain_rates(8, 1e4, **CPU), rtol=1e-15, atol=0)
    assert scaling.temperature == 1


@pytest.mark.parametrize("scaling", EVERY, ids=str)
def test_a_scaling_and_its_dictionary_are_the_same(scaling):
    assert scaling_from_dict(scaling_to_dict(scaling)) == scaling
    hash(scaling)


def test_every_type_has_a_dictionary():
    assert {scaling_to_dict(s)["rope_type"] for s in EVERY} | {"default"} == set(ROPE_TYPES)


@pytest.mark.parametrize(
    ("scaling", "reach"),
    [
        (None, 100),
        (LinearScaling(2.5), 250),
        (NTK(2.0), 200),
        (DynamicNTK(2.0, 100), None),
        (YaRN(4.0, 50), 200),
        (YaRN(4.0, 10), 100),
        (Llama3(8.0, 50), 400),
        (LongRoPE((1.0,) * 4, (2.0,) * 4, 50, 4.0), 200),
        (Proportional(0.5), 100),
    ],
    ids=str,
)
def test_how_far_a_scaling_carries(scaling, reach):
    rotary = Rotary(8, scaling=scaling, max_length=100)
    assert rotary.reach == reach
    x = torch.randn(1, 1, 1, 8)
    if reach is not None:
        rotary(x, torch.tensor([[reach - 1]]))
        with pytest.raises(
            InvalidArgument, match=rf"{reach + 1} tokens is longer than the {reach} .*allow_longer=True"
        ):
            rotary(x, torch.tensor([[reach]]))
    assert Rotary(8, scaling=scaling, max_length=100, allow_longer=True).reach is None
    assert Rotary(8, scaling=scaling).reach is None


def test_old_and_new_names_of_a_configuration():
    old = rope_from_config({"type": "linear", "factor": 2}, head_dim=8, base=500.0, turned=0.5)
    new = rope_from_config(
        {"rope_type": "linear", "factor": 2, "rope_theta": 500.0, "partial_rotary_factor": 0.5}, head_dim=8
    )
    for rotary in (old, new):
        assert (rotary.base, rotary.turned, rotary.scaling) == (500.0, 4, LinearScaling(2))
    both = rope_from_config({"type": "su", "rope_type": "longrope", **LONG, "factor": None}, head_dim=4, max_length=40)
    assert both.scaling == LongRoPE((1.0, 1.0), (2.0, 3.0), 10, 4.0, per_token=False)
    assert rope_from_config(None, head_dim=8).scaling is None
    assert rope_from_config({}, head_dim=8, max_length=9).reach == 9
    yarn = rope_from_config({"rope_type": "yarn", "original_max_position_embeddings": 32}, head_dim=8, max_length=128)
    assert yarn.scaling == YaRN(4.0, 32)
    dynamic = rope_from_config({"rope_type": "dynamic", "factor": 2.0}, head_dim=8, max_length=128)
    assert dynamic.scaling == DynamicNTK(2.0, 128, per_token=False)


LONG = {"short_factor": [1.0, 1.0], "long_factor": [2.0, 3.0], "original_max_position_embeddings": 10}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_type": "axial"}, "must be one of default, linear, ntk, dynamic"),
        ({"rope_type": "mrope", "mrope_section": [1]}, "must be one of"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2}, "must be one of"),
        ({"rope_type": 3}, "must be one of"),
        ({"rope_type": "default", "factor": 2.0}, "'default' does not know factor; it has no keys"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 32}, "does not know beta_fast; its keys are factor"),
        ({"rope_type": "linear"}, "'linear' needs factor"),
        ({"rope_type": "linear", "factor": "two"}, "factor must be a number of 1 or more, not 'two'"),
        ({"rope_type": "linear", "factor": True}, "factor must be a number"),
        ({"rope_type": "linear", "factor": math.inf}, "factor must be a number"),
        ({"rope_type": "yarn", "factor": 2.0}, "needs original_max_position_embeddings"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2.5}, "whole number"),
        ({"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 8, "beta_fast": 1}, "below beta_fast"),
        ({"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 8, "truncate": 1}, "True or False"),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "attention_factor": -1},
            "attention_factor must be a number of 0 or more",
        ),
        ({"rope_type": "llama3", "factor": 2.0}, "needs high_freq_factor, low_freq_factor, original"),
        (
            {
                "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 1,
                "original_max_position_embeddings": 8,
            },
            "low must be above 0 and below high",
        ),
        ({"rope_type": "longrope", **LONG}, "needs factor"),
        ({"rope_type": "longrope", "factor": 2, **LONG, "long_factor": [1.0]}, "long has 1 numbers, but 4 turned"),
        ({"rope_type": "longrope", "factor": 2, **LONG, "short_factor": 2}, "short must be numbers"),
        ({"rope_type": "longrope", "factor": 2, **LONG, "short_factor": [1.0, 0.0]}, "above 0"),
        ({"rope_type": "dynamic", "factor": 2}, "needs original_max_position_embeddings"),
        ({"rope_type": "proportional", "partial_rotary_factor": 0}, "share must be above 0"),
        ({"partial_rotary_factor": 1.5}, "at most 1"),
        ({"rope_theta": "big"}, "rope_theta must be a number"),
        ({"partial_rotary_factor": 0.3}, "even number of channels"),
    ],
    ids=str,
)  # fmt: skip
def test_dictionaries_that_cannot_be_are_refused(values, message):
    with pytest.raises(InvalidArgument, match=message):
        rope_from_config(values, head_dim=4)


def test_two_trained_lengths_of_dynamic_ntk_are_refused():
    values = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}
    with pytest.raises(InvalidArgument, match="grows from max_length=128"):
        rope_from_config(values, head_dim=8, max_length=128)
    assert rope_from_config(values, head_dim=8, max_length=64).scaling == DynamicNTK(2.0, 64, per_token=False)


@pytest.mark.parametrize("make", [lambda: NTK(2.0).base(2, 1e4), lambda: Rotary(2, scaling=DynamicNTK(2.0, 8))])
def test_one_pair_has_no_base_to_change(make):
    with pytest.raises(InvalidArgument, match="at least 4 turned channels, not 2"):
        make()


@pytest.mark.parametrize("given", [{}, {"factor": None}, {"beta_fast": 16, "original_max_position_embeddings": None}])
def test_yarn_needs_a_factor_or_what_it_follows_from(given):
    """It was taken for 1, which changes nothing, where the others were refused; so does `transformers` refuse it."""
    with pytest.raises(InvalidArgument, match="'yarn' needs factor"):
        rope_from_config({"rope_type": "yarn", **given}, head_dim=8, max_length=128)
    told = rope_from_config({"rope_type": "yarn", **given, "factor": 4.0}, head_dim=8, max_length=128)
    assert (told.scaling.factor, told.scaling.trained) == (4.0, 128)
    derived = {"rope_type": "yarn", **given, "original_max_position_embeddings": 32}
    assert rope_from_config(derived, head_dim=8, max_length=128).scaling.factor == 4.0
