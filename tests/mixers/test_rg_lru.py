"""The recurrent block of Griffin against its formulas, written out in float64."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mercer.errors import InvalidArgument, Unsupported
from mercer.mixers import rg_lru
from mercer.mixers.names import mixer_config
from mercer.mixers.rg_lru import RGLRU

SIZES = {"dim": 6, "width": 8, "blocks": 2, "conv": 3}


def block() -> RGLRU:
    mixer = RGLRU(SIZES["dim"], SIZES["width"], blocks=SIZES["blocks"], conv=SIZES["conv"]).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return mixer


def formula(mixer: RGLRU, x: Tensor) -> Tensor:
    """One sequence ``[L, dim]``, one number at a time where that can be."""
    width, size = SIZES["width"], SIZES["width"] // SIZES["blocks"]
    p = {name: value.detach() for name, value in mixer.named_parameters()}
    gate_weight, value_weight = p["input.weight"].split(width)
    gate_bias, value_bias = p["input.bias"].split(width)
    values = x @ value_weight.T + value_bias
    h, out = torch.zeros(width, dtype=torch.float64), []
    for t in range(len(x)):
        u = p["conv.bias"].clone()
        for i in range(SIZES["conv"]):
            if t - i >= 0:
                u = u + p["conv.weight"][:, SIZES["conv"] - 1 - i] * values[t - i]
        following = torch.empty_like(h)
        for c in range(width):
            b, place = divmod(c, size)
            inputs = u[b * size : (b + 1) * size]
            r, i = (
                1 / (1 + math.exp(-float(inputs @ p[f"{name}.weight"][b, :, place] + p[f"{name}.bias"][b, place])))
                for name in ("decay_gate", "input_gate")
            )
            base = 1 / (1 + math.exp(float(p["decay"][c])))  # sigmoid(Lambda), Lambda = -decay
            a = base ** (8 * r)
            room = 1.0 if t == 0 else math.sqrt(1 - a * a)
            following[c] = a * h[c] + room * i * u[c]
        h = following
        g = x[t] @ gate_weight.T + gate_bias
        gelu = 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
        out.append(p["output.weight"] @ (gelu * h) + p["output.bias"])
    return torch.stack(out)


def test_it_is_the_formula(generator):
    mixer = block()
    x = torch.randn(2, 9, SIZES["dim"], generator=generator, dtype=torch.float64)
    found = mixer(x).detach()
    for row in range(2):
        assert_close(found[row], formula(mixer, x[row]), rtol=1e-10, atol=1e-10)


def test_the_first_token_is_the_first_real_one(generator):
    """Also where a call came before that had none, and only there."""
    mixer = block()
    x = torch.randn(2, 5, SIZES["dim"], generator=generator, dtype=torch.float64)
    padding = torch.tensor([[False, True], [False, False]])
    _, state = mixer(x[:, :2], padding=padding, return_state=True)
    assert state.parts["begun"].tolist() == [1, 0]
    out = mixer(x[:, 2:], state=state).detach()
    assert_close(out[0], formula(mixer, x[0, 1:])[1:], rtol=1e-10, atol=1e-10)
    assert_close(out[1], formula(mixer, x[1, 2:]), rtol=1e-10, atol=1e-10)


def test_initial_values():
    mixer = mixer_config("rg-lru", {"width": 6000, "blocks": 8}).build(16, 4, layer=0, layers=1)
    assert isinstance(mixer, RGLRU)
    decay = torch.exp(-8 * torch.nn.functional.softplus(mixer.decay.detach().double()))
    assert 0.9 <= float(decay.min()) < 0.901
    assert 0.998 < float(decay.max()) <= 0.999 + 1e-6
    assert abs(float(decay.mean()) - 0.9495) < 2e-3
    assert abs(float(mixer.input_gate.weight.detach().square().mean()) - 1 / 750) < 1e-5
    assert not mixer.decay_gate.bias.any()
    same = mixer_config("rg-lru").build(16, 4, layer=0, layers=1)
    assert isinstance(same, RGLRU)
    assert (same.width, same.input_gate.weight.shape) == (16, (4, 4, 4))


def test_the_slope_of_the_root_is_bounded():
    """Where a gate is shut, a is 1 and 1 - a^2 is 0: its root has no slope."""
    mixer = block().float()
    with torch.no_grad():
        mixer.decay_gate.bias.fill_(-200.0)
        mixer.decay_gate.weight.zero_()
    x = torch.ones(1, 4, SIZES["dim"], requires_grad=True)
    mixer(x).sum().backward()
    for name, tensor in [("x", x), *mixer.named_parameters()]:
        assert tensor.grad is not None, name
        assert tensor.grad.isfinite().all(), name


def test_refusals():
    with pytest.raises(InvalidArgument, match="a width that its blocks divide, not 10 in 4 blocks"):
        mixer_config("rg-lru", {"width": 10}).build(16, 4, layer=0, layers=1)
    with pytest.raises(InvalidArgument, match="not 16 in 0 blocks"):
        mixer_config("rg-lru").build(16, 0, layer=0, layers=1)
    with pytest.raises(InvalidArgument, match="there are width, blocks, conv, bias"):
        mixer_config("rg-lru", {"heads": 2})


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_segments_of_tokens_give_what_one_gives(monkeypatch, generator, masked, begun):
    """Outputs, states and the gradients of inputs, states and every parameter."""
    mixer = block()
    x = torch.randn(2, 11, SIZES["dim"], generator=generator, dtype=torch.float64, requires_grad=True)
    real = torch.ones(2, 11, dtype=torch.bool)
    if masked:  # a row ends within the first segment
        real[0, 2:] = False
        real[1, 7:] = False
    parts = {
        "recurrence": torch.randn(2, 8, generator=generator, dtype=torch.float64, requires_grad=True),
        "conv": torch.randn(2, 2, 8, generator=generator, dtype=torch.float64),
        "begun": torch.tensor([1, 0]),
    }
    lengths = real.sum(1) if masked else None
    leaves = [x, *mixer.parameters(), *([parts["recurrence"]] if begun else [])]
    found = []
    for tokens in (100, 4, 1):
        monkeypatch.setattr(rg_lru, "SEGMENT", 0)
        monkeypatch.setattr(rg_lru, "FEWEST", tokens)
        y, after = mixer.mix(x * real.unsqueeze(-1), lengths, parts if begun else None)
        loss = (y * real.unsqueeze(-1)).square().sum() + after["recurrence"].square().sum()
        found.append((y[real], after["recurrence"], *torch.autograd.grad(loss, leaves)))
    for other in found[1:]:
        for ours, right in zip(other, found[0], strict=True):
            assert_close(ours, right, rtol=1e-10, atol=1e-10)


def test_segments_keep_autocast_and_refuse_second_derivatives(monkeypatch, generator):
    mixer = block().float()
    x = torch.randn(1, 9, SIZES["dim"], generator=generator, requires_grad=True)
    found = []
    for tokens in (100, 4):
        monkeypatch.setattr(rg_lru, "SEGMENT", 0)
        monkeypatch.setattr(rg_lru, "FEWEST", tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = mixer(x)
        found.append(torch.autograd.grad(out.float().square().sum(), (x, mixer.decay_gate.weight, mixer.decay)))
    for ours, right in zip(found[1], found[0], strict=True):
        assert_close(ours, right, rtol=0.05, atol=0.05 * float(right.abs().max()))
    with pytest.raises(Unsupported, match="segments of one sequence"):
        torch.autograd.grad(mixer(x).sum(), x, create_graph=True)
