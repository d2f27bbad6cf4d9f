"""Gated linear attention, DeltaNet and gated DeltaNet against the recurrences of their papers in float64."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.mixers.naive import naive
from torch import Tensor
from torch.nn.functional import logsigmoid, silu, softplus

from mercer.errors import InvalidArgument
from mercer.mixers.deltanet import DeltaNet
from mercer.mixers.gated_deltanet import GatedDeltaNet
from mercer.mixers.gla import GatedLinearAttention
from mercer.mixers.names import mixer_config


def _redrawn(layer: Any, seed: int = 3) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.3)
    return layer


def _rms(out: Tensor, weight: Tensor) -> Tensor:
    """out: [B, L, H, V]."""
    return (out / (out.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight).flatten(2)


def _convolved(x: Tensor, weight: Tensor) -> Tensor:
    width = weight.shape[1]
    padded = torch.cat((torch.zeros(x.shape[0], width - 1, x.shape[2], dtype=x.dtype), x), 1)
    return silu(torch.stack([(padded[:, t : t + width] * weight.T).sum(1) for t in range(x.shape[1])], 1))


@given(length=st.integers(1, 9), heads=st.sampled_from([1, 2, 4]), rank=st.integers(1, 5), seed=st.integers(0, 99))
def test_gated_linear_attention_is_the_recurrence(length, heads, rank, seed):
    layer = _redrawn(GatedLinearAttention(8, heads, rank=rank, temperature=3.0).double(), seed)
    x = torch.randn(2, length, 8, dtype=torch.float64)
    query, key, value = (p.unflatten(-1, (heads, -1)) for p in (x @ layer.qkv.weight.T).split((4, 4, 8), -1))
    logits = x @ layer.decay_in.weight.T @ layer.decay_out.weight.T + layer.decay_out.bias
    decay = torch.exp(logsigmoid(logits) / 3).unflatten(-1, (heads, -1))
    sums = torch.zeros(2, heads, 4 // heads, 8 // heads, dtype=torch.float64)
    rows = []
    for t in range(length):
        sums = decay[:, t, :, :, None] * sums + key[:, t, :, :, None] * value[:, t, :, None]
        rows.append((query[:, t, :, :, None] * sums).sum(2) / (4 // heads) ** 0.5)
    wanted = silu(x @ layer.gate.weight.T) * _rms(torch.stack(rows, 1), layer.norm.weight)
    torch.testing.assert_close(layer(x), wanted @ layer.output.weight.T, rtol=1e-10, atol=1e-12)


@given(
    length=st.integers(1, 9),
    heads=st.sampled_from([1, 2, 4]),
    twice=st.booleans(),
    gate=st.booleans(),
    gated=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_delta_rule_is_the_recurrence(length, heads, twice, gate, gated, seed):
    sizes = {"key_expand": 0.5, "value_expand": 1.5, "width": 3, "twice": twice}
    made = GatedDeltaNet(8, heads, **sizes) if gated else DeltaNet(8, heads, gate=gate, **sizes)
    layer = _redrawn(made.double(), seed)
    x = torch.randn(2, length, 8, dtype=torch.float64)
    parts = _convolved(x @ layer.qkv.weight.T, layer.convolution.weight).split((4, 4, 12), -1)
    query, key, value = (part.unflatten(-1, (heads, -1)) for part in parts)
    query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
    beta = (1 + twice) * torch.sigmoid(x @ layer.beta.weight.T)
    alpha = torch.ones(2, length, heads, dtype=torch.float64)
    if isinstance(layer, GatedDeltaNet):
        alpha = torch.exp(-layer.log_rate.exp() * softplus(x @ layer.alpha.weight.T + layer.step_bias))
    size, eye = 4 // heads, torch.eye(4 // heads, dtype=torch.float64)
    sums = torch.zeros(2, heads, size, 12 // heads, dtype=torch.float64)
    rows = []
    for t in range(length):
        k = key[:, t, :, :, None]
        step = alpha[:, t, :, None, None] * (eye - beta[:, t, :, None, None] * k * k.mT)
        sums = step @ sums + beta[:, t, :, None, None] * k * value[:, t, :, None]
        rows.append((query[:, t, :, :, None] * sums).sum(2) / size**0.5)
    wanted = _rms(torch.stack(rows, 1), layer.norm.weight)
    if layer.gate is not None:
        wanted = wanted * silu(x @ layer.gate.weight.T)
    torch.testing.assert_close(layer(x), wanted @ layer.output.weight.T, rtol=1e-10, atol=1e-12)


def test_a_key_that_comes_again_replaces_its_value():
    """With beta = 1 and unit keys the delta rule is a table: what is read is what was written last."""
    layer = DeltaNet(4, 1, width=1).double()
    with torch.no_grad():
        layer.qkv.weight.copy_(torch.eye(4, dtype=torch.float64).repeat(3, 1))
        layer.convolution.weight.fill_(1.0)
        layer.beta.weight.fill_(1e3)
        layer.output.weight.copy_(torch.eye(4, dtype=torch.float64))
    first, second = torch.eye(4, dtype=torch.float64)[:2]
    _, state = layer(torch.stack((3 * first, second, first))[None], return_state=True)
    wanted = torch.zeros(4, 4, dtype=torch.float64)
    wanted[0, 0] = wanted[1, 1] = silu(torch.ones(1)).item()  # of the last time that each key came
    torch.testing.assert_close(state.parts["sums"][0, 0], wanted, rtol=1e-5, atol=1e-5)


def test_decays_start_as_in_the_reference():
    layer = GatedDeltaNet(64, 64, key_expand=1.0, value_expand=1.0)
    rates, steps = layer.log_rate.detach().exp(), softplus(layer.step_bias.detach())
    assert 0 < float(rates.min()) < 2
    assert 14 < float(rates.max()) <= 16
    assert 0.00099 < float(steps.min()) < 0.003
    assert 0.05 < float(steps.max()) < 0.101


@pytest.mark.peers
@pytest.mark.parametrize("name", ["gla", "deltanet", "gated-deltanet"])
def test_the_recurrence_is_that_of_flash_linear_attention(name, monkeypatch):
    """What the layer hands to the operator, read by their loops, gives what the operator gives."""
    from mercer.mixers import deltanet, gla

    seen = {}

    def spy(module):
        plain = module.matrix_recurrence

        def call(query, key, value, **options):
            out, state = plain(query, key, value, **options)
            seen.update(options, query=query, key=key, value=value, out=out, state=state)
            return out, state

        monkeypatch.setattr(module, "matrix_recurrence", call)

    spy(gla if name == "gla" else deltanet)
    layer = _redrawn(mixer_config(name).build(16, 2, layer=0, layers=1))
    with torch.no_grad():
        layer(torch.randn(2, 19, 16))
    query, key, value = (seen[part] for part in ("query", "key", "value"))
    if name == "gla":
        times = [part.transpose(1, 2) for part in (query, key, value, seen["log_decay"])]
        out, state = naive("gla", "naive_recurrent_gla")(*times, output_final_state=True)
        out = out.transpose(1, 2)
    else:
        beta = seen["delta"]
        if name == "deltanet":
            out, state = naive("delta_rule", "delta_rule_recurrence")(query, key, value, beta)
        else:
            times = [part.transpose(1, 2) for part in (query, key, value, beta, seen["log_decay"])]
            run = naive("gated_delta_rule", "naive_recurrent_gated_delta_rule")
            out, state = run(*times, output_final_state=True)
            out = out.transpose(1, 2)
    torch.testing.assert_close(seen["out"], out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen["state"], state, rtol=1e-4, atol=1e-5)


@pytest.mark.peers
def test_gated_deltanet_is_the_layer_of_qwen3_next():
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = Qwen3NextConfig(
        hidden_size=16, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=6,
        linear_value_head_dim=12, linear_conv_kernel_dim=4, num_hidden_layers=1, rms_norm_eps=1e-5,
    )  # fmt: skip
    theirs = Qwen3NextGatedDeltaNet(config, 0).eval()
    ours = _redrawn(GatedDeltaNet(16, 2))
    with torch.no_grad():
        q, k, v = (p.unflatten(0, (2, -1)) for p in ours.qkv.weight.split((12, 12, 24)))
        z = ours.gate.weight.unflatten(0, (2, -1))
        theirs.in_proj_qkvz.weight.copy_(torch.cat((q, k, v, z), 1).flatten(0, 1))
        theirs.in_proj_ba.weight.copy_(torch.stack((ours.beta.weight, ours.alpha.weight), 1).flatten(0, 1))
        theirs.conv1d.weight.copy_(ours.convolution.weight.unsqueeze(1))
        for name, parameter in {
            "A_log": ours.log_rate,
            "dt_bias": ours.step_bias,
            "norm.weight": ours.norm.weight,
            "out_proj.weight": ours.output.weight,
        }.items():
            theirs.get_parameter(name).copy_(parameter)
        x = torch.randn(2, 23, 16)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("gla", {"heads": 3}, "whole number of key channels in each head: 0.5"),
        ("gla", {"value_expand": 0.3}, "whole number of value channels"),
        ("deltanet", {"key_expand": 0.1}, "whole number of key channels"),
        ("gated-deltanet", {"heads": 5}, "whole number of key channels in each head: 0.75"),
        ("deltanet", {"window": 5}, "'window' is unknown; there are heads, key_expand"),
        ("gla", {"rank": 0}, "rank must be 1 or more"),
    ],
)
def test_sizes_that_do_not_fit(name, options, said):
    with pytest.raises(InvalidArgument, match=said):
        mixer_config(name, options).build(16, 2, layer=0, layers=1)
    with pytest.raises(InvalidArgument, match=f"{name} needs at least 1 head, not 0"):
        mixer_config(name).build(16, 0, layer=0, layers=1)
