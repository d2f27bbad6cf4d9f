"""Rates that have grown out of all bounds forget everything, without a NaN in what comes out or in its gradients."""

import pytest
import torch
from tests.mixers.cases import build, inputs

from mercer.mixers.steps import GONE, decay_of, rates

LEARNED = {
    "mamba": ("log_rate",),
    "mamba, heads": ("log_rate",),
    "mamba2": ("log_rate",),
    "gated-deltanet": ("log_rate",),
    "rwkv4": ("decay",),
    "rwkv5": ("decay",),
    "rwkv6": ("decay",),
    "rg-lru": ("decay",),
    "s4d": ("log_rate", "log_step"),
    "s4d, real, bilinear": ("log_rate", "log_step"),
    "s4d, convolution": ("log_rate", "log_step"),
    "s4": ("log_rate", "log_step"),
    "s4, convolution": ("log_rate",),
}
STEEP = [(case, name) for case, names in LEARNED.items() for name in names]


def run(case, name, value, length, dtype):
    """What a mixer gives, whose first rate is `value`, in two pieces, and the gradients of all that it is made of."""
    mixer = build(case, dtype=dtype)
    parameters = dict(mixer.named_parameters())
    with torch.no_grad():
        parameters[name].view(-1)[0] = value
    x = inputs(2, 2 * length, dtype=dtype).requires_grad_()
    first, state = mixer(x[:, :length], return_state=True)
    second = mixer(x[:, length:], state=state)
    out = torch.cat((first, second), 1)
    names = [other for other in parameters if other != name]
    grads = torch.autograd.grad(out.square().sum(), [x, parameters[name], *(parameters[other] for other in names)])
    return out.detach(), grads[1], (grads[0], *grads[2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("case", "name"), STEEP)
def test_a_mixer_forgets(case, name, dtype):
    for length in (1, 40):
        expected, _, gradients = run(case, name, 33.0, length, dtype)  # exp(-exp(33)) is 0, and exp(33) is in range
        for value in (89.0, 800.0, 1e30):
            out, own, others = run(case, name, value, length, dtype)
            assert out.isfinite().all()
            if name != "log_step":  # which decides how much is written, too
                torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
            assert own.isfinite().all()
            for found, wanted in zip(others, gradients, strict=True):
                assert found.isfinite().all()
                if name != "log_step":
                    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4 * (1 + wanted.abs().max().item()))


def test_rates_keep_a_gradient_until_they_are_too_many():
    log_rate = torch.tensor([-200.0, 0.0, 8.0, 39.0, 60.0, 1e30, torch.inf], requires_grad=True)
    rate = rates(log_rate, torch.float32)
    torch.testing.assert_close(
        rate[1:4].double(), torch.tensor([0.0, 8.0, 39.0], dtype=torch.float64).exp(), rtol=1e-6, atol=0.0
    )
    decay = decay_of(rate)
    assert decay[1:].tolist() == [-1.0, pytest.approx(-2980.958), *[-GONE] * 4]
    assert decay.exp()[3:].tolist() == [0.0] * 4
    decay.sum().backward()
    assert log_rate.grad.tolist() == [0.0, -1.0, pytest.approx(-2980.958), 0.0, 0.0, 0.0, 0.0]
