"""Mamba-2 against the recurrence of its paper in float64, and against transformers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu, softplus

from mercer.errors import InvalidArgument
from mercer.mixers.mamba2 import Mamba2
from mercer.mixers.names import mixer_config


def _redrawn(layer: Mamba2) -> Mamba2:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.3)
    return layer


def _expected(layer: Mamba2, u: Tensor, norm_groups: int, after: bool, least: float, most: float) -> Tensor:
    """One token, one head and one sum after the other."""
    heads, size, state, groups = layer.heads, layer.head_dim, layer.state, layer.groups
    inner, width = heads * size, layer.convolution.width
    projected = u @ layer.input.weight.T + (0 if layer.input.bias is None else layer.input.bias)
    z, xbc, dt = projected.split((inner, inner + 2 * groups * state, heads), -1)
    padded = torch.cat((torch.zeros(u.shape[0], width - 1, xbc.shape[2], dtype=u.dtype), xbc), 1)
    bias = 0 if layer.convolution.bias is None else layer.convolution.bias
    weight = layer.convolution.weight.T
    rows = [silu((padded[:, t : t + width] * weight).sum(1) + bias) for t in range(u.shape[1])]
    x, b, c = torch.stack(rows, 1).split((inner, groups * state, groups * state), -1)
    dt = softplus(dt + layer.step_bias).clamp(least, most)
    y = torch.zeros_like(x)
    for h in range(heads):
        g = slice(h // (heads // groups) * state, (h // (heads // groups) + 1) * state)
        sums = torch.zeros(u.shape[0], state, size, dtype=u.dtype)
        for t in range(u.shape[1]):
            own = x[:, t, h * size : (h + 1) * size]
            decay = torch.exp(-dt[:, t, h] * layer.log_rate[h].exp())
            sums = decay[:, None, None] * sums + dt[:, t, h, None, None] * b[:, t, g, None] * own[:, None]
            y[:, t, h * size : (h + 1) * size] = (sums * c[:, t, g, None]).sum(1) + layer.skip[h] * own
    gated = y if after else y * silu(z)
    parts = gated.unflatten(-1, (norm_groups, -1))
    normed = (parts / (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(2) * layer.norm.weight
    normed = normed * silu(z) if after else normed
    return normed @ layer.output.weight.T + (0 if layer.output.bias is None else layer.output.bias)


@given(
    length=st.integers(1, 9),
    state=st.sampled_from([1, 3, 8]),
    groups=st.sampled_from([1, 2, 4]),
    norm_groups=st.sampled_from([None, 1, 8]),
    width=st.integers(1, 4),
    after=st.booleans(),
    limits=st.sampled_from([(0.0, None), (0.05, 0.4)]),
    bias=st.booleans(),
)
def test_it_is_the_recurrence(length, state, groups, norm_groups, width, after, limits, bias):
    layer = Mamba2(
        8,
        state=state,
        head_dim=4,
        groups=groups,
        norm_groups=norm_groups,
        width=width,
        step_least=limits[0],
        step_most=limits[1],
        norm_before_gate=after,
        bias=bias,
        convolution_bias=not bias,
    )
    layer = _redrawn(layer.double())
    u = torch.randn(2, length, 8, dtype=torch.float64)
    most = math.inf if limits[1] is None else limits[1]
    wanted = _expected(layer, u, norm_groups or groups, after, limits[0], most)
    torch.testing.assert_close(layer(u), wanted, rtol=1e-10, atol=1e-11)


def test_it_starts_as_the_reference_does():
    layer = Mamba2(512, state=4, head_dim=8)
    rates, steps = layer.log_rate.detach().exp(), softplus(layer.step_bias.detach())
    assert 1 <= float(rates.min()) < 3
    assert 14 < float(rates.max()) <= 16
    assert 0.00099 < float(steps.min()) < 0.003
    assert 0.05 < float(steps.max()) < 0.101
    middle = float(steps.log().mean())  # log-uniform, not uniform: the mean of its logarithm is that of the ends
    assert abs(middle - (math.log(0.001) + math.log(0.1)) / 2) < 0.5
    assert bool((layer.skip == 1).all())


@pytest.mark.peers
@pytest.mark.parametrize(("groups", "limits"), [(1, (0.0, math.inf)), (2, (0.02, 0.5))])
def test_it_is_the_mixer_of_transformers(groups, limits):
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=16, state_size=8, num_heads=8, head_dim=4, n_groups=groups, chunk_size=8, num_hidden_layers=1,
        time_step_limit=limits,
    )  # fmt: skip
    theirs = Mamba2Mixer(config, 0).eval()
    most = None if math.isinf(limits[1]) else limits[1]
    ours = _redrawn(Mamba2(16, state=8, head_dim=4, groups=groups, step_least=limits[0], step_most=most))
    names = {
        "input.weight": "in_proj.weight",
        "convolution.weight": "conv1d.weight",
        "convolution.bias": "conv1d.bias",
        "log_rate": "A_log",
        "step_bias": "dt_bias",
        "skip": "D",
        "norm.weight": "norm.weight",
        "output.weight": "out_proj.weight",
    }
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            target = theirs.get_parameter(names[name])
            target.copy_(parameter.view(target.shape))
        x = torch.randn(2, 21, 16)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"head_dim": 5}, "which heads of 5 do not divide"),
        ({"head_dim": 4, "groups": 3}, "3 groups do not divide the 4 heads"),
        ({"head_dim": 4, "norm_groups": 3}, "3 norm_groups do not divide the 16 channels"),
        ({"head_dim": 4, "step_least": 0.5, "step_most": 0.1}, "step_most 0.1 is below step_least 0.5"),
    ],
)
def test_sizes_that_do_not_fit(options, said):
    with pytest.raises(InvalidArgument, match=said):
        mixer_config("mamba2", options).build(8, 2, layer=0, layers=1)
