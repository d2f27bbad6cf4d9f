"""The short convolution against torch's Conv1d in float64, in one call and in several."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import conv1d, pad, silu

from mercer.errors import InvalidArgument
from mercer.mixers.short_convolution import ShortConvolution


def expected(conv, x, past=None):
    """F.conv1d with a group per channel, in float64; x [L, C]."""
    x = x.double()
    before = conv.width - 1
    x = pad(x, (0, 0, before, 0)) if past is None else torch.cat((past.double(), x))
    if len(x) == before:
        return x[:0]
    bias = None if conv.bias is None else conv.bias.double()
    out = conv1d(x.T[None], conv.weight.double()[:, None], bias, groups=conv.channels)[0].T
    return silu(out) if conv.activation else out


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    channels=st.sampled_from([1, 3, 16, 19, 40]),
    width=st.integers(1, 5),
    bias=st.booleans(),
    activation=st.sampled_from(["silu", None]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    given_past=st.booleans(),
)
def test_rows_and_gradients_are_those_of_conv1d(lengths, channels, width, bias, activation, dtype, given_past):
    torch.manual_seed(0)
    conv = ShortConvolution(channels, width, bias=bias, activation=activation).to(dtype)
    batch, length = len(lengths), max(lengths)
    x = torch.randn(batch, length, channels, dtype=dtype)
    for row, count in zip(x, lengths, strict=True):
        row[count:] = 0
    past = torch.randn(batch, width - 1, channels, dtype=dtype) if given_past else None
    inputs = [t.requires_grad_() for t in (x, past) if t is not None] + list(conv.parameters())
    y, tail = conv(x, torch.tensor(lengths), past)
    assert y.dtype == tail.dtype == dtype
    grad, grad_tail = torch.randn_like(y), torch.randn_like(tail)
    tolerance = 1e-12 if dtype == torch.float64 else 3e-6
    total = torch.zeros((), dtype=torch.float64)
    for b, count in enumerate(lengths):
        old = None if past is None else past[b]
        want = expected(conv, x[b, :count], old)
        assert torch.allclose(y[b, :count].double(), want, atol=tolerance, rtol=tolerance)
        assert not y[b, count:].any()
        whole = torch.cat((x.new_zeros(width - 1, channels) if old is None else old, x[b, :count]))
        kept = whole[len(whole) - (width - 1) :]
        assert torch.equal(tail[b], kept)
        total = total + (want * grad[b, :count]).sum() + (kept.double() * grad_tail[b]).sum()
    found = torch.autograd.grad((y, tail), inputs, (grad, grad_tail), materialize_grads=True)
    wanted = [torch.zeros_like(t) for t in inputs]
    if total.requires_grad:
        wanted = torch.autograd.grad(total, inputs, materialize_grads=True)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(mine, theirs, atol=20 * tolerance, rtol=20 * tolerance)


@pytest.mark.parametrize("cuts", [(), (1,), (2, 3), (5, 5, 9), tuple(range(1, 12))])
def test_several_calls_are_one(cuts):
    conv = ShortConvolution(20, 4)
    x = torch.randn(2, 12, 20)
    whole, tail = conv(x)
    past, parts = None, []
    for start, stop in pairwise((0, *cuts, 12)):
        y, past = conv(x[:, start:stop], past=past)
        parts.append(y)
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-6)
    assert torch.equal(past, tail)


def test_a_row_without_tokens_keeps_its_tail_to_the_bit():
    conv = ShortConvolution(7, 4)
    past = torch.randn(3, 3, 7)
    past[0, 0, 0] = -0.0
    _, tail = conv(torch.zeros(3, 2, 7), torch.tensor([0, 2, 0]), past)
    assert torch.equal(tail[::2].view(torch.int32), past[::2].view(torch.int32))
    assert torch.equal(tail[1], torch.cat((past[1, 2:], torch.zeros(2, 7))))


def test_bfloat16_is_summed_in_float32():
    conv = ShortConvolution(33, 4).to(torch.bfloat16)
    x = torch.randn(2, 50, 33).bfloat16()
    y, tail = conv(x)
    assert y.dtype == torch.bfloat16
    assert tail.dtype == torch.float32
    want = torch.stack([expected(conv, row) for row in x])
    assert torch.allclose(y.double(), want, atol=1e-6, rtol=2**-8)


def test_start_draws_from_its_generator_alone():
    conv = ShortConvolution(400, 4)
    conv.start(torch.Generator().manual_seed(3))
    again = ShortConvolution(400, 4)
    again.start(torch.Generator().manual_seed(3))
    assert torch.equal(conv.weight, again.weight)
    assert torch.equal(conv.bias, again.bias)
    assert 0.45 < conv.weight.abs().max() <= 0.5
    assert abs(conv.weight.mean()) < 0.05


@pytest.mark.parametrize(
    ("arguments", "word"),
    [((0, 4), "channels"), ((4, 0), "width"), ((True, 4), "channels")],
)
def test_wrong_sizes_are_refused(arguments, word):
    with pytest.raises(InvalidArgument, match=word):
        ShortConvolution(*arguments)


def test_unknown_activations_are_refused():
    with pytest.raises(InvalidArgument, match="'silu' or None"):
        ShortConvolution(4, 4, activation="relu")
