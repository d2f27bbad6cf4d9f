"""RWKV-4's average beside its sums written out in float64, in both forms."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from mercer.errors import InvalidArgument, Unsupported
from mercer.mixers.wkv import wkv

FORMS = ["recurrent", "chunked", "fused"]
forms = pytest.mark.parametrize("form", FORMS)


def written_out(key, value, log_decay, bonus, first=0):
    """The two sums of the paper's formula for every t from the first, with exponents relative to their largest."""
    k, v, w, u = (np.asarray(x, np.float64) for x in (key, value, log_decay, bonus))
    out = np.zeros_like(v)
    for t in range(first, k.shape[1]):
        weights = np.concatenate([(t - 1 - np.arange(t))[:, None] * w + k[:, :t], (u + k[:, t])[:, None]], 1)
        weights = np.exp(weights - weights.max(1, keepdims=True))
        out[:, t] = (weights * v[:, : t + 1]).sum(1) / weights.sum(1)
    return torch.tensor(out[:, first:])


def drawn(batch, length, channels, *, seed=0, spread=1.0, slow=1.0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, batch, length, channels, generator=g) * torch.tensor([spread, 1])[:, None, None, None]
    decay, bonus = -slow * torch.rand(channels, generator=g), spread * torch.randn(channels, generator=g)
    return [key, value, decay, bonus]


def run(key, value, log_decay, bonus, **options):
    return wkv(key, value, log_decay=log_decay, bonus=bonus, **options)


@forms
@settings(max_examples=20)
@given(
    batch=st.integers(1, 3),
    length=st.integers(0, 40),
    channels=st.sampled_from([1, 5, 16, 17, 70]),
    seed=st.integers(0, 99),
)
def test_every_form_is_the_formula(form, batch, length, channels, seed):
    given = drawn(batch, length, channels, seed=seed)
    out, _ = run(*given, form=form)
    assert_close(out.double(), written_out(*given), rtol=1e-5, atol=2e-6)


@forms
@pytest.mark.parametrize("spread", [30.0, 1e4])
def test_extreme_keys_neither_overflow_nor_lose_the_rest(form, spread):
    given = drawn(2, 50, 20, spread=spread)
    given[0] = given[0].round()  # then float32 has every exponent
    given[2], given[3] = -given[2].mul(8).round(), given[3].round()
    out, state = run(*given, form=form)
    assert_close(out.double(), written_out(*given), rtol=1e-5, atol=2e-6)
    assert all(bool(part.isfinite().all()) for part in state)
    assert float(state[1].min()) >= 1  # the largest weight is e^0


@pytest.mark.parametrize("form", FORMS[1:])
def test_a_key_that_is_remembered_long_keeps_its_weight(form):
    """4096 decays of less than 0.001 on an exponent of 24 are smaller than float32 can add to it one by one."""
    given = drawn(1, 4096, 8, slow=1e-3)
    given[0][:, 0] = 24
    out, _ = run(*given, form=form)
    assert_close(out[:, -5:].double(), written_out(*given, first=4091), rtol=2e-5, atol=2e-5)


@forms
def test_pieces_and_lengths_agree_with_the_whole(form):
    key, value, decay, bonus = drawn(3, 41, 33)
    whole, last = run(key, value, decay, bonus, form=form)
    state, outs = None, []
    for piece in torch.arange(41).split([1, 7, 0, 20, 1, 12]):
        out, state = run(key[:, piece], value[:, piece], decay, bonus, state=state, form=form)
        outs.append(out)
    assert_close(torch.cat(outs, 1), whole, rtol=1e-5, atol=1e-5)
    assert_close(state, last, rtol=1e-5, atol=1e-5)
    lengths = torch.tensor([41, 13, 0])
    dirty = key.clone()
    dirty[1, 13:], dirty[2] = torch.nan, torch.nan
    out, after = run(dirty, value, decay, bonus, state=last, lengths=lengths, form=form)
    for row, count in enumerate(lengths.tolist()):
        own = tuple(part[row : row + 1] for part in last)
        alone, end = run(key[row : row + 1, :count], value[row : row + 1, :count], decay, bonus, state=own, form=form)
        assert_close(out[row : row + 1, :count], alone, rtol=1e-5, atol=1e-5)
        assert (out[row, count:] == 0).all()
        assert_close(tuple(part[row : row + 1] for part in after), end, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a[2], b[2]) for a, b in zip(after, last, strict=True))
    empty, nothing = run(key, value, decay, bonus, lengths=torch.zeros(3, dtype=torch.int64), form=form)
    assert (empty == 0).all()
    assert [float(part.max()) for part in nothing] == [0, 0, -torch.inf]


@forms
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("lengths", [None, [37, 30, 0]])
def test_gradients(form, begun, lengths):
    """Of everything, states in and out too, beside automatic differentiation of the recurrence in float64."""
    g = torch.Generator().manual_seed(1)
    given = drawn(3, 37, 21, seed=2)
    state = [torch.randn(3, 21, generator=g), torch.rand(3, 21, generator=g) + 0.1, torch.randn(3, 21, generator=g)]
    targets = [torch.randn(3, 37, 21, generator=g), *torch.randn(3, 3, 21, generator=g)]
    counts = [37] * 3 if lengths is None else lengths

    def step_by_step(key, value, w, u, *past):
        num, den, peak = past if begun else (torch.zeros(3, 21), torch.zeros(3, 21), torch.full((3, 21), -1e30))
        outs = []
        for t in range(37):
            real = torch.tensor([[t < count] for count in counts])
            own = (u + key[:, t]).exp()
            outs.append(
                torch.where(real, (num * peak.exp() + own * value[:, t]) / (den * peak.exp() + own), torch.zeros(3, 21))
            )
            top = torch.maximum(peak + w, key[:, t])
            old, new = (peak + w - top).exp(), (key[:, t] - top).exp()
            after = (old * num + new * value[:, t], old * den + new, top)
            num, den, peak = (torch.where(real, a, b) for a, b in zip(after, (num, den, peak), strict=True))
        return torch.stack(outs, 1), num, den, peak

    def gradients(call, dtype):
        tensors = [x.to(dtype).requires_grad_() for x in (*given, *(state if begun else ()))]
        results = call(*tensors)
        rows = torch.tensor(counts) > 0 if not begun else torch.ones(3, dtype=torch.bool)
        loss = sum((r * t)[rows].sum() for r, t in zip(results, targets, strict=True))
        return torch.autograd.grad(loss, tensors)

    def flat(*tensors):
        out, after = run(
            *tensors[:4],
            state=tensors[4:] or None,
            lengths=None if lengths is None else torch.tensor(lengths),
            form=form,
        )
        return out, *after

    wanted = gradients(step_by_step, torch.float64)
    for found, exact in zip(gradients(flat, torch.float32), wanted, strict=True):
        assert float((found - exact).abs().max()) <= 3e-6 * float(exact.abs().max())


def test_the_recurrent_form_is_differentiable_twice():
    tensors = [x.double().requires_grad_() for x in drawn(1, 7, 2)]
    state = [x.double().requires_grad_() for x in (torch.randn(1, 2), torch.rand(1, 2) + 0.1, torch.randn(1, 2))]

    def call(*given):
        out, after = run(*given[:4], state=given[4:], lengths=torch.tensor([6]), form="recurrent")
        return out, *after

    assert torch.autograd.gradcheck(call, (*tensors, *state), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (*tensors, *state), fast_mode=True)


def test_the_fused_form_says_that_it_is_differentiable_once():
    key, value, decay, bonus = drawn(1, 5, 3)
    key.requires_grad_()
    out, _ = run(key, value, decay, bonus, form="fused")
    with pytest.raises(Unsupported, match="Second derivatives"):
        torch.autograd.grad(out.sum(), key, create_graph=True)


@forms
def test_bfloat16_is_read_as_it_is_and_summed_in_float32(form):
    given = [x.bfloat16() for x in drawn(2, 30, 18)]
    out, state = run(*given, form=form)
    assert out.dtype == torch.bfloat16
    assert all(part.dtype == torch.float32 for part in state)
    assert_close(out.double(), written_out(*(x.float() for x in given)), rtol=0.01, atol=0.01)


def test_threads_and_strides_change_no_digit():
    key, value, decay, bonus = drawn(5, 40, 200)
    turned = key.transpose(1, 2).contiguous().transpose(1, 2)
    results = []
    before = torch.get_num_threads()
    for count, source in ((1, key), (2, key), (3, turned)):
        torch.set_num_threads(count)
        leaf = source.clone().requires_grad_()
        out, state = run(leaf, value, decay, bonus, form="fused")
        out.square().sum().backward()
        results.append((out, *state, leaf.grad))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_refusals():
    key, value, decay, bonus = drawn(2, 4, 3)
    whole = {"log_decay": decay, "bonus": bonus}
    with pytest.raises(InvalidArgument, match="of one shape"):
        wkv(key, value[:, :3], **whole)
    with pytest.raises(InvalidArgument, match=r"bonus must be \[3\]"):
        wkv(key, value, log_decay=decay, bonus=bonus[:2])
    with pytest.raises(InvalidArgument, match=r"num, den and peak, each \[2, 3\]"):
        wkv(key, value, **whole, state=(decay, decay, decay))
    with pytest.raises(InvalidArgument, match=r"int64 \[2\], each from 0 to 4"):
        wkv(key, value, **whole, lengths=torch.tensor([5, 1]))
    with pytest.raises(InvalidArgument, match="float dtype"):
        wkv(key.long(), value, **whole)
    with pytest.raises(InvalidArgument, match="form must be one of"):
        wkv(key, value, **whole, form="dense")
    with pytest.raises(Unsupported, match="use form='chunked'"):
        wkv(key.double(), value, **whole, form="fused")
