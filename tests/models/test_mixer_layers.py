"""Models of mixers and of mixers and attention: what the configuration takes and refuses, states, swaps."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from mercer.core.mixer_state import MixerState
from mercer.core.state import CacheState
from mercer.errors import InvalidArgument
from mercer.mixers import names
from mercer.mixers.base import Mixer
from mercer.mixers.mixer_config import MixerConfig
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.models.io import load_model, save_model
from mercer.training.config import TrainConfig
from mercer.training.optim import make_optimizer


class Sums(Mixer):
    """y_t = W sum_{s <= t} x_s, the least a mixer can be."""

    undecayed = ("rate",)

    def __init__(self, dim: int, factor: float) -> None:
        super().__init__()
        self.dim, self.factor = dim, factor
        self.output = nn.Linear(dim, dim)
        self.rate = nn.Parameter(torch.empty(2, 3))
        self.start()

    @property
    def kind(self) -> str:
        return f"sums({self.dim})"

    def start(self, generator: torch.Generator | None = None) -> None:
        with torch.no_grad():
            self.rate.copy_(torch.rand(2, 3, generator=generator) + 5)

    def mix(self, x: Tensor, lengths: Tensor | None, past: Mapping[str, Tensor] | None, *_: dict[str, Tensor]):
        before = x.new_zeros(x.shape[0], self.dim) if past is None else past["sum"]
        sums = before.unsqueeze(1) + self.factor * x.cumsum(1)
        return self.output(sums), {"sum": sums[:, -1]}


class SumsConfig(MixerConfig):
    factor: float = 1.0

    def build(self, dim: int, heads: int, *, layer: int, layers: int) -> Sums:
        return Sums(dim, self.factor)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    from mercer.mixers import base

    monkeypatch.setattr(base, "SumsConfig", SumsConfig, raising=False)
    monkeypatch.setitem(names._HOMES, "sums", ("base", "SumsConfig"))


def _config(**changes: object) -> ModelConfig:
    values = {"vocab_size": 11, "dim": 16, "heads": 2, "layers": 3, "attention": ("sums", "sums", "softmax")}
    return ModelConfig(**(values | changes))


def test_layers_mix_and_hand_on_their_states():
    model = DecoderLM(_config(mixers={"sums": {"factor": 0.5}}))
    assert [type(block).__name__ for block in model.blocks] == ["MixerBlock", "MixerBlock", "Block"]
    assert model.blocks[0].mixer.factor == 0.5
    tokens = torch.randint(0, 11, (2, 9))
    whole, states = model(tokens, return_states=True)
    assert [type(state) for state in states] == [MixerState, MixerState, CacheState]
    first, states = model(tokens[:, :4], return_states=True)
    rest = model(tokens[:, 4:], states=states)
    torch.testing.assert_close(torch.cat((first, rest), 1), whole)


def test_padding_is_absence_through_both_kinds_of_layers():
    model = DecoderLM(_config()).double()
    tokens = torch.randint(0, 11, (1, 6))
    padded = torch.cat((torch.randint(0, 11, (1, 3)), tokens), 1)
    padding = torch.arange(9).unsqueeze(0) >= 3
    torch.testing.assert_close(model(padded, padding=padding)[:, 3:], model(tokens))


def test_starts_depend_on_the_seed_and_the_name_alone():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first = DecoderLM(_config(seed=4))
        torch.manual_seed(2)
        second = DecoderLM(_config(seed=4))
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)
    rates = [block.mixer.rate for block in first.blocks[:2]]
    assert not torch.equal(*rates)
    assert float(rates[0].detach().min()) >= 5


def test_weight_decay_spares_what_a_mixer_names():
    model = DecoderLM(_config())
    optimizer, _ = make_optimizer(model, TrainConfig(steps=10, weight_decay=0.1), torch.device("cpu"))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay[id(model.blocks[0].mixer.rate)] == 0
    assert decay[id(model.blocks[0].mixer.output.weight)] == 0.1


def test_a_model_without_attention_has_no_end():
    model = DecoderLM(_config(attention="sums", feedforward="none", max_length=4))
    assert model.reach is None
    assert model.config.position == "none"
    assert _config(attention="sums", heads=3).heads == 3  # no attention has to divide dim by it
    assert ModelConfig(**model.config.model_dump()) == model.config
    assert _config().position == "rotary"
    assert model(torch.zeros(1, 9, dtype=torch.int64)).shape == (1, 9, 11)
    assert model.blocks[0].feedforward is None


def test_saved_and_loaded(tmp_path):
    model = DecoderLM(_config(mixers={"sums": {"factor": 0.5}}))
    save_model(model, tmp_path)
    again = load_model(tmp_path)
    assert again.config == model.config
    assert hash(again.config) == hash(model.config)
    tokens = torch.randint(0, 11, (1, 5))
    torch.testing.assert_close(again(tokens), model(tokens), rtol=0, atol=0)


def test_one_name_swaps_the_layers_of_attention():
    model = DecoderLM(_config())
    assert model.with_attention("taylor2-sum").config.attentions == ("sums", "sums", "taylor2-sum")
    with pytest.raises(InvalidArgument, match="layer 0 is 'sums', and 'exp-l2' cannot take its weights"):
        model.with_attention(["exp-l2", "sums", "softmax"])
    with pytest.raises(InvalidArgument, match="no layer of this model is an attention"):
        DecoderLM(_config(attention="sums")).with_attention("softmax")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mixers": {"sums": {"size": 1}}}, "the options of sums: 'size' is unknown; there are factor"),
        ({"mixers": {"mamba": {}}}, "mixers has options of 'mamba', which attention does not name"),
        ({"attention": "sums", "kv_heads": 1}, "kv_heads is for layers that are attentions"),
        ({"attention": "sums", "bias": ("query",)}, "bias is for layers that are attentions"),
        ({"attention": "sums", "position": "alibi"}, 'position "alibi" is for layers that are attentions'),
        ({"norm_position": "post"}, 'layers of sums have norm_position "pre"'),
        ({"feedforward": "none"}, "feedforward 'none' is for mixers, and attention names 'softmax'"),
        ({"attention": "sums", "feedforward": "none", "experts": {"count": 2, "chosen": 1}}, "experts and feedforward"),
        ({"attention": "sums", "feedforward": "none", "hidden": 3}, "hidden is the size of a feed-forward"),
        ({"attention": "sums", "window": 4}, "window is for layers that are attentions, and here all are sums"),
        ({"attention": "sums", "structure": "strided(4)"}, "structure is for layers that are attentions"),
        ({"attention": "sums", "recency": True}, "recency is for layers that are attentions"),
        ({"attention": "sums", "attention_scale": 0.5}, "attention_scale is for layers that are attentions"),
    ],
)
def test_refusals(changes, said):
    with pytest.raises(InvalidArgument, match=said):
        _config(**changes)


def test_a_state_of_another_kind_is_refused():
    model = DecoderLM(_config(attention="sums"))
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    _, states = model(tokens, return_states=True)
    other = [MixerState("sums(8)", state.parts, state.length) for state in states]
    with pytest.raises(InvalidArgument, match=r"the state is of sums\(8\), and this layer is sums\(16\)"):
        model(tokens, states=other)
    with pytest.raises(InvalidArgument, match="every one of states must be a state"):
        model(tokens, states=[None] * 3)
