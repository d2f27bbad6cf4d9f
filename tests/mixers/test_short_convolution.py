"""The short convolution against torch's Conv1d in float64, in one call and in several."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import conv1d, pad, silu

from mercer.backends import short_convolution as fused
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


@pytest.fixture(params=[False, True], ids=["torch", "fused"])
def kernels(request, monkeypatch):
    """Whether Numba's kernels compute what is no float64, however small."""
    monkeypatch.setattr(fused, "LEAST", 0 if request.param else 1 << 60)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    channels=st.sampled_from([1, 3, 16, 19, 40]),
    width=st.integers(1, 5),
    bias=st.booleans(),
    activation=st.sampled_from(["silu", None]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    given_past=st.booleans(),
    quick=st.booleans(),
)
def test_rows_and_gradients_are_those_of_conv1d(lengths, channels, width, bias, activation, dtype, given_past, quick):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "LEAST", 0 if quick else 1 << 60)
        compare(lengths, channels, width, bias, activation, dtype, given_past)


def test_runs_of_tokens_meet(kernels):
    compare((600, 257, 256), 19, 4, True, "silu", torch.float32, True)


def compare(lengths, channels, width, bias, activation, dtype, given_past):
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
    tolerance = 1e-12 if dtype == torch.float64 else 3e-6 * max(1, length / 16) ** 0.5
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
def test_several_calls_are_one(cuts, kernels):
    conv = ShortConvolution(20, 4)
    x = torch.randn(2, 12, 20)
    whole, tail = conv(x)
    past, parts = None, []
    for start, stop in pairwise((0, *cuts, 12)):
        y, past = conv(x[:, start:stop], past=past)
        parts.append(y)
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-6)
    assert torch.equal(past, tail)


def test_a_row_without_tokens_keeps_its_tail_to_the_bit(kernels):
    conv = ShortConvolution(7, 4)
    past = torch.randn(3, 3, 7)
    past[0, 0, 0] = -0.0
    _, tail = conv(torch.zeros(3, 2, 7), torch.tensor([0, 2, 0]), past)
    assert torch.equal(tail[::2].view(torch.int32), past[::2].view(torch.int32))
    assert torch.equal(tail[1], torch.cat((past[1, 2:], torch.zeros(2, 7))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_summed_in_float32(kernels, dtype):
    conv = ShortConvolution(33, 4).to(dtype)
    x = torch.randn(2, 50, 33).to(dtype)
    y, tail = conv(x)
    assert y.dtype == dtype
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


def test_lengths_beyond_the_input_are_refused():
    with pytest.raises(InvalidArgument, match="between 0 and 3"):
        ShortConvolution(4, 4)(torch.zeros(2, 3, 4), torch.tensor([1, 4]))


def test_the_kernels_give_the_same_digits_on_any_number_of_threads(monkeypatch):
    monkeypatch.setattr(fused, "LEAST", 0)
    conv, x, found = ShortConvolution(50, 4), torch.randn(2, 700, 50, requires_grad=True), []
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            y, tail = conv(x)
            found.append((y, tail, *torch.autograd.grad(y.square().sum(), [x, *conv.parameters()])))
    finally:
        torch.set_num_threads(threads)
    for one, three in zip(*found, strict=True):
        assert torch.equal(one, three)


def test_unknown_activations_are_refused():
    with pytest.raises(InvalidArgument, match="'silu' or None"):
        ShortConvolution(4, 4, activation="relu")
