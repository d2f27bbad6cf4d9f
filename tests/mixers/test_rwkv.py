"""RWKV's mixers beside their papers' formulas, in float64 and token by token."""

import math

import numpy as np
import pytest
import torch
from tests.mixers.cases import DIM, HEADS, build, inputs
from torch.testing import assert_close

from mercer.core.structures import Documents
from mercer.errors import InvalidArgument
from mercer.mixers.channel_mixing import ChannelMixing, UngatedChannelMixing
from mercer.mixers.rwkv4 import RWKV4
from mercer.mixers.rwkv5 import RWKV5
from mercer.mixers.rwkv6 import RWKV6
from mercer.mixers.rwkv7 import RWKV7
from mercer.mixers.token_shift import token_shift
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM

SIZE = DIM // HEADS


def numbers(module):
    return {name: p.detach().double().numpy() for name, p in module.named_parameters()}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def head_norm(x, weight, bias, eps=64e-5):
    runs = x.reshape(HEADS, SIZE)
    centred = runs - runs.mean(1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(1, keepdims=True) + eps)
    return normed.reshape(-1) * weight + bias


def rwkv4(p, x):
    last, out = np.zeros(DIM), []
    keys, values = [], []
    for t, now in enumerate(x):
        k, v, r = (
            p[f"{n}.weight"] @ (p[f"mix_{n}"] * now + (1 - p[f"mix_{n}"]) * last)
            for n in ("key", "value", "receptance")
        )
        weights = [np.exp(-(t - 1 - i) * np.exp(p["decay"]) + keys[i]) for i in range(t)] + [np.exp(p["bonus"] + k)]
        keys.append(k)
        values.append(v)
        average = sum(w * u for w, u in zip(weights, values, strict=True)) / sum(weights)
        out.append(p["output.weight"] @ (sigmoid(r) * average))
        last = now
    return np.stack(out)


def rwkv5(p, x, read=None):
    last, state, out = np.zeros(DIM), np.zeros((HEADS, SIZE, SIZE)), []
    for now in x:
        if read is None:
            r, k, v, g = (now + (last - now) * p[f"mix_{n}"] for n in ("receptance", "key", "value", "gate"))
            decay = np.exp(-np.exp(p["decay"]))
        else:
            r, k, v, g, decay = read(p, now, last)
        r, k, v, g = (
            p[f"{n}.weight"] @ y for n, y in zip(("receptance", "key", "value", "gate"), (r, k, v, g), strict=True)
        )
        mixed = np.zeros(DIM)
        for h in range(HEADS):
            c = slice(h * SIZE, (h + 1) * SIZE)
            new = np.outer(k[c], v[c])
            mixed[c] = r[c] @ (np.diag(p["bonus"][h]) @ new + state[h])
            state[h] = np.diag(decay[h]) @ state[h] + new
        out.append(p["output.weight"] @ (silu(g) * head_norm(mixed, p["norm.weight"], p["norm.bias"])))
        last = now
    return np.stack(out)


def rwkv6(p, x):
    rank = p["mix_up"].shape[1]

    def read(p, now, last):
        seed = now + (last - now) * p["mix_all"]
        found = {}
        for i, n in enumerate(("decay", "key", "value", "receptance", "gate")):
            rows = slice(i * rank, (i + 1) * rank)
            share = p[f"mix_{n}"] + np.tanh(seed @ p["mix_down.weight"][rows].T) @ p["mix_up"][i]
            found[n] = now + (last - now) * share
        d = p["decay"] + (p["decay_map.up.weight"] @ np.tanh(p["decay_map.down.weight"] @ found["decay"])).reshape(
            HEADS, SIZE
        )
        return *(found[n] for n in ("receptance", "key", "value", "gate")), np.exp(-np.exp(d))

    return rwkv5(p, x, read)


def rwkv7(p, x):
    """Of a layer alone, which is its own first, so that its values are what it reads."""
    last, state, out = np.zeros(DIM), np.zeros((HEADS, SIZE, SIZE)), []

    def low_rank(name, y, inside=lambda u: u):
        return p[f"{name}.up.weight"] @ inside(p[f"{name}.down.weight"] @ y) + p.get(f"{name}.up.bias", 0)

    for now in x:
        r, w, k, v, a, g = (
            now + (last - now) * p[f"mix_{n}"] for n in ("receptance", "decay", "key", "value", "rate", "gate")
        )
        last = now
        r, k, v = (p[f"{n}.weight"] @ y for n, y in (("receptance", r), ("key", k), ("value", v)))
        w = np.exp(-math.exp(-0.5) * sigmoid(low_rank("decay", w, np.tanh)))
        a, g = sigmoid(low_rank("rate", a)), low_rank("gate", g, sigmoid)
        removed, k = k * p["key_scale"], k * (1 + (a - 1) * p["key_rate"])
        mixed, own = np.zeros(DIM), np.zeros(DIM)
        for h in range(HEADS):
            c = slice(h * SIZE, (h + 1) * SIZE)
            unit = removed[c] / np.sqrt((removed[c] ** 2).sum())
            state[h] = state[h] @ (np.diag(w[c]) - np.outer(unit, a[c] * unit)) + np.outer(v[c], k[c])
            mixed[c] = state[h] @ r[c]
            own[c] = (r[c] * p["bonus"][h] * k[c]).sum() * v[c]
        joined = head_norm(mixed, p["norm.weight"], p["norm.bias"]) + own
        out.append(p["output.weight"] @ (g * joined))
    return np.stack(out)


@pytest.mark.parametrize(("case", "formula"), [("rwkv4", rwkv4), ("rwkv5", rwkv5), ("rwkv6", rwkv6), ("rwkv7", rwkv7)])
def test_a_mixer_is_its_papers_formula(case, formula):
    mixer, x = build(case), inputs(2, 23)
    out = mixer(x)
    for row in range(2):
        wanted = torch.tensor(formula(numbers(mixer), x[row].numpy()))
        assert_close(out[row], wanted, rtol=1e-8, atol=1e-10)


def channels(kind):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = kind(DIM, 24, layer=1, layers=3).double()
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return made


@pytest.mark.parametrize("kind", [ChannelMixing, UngatedChannelMixing])
def test_channel_mixing_is_its_formula_and_has_a_state(kind):
    mixing, x = channels(kind), inputs(2, 13)
    p, out = numbers(mixing), mixing(x)
    for row in range(2):
        now = x[row].numpy()
        last = np.concatenate((np.zeros((1, DIM)), now[:-1]))
        if kind is ChannelMixing:
            k, r = (now * p[f"mix_{n}"] + last * (1 - p[f"mix_{n}"]) for n in ("key", "receptance"))
            gate = sigmoid(r @ p["receptance.weight"].T)
        else:
            k, gate = now + (last - now) * p["mix_key"], 1
        wanted = gate * (np.maximum(k @ p["key.weight"].T, 0) ** 2 @ p["value.weight"].T)
        assert_close(out[row], torch.tensor(wanted), rtol=1e-9, atol=1e-11)
    first, state = mixing(x[:, :5], return_state=True)
    rest, state = mixing(x[:, 5:], state=state, return_state=True)
    assert_close(torch.cat((first, rest), 1), out, rtol=1e-9, atol=1e-11)
    assert torch.equal(state.parts["last"], x[:, -1])
    padding = torch.tensor([[True, False] * 6 + [False], [False] * 13])
    masked, after = mixing(
        x.masked_fill(~padding[..., None], torch.nan), padding=padding, state=state, return_state=True
    )
    alone, end = mixing(x[:1, :12:2], state=state.select(torch.tensor([0])), return_state=True)
    assert_close(masked[:1, :12:2], alone, rtol=1e-9, atol=1e-11)
    assert (masked[~padding] == 0).all()
    assert torch.equal(after.parts["last"], torch.stack((end.parts["last"][0], x[1, -1])))
    packed = mixing(x, structure=Documents(torch.tensor([0, 4, 13])))
    assert_close(packed[:, 4:], mixing(x[:, 4:]), rtol=1e-9, atol=1e-11)


def test_the_shift_gives_the_token_before():
    x = torch.arange(12.0).view(2, 3, 2)
    before, last = token_shift(x)
    assert torch.equal(before, torch.tensor([[[0, 0], [0, 1], [2, 3]], [[0, 0], [6, 7], [8, 9.0]]]))
    assert torch.equal(last, torch.tensor([[4, 5], [10, 11.0]]))
    past = torch.tensor([[-1, -2], [-3, -4.0]])
    before, last = token_shift(x, torch.tensor([2, 0]), past)
    assert torch.equal(before[:, 0], past)
    assert torch.equal(last, torch.tensor([[2, 3], [-3, -4.0]]))


def test_the_fused_average_serves_layers_that_are_large_enough(monkeypatch):
    """In float32, with a state and padding, beside the same layer in float64, which has torch's operators alone."""
    layer = RWKV4(64, layer=1, layers=3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    x = torch.randn(4, 160, 64, generator=torch.Generator().manual_seed(2))
    padding = torch.arange(160) < torch.tensor([[160], [119], [7], [0]])
    results = []
    for dtype in (torch.float64, torch.float32):
        own, given = layer.to(dtype), x.to(dtype).requires_grad_()
        own.zero_grad()
        _, state = own(given[:, :80], return_state=True)
        out = own(given, padding=padding, state=state)
        out.square().sum().backward()
        results.append([out.detach(), given.grad, *(p.grad.clone() for p in own.parameters())])
        monkeypatch.setattr("mercer.mixers.wkv._by_scan", None)  # float32 must not need it
    for exact, near in zip(*results, strict=True):
        assert float((near - exact).abs().max()) < 2e-5 * float(exact.abs().max())


VERSIONS = {"rwkv4": ("rwkv4", {}), "rwkv5": ("rwkv4", {}), "rwkv6": ("rwkv4", {"mix_rank": 4, "decay_rank": 4})}
VERSIONS["rwkv7"] = ("rwkv7", {"decay_rank": 4, "rate_rank": 4, "value_rank": 4, "gate_rank": 4})


@pytest.mark.parametrize("name", VERSIONS)
def test_a_model_of_each_reads_in_pieces_and_past_padding(name):
    feedforward, options = VERSIONS[name]
    config = ModelConfig(
        vocab_size=32, dim=DIM, heads=HEADS, layers=3, attention=name, mixers={name: options}, feedforward=feedforward,
        norm="layer", position="none", embedding_norm=True,
    )  # fmt: skip
    model = DecoderLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)), alpha=0.2)
    ids = torch.randint(0, 32, (2, 17), generator=torch.Generator().manual_seed(4))
    whole = model(ids)
    states, outs = None, []
    for piece in ids.split([5, 1, 1, 10], 1):
        out, states = model(piece, states=states, return_states=True)
        outs.append(out)
    assert_close(torch.cat(outs, 1), whole, rtol=1e-8, atol=1e-9)
    padding = torch.tensor([[True] * 17, [False, True, True, False, True] + [True, False] * 6])
    masked = model(ids, padding=padding)
    assert_close(masked[0], whole[0], rtol=1e-8, atol=1e-9)
    assert_close(masked[1, padding[1]], model(ids[1:, padding[1]])[0], rtol=1e-8, atol=1e-9)


def test_values_of_the_first_layer_reach_the_later_ones():
    """Behind an attention too; the first of them has nobody to take values from, and so no use for its map."""
    options = VERSIONS["rwkv7"][1]
    config = ModelConfig(
        vocab_size=32, dim=DIM, heads=HEADS, layers=3, attention=("softmax", "rwkv7", "rwkv7"),
        mixers={"rwkv7": options},
    )  # fmt: skip
    model = DecoderLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)), alpha=0.2)
    model(torch.arange(9).view(1, 9)).square().sum().backward()
    first, second = (model.blocks[i].mixer.first_share.up.weight.grad.abs().max() for i in (1, 2))
    assert float(first) == 0
    assert float(second) > 1e-4


def test_starts_are_those_of_the_papers():
    first, last = (RWKV4(8, layer=i, layers=4) for i in (0, 3))
    assert_close(first.decay, torch.tensor([-5 + 8 * (i / 7) ** 0.7 for i in range(8)]))
    assert_close(last.decay, torch.tensor([-5 + 8 * (i / 7) ** 2 for i in range(8)]))
    assert_close(first.bonus[:4].exp(), 0.3 * torch.tensor([0.0, 0.5, -0.5, 0.0]).exp())
    assert_close(first.mix_value, torch.arange(8) / 8)
    assert_close(last.mix_value, (torch.arange(8) / 8) ** 0.25 + 0.3)
    assert not bool(first.output.weight.any() or first.key.weight.any() or first.receptance.weight.any())
    assert_close(first.value.weight @ first.value.weight.T, torch.eye(8), atol=1e-5, rtol=0)
    fifth = RWKV5(8, 2, layer=3, layers=4)
    assert_close(fifth.decay.flatten(), torch.tensor([-6 + 5 * (i / 7) ** 2 for i in range(8)]))
    assert_close(fifth.bonus.flatten()[:3], torch.tensor([1.0, 6 / 7 + 0.1, 5 / 7 - 0.1]))
    assert_close(fifth.norm.weight, torch.ones(8))
    sixth = RWKV6(8, 2, layer=0, layers=4)
    x = torch.randn(1, 5, 8)
    sixth.output.weight.data.copy_(torch.eye(8))
    fifth = RWKV5(8, 2, layer=0, layers=4)
    fifth.load_state_dict({n: p for n, p in sixth.state_dict().items() if n in fifth.state_dict()})
    assert_close(sixth(x), fifth(x))  # its maps begin as nothing
    seventh = RWKV7(128, 2, layer=1, layers=4)
    assert_close(seventh.mix_key, 1 - (torch.arange(128) / 128) ** (0.7 * 0.75))
    assert_close(seventh.decay.up.bias[0], torch.tensor(-6 + 0.5 - 2.5))
    assert_close(seventh.decay.up.bias[-1], torch.tensor(0.5 + 2.5))
    assert seventh.gate.down.weight.shape[0] == 64  # 5 sqrt(128) is 56.6
    assert seventh.decay.down.weight.shape[0] == 32
    assert float(seventh.key.weight.detach().abs().max()) <= 0.05 * 128**-0.5
    mixing = UngatedChannelMixing(8, layer=1, layers=4)
    assert mixing.hidden == 32
    assert_close(mixing.mix_key, 1 - (torch.arange(8) / 8) ** 0.75**4)


def test_a_model_starts_by_its_seed_alone():
    config = ModelConfig(vocab_size=32, dim=DIM, heads=HEADS, layers=2, attention="rwkv7", feedforward="rwkv7")
    first = DecoderLM(config).state_dict()
    torch.manual_seed(7)
    assert all(torch.equal(tensor, first[name]) for name, tensor in DecoderLM(config).state_dict().items())


@pytest.mark.parametrize("length", [1, 40])
def test_a_decay_that_forgets_everything_has_finite_gradients(length):
    mixer, x = build("rwkv6", dtype=torch.float32), inputs(1, length, dtype=torch.float32).requires_grad_()
    with torch.no_grad():
        mixer.decay.view(-1)[::2] = 1e4
    _, before = mixer(inputs(1, 3, seed=1, dtype=torch.float32), return_state=True)
    out, state = mixer(x, state=before, return_state=True)
    (out.square().sum() + state.parts["sums"].square().sum()).backward()
    for name, tensor in [("x", x), *mixer.named_parameters()]:
        assert tensor.grad is not None, name
        assert tensor.grad.isfinite().all(), name


def test_refusals():
    with pytest.raises(InvalidArgument, match="layer 3 of 3"):
        RWKV4(8, layer=3, layers=3)
    with pytest.raises(InvalidArgument, match="whole number of key channels"):
        RWKV7(8, 3)
    with pytest.raises(InvalidArgument, match="mix_rank of at least 1"):
        RWKV6(8, 2, mix_rank=0)
    with pytest.raises(InvalidArgument, match="a rank of at least 1"):
        RWKV7(8, 2, value_rank=0, layer=1, layers=2)
    with pytest.raises(InvalidArgument, match="dim and hidden of at least 1"):
        ChannelMixing(8, 0, layer=0, layers=1)
    with pytest.raises(InvalidArgument, match="dim and width of at least 1"):
        RWKV4(8, width=0)
