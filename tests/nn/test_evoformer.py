"""Triangle updates equal the sums over triangles, written out, and those of transformers' ESMFold."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from mercer.core.kernels import Elu, Exp, Taylor
from mercer.core.normalizers import L2, Sum
from mercer.errors import InvalidArgument
from mercer.nn import TriangleAttention, TriangleMultiplication

DIM = 6


def redrawn(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.4)
    return layer.double()


def drawn(batch=2, size=5):
    return torch.randn(batch, size, size, DIM, dtype=torch.float64, requires_grad=True)


def norm(x, layer):
    return F.layer_norm(x, layer.weight.shape, layer.weight, layer.bias, layer.eps)


def multiplied(layer, z):
    """Algorithms 11 and 12, one edge after the other."""
    x, n = norm(z, layer.norm), z.shape[1]
    h = F.linear(x, layer.input.weight, layer.input.bias)
    a_gate, b_gate, a, b = h.chunk(4, -1)
    a, b = a_gate.sigmoid() * a, b_gate.sigmoid() * b
    out = torch.empty_like(z)
    for i, j in itertools.product(range(n), range(n)):
        if layer.outgoing:
            summed = sum(a[:, i, k] * b[:, j, k] for k in range(n))
        else:
            summed = sum(a[:, k, i] * b[:, k, j] for k in range(n))
        out[:, i, j] = layer.output(norm(summed, layer.inner_norm)) * layer.gate(x[:, i, j]).sigmoid()
    return out


def attended(layer, z, weigh, average):
    """Algorithms 13 and 14, one edge and head after the other; `weigh` gives weights of scores and biases."""
    x, n, inner = norm(z, layer.norm), z.shape[1], layer.attention
    q, k, v = (t.unflatten(-1, (inner.heads, -1)) for t in F.linear(x, inner.qkv.weight).chunk(3, -1))
    gate, bias = inner.gate(x).sigmoid(), F.linear(x, layer.bias.weight)
    out = torch.empty_like(z)
    for i, j in itertools.product(range(n), range(n)):
        heads = []
        for h in range(inner.heads):
            ends = range(n)
            if layer.starting:
                scores = torch.stack([(q[:, i, j, h] * k[:, i, e, h]).sum(-1) for e in ends], -1)
                third = torch.stack([bias[:, j, e, h] for e in ends], -1)
                values = v[:, i, :, h]
            else:
                scores = torch.stack([(q[:, i, j, h] * k[:, e, j, h]).sum(-1) for e in ends], -1)
                third = torch.stack([bias[:, e, i, h] for e in ends], -1)
                values = v[:, :, j, h]
            heads.append(average(weigh(scores / inner.head_dim**0.5, third), values))
        out[:, i, j] = inner.output(torch.cat(heads, -1) * gate[:, i, j])
    return out


def compare(layer, expected, z):
    y = layer(z)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    cotangent, inputs = torch.randn_like(y), (z, *layer.parameters())
    for got, wanted in zip(*(torch.autograd.grad(out, inputs, cotangent) for out in (y, expected)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("hidden", [None, 3])
@pytest.mark.parametrize("outgoing", [True, False])
def test_multiplication_sums_over_triangles(outgoing, hidden):
    layer, z = redrawn(TriangleMultiplication(DIM, hidden, outgoing=outgoing)), drawn()
    compare(layer, multiplied(layer, z), z)


def summed(weights, values):
    return (weights.unsqueeze(-1) * values).sum(1)


CASES = {
    "softmax": (Exp(), Sum(), lambda s, b: (s + b).softmax(-1), summed),
    "taylor2-l2": (
        Taylor(2), L2(), lambda s, b: (1 + s + s**2 / 2) * b.exp(), lambda w, v: F.normalize(summed(w, v), dim=-1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("starting", [True, False])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["auto", "dense"])
def test_attention_runs_along_rows_of_edges(case, starting, form):
    kernel, normalizer, weigh, average = CASES[case]
    layer = TriangleAttention(DIM, 2, starting=starting, kernel=kernel, normalizer=normalizer, form=form)
    layer, z = redrawn(layer), drawn()
    compare(layer, attended(layer, z, weigh, average), z)


LAYERS = {
    "outgoing": lambda: TriangleMultiplication(DIM, 4),
    "incoming": lambda: TriangleMultiplication(DIM, 4, outgoing=False),
    "starting": lambda: TriangleAttention(DIM, 2, head_dim=5),
    "ending": lambda: TriangleAttention(DIM, 2, head_dim=5, starting=False, kernel=Elu()),
}


@pytest.mark.parametrize("name", LAYERS)
def test_padded_residues_are_as_if_absent_whatever_stands_there(name):
    layer, z = redrawn(LAYERS[name]()), drawn(batch=1, size=7)
    keep = torch.tensor([[1, 0, 1, 1, 0, 1, 0]], dtype=torch.bool)
    at = keep[0].nonzero()[:, 0]
    there = keep[0][:, None] & keep[0]
    spoilt = z.detach().masked_fill(~there[None, :, :, None], torch.nan).requires_grad_()
    y = layer(spoilt, padding=keep)[:, at][:, :, at]
    torch.testing.assert_close(y, layer(z[:, at][:, :, at]), rtol=0, atol=1e-12)
    y.sum().backward()
    assert torch.equal(spoilt.grad[0, ~there], torch.zeros(33, DIM, dtype=torch.float64))
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    both = layer(torch.cat((z, z)), padding=torch.cat((keep, torch.ones_like(keep))))
    torch.testing.assert_close(both[:1, at][:, :, at], y, rtol=0, atol=1e-12)
    torch.testing.assert_close(both[1:], layer(z), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("size", [(0, 3), (2, 0), (1, 1)])
def test_nothing_and_one_residue(name, size):
    z = torch.randn(size[0], size[1], size[1], DIM)
    y = LAYERS[name]()(z)
    assert y.shape == z.shape
    assert torch.equal(y, torch.zeros_like(z))  # a new layer's output is 0


@pytest.mark.parametrize("name", LAYERS)
def test_gates_start_open(name):
    layer = LAYERS[name]()
    gate = layer.gate if isinstance(layer, TriangleMultiplication) else layer.attention.gate
    assert torch.equal(gate(torch.randn(3, DIM)), torch.ones(3, gate.out_features))


def test_sums_over_many_residues_stay_finite_in_float16():
    layer, z = redrawn(TriangleMultiplication(DIM, 4)), 3 + torch.randn(1, 40, 40, DIM)
    with torch.no_grad():
        layer.input.bias[-8:] += 100  # products of 1e4, and sums beyond 65504
        expected = layer(z.double())
        found = layer.half()(z.half())
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.double(), expected, rtol=0.1, atol=0.05)


def test_refusals():
    for layer in (TriangleMultiplication(DIM), TriangleAttention(DIM, 2)):
        with pytest.raises(InvalidArgument, match=r"\[B, N, N, 6\]"):
            layer(torch.randn(1, 3, 4, DIM))
        with pytest.raises(InvalidArgument, match="boolean"):
            layer(torch.randn(1, 3, 3, DIM), padding=torch.ones(1, 3))
    with pytest.raises(InvalidArgument, match="at least 1"):
        TriangleMultiplication(4, 0)
    with pytest.raises(InvalidArgument, match="not a multiple"):
        TriangleAttention(DIM, 4)


def against(ours, theirs, names, stack=()):
    """Equal outputs and gradients on real pairs, after the weights of `theirs` were drawn again and copied."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.3)
        given = dict(theirs.named_parameters())
        mapped = {}
        for mine, other in names.items():
            parts = (other,) if isinstance(other, str) else other
            for kind in ("weight", "bias"):
                found = [given.pop(f"{part}.{kind}") for part in parts if f"{part}.{kind}" in given]
                if found:
                    mapped[f"{mine}.{kind}"] = torch.cat(found)
        assert not given
        ours.load_state_dict(mapped)
    z, upstream = torch.randn(2, 9, 9, 12, requires_grad=True), torch.randn(2, 9, 9, 12)
    keep = torch.ones(2, 9, dtype=torch.bool)
    keep[0, :2] = keep[0, 5] = False
    there = (keep[:, :, None] & keep[:, None]).unsqueeze(-1)
    outs = [ours(z, padding=keep) * there, theirs(z, mask=there[..., 0].float()) * there]
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(out, z, upstream)[0] * there for out in outs]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


@pytest.mark.peers
@pytest.mark.parametrize("outgoing", [True, False])
def test_multiplication_equals_transformers(outgoing):
    modeling = pytest.importorskip("transformers.models.esm.modeling_esmfold")
    config = type("Config", (), {"pairwise_state_dim": 12})
    theirs = modeling.EsmFoldTriangleMultiplicativeUpdate(config, _outgoing=outgoing)
    names = {
        "norm": "layer_norm_in",
        "inner_norm": "layer_norm_out",
        "input": ("linear_a_g", "linear_b_g", "linear_a_p", "linear_b_p"),
        "gate": "linear_g",
        "output": "linear_z",
    }
    against(TriangleMultiplication(12, outgoing=outgoing), theirs, names)


@pytest.mark.peers
@pytest.mark.parametrize("starting", [True, False])
def test_attention_equals_transformers(starting):
    modeling = pytest.importorskip("transformers.models.esm.modeling_esmfold")
    theirs = modeling.EsmFoldTriangleAttention(12, 5, 3, starting=starting)
    names = {
        "norm": "layer_norm",
        "bias": "linear",
        "attention.qkv": ("mha.linear_q", "mha.linear_k", "mha.linear_v"),
        "attention.gate": "mha.linear_g",
        "attention.output": "mha.linear_o",
    }
    against(TriangleAttention(12, 3, head_dim=5, starting=starting), theirs, names)
