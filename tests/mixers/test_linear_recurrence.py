"""The recurrence of single channels: each form against the definition in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from mercer.backends.sharing import installed
from mercer.errors import InvalidArgument, Unsupported
from mercer.mixers.linear_recurrence import linear_recurrence

FORMS = ["recurrent", "chunked", pytest.param("fused", marks=pytest.mark.skipif(not installed(), reason="Numba"))]


def definition(log: Tensor, x: Tensor, state: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token, in float64; behind a row's length the state stays and h is 0."""
    rows = [torch.zeros_like(x[:, 0])] if x.shape[1] else []
    for t in range(x.shape[1]):
        there = (t < lengths).unsqueeze(1)
        state = torch.where(there, log[:, t].exp() * state + x[:, t], state)
        rows.append(torch.where(there, state, 0))
    return torch.stack(rows[1:], 1) if rows else x, state


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=10)
@given(
    batch=st.integers(1, 3), length=st.sampled_from([0, 1, 2, 64, 65, 130]), channels=st.sampled_from([1, 16, 33]),
    seed=st.integers(0, 99), ragged=st.booleans(), half=st.booleans(),
)  # fmt: skip
def test_every_form_is_the_definition(form, batch, length, channels, seed, ragged, half):
    generator = torch.Generator().manual_seed(seed)
    log = -3 * torch.rand(batch, length, channels, generator=generator) ** 4
    x = torch.randn(batch, length, channels, generator=generator)
    state = torch.randn(batch, channels, generator=generator)
    if half:
        x = x.bfloat16()
    lengths = torch.randint(0, length + 1, (batch,), generator=generator)
    lengths = lengths if ragged else torch.full((batch,), length)
    here = [t.clone().requires_grad_() for t in (log, x, state)]
    exact = [t.double().requires_grad_() for t in (log, x, state)]
    found = linear_recurrence(here[0], here[1], state=here[2], lengths=lengths if ragged else None, form=form)
    wanted = definition(*exact, lengths)
    slopes = [torch.randn(t.shape, generator=generator) for t in found]
    sum((t * s).sum() for t, s in zip(found, slopes, strict=True)).backward()
    sum((t * s).sum() for t, s in zip(wanted, slopes, strict=True)).backward()
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == torch.float32
        assert_close(a.double(), b, rtol=2e-5, atol=2e-5)
    for a, b in zip(here, exact, strict=True):
        if a.grad is None:
            assert not a.numel()
            continue
        coarse = 1e-2 if a.dtype == torch.bfloat16 else 1e-4
        assert_close(a.grad.double(), b.grad, rtol=coarse, atol=coarse)


@pytest.mark.parametrize("form", ["recurrent", "chunked"])
def test_float64_is_exact(form, generator):
    log = -torch.rand(2, 70, 5, dtype=torch.float64, generator=generator)
    x, state = torch.randn(2, 70, 5, dtype=torch.float64, generator=generator), torch.ones(2, 5, dtype=torch.float64)
    found = linear_recurrence(log, x, state=state, form=form)
    for a, b in zip(found, definition(log, x, state, torch.tensor([70, 70])), strict=True):
        assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("form", FORMS)
def test_decays_that_vanish_and_those_that_never_do(form):
    """Products of decays go to 0 in a few tokens, or stay 1 over thousands: nothing is divided by them."""
    for log, steady in ((-60.0, 1.0), (-torch.inf, 1.0), (0.0, 3000.0)):
        gates = torch.full((1, 3000, 2), log).requires_grad_()
        x = torch.ones(1, 3000, 2, requires_grad=True)
        out, last = linear_recurrence(gates, x, form=form)
        assert_close(last, torch.full((1, 2), steady))
        out.sum().backward()
        assert gates.grad is not None
        assert gates.grad.isfinite().all()
        assert x.grad is not None
        assert_close(x.grad[0, 0], torch.full((2,), steady))


@pytest.mark.parametrize("form", FORMS)
def test_absent_tokens_are_not_looked_at(form):
    log, x = torch.full((2, 8, 3), -0.1), torch.ones(2, 8, 3)
    log[0, 5:], x[0, 5:], log[1], x[1] = torch.nan, torch.nan, torch.nan, torch.nan
    log, x = log.requires_grad_(), x.requires_grad_()
    state = torch.tensor([[1.0, 2.0, 3.0], [-0.0, 1e-40, 5.0]])
    out, last = linear_recurrence(log, x, state=state, lengths=torch.tensor([5, 0]), form=form)
    assert torch.equal(last[1].view(torch.int32), state[1].view(torch.int32))
    assert (out[0, 5:] == 0).all()
    assert (out[1] == 0).all()
    (out.sum() + last.sum()).backward()
    for grad in (log.grad, x.grad):
        assert grad is not None
        assert (grad[0, 5:] == 0).all()
        assert (grad[1] == 0).all()
        assert grad[0, :5].isfinite().all()


@pytest.mark.skipif(not installed(), reason="Numba")
def test_auto_takes_the_fused_form_for_large_calls(monkeypatch):
    from mercer.backends import channel_scan

    seen = []
    run = channel_scan.scan
    monkeypatch.setattr(channel_scan, "scan", lambda *given: seen.append(given[1].shape) or run(*given))
    for length in (2, 200):
        linear_recurrence(-torch.ones(1, length, 32), torch.ones(1, length, 32))
    assert seen == [torch.Size([1, 200, 32])]


@pytest.mark.skipif(not installed(), reason="Numba")
def test_any_strides(generator):
    log = -torch.rand(3, 2, 40, generator=generator).transpose(0, 1)
    x = torch.randn(2, 20, 3, generator=generator).transpose(1, 2)[..., ::2]
    log = log[..., :20:2]
    found, _ = linear_recurrence(log, x, form="fused")
    wanted, _ = linear_recurrence(log, x, form="recurrent")
    assert_close(found, wanted)


def test_refusals():
    x = torch.zeros(2, 3, 4)
    for call, message in (
        (lambda: linear_recurrence(x, x, form="dense"), "form must be one of auto, recurrent"),
        (lambda: linear_recurrence(x, x[..., :3]), r"must both be \[B, L, C\]"),
        (lambda: linear_recurrence(x.long(), x), "must be floats"),
        (lambda: linear_recurrence(x, x, state=torch.zeros(2, 3)), r"state must be torch.float32 \[2, 4\]"),
        (lambda: linear_recurrence(x, x, state=torch.zeros(2, 4).double()), "state must be torch.float32"),
        (lambda: linear_recurrence(x, x, lengths=torch.zeros(3).long()), r"lengths must be integers \[2\]"),
        (lambda: linear_recurrence(x, x, lengths=torch.tensor([True, False])), "not torch.bool"),
        (lambda: linear_recurrence(x, x, lengths=torch.tensor([4, 0]), form="fused"), r"from 0 to 3, not \[4, 0\]"),
        (lambda: linear_recurrence(x, x, lengths=torch.tensor([-1, 0])), r"from 0 to 3, not \[-1, 0\]"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            call()
    with pytest.raises(Unsupported, match="use form='chunked'"):
        linear_recurrence(x.double(), x.double(), form="fused")
