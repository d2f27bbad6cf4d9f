"""Attention sinks: as a formula, at extremes, and their gradients."""

import pytest
import torch

pytest.importorskip("transformers")
from mercer import Causal, InvalidArgument, Padding, Taylor, attention
from mercer.integrations.hf.extras import Sink

pytestmark = pytest.mark.peers
FORMS = [{"form": "dense"}, {"form": "chunked"}, {"form": "recurrent", "path": "pairs"}]


def draw(length=21, heads=4, key_heads=2):
    query, key, value = (torch.randn(2, h, length, 8, dtype=torch.float64) for h in (heads, key_heads, key_heads))
    return [x.requires_grad_() for x in (query, key, value)]


def literal(query, key, value, sink=None):
    """Causal softmax beside a sink, as the formula says it."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    score = query @ key.mT * query.shape[-1] ** -0.5
    order = torch.ones(score.shape[-2:], dtype=torch.bool).tril()
    score = score.masked_fill(~order, -torch.inf)
    if sink is not None:
        score = torch.cat((score, sink.view(1, -1, 1, 1).expand(*score.shape[:-1], 1)), -1)
    return score.softmax(-1)[..., : key.shape[2]] @ value


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1.0, 700.0])
def test_sinks(form, size):
    """At 700 exp(sink) and the factors of the rows leave float32, and nearly float64."""
    given, sink = draw(), (torch.tensor([-1.0, 0.0, 1.0, 0.5], dtype=torch.float64) * size).requires_grad_()
    ours = attention(*given, normalizer=Sink(sink), structure=Causal(), **form)
    theirs = literal(*given, sink=sink)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    direction = torch.randn_like(theirs)
    found = (torch.autograd.grad((x * direction).sum(), [*given, sink]) for x in (ours, theirs))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_sinks_in_single_precision_with_scores_out_of_range():
    query, key, value = (x.detach().float() for x in draw())
    sink = torch.tensor([200.0, -200.0, 0.0, 3.0])
    ours = attention(query * 100, key, value, normalizer=Sink(sink), structure=Causal())
    theirs = literal((query * 100).double(), key.double(), value.double(), sink=sink.double())
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-4)


def test_a_sink_beside_another_kernel():
    query, key, value = (x.detach() for x in draw(key_heads=4))
    sink = torch.tensor([0.0, 1.0, 2.0, -1.0], dtype=torch.float64)
    options = {"kernel": Taylor(2), "structure": Causal()}
    ours = attention(query, key, value, normalizer=Sink(sink), **options)
    ones = torch.ones_like(value[..., :1])
    from mercer import Identity

    numerator, denominator = (attention(query, key, v, normalizer=Identity(), **options) for v in (value, ones))
    torch.testing.assert_close(ours, numerator / (denominator + sink.exp().view(1, -1, 1, 1)))


def test_a_row_that_sees_nothing_is_zero():
    given, sink = draw(), torch.zeros(4, dtype=torch.float64, requires_grad=True)
    hidden = Padding(torch.zeros(2, 21, dtype=torch.bool))
    out = attention(*given, normalizer=Sink(sink), structure=hidden)
    assert (out == 0).all()
    assert all(torch.isfinite(x).all() for x in torch.autograd.grad(out.sum(), [*given, sink]))


def test_refusals():
    with pytest.raises(InvalidArgument, match=r"sink must be \[4\]"):
        attention(*draw(), normalizer=Sink(torch.zeros(3, dtype=torch.float64)))
