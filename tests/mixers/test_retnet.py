"""Retention against the paper's recurrence and its parallel form, in float64."""

import pytest
import torch
from tests.mixers.naive import naive
from torch import Tensor

from mercer.errors import InvalidArgument
from mercer.mixers.decayed_sum import decayed_sum
from mercer.mixers.names import mixer_config
from mercer.mixers.retnet import Retention


def _made(norm: str = "layer") -> Retention:
    layer = Retention(24, 3, norm=norm).double()  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        for parameter in layer.norm.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return layer


def _expected(layer: Retention, x: Tensor, first: int = 0) -> Tensor:
    """y by sum over pairs, g^(n - m) (turn_n q_n) . (turn_m k_m) v_m, with the turning as complex numbers."""
    query, key, value = (
        part.unflatten(-1, (3, -1)) for part in (x @ layer.qkv.weight.T).split((24, 24, layer.norm.heads * 16), -1)
    )
    rates = 10000.0 ** (-2 * torch.arange(4, dtype=torch.float64) / 8)
    where = torch.arange(first, first + x.shape[1], dtype=torch.float64)
    turn = torch.polar(torch.ones(x.shape[1], 4, dtype=torch.float64), where[:, None] * rates)[None, :, None]
    query, key = (torch.complex(part[..., :4], part[..., 4:]) * turn for part in (query, key))
    out = torch.zeros(*x.shape[:2], 3, 16, dtype=torch.float64)
    for head in range(3):
        rate = 1 - 2.0 ** (-5 - head)
        for n in range(x.shape[1]):
            for m in range(n + 1):
                score = (query[:, n, head] * key[:, m, head].conj()).real.sum(-1, keepdim=True) / 8**0.5
                out[:, n, head] += rate ** (n - m) * score * value[:, m, head]
    if layer.norm.kind == "layer":
        normed = (out - out.mean(-1, keepdim=True)) / (out.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    else:
        normed = out / (out.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    normed = normed.flatten(2) * layer.norm.weight + (0 if layer.norm.bias is None else layer.norm.bias)
    gate = x @ layer.gate.weight.T
    return (gate * torch.sigmoid(gate) * normed) @ layer.output.weight.T


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_it_is_the_sum_over_pairs(norm):
    layer, x = _made(norm), torch.randn(2, 13, 24, dtype=torch.float64)
    torch.testing.assert_close(layer(x), _expected(layer, x), rtol=1e-12, atol=1e-13)


def test_only_distances_matter():
    """Positions that begin at 1,000 give the same, and a state that has read 1,000 tokens has lost no digits."""
    layer, x = _made(), torch.randn(1, 7, 24, dtype=torch.float64)
    torch.testing.assert_close(layer(x), _expected(layer, x, first=1000), rtol=1e-10, atol=1e-11)
    narrow = Retention(24, 3)
    narrow.load_state_dict(layer.state_dict())
    state, long = None, torch.randn(1, 1000, 24)
    for piece in long.split(37, 1):
        y, state = narrow(piece, state=state, return_state=True)
    assert state is not None
    torch.testing.assert_close(y[:, -1:].double(), layer(long.double())[:, -1:], rtol=1e-4, atol=1e-4)


def test_the_decays_are_the_papers():
    layer = Retention(512, 64)  # the last heads' decays are 1 in float32
    rates = torch.exp(layer._log_rates(torch.device("cpu")))
    torch.testing.assert_close(rates[:3], torch.tensor([31 / 32, 63 / 64, 127 / 128], dtype=torch.float64))
    assert bool((layer._log_rates(torch.device("cpu")) < 0).all())


@pytest.mark.peers
def test_the_sum_is_that_of_flash_linear_attention():
    query, key, value = (torch.randn(2, 4, 21, size) for size in (8, 8, 12))
    rates = Retention(64, 4)._log_rates(torch.device("cpu"))
    found, _ = decayed_sum(query, key, value, rates, scale=8**-0.5)
    torch.testing.assert_close(found, naive("retention", "naive_retention")(query, key, value), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dim", "heads", "options", "said"),
    [
        (24, 8, {}, "even number of key channels"),
        (24, 5, {}, "even number of key channels"),
        (24, 3, {"value_expand": 0.7}, "whole number of value channels in each head: 0.7"),
        (24, 0, {}, "even number of key channels"),
        (24, 3, {"value_expand": float("inf")}, "value_expand must be a finite number"),
        (24, 3, {"rope_base": float("inf")}, "rope_base must be a finite number"),
    ],
)
def test_sizes_that_do_not_fit(dim, heads, options, said):
    with pytest.raises(InvalidArgument, match=said):
        mixer_config("retnet", options).build(dim, heads, layer=0, layers=1)
