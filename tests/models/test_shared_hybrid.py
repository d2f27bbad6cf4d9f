"""Decoders whose layers share a transformer block: what they compute, states, swaps, saving, and what is refused."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from mercer.core.mixer_state import JoinedState, MixerState
from mercer.core.state import State
from mercer.errors import InvalidArgument
from mercer.inference.generate import complete
from mercer.inference.sampler import Sampling
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.models.io import load_model, save_model
from mercer.models.shared_hybrid import SharedHybridLM
from mercer.models.shared_hybrid_config import SharedHybridConfig


def _config(**changes: object) -> SharedHybridConfig:
    values = {
        "vocab_size": 13, "dim": 16, "heads": 4, "layers": 4, "shared_at": (0, 1, 3), "shared": 2, "max_length": 32,
        "mixers": {"mamba2": {"state": 4, "head_dim": 8}}, "feedforward": "geglu", "attention_rank": 3,
        "feedforward_rank": 2,
    }  # fmt: skip
    return SharedHybridConfig(**(values | changes))


def _model(**changes: object) -> SharedHybridLM:
    model = SharedHybridLM(_config(**changes)).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    return model


def _tokens(rows: int = 2, length: int = 11) -> Tensor:
    return torch.randint(13, (rows, length), generator=torch.Generator().manual_seed(1))


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def test_it_is_the_formula():
    """Without positions, with the adapters merged into the matrices by hand and softmax written out."""
    model = _model(position="none")
    tokens = _tokens()
    e = x = model.embedding.weight[tokens]
    for layer, block in enumerate(model.blocks):
        read = x
        if layer in (0, 1, 3):
            use = (0, 1, 3).index(layer)
            shared, adapters = model.shared[use % 2], block.adapters
            joined = _rms(torch.cat((x, e), -1), shared.attention_norm.weight)
            merged = [low.up.weight @ low.down.weight for low in adapters.attention]
            q, k, v = (joined @ (shared.attention.qkv.weight + torch.cat(merged)).T).split(32, -1)
            q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in (q, k, v))
            scores = q @ k.mT / 8**0.5
            scores = scores.masked_fill(torch.ones(11, 11, dtype=torch.bool).triu(1), -torch.inf)
            told = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ shared.attention.output.weight.T
            told = _rms(told, shared.feedforward_norm.weight)
            low = adapters.feedforward
            gate, value = (told @ (shared.feedforward.input.weight + low.up.weight @ low.down.weight).T).chunk(2, -1)
            told = linear(gelu(gate) * value, shared.feedforward.output.weight)
            read = x + told @ block.bridge.weight.T
        x = x + block.mixer(_rms(read, block.mixer_norm.weight))
    wanted = _rms(x, model.norm.weight) @ model.embedding.weight.T
    torch.testing.assert_close(model(tokens), wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("attention", ["softmax", ("taylor2-sum", "softmax")])
@pytest.mark.parametrize("position", ["rotary", "alibi", "none"])
def test_pieces_and_padding_agree_with_the_whole(attention, position):
    model, tokens = _model(attention=attention, position=position), _tokens()
    whole, states = model(tokens, return_states=True)
    assert [type(state) for state in states] == [JoinedState, JoinedState, MixerState, JoinedState]
    logits: list[Tensor] = []
    after: list[State] | None = None
    for piece in tokens.split([4, 1, 5, 1], 1):
        out, after = model(piece, states=after, return_states=True)
        logits.append(out)
    torch.testing.assert_close(torch.cat(logits, 1), whole, rtol=1e-9, atol=1e-10)
    padding = torch.tensor([[False] * 3 + [True] * 11 + [False], [True] * 4 + [False] * 4 + [True] * 7])
    filled = torch.full((2, 15), 7).masked_scatter(padding, tokens)
    torch.testing.assert_close(model(filled, padding=padding)[padding], whole.flatten(0, 1), rtol=1e-9, atol=1e-10)


def test_states_are_saved_and_loaded():
    model, tokens = _model(), _tokens()
    _, states = model(tokens[:, :6], return_states=True)
    again = [State.from_tensors(state.tensors()) for state in states]
    assert torch.equal(model(tokens[:, 6:], states=again), model(tokens[:, 6:], states=states))
    with pytest.raises(InvalidArgument, match="JoinedState of its attention and its mixer"):
        model(tokens[:, 6:], states=[states[2], *states[1:]])


def test_a_shared_block_is_one():
    model = SharedHybridLM(_config())
    names = {name for name, _ in model.named_parameters()}
    assert sum(name.endswith("attention.qkv.weight") for name in names) == 2
    assert model.state_dict().keys() == names
    model.loss(_tokens()[:, :-1], _tokens()[:, 1:]).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_it_is_saved_loaded_swapped_and_lengthened(tmp_path):
    model, tokens = _model().float(), _tokens()
    save_model(model, tmp_path)
    again = load_model(tmp_path)
    assert type(again) is SharedHybridLM
    assert again.config == model.config
    assert torch.equal(again(tokens), model(tokens))
    swapped = model.with_attention("taylor2-sum")
    assert swapped.shared[0].attention.qkv.weight is model.shared[0].attention.qkv.weight
    assert not torch.allclose(swapped(tokens), model(tokens))
    long = _tokens(1, 40)
    with pytest.raises(InvalidArgument, match="max_length"):
        model(long)
    longer = model.with_positions(allow_longer=True)
    assert isinstance(longer, SharedHybridLM)
    assert longer(long).shape == (1, 40, 13)
    torch.testing.assert_close(longer(tokens), model(tokens))


def test_random_features_are_drawn_anew():
    model, tokens = _model(attention="favor8-sum"), _tokens()
    before = model(tokens)
    model.redraw(5)
    assert not torch.allclose(model(tokens), before)


def test_it_writes_text():
    model = SharedHybridLM(_config()).eval()
    rows = [[1, 2, 3], [4, 5, 6, 7, 8]]
    together = complete(model, rows, 6, sampling=Sampling(0))
    alone = [complete(model, [row], 6, sampling=Sampling(0))[0] for row in rows]
    assert [one.tokens for one in together] == [one.tokens for one in alone]


def test_the_default_head_is_a_share_of_both_streams():
    assert _config().head_size == 8
    assert _config(head_dim=6).head_size == 6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shared_at": (1, 0)}, r"shared_at must be layers from 0 to 3 in order, not \(1, 0\)"),
        ({"shared_at": (1, 4)}, "shared_at must be layers from 0 to 3"),
        ({"shared_at": (1,)}, "2 shared blocks need as many layers in shared_at, not 1"),
        ({"attention": ("softmax", "softmax", "exp-l2")}, "attention has 3 names for 2 shared blocks"),
        ({"attention": "mamba2"}, "attention is that of the shared blocks, and 'mamba2' is a mixer"),
        ({"mixer": "gla"}, "mixers has options of 'mamba2', and mixer is 'gla'"),
        ({"mixer": "none", "mixers": {}}, "mixer: there is no mixer 'none'"),
        ({"norm_position": "post"}, 'shared blocks have norm_position "pre"'),
        ({"feedforward": "none"}, "a feed-forward of two matrices, not 'none'"),
        ({"experts": {"count": 2}}, "a feed-forward of their own and no experts"),
        ({"heads": 5}, "2 dim = 32 is not a multiple of 5 heads"),
    ],
)
def test_refusals(changes, said):
    with pytest.raises(InvalidArgument, match=said):
        _config(**changes)


def test_an_ordinary_configuration_stays_one(tmp_path):
    model = DecoderLM(ModelConfig(vocab_size=9, dim=8, heads=2, layers=1))
    save_model(model, tmp_path)
    assert type(load_model(tmp_path)) is DecoderLM
