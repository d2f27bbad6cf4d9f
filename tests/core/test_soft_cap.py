"""SoftCap: softmax of scores that are bent by a hyperbolic tangent, at moderate and at extreme scores."""

import pytest
import torch

from mercer import Alibi, Causal, Exp, Padding, attention
from mercer.core.soft_cap import SoftCap
from mercer.errors import InvalidArgument

FORMS = [{"form": "dense"}, {"form": "chunked"}, {"form": "recurrent", "path": "pairs"}]


def draw(length=21, heads=4, key_heads=2):
    query, key, value = (torch.randn(2, h, length, 8, dtype=torch.float64) for h in (heads, key_heads, key_heads))
    return [x.requires_grad_() for x in (query, key, value)]


def literal(query, key, value, cap, bias=0.0):
    """Causal softmax of capped scores, to which log-weights are added after the cap."""
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    score = cap * torch.tanh(query @ key.mT * query.shape[-1] ** -0.5 / cap) + bias
    order = torch.ones(score.shape[-2:], dtype=torch.bool).tril()
    return score.masked_fill(~order, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cap", [0.5, 50.0, 80])
def test_scores_are_capped(form, cap):
    given = draw()
    ours, theirs = attention(*given, kernel=SoftCap(cap), structure=Causal(), **form), literal(*given, cap)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    direction = torch.randn_like(theirs)
    for a, b in zip(*(torch.autograd.grad((x * direction).sum(), given) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_log_weights_are_added_after_the_cap(form):
    given, slopes = draw(), torch.tensor([0.5, 0.25, 0.125, 1.0], dtype=torch.float64)
    distance = (torch.arange(21)[:, None] - torch.arange(21)).double()
    expected = literal(*given, 2.0, -slopes[:, None, None] * distance)
    ours = attention(*given, kernel=SoftCap(2.0), structure=Causal() & Alibi(slopes), **form)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1e-3, 30.0, 1e6])
def test_single_precision_at_any_size_of_scores(form, size):
    """At 30 the weights of a row reach from exp(-50) to exp(50); at 1e6 nearly every score is at its cap, and others
    have lost their digits in the product."""
    given = [x.detach().float().requires_grad_() for x in draw()]
    given[0].data *= size
    exact = [x.detach().double().requires_grad_() for x in given]
    ours, theirs = attention(*given, kernel=SoftCap(50.0), structure=Causal(), **form), literal(*exact, 50.0)
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=1e-4)
    direction = torch.randn_like(theirs)
    got = torch.autograd.grad(ours, given, direction.float())
    assert all(bool(x.isfinite().all()) for x in got)
    if size > 1e3:
        return
    for name, a, b in zip("qkv", got, torch.autograd.grad(theirs, exact, direction), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-4 * float(b.abs().max().clamp_min(1)), msg=name)


def test_large_caps_are_the_exponential():
    query, key, value = (x.detach() for x in draw())
    near = attention(query * 0.01, key * 0.01, value, kernel=SoftCap(80), structure=Causal())
    exact = attention(query * 0.01, key * 0.01, value, kernel=Exp(), structure=Causal())
    torch.testing.assert_close(near, exact, rtol=0, atol=1e-12)


def test_a_cache_continues_with_padding():
    query, key, value = (x.detach() for x in draw())
    keep = torch.rand(2, 21) > 0.2
    options = {"kernel": SoftCap(1.5)}
    whole = attention(query, key, value, structure=Causal() & Padding(keep), **options)
    state, outs = None, []
    for a, b in ((0, 9), (9, 10), (10, 21)):
        out, state = attention(
            *(x[:, :, a:b] for x in (query, key, value)),
            structure=Causal() & Padding(keep[:, a:b]),
            state=state,
            return_state=True,
            **options,
        )
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cap", [0, -1.0, 80.5, True, float("nan"), float("inf"), "50"])
def test_caps_are_numbers_that_single_precision_can_take(cap):
    with pytest.raises(InvalidArgument, match="a number above 0 and at most 80"):
        SoftCap(cap)


@pytest.mark.peers
def test_equals_the_attention_of_gemma():
    modeling = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    query, key, value = (x.detach().float() * 3 for x in draw())
    layer = torch.nn.Module()
    layer.num_key_value_groups, layer.training = 2, False
    hidden = torch.full((21, 21), torch.finfo(torch.float32).min).triu(1)[None, None]
    theirs, _ = modeling.eager_attention_forward(layer, query, key, value, hidden, scaling=8**-0.5, softcap=5.0)
    ours = attention(query, key, value, kernel=SoftCap(5.0), structure=Causal())
    torch.testing.assert_close(ours, theirs.transpose(1, 2), rtol=1e-5, atol=1e-5)
