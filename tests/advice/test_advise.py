"""mercer.advise: exact sizes, crossings that are where the curves cross, and what it refuses."""

import json

import pytest
import torch

import mercer
from mercer.advice import LIMIT, advise
from mercer.advice.advise import KERNELS
from mercer.advice.crossing import first_length
from mercer.core.kernels import Cosine, Elu, Gaussian, Taylor
from mercer.core.learned_maps import Hedgehog
from mercer.core.machine import use_machine
from mercer.core.machine_default import DEFAULT
from mercer.core.mixed import Mixed
from mercer.core.normalizers import L2
from mercer.core.patterns import Strided
from mercer.core.random_features import PositiveRandomFeatures
from mercer.core.structures import Padding, Window
from mercer.errors import InvalidArgument, Unsupported

SIZES = {"dim": 64, "heads": 8, "context": 4096}


@pytest.mark.parametrize("at", [1, 2, 3, 10, 93, 515, 24_327, LIMIT])
def test_the_first_length_is_found_exactly(at: int):
    assert first_length(lambda n: n >= at) == at


def test_a_length_that_is_not_for_good_does_not_count():
    assert first_length(lambda n: n < 1000 or n >= 50_000) == 50_000
    assert first_length(lambda n: n < 1000) is None


@pytest.mark.parametrize(("dim", "tokens"), [(8, 93), (16, 515), (64, 24_327)])
def test_where_the_state_of_orders_up_to_3_is_smaller_than_the_cache(dim: int, tokens: int):
    """C(D + 3, 3) (D + 1) numbers against 2 D a token."""
    found = advise(dim=dim, heads=8, context=100, kernels=["taylor3-signed-sum"]).options[0].crossings
    assert found is not None
    assert found.state == tokens
    more = advise(dim=dim, heads=8, context=tokens, kernels=["taylor3-signed-sum"])
    assert more.options[0].state_bytes < more.cache_bytes
    less = advise(dim=dim, heads=8, context=tokens - 1, kernels=["taylor3-signed-sum"])
    assert less.options[0].state_bytes >= less.cache_bytes


def test_half_precision_halves_the_cache_and_not_the_state():
    whole, half = (advise(**SIZES, kernels=["elu-sum"], dtype=t) for t in (torch.float32, torch.bfloat16))
    assert half.cache_bytes * 2 == whole.cache_bytes == 2 * 8 * 4096 * 64 * 4
    assert half.options[0].state_bytes == whole.options[0].state_bytes == 8 * 64 * 65 * 4
    assert half.options[0].crossings.state == 66  # 65 x 64 x 4 bytes against 2 x 64 x 2 a token
    assert whole.options[0].crossings.state == 33


def test_grouped_heads_share_what_is_kept():
    found = advise(**SIZES, kv_heads=2, value_dim=32, batch=3, kernels=["elu-sum"])
    assert found.cache_bytes == 3 * 2 * 4096 * (64 + 32) * 4
    assert found.options[0].state_bytes == 3 * 2 * 64 * 33 * 4


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", [n for n in KERNELS if n != "softmax"])
def test_crossings_are_where_the_times_cross(name: str, training: bool):
    found = advise(dim=16, heads=8, context=64, kernels=[name], training=training).options[0].crossings

    def cheaper(length: int) -> tuple[bool, bool, bool]:
        at = advise(dim=16, heads=8, context=length, kernels=[name], training=training)
        own, softmax = at.options[0], at.softmax
        return (
            own.state_bytes < softmax.state_bytes,
            own.decode.seconds < softmax.decode.seconds,
            own.reading.seconds < softmax.reading.seconds,
        )

    for place, length in enumerate((found.state, found.decode, found.reading)):
        assert length is not None
        assert cheaper(length)[place]
        assert cheaper(4 * length)[place]
        if length > 1:
            assert not cheaper(length - 1)[place]


def test_times_grow_with_the_context_and_fixed_states_do_not():
    few, many = (advise(dim=64, heads=8, context=n) for n in (1024, 8192))
    assert [option.attention for option in few.options] == list(KERNELS)
    for a, b in zip(few.options, many.options, strict=True):
        assert a.reading.seconds < b.reading.seconds
        if a.fixed:
            assert (a.state_bytes, a.decode) == (b.state_bytes, b.decode)
        else:
            assert (8 * a.state_bytes, a.decode.seconds < b.decode.seconds) == (b.state_bytes, True)
    assert [option.fixed for option in few.options] == [False, *[True] * 5]


def test_training_takes_longer_than_reading_and_keeps_no_state():
    reading, training = (advise(**SIZES, training=t) for t in (False, True))
    for a, b in zip(reading.options, training.options, strict=True):
        assert 1.5 * a.reading.seconds < b.reading.seconds
        assert a.state_bytes == b.state_bytes
    few = advise(dim=64, heads=8, context=512, kernels=["taylor2-sum"], training=True)
    assert few.options[0].reading.path == "pairs"  # without a state, pairs are cheaper here


def test_a_state_too_large_is_a_cache():
    found = advise(dim=64, heads=8, context=100, kernels=["taylor4-l2"]).options[0]
    assert (found.fixed, found.state_bytes) == (False, 2 * 8 * 100 * 64 * 4)
    assert found.crossings is None


def test_kernels_as_objects_and_a_normaliser_for_all():
    found = advise(**SIZES, kernels=[Elu(), Cosine(), "taylor3-sum", Hedgehog()], normalizer=L2())
    assert [option.attention for option in found.options] == ["elu-l2", "cosine-l2", "taylor3-l2", "hedgehog-l2"]
    assert advise(**SIZES, kernels=[Taylor(2)]).options == advise(**SIZES).options[2:3]
    plain = advise(**SIZES, kernels=[Hedgehog(), Hedgehog(width=8)]).options
    assert [option.attention for option in plain] == ["hedgehog-sum", "Hedgehog(width=8)"]


def test_recommendations_name_the_least_of_each():
    found = advise(**SIZES)
    words = found.recommendations()
    options = (*found.options, found.softmax)
    assert found.least_reading.reading.seconds == min(o.reading.seconds for o in options)
    assert found.least_decode.decode.seconds == min(o.decode.seconds for o in options)
    assert found.least_memory.state_bytes == min(o.state_bytes for o in options)
    for goal, option in zip(words, (found.least_reading, found.least_decode, found.least_memory), strict=True):
        assert option.attention in words[goal]
    short = advise(dim=64, heads=8, context=8, kernels=["taylor2-sum"])
    assert "Least memory: softmax" in str(short)


def test_what_comes_to_the_same_is_not_called_less():
    found = advise(dim=64, heads=8, context=400, kernels=["taylor4-sum"])
    assert found.options[0].state_bytes == found.cache_bytes
    assert found.least_memory is found.softmax
    assert found.recommendations()["memory"] == "Least memory: softmax and taylor4-sum alike, 1.64 MB."
    only = advise(**SIZES, kernels=["softmax"]).recommendations()
    assert all("softmax" in words and words.count("softmax") == 1 for words in only.values())
    states = advise(**SIZES, kernels=["taylor2-sum", "elu-sum", "relu-sum"]).recommendations()["memory"]
    assert states == "Least memory: elu-sum and relu-sum alike, 133 kB; softmax 16.8 MB."


def test_a_cache_that_grows_says_why():
    found = advise(dim=64, heads=8, context=100, kernels=["taylor4-sum", "exp-l2", "softmax", "exp@8:gaussian-sum"])
    large, exp, softmax, mixed = found.options
    assert "814,385 features" in large.grows_because
    assert "no finite feature map" in exp.grows_because
    assert "no finite feature map" in mixed.grows_because
    text = str(found)
    assert text.count("keeps a cache, since ") == 3  # softmax needs no reason
    assert softmax.grows_because
    assert not advise(**SIZES, kernels=["elu-sum"]).options[0].grows_because


def test_the_table_fits_100_columns():
    kernels = ["softmax", "taylor4-signed-layernorm", PositiveRandomFeatures(64, seed=3, plain=True),
               Mixed(Gaussian(), PositiveRandomFeatures(1234, orthogonal=False, hyperbolic=True, seed=17), window=512),
               Hedgehog(width=3), Elu()]  # fmt: skip
    for training in (False, True):
        found = advise(dim=32, heads=16, kv_heads=4, value_dim=128, context=2**24, kernels=kernels, batch=128,
                       dtype=torch.bfloat16, training=training)  # fmt: skip
        text = str(found)
        assert max(map(len, text.splitlines())) <= 100
        flat = " ".join(text.split())
        for option in found.options:
            assert option.attention in flat
    assert [option.attention for option in found.options][-1] == "elu-sum"


def test_as_a_table_and_as_json():
    found = advise(**SIZES)
    text = str(found)
    for option in found.options:
        assert f"\n{option.attention} " in text
    assert "say nothing of quality" in text
    facts = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert facts["options"][1]["crossings"]["state"] == found.options[1].crossings.state
    assert facts["options"][0]["crossings"] is None
    assert set(facts["recommendations"]) == {"reading", "decode", "memory"}


def test_it_uses_the_machine_it_is_given():
    from dataclasses import replace

    slow = replace(DEFAULT, name="slow", bandwidth=DEFAULT.bandwidth / 100)
    given = advise(**SIZES, machine=slow)
    with use_machine(slow):
        assert advise(**SIZES) == given
    assert given.machine == "slow"
    assert given.softmax.decode.seconds > advise(**SIZES).softmax.decode.seconds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 0}, "dim must be an integer of 1 or more, not 0"),
        ({"heads": True}, "heads must be an integer"),
        ({"context": 2.5}, "context must be an integer"),
        ({"context": LIMIT + 1}, "at most 16,777,216 tokens"),
        ({"value_dim": -1}, "value_dim must be"),
        ({"kv_heads": 3}, "kv_heads must divide the 8 heads"),
        ({"batch": 0}, "batch must be"),
        ({"dtype": torch.int8}, r"dtype must be torch.float64"),
        ({"kernels": []}, "one or more"),
        ({"kernels": "softmax"}, "list of names or kernels"),
        ({"kernels": [3]}, "3 is neither"),
        ({"kernels": ["best"]}, "Unknown attention 'best'"),
        ({"kernels": ["dpfp999-sum"]}, "nu must be at most"),
        ({"normalizer": "l2"}, "normalizer must be a Normalizer"),
        ({"device": "cuda"}, r"measure_machine\('cuda'\)"),
        ({"machine": 3}, "machine must be a Machine"),
    ],
)
def test_refusals(change: dict, message: str):
    with pytest.raises(InvalidArgument, match=message):
        advise(**(SIZES | change))


def test_parts_that_do_not_go_together_are_named():
    with pytest.raises(Unsupported, match=r"advise: taylor3-sum: .*signed=True"):
        advise(**SIZES, kernels=["taylor3-sum"])


def test_it_is_exported():
    assert mercer.advise is advise
    assert mercer.Advice is type(advise(**SIZES, kernels=["softmax"]))


def test_a_window_bounds_the_cache_and_the_work_of_every_attention():
    names = ["softmax", "elu-sum"]
    for context in (4096, 65536):
        found = advise(dim=64, heads=8, context=context, kernels=names, structure="window(512)")
        assert found.structure == "window(512)"
        for option in (found.softmax, *found.options):
            assert option.state_bytes == 8 * 511 * 2 * 64 * 4  # the next token brings the 512th key
            assert option.fixed
            assert option.crossings is None
        assert "leaves a window" in found.options[1].grows_because
    whole = advise(dim=64, heads=8, context=65536, kernels=names)
    assert found.softmax.reading.seconds < whole.softmax.reading.seconds / 20
    assert found.softmax.decode.seconds < whole.softmax.decode.seconds / 5
    short = advise(dim=64, heads=8, context=100, kernels=names, structure=Window.last(512)).softmax
    assert (short.state_bytes, short.fixed) == (8 * 100 * 2 * 64 * 4, False)
    assert "under window(512)" in str(found)


@pytest.mark.parametrize("structure", ["strided(64)", Strided(64), "strided(64) & causal"])
def test_a_pattern_keeps_all_keys_and_reads_some_of_them(structure: str | Strided):
    found, whole = (advise(dim=64, heads=8, context=8192, **more) for more in ({"structure": structure}, {}))
    assert found.softmax.state_bytes == whole.softmax.state_bytes
    assert found.softmax.reading.seconds < whole.softmax.reading.seconds
    assert [option.attention for option in found.options] == [name for name in KERNELS if "@" not in name]
    assert all(option.reading.path == "pairs" and option.crossings is None for option in found.options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"structure": "sparse"}, InvalidArgument, "'sparse' is unknown; write causal, "),
        (
            {"structure": Padding(lengths=torch.tensor([3]))},
            InvalidArgument,
            "a name such as 'strided\\(128\\)', or",
        ),
        ({"structure": 3}, InvalidArgument, "structure must be a name"),
        ({"structure": "strided(64)", "context": 200_000}, InvalidArgument, "at most 131,072 tokens, not 200,000"),
        ({"structure": "bigbird(64)"}, Unsupported, "depends on the length, so a state cannot continue it"),
        ({"structure": "strided(64)", "kernels": ["exp@8:elu-sum"]}, Unsupported, "window of its own"),
    ],
)
def test_structures_that_cannot_be_advised_on(options: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        advise(**(SIZES | options))
