"""A trained model on sequences longer than those it was trained on: refused, scaled, or let run on."""

import pytest
import torch

from mercer.errors import InvalidArgument
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.models.io import load_model, save_model
from mercer.nn.rope_bands import LongRoPE, YaRN
from mercer.nn.rope_scaling import DynamicNTK, LinearScaling

SHORT, LONG = 8, 14


def make_config(**values):
    return ModelConfig(**{"vocab_size": 20, "dim": 16, "layers": 2, "heads": 2, "max_length": SHORT} | values)


def make_model(**values):
    return DecoderLM(make_config(init_std=0.3, **values)).eval()


def draw(length=LONG):
    return torch.randint(0, 20, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("position", ["rotary", "sinusoidal"])
def test_longer_sequences_are_refused_with_the_way_out(position):
    model, tokens = make_model(position=position), draw()
    model(tokens[:, :SHORT])
    way = r"YaRN\(factor=\.\.\., trained=8\)" if position == "rotary" else "allow_longer=True"
    with pytest.raises(InvalidArgument, match=rf"14 tokens is longer than the 8 .*{way}"):
        model(tokens)
    _, states = model(tokens[:, :SHORT], return_states=True)
    with pytest.raises(InvalidArgument, match="9 tokens is longer than the 8"):
        model(tokens[:, SHORT : SHORT + 1], states=states)
    longer = model.with_positions(allow_longer=True)
    assert torch.equal(longer(tokens[:, :SHORT]), model(tokens[:, :SHORT]))
    assert longer(tokens).shape == (2, LONG, 20)


def test_padding_does_not_count():
    model, tokens = make_model(), draw()
    padding = torch.zeros(2, LONG, dtype=torch.bool)
    padding[:, -SHORT:] = True
    torch.testing.assert_close(model(tokens, padding=padding)[:, -SHORT:], model(tokens[:, -SHORT:]))
    padding[0, 0] = True
    with pytest.raises(InvalidArgument, match="9 tokens is longer than the 8"):
        model(tokens, padding=padding)


@pytest.mark.parametrize("position", ["alibi", "t5", "none"])
def test_positions_without_a_trained_range_go_on(position):
    assert make_model(position=position)(draw()).shape == (2, LONG, 20)


def test_a_scaling_is_another_model_on_the_same_weights():
    model, tokens = make_model(), draw()
    longer = model.with_positions(rope_scaling=LinearScaling(2.0))
    assert longer.embedding.weight is model.embedding.weight
    assert all(a is b for a, b in zip(longer.parameters(), model.parameters(), strict=True))
    assert (longer.reach, model.reach) == (16, 8)
    assert model.config.rope_scaling is None
    assert longer.config.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert not torch.allclose(longer(tokens[:, :SHORT]), model(tokens[:, :SHORT]), atol=1e-4)
    again = longer.with_positions()
    assert torch.equal(again(tokens[:, :SHORT]), model(tokens[:, :SHORT]))
    with pytest.raises(InvalidArgument, match=r"LinearScaling\(factor=2.0\) carries it to"):
        longer(draw(17))


def test_a_scaled_model_is_saved_with_its_scaling(tmp_path):
    model = make_model().with_positions(rope_scaling={"rope_type": "yarn", "factor": 4})
    save_model(model, tmp_path)
    loaded = load_model(tmp_path).eval()
    assert loaded.config.scaling == YaRN(4, trained=SHORT)
    assert torch.equal(loaded(draw()), model(draw()))


@torch.no_grad()
@pytest.mark.parametrize(
    "scaling",
    [DynamicNTK(2.0, SHORT), LongRoPE((1.0, 1.0, 1.2, 1.5), (1.5, 2.0, 4.0, 4.0), SHORT, 2.0)],
    ids=["ntk", "long"],
)
def test_case_21_reading_in_pieces_equals_reading_at_once_at_any_depth(scaling):
    """transformers#25104: rates that depend on the length, decoded from a cache of turned keys."""
    model = make_model().double().with_positions(rope_scaling=scaling)
    tokens = draw(15)
    full = model(tokens)
    plain = make_model().double().with_positions(allow_longer=True)(tokens)
    torch.testing.assert_close(full[:, 0], (plain if scaling.temperature == 1 else full)[:, 0])
    assert not torch.allclose(full[:, -1], plain[:, -1], atol=1e-3)
    states, at = None, 0
    for size in (1, 5, 1, 1, 1, 4, 2):
        out, states = model(tokens[:, at : at + size], states=states, return_states=True)
        torch.testing.assert_close(out, full[:, at : at + size], rtol=0, atol=1e-10)
        at += size
    assert at == 15


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"position": "alibi", "rope_scaling": {"rope_type": "linear", "factor": 2}},
            'rope_scaling is for position "rotary"',
        ),
        ({"position": "none", "rope_turned": 4}, 'rope_turned is for position "rotary"'),
        ({"rope_turned": 3}, "rope_turned must be even"),
        ({"rope_turned": 10}, "at most 8, a head"),
        ({"rope_scaling": {"rope_type": "stretch"}}, "rope_type must be one of default, linear"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "speed": 3}}, "does not know speed"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor must be a number of 1 or more"),
        ({"rope_turned": 2, "rope_scaling": {"rope_type": "ntk", "factor": 2}}, "at least 4 turned channels"),
        ({"position": "learned", "allow_longer": True}, "raise max_length"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"position": "t5", "t5_buckets": 1}, "t5_buckets must be at least 2"),
        ({"position": "t5", "t5_max_distance": 16}, "t5_max_distance above half"),
    ],
)
def test_configurations_that_cannot_be_are_refused(values, message):
    with pytest.raises(InvalidArgument, match=message):
        make_config(**values)


def test_a_scaling_that_is_a_string_is_refused():
    with pytest.raises(InvalidArgument, match="not 'yarn=4'"):
        make_model().with_positions(rope_scaling="yarn=4")
