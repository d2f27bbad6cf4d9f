import pytest
import torch
import torch.nn.functional as F

from mercer.errors import InvalidArgument
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM

POSITIONS = ["rotary", "sinusoidal", "learned", "alibi", "t5", "none"]
ATTENTIONS = ["softmax", "exp-l2", "elu-sum", "taylor2-sum", "taylor3-l2", ["elu-sum", "softmax"]]
VARIANTS = [
    *({"position": position} for position in POSITIONS),
    *({"attention": attention} for attention in ATTENTIONS[1:]),
    *({"attention": attention, "position": "alibi"} for attention in ("exp-l2", "elu-sum")),
    *(
        {"attention": attention, "position": position}
        for attention in ("exp@4:taylor2-sum", ["exp@3:favor8-sum", "softmax"])
        for position in ("rotary", "alibi")
    ),
    {"window": 5},
    {"window": 5, "attention": "exp-l2", "position": "alibi"},
    {"structure": "strided(3)"},
    {"structure": ["window(3, dilation=2) | global(first=2)", "causal"], "attention": "taylor2-sum", "position": "t5"},
    {"structure": "bigbird(2, random=1, heads=4, causal=true)", "position": "alibi"},
    {"structure": "fixed(4)", "window": 7, "attention": ["softmax", "exp-l2"]},
    {"kv_heads": 1, "norm": "layer", "norm_position": "post", "feedforward": "gelu", "bias": True},
    {"kv_heads": 2, "feedforward": "relu", "tie_embeddings": False, "head_dim": 6},
    {"attention": "exp-rms", "gain": "channel", "gain_init": 0.1, "attention_scale": 0.3},
]


def names(variant):
    return "-".join(str(v).replace(" ", "") for v in variant.values())


def make(seed=0, **values):
    """A small model whose every parameter is large and random: default weights hide faults."""
    model = DecoderLM(ModelConfig(**{"vocab_size": 40, "dim": 24, "layers": 2, "heads": 4, "max_length": 160} | values))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else parameter + 0.2 * noise)
    return model.eval()


def draw(batch, length):
    return torch.randint(0, 40, (batch, length))


@pytest.mark.parametrize("variant", VARIANTS, ids=names)
def test_one_token_at_a_time_equals_all_at_once(variant):
    model, tokens = make(**variant), draw(2, 12)
    with torch.no_grad():
        full = model(tokens)
        logits, states = model(tokens[:, :5], return_states=True)
        parts = [logits]
        for t in range(5, 12):
            logits, states = model(tokens[:, t : t + 1], states=states, return_states=True)
            parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=0, atol=2e-5)
    assert all(state.length.tolist() == [12, 12] for state in states)


@pytest.mark.parametrize("attention", ["softmax", "elu-sum"])
@pytest.mark.parametrize("length", [1, 7, 8, 63, 64, 65, 127])
def test_prefill_and_one_step_at_awkward_lengths(length, attention):
    model, tokens = make(attention=attention), draw(1, length + 16)
    with torch.no_grad():
        full = model(tokens)
        _, states = model(tokens[:, :length], return_states=True)
        step, _ = model(tokens[:, length : length + 1], states=states, return_states=True)
        chunk = model(tokens[:, length:], states=states)  # sixteen tokens at once on a filled cache
    torch.testing.assert_close(step, full[:, length : length + 1], rtol=0, atol=1e-5)
    torch.testing.assert_close(chunk, full[:, length:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS, ids=names)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_equals_no_padding_and_decoding_goes_on(variant, side):
    model, lengths = make(**variant), (12, 7, 1)
    rows = [draw(1, n) for n in lengths]
    width = 17
    batch, keep = draw(3, width), torch.zeros(3, width, dtype=torch.bool)
    for row, n, tokens in zip(range(3), lengths, rows, strict=True):
        where = slice(width - n, None) if side == "left" else slice(0, n)
        batch[row, where], keep[row, where] = tokens[0], True
    with torch.no_grad():
        padded, states = model(batch, padding=keep, return_states=True)
        following = draw(3, 1)
        step = model(following, states=states)
        for row, tokens in enumerate(rows):
            alone = model(torch.cat((tokens, following[row : row + 1]), 1))[0]
            torch.testing.assert_close(torch.cat((padded[row][keep[row]], step[row])), alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("position", POSITIONS)
def test_order_is_seen_through_positions_and_the_future_never(position):
    model, tokens = make(position=position, layers=1), draw(1, 9)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 40
    with torch.no_grad():
        a, b = model(tokens), model(changed)
        torch.testing.assert_close(a[:, :-1], b[:, :-1], rtol=0, atol=0)
        swapped = tokens[:, [1, 0, *range(2, 9)]]
        difference = (model(swapped)[:, -1] - a[:, -1]).abs().max()
    assert (difference > 1e-3) == (position != "none")


def test_a_window_sees_its_width_and_no_more():
    model, tokens = make(window=4, layers=1), draw(1, 9)
    with torch.no_grad():
        base = model(tokens)[:, -1]
        for distance in range(9):
            changed = tokens.clone()
            changed[:, 8 - distance] = (changed[:, 8 - distance] + 1) % 40
            seen = not torch.equal(model(changed)[:, -1], base)
            assert seen == (distance <= 3)


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_is_the_cross_entropy_of_the_logits(tied):
    model, tokens, targets = make(tie_embeddings=tied).double(), draw(3, 8), draw(3, 8)
    targets[0, :4] = -100
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss = model.loss(tokens, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    parameters = dict(model.named_parameters())
    got, wanted = (torch.autograd.grad(x, list(parameters.values())) for x in (loss, expected))
    for name, a, b in zip(parameters, got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
    assert model.loss(tokens, targets, reduction="sum").item() == pytest.approx(20 * expected.item())


def test_initial_weights_depend_on_the_seed_and_the_name_only():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    softmax = DecoderLM(ModelConfig(vocab_size=40, layers=2, seed=3))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    other = DecoderLM(ModelConfig(vocab_size=40, layers=3, attention="exp-l2", gain="head", seed=3)).state_dict()
    std = {"embedding": 0.02, "qkv": 0.02, "output": 0.02 / 2, "input": 0.02}
    for name, value in softmax.state_dict().items():
        if "output" not in name:  # its size depends on the number of layers
            assert torch.equal(value, other[name]), name
        elif value.dim() > 1:
            torch.testing.assert_close(value * 2**0.5, other[name] * 3**0.5)
        if value.dim() > 1:
            assert value.std().item() == pytest.approx(std[name.split(".")[-2]], rel=0.05), name
    again = DecoderLM(ModelConfig(vocab_size=40, layers=2, seed=4)).state_dict()
    assert not any(torch.equal(v, again[n]) for n, v in softmax.state_dict().items() if v.dim() > 1)


def test_every_parameter_learns_and_only_l2_layers_have_gains():
    model = make(attention=["softmax", "exp-l2"], gain="head", gain_init=0.1)
    model.loss(draw(2, 6), draw(2, 6)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert [block.attention.gain is not None for block in model.blocks] == [False, True]
    fresh = DecoderLM(ModelConfig(vocab_size=9, attention="exp-l2", gain="channel", gain_init=0.1))
    assert torch.equal(fresh.blocks[0].attention.gain, torch.full((8, 16), 0.1))


def test_bfloat16_runs_close_to_float32():
    model, tokens = make(), draw(2, 9)
    with torch.no_grad():
        exact = model(tokens).softmax(-1)
        rounded = model.bfloat16()(tokens)
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float().softmax(-1) - exact).abs().max() < 0.1


def test_bad_calls_are_refused():
    model, tokens = make(position="learned", max_length=8), draw(1, 8)
    _, states = model(tokens, return_states=True)
    with pytest.raises(InvalidArgument, match=r"position 8 .*8 positions"):
        model(tokens[:, :1], states=states)
    with pytest.raises(InvalidArgument, match="each of its 2 layers"):
        model(tokens, states=states[:1])
    with pytest.raises(InvalidArgument, match=r"integers \[B, T\]"):
        model(tokens.float())
    with pytest.raises(InvalidArgument, match="padding"):
        model(tokens, padding=torch.ones(1, 7, dtype=torch.bool))
