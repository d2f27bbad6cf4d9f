"""Mamba against its formula written out in float64, and against transformers' mixers."""

import math

import pytest
import torch
from torch.nn.functional import silu, softplus

from mercer.errors import InvalidArgument
from mercer.mixers.mamba import Mamba


def expected(mixer, u):
    """y [L, dim] of one row u, token by token, with every matrix applied by hand."""
    p = {name: v.detach().double() for name, v in mixer.named_parameters()}
    u = u.double()
    zero = torch.zeros((), dtype=torch.float64)
    both = u @ p["input.weight"].T + p.get("input.bias", zero)
    inputs, gate = both[:, : mixer.inner], both[:, mixer.inner :]
    width = mixer.convolution.width
    h = torch.zeros(mixer.inner, mixer.state, dtype=torch.float64)
    rows = []
    for t in range(len(u)):
        x = p.get("convolution.bias", zero).expand(mixer.inner)
        for i in range(width):
            if t - width + 1 + i >= 0:
                x = x + p["convolution.weight"][:, i] * inputs[t - width + 1 + i]
        x = silu(x)
        chosen = p["select.weight"] @ x
        r, b, c = chosen[: mixer.rank], chosen[mixer.rank : -mixer.state], chosen[-mixer.state :]
        if mixer.inner_norms:
            r, b, c = (v / ((v**2).mean() + mixer.norm_eps).sqrt() for v in (r, b, c))
        if mixer.inner_norms == "learned":
            r, b, c = r * p["step_norm.weight"], b * p["write_norm.weight"], c * p["read_norm.weight"]
        dt = softplus(p["step.weight"] @ r + p["step.bias"])
        h = torch.exp(-dt[:, None] * p["log_rate"].exp()) * h + (dt * x)[:, None] * b
        rows.append(p["output.weight"] @ ((h @ c + p["skip"] * x) * silu(gate[t])) + p.get("output.bias", zero))
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"state": 5, "inner": 24, "rank": 2, "width": 3, "bias": True, "inner_norms": "learned", "norm_eps": 1e-2},
        {"expand": 1, "convolution_bias": False, "inner_norms": "plain"},
    ],
)
def test_outputs_are_those_of_the_formula(options, dtype):
    mixer = Mamba(20, **options)
    with torch.no_grad():
        for v in mixer.parameters():
            v.add_(torch.randn_like(v), alpha=0.2)
    u = torch.randn(2, 45, 20)
    found = mixer.to(dtype)(u.to(dtype))
    for mine, row in zip(found, u, strict=True):
        torch.testing.assert_close(
            mine.double(), expected(mixer, row), rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5
        )


def test_it_starts_as_in_the_paper():
    mixer = Mamba(64)
    assert (mixer.inner, mixer.state, mixer.rank, mixer.convolution.width) == (128, 16, 4, 4)
    assert torch.allclose(mixer.log_rate.exp(), torch.arange(1.0, 17).expand(128, -1))
    steps = softplus(mixer.step.bias.double())
    assert 0.0009 < steps.min() < 0.002
    assert 0.05 < steps.max() < 0.101
    assert 0.4 < mixer.step.weight.abs().max() <= 0.5
    assert mixer.skip.eq(1).all()
    assert Mamba(65).rank == math.ceil(65 / 16)


def test_heads_are_mambas_of_their_own_channels():
    """Those of a share of the channels, each with its own choice, side by side."""
    whole = Mamba(6, inner=12, heads=3, state=4, rank=2).double()
    u = torch.randn(1, 11, 6, dtype=torch.float64)
    mixed = torch.zeros_like(u)
    for head in range(3):
        rows = slice(4 * head, 4 * head + 4)
        alone = Mamba(6, inner=4, state=4, rank=2).double()
        with torch.no_grad():
            both = whole.input.weight.unflatten(0, (2, 12))[:, rows].flatten(0, 1)
            alone.input.weight.copy_(both)
            alone.select.weight.copy_(whole.select.weight[head])
            alone.step.weight.copy_(whole.step.weight[rows])
            alone.step.bias.copy_(whole.step.bias[rows])
            alone.convolution.weight.copy_(whole.convolution.weight[rows])
            alone.convolution.bias.copy_(whole.convolution.bias[rows])
            alone.output.weight.copy_(whole.output.weight[:, rows])
        mixed = mixed + expected(alone, u[0])
    torch.testing.assert_close(whole(u), mixed, rtol=1e-9, atol=1e-12)


def test_an_unknown_norm_and_heads_that_do_not_fit_are_refused():
    with pytest.raises(InvalidArgument, match="inner_norms"):
        Mamba(8, inner_norms="layer")
    with pytest.raises(InvalidArgument, match="3 heads do not divide the 16 channels"):
        Mamba(8, heads=3)


@pytest.mark.peers
@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba"])
def test_outputs_are_those_of_transformers(family):
    from transformers.models.falcon_mamba.configuration_falcon_mamba import FalconMambaConfig
    from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
    from transformers.models.jamba.configuration_jamba import JambaConfig
    from transformers.models.jamba.modeling_jamba import JambaMambaMixer
    from transformers.models.mamba.configuration_mamba import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    options = {"state": 6, "rank": 3, "width": 3, "bias": True}
    if family == "jamba":
        config = JambaConfig(
            hidden_size=16, mamba_d_state=6, mamba_dt_rank=3, mamba_d_conv=3, mamba_expand=2, mamba_proj_bias=True,
            rms_norm_eps=1e-3,
        )  # fmt: skip
        theirs = JambaMambaMixer(config, 0)
        options |= {"inner_norms": "learned", "norm_eps": 1e-3}
    else:
        made = {"mamba": MambaConfig, "falcon_mamba": FalconMambaConfig}[family]
        config = made(hidden_size=16, state_size=6, time_step_rank=3, conv_kernel=3, use_bias=True, num_hidden_layers=1)
        if family == "falcon_mamba":
            config.mixer_rms_eps = 1e-3
            options |= {"inner_norms": "plain", "norm_eps": 1e-3}
        theirs = {"mamba": MambaMixer, "falcon_mamba": FalconMambaMixer}[family](config, 0, False)
    theirs.eval()
    with torch.no_grad():
        for v in theirs.parameters():
            v.normal_(0, 0.3)
    mine = Mamba(16, **options)
    names = {
        "in_proj": "input", "conv1d": "convolution", "x_proj": "select", "dt_proj": "step", "out_proj": "output",
        "A_log": "log_rate", "D": "skip", "dt_layernorm": "step_norm", "b_layernorm": "write_norm",
        "c_layernorm": "read_norm",
    }  # fmt: skip
    with torch.no_grad():
        own = dict(mine.named_parameters())
        for name, v in theirs.named_parameters():
            first, dot, rest = name.partition(".")
            target = own.pop(names[first] + dot + rest)
            target.copy_(v.view_as(target))
    assert not own
    x = torch.randn(2, 40, 16)
    y, state = mine(x[:, :39], return_state=True)
    last = mine(x[:, 39:], state=state)
    torch.testing.assert_close(torch.cat((y, last), 1), theirs(x), rtol=1e-5, atol=1e-5)
