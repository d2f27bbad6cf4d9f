"""Gates, shifts and recency of an attention layer, each against its formula written out."""

import pytest
import torch
import torch.nn.functional as F

from mercer.core.denominators import Clamped, Detached, Length, SigmoidGate
from mercer.core.kernels import Elu, Exp, Taylor
from mercer.core.normalizers import L2, Identity, Normalizer, Standardize, Sum
from mercer.core.structures import Causal, Documents, Full
from mercer.errors import InvalidArgument, Unsupported
from mercer.nn import Attention, Rotary


def projected(layer: Attention, x: torch.Tensor):
    """Queries, keys and values [B, H, L, D], keys and values repeated for the groups."""
    q, k, v = (
        t.transpose(1, 2)
        for t in layer.qkv(x).unflatten(2, (-1, layer.head_dim)).split((layer.heads, layer.kv_heads, layer.kv_heads), 2)
    )
    return q, *(t.repeat_interleave(layer.heads // layer.kv_heads, 1) for t in (k, v))


def sums(layer: Attention, x: torch.Tensor):
    """exp(q.k / sqrt(D)) v summed over the past, and the weights alone."""
    q, k, v = projected(layer, x)
    weights = (q @ k.mT / layer.head_dim**0.5).exp().tril()
    return weights @ v, weights.sum(-1, keepdim=True)


@pytest.mark.parametrize(("gate", "width"), [(None, 2), ("channel", 2), ("head", 1)])
@pytest.mark.parametrize("inner", [Identity(), Sum(), L2(), Length()], ids=str)
def test_a_gate_is_projected_from_the_input(gate: str | None, width: int, inner: Normalizer):
    layer = Attention(8, 4, kv_heads=2, normalizer=SigmoidGate(inner=inner), gate=gate).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    u, d = sums(layer, x)
    rows = {Identity(): u, Sum(): u / d, Length(): u / torch.arange(1, 6)[:, None]}.get(inner, F.normalize(u, dim=-1))
    gates = torch.sigmoid(x @ layer.gate.weight.T).view(2, 5, 4, width).transpose(1, 2)
    expected = layer.output((gates * rows).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    layer(x).sum().backward()
    assert layer.gate.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("gain", "shift", "shape"),
    [("none", "none", None), ("head", "head", (4,)), ("channel", "channel", (4, 2)), ("none", "channel", (4, 2))],
)
def test_a_layer_norm_has_a_gain_and_a_shift(gain: str, shift: str, shape: tuple[int, ...] | None):
    layer = Attention(8, 4, normalizer=Standardize(), gain=gain, gain_init=0.5, shift=shift).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    rows = F.layer_norm(sums(layer, x)[0], (2,), eps=0.0)
    if gain != "none":
        rows = rows * 0.5
    if shift != "none":
        assert layer.shift.shape == shape
        assert not layer.shift.any()
        with torch.no_grad():
            layer.shift.copy_(torch.randn(shape))
        rows = rows + (layer.shift if len(shape) == 2 else layer.shift[:, None])[:, None]
    torch.testing.assert_close(layer(x), layer.output(rows.transpose(1, 2).flatten(2)), rtol=0, atol=1e-10)


def test_a_gain_learns_inside_of_a_gate():
    layer = Attention(8, 4, normalizer=SigmoidGate(inner=L2()), gain="head", gain_init=0.25).double()
    bare = Attention(8, 4, normalizer=SigmoidGate(inner=L2())).double()
    bare.load_state_dict({n: t for n, t in layer.state_dict().items() if n != "gain"})
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x), bare(x) / 4)


@pytest.mark.parametrize("normalizer", [Length(), Clamped(), Detached()], ids=str)
def test_the_others_come_as_they_are(normalizer: Normalizer):
    layer = Attention(8, 4, normalizer=normalizer).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    u, d = sums(layer, x)
    divisor = (
        torch.arange(1, 6)[:, None] if normalizer == Length() else d.clamp(min=1) if normalizer == Clamped() else d
    )
    torch.testing.assert_close(layer(x), layer.output((u / divisor).transpose(1, 2).flatten(2)), rtol=0, atol=1e-12)


def recurrence(layer: Attention, x: torch.Tensor) -> torch.Tensor:
    """S = g S + (1 - g) phi(k) v^T and z likewise, token by token, phi = elu + 1; rows of phi(q) S / phi(q) z."""
    q, k, v = projected(layer, x)
    q, k = (torch.where(t > 0, t + 1, t.exp()) for t in (q, k))
    gates = torch.sigmoid(layer.recency(x)).transpose(1, 2).repeat_interleave(layer.heads // layer.kv_heads, 1)
    state, mass, rows = torch.zeros(2, 2, dtype=x.dtype), torch.zeros(2, dtype=x.dtype), []
    for t in range(x.shape[1]):
        g = gates[:, :, t, None, None]
        state = g * state + (1 - g) * k[:, :, t, :, None] * v[:, :, t, None, :]
        mass = g[..., 0] * mass + (1 - g[..., 0]) * k[:, :, t]
        rows.append((q[:, :, t, None] @ state)[:, :, 0] / (q[:, :, t] * mass).sum(-1, keepdim=True))
    return layer.output(torch.stack(rows, 1).flatten(2))


@pytest.mark.parametrize("path", ["pairs", "features"])
def test_recency_is_the_gated_recurrence(path: str):
    layer = Attention(8, 4, kv_heads=2, kernel=Elu(), recency=True, path=path).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    expected = recurrence(layer, x)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    first, state = layer(x[:, :4], return_state=True)
    second = layer(x[:, 4:], state=state)
    torch.testing.assert_close(torch.cat((first, second), 1), expected, rtol=0, atol=1e-12)
    wanted = torch.autograd.grad(expected.sin().sum(), list(layer.parameters()))
    got = torch.autograd.grad(layer(x).sin().sum(), list(layer.parameters()))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    assert layer.recency.weight.shape == (2, 8)
    packed = layer(x, structure=Documents(torch.tensor([0, 4, 9])))
    torch.testing.assert_close(packed, torch.cat((recurrence(layer, x[:, :4]), recurrence(layer, x[:, 4:])), 1))


@pytest.mark.parametrize(
    "options",
    [
        {"kernel": Elu(), "recency": True},
        {"kernel": Taylor(2), "normalizer": Length()},
        {"kernel": Exp(), "normalizer": SigmoidGate(inner=Sum())},
        {"kernel": Taylor(2), "normalizer": SigmoidGate(inner=Length()), "recency": True},
        {"kernel": Elu(), "normalizer": Standardize(), "shift": "channel", "gain": "channel"},
    ],
    ids=str,
)
def test_masked_tokens_and_states_with_options(options):
    torch.manual_seed(0)
    layer = Attention(8, 2, rotary=Rotary(4), **options).double()
    x = torch.randn(1, 7, 8, dtype=torch.float64)
    keep = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 1, 0, 1]], dtype=torch.bool)
    padded = torch.full((1, 10, 8), 9.0, dtype=torch.float64)
    padded[keep] = x[0]
    padded.requires_grad_()
    out = layer(padded, padding=keep)
    torch.testing.assert_close(out[keep], layer(x)[0], rtol=0, atol=1e-12)
    out[keep].sum().backward()
    assert not padded.grad[~keep].any()
    first, state = layer(padded[:, :4], padding=keep[:, :4], return_state=True)
    second = layer(padded[:, 4:], padding=keep[:, 4:], state=state)
    torch.testing.assert_close(torch.cat((first, second), 1)[keep], out[keep], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"gate": "head"}, "goes with the normaliser SigmoidGate"),
        ({"gate": "row", "normalizer": SigmoidGate()}, "head, channel"),
        ({"normalizer": SigmoidGate(torch.zeros(1, 2, 3))}, "the layer makes the gate"),
        ({"normalizer": SigmoidGate(inner=SigmoidGate())}, "a second gate"),
        ({"shift": "head", "normalizer": L2()}, "goes with the normaliser Standardize"),
        ({"shift": "row", "normalizer": Standardize()}, "none, head, channel"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        Attention(8, 2, **options)


def test_recency_needs_a_causal_structure():
    with pytest.raises((InvalidArgument, Unsupported), match=r"[Cc]ausal"):
        Attention(8, 2, structure=Full(), recency=True)
    assert Attention(8, 2, structure=Causal(), recency=True).recency is not None
