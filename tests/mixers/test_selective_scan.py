"""Every form of the selective scan against its formula written out in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from mercer.backends import selective_scan as fused
from mercer.errors import InvalidArgument, Unsupported
from mercer.mixers.selective_scan import selective_scan

FORMS = ("recurrent", "chunked", "fused")
TORCH = ("recurrent", "chunked", "auto")  # of float64


def draw(batch, length, channels, states, dtype=torch.float64):
    """All arguments, with steps from small to large."""
    return {
        "x": torch.randn(batch, length, channels, dtype=dtype),
        "step": torch.randn(batch, length, channels, dtype=dtype) * 2 - 1,
        "rates": -torch.rand(channels, states, dtype=dtype) * 8,
        "write": torch.randn(batch, length, states, dtype=dtype),
        "read": torch.randn(batch, length, states, dtype=dtype),
        "skip": torch.randn(channels, dtype=dtype),
        "gate": torch.randn(batch, length, channels, dtype=dtype),
        "bias": torch.randn(channels, dtype=dtype),
        "state": torch.randn(batch, states, channels, dtype=dtype),
    }


def expected(x, step, rates, write, read, skip, gate, bias, state, lengths):
    """The formula, one row and one token after the other; softplus as log(1 + e^s)."""
    rows, finals = [], []
    for b, length in enumerate(lengths):
        h, ys = state[b], []
        for t in range(x.shape[1]):
            if t >= length:
                ys.append(torch.zeros_like(x[b, t]))
                continue
            s = torch.log1p(torch.exp(step[b, t] + bias))
            h = torch.exp(s * rates.T) * h + (s * x[b, t])[None] * write[b, t][:, None]
            z = gate[b, t]
            ys.append((read[b, t] @ h + skip * x[b, t]) * z / (1 + torch.exp(-z)))
        rows.append(torch.stack(ys))
        finals.append(h)
    return torch.stack(rows), torch.stack(finals)


@pytest.mark.parametrize("form", [*TORCH, "fused"])
@pytest.mark.parametrize(
    ("lengths", "channels", "states"), [((1,), 1, 1), ((0, 5), 3, 4), ((37, 0, 33), 2, 17), ((70,), 19, 2)]
)
def test_outputs_states_and_gradients_are_those_of_the_formula(form, lengths, channels, states):
    dtype = torch.float32 if form == "fused" else torch.float64
    given = draw(len(lengths), max(lengths), channels, states)
    exact = {name: v.requires_grad_() for name, v in given.items()}
    want = expected(**exact, lengths=lengths)
    upstream = [torch.randn_like(v) for v in want]
    wanted = torch.autograd.grad(want, list(exact.values()), upstream)
    mine = {name: v.detach().to(dtype).requires_grad_() for name, v in given.items()}
    found = selective_scan(**mine, softplus=True, lengths=torch.tensor(lengths), form=form)
    gradients = torch.autograd.grad(found, list(mine.values()), [v.to(dtype) for v in upstream])
    tolerance = 3e-6 if dtype == torch.float32 else 1e-12
    for a, b in zip((*found, *gradients), (*want, *wanted), strict=True):
        assert a.dtype == dtype
        assert (a - b).abs().max() <= tolerance * max(1, b.abs().max())


@pytest.mark.parametrize("form", ["recurrent", "chunked", "fused"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("lengths", "channels"), [((1,), 1), ((70, 0, 33), 19), ((64, 96), 130)])
def test_steps_are_made_from_fewer_numbers_by_segments(monkeypatch, form, whole, lengths, channels):
    """Of 32 tokens, or of all."""
    monkeypatch.setattr(fused, "SEGMENT", 1 << 30 if whole else 1)
    dtype = torch.float32 if form == "fused" else torch.float64
    given = draw(len(lengths), max(lengths), channels, 5)
    given["step"], given["expand"] = (
        torch.randn(*n, dtype=torch.float64) for n in ((*given["x"].shape[:2], 3), (channels, 3))
    )
    exact = {name: v.requires_grad_() for name, v in given.items()}
    steps = exact["step"] @ exact["expand"].T
    others = {name: v for name, v in exact.items() if name not in ("step", "expand")}
    want = expected(**others, step=steps, lengths=lengths)
    upstream = [torch.randn_like(v) for v in want]
    wanted = torch.autograd.grad(want, list(exact.values()), upstream)
    mine = {name: v.detach().to(dtype).requires_grad_() for name, v in given.items()}
    found = selective_scan(**mine, softplus=True, lengths=torch.tensor(lengths), form=form)
    gradients = torch.autograd.grad(found, list(mine.values()), [v.to(dtype) for v in upstream])
    tolerance = 6e-6 if dtype == torch.float32 else 1e-12
    for a, b in zip((*found, *gradients), (*want, *wanted), strict=True):
        assert a.dtype == dtype
        assert (a - b).abs().max() <= tolerance * max(1, b.abs().max())


def test_segments_take_halves_and_autocast(monkeypatch):
    """In bfloat16 the steps of a segment are those of one product over all tokens."""
    monkeypatch.setattr(fused, "SEGMENT", 1)
    given = {name: v.requires_grad_() for name, v in draw(2, 70, 33, 4, torch.float32).items()}
    small, expand = torch.randn(2, 70, 8, requires_grad=True), torch.randn(33, 8, requires_grad=True)
    found = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for parts in (
            {"step": small, "expand": expand},
            {"step": torch.nn.functional.linear(small, expand)},
        ):
            outputs = selective_scan(**given | parts, softplus=True, form="fused")
            loss = sum(v.square().sum() for v in outputs)
            found.append((*outputs, *torch.autograd.grad(loss, (given["x"], given["rates"], small, expand))))
    for ours, right in zip(*found, strict=True):
        assert ours.dtype == right.dtype
        assert (ours - right).abs().max() <= 0.02 * right.abs().max()


@settings(max_examples=15, deadline=None)
@given(
    length=st.integers(0, 80),
    cut=st.integers(0, 80),
    channels=st.sampled_from([1, 16, 17, 130]),
    states=st.sampled_from([1, 16, 20]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_the_fused_form_takes_strides_halves_and_pieces(length, cut, channels, states, dtype):
    torch.manual_seed(1)
    given = draw(2, length, channels, states, torch.float32)
    given["x"], given["gate"] = torch.randn(2, length, 2 * channels).to(dtype).chunk(2, -1)
    given["step"] = given["step"].to(dtype)
    given["write"], given["read"] = torch.randn(2, length, 3 + 2 * states).to(dtype)[..., 3:].chunk(2, -1)
    want, final = selective_scan(**given, softplus=True, form="recurrent")
    cut = min(cut, length)
    pieces, state = [], given.pop("state")
    for part in (slice(0, cut), slice(cut, length)):
        along = {n: v[:, part] if v.dim() == 3 else v for n, v in given.items()}
        y, state = selective_scan(**along, softplus=True, state=state, form="fused")
        assert y.dtype == dtype
        pieces.append(y)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert torch.allclose(torch.cat(pieces, 1).float(), want.float(), atol=tolerance, rtol=tolerance)
    assert torch.allclose(state, final, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_without_options_it_is_the_recurrence_alone(form):
    """Worked out by hand: a decay of 1/2 a step, inputs 1, 2, 4 written with 3 and read with 10."""
    one = torch.ones(1, 3, 1)
    y, state = selective_scan(
        torch.tensor([[[1.0], [2.0], [4.0]]]), one, torch.tensor([[-math.log(2)]]), 3 * one, 10 * one, form=form
    )
    assert y.flatten().tolist() == pytest.approx([30, 75, 157.5], rel=1e-6)
    assert state.item() == pytest.approx(15.75, rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_without_tokens_keeps_its_state_to_the_bit_and_nothing_behind_a_row_is_looked_at(form):
    given = draw(3, 40, 5, 3, torch.float32)
    given["state"][0, 0, 0] = -0.0
    lengths = torch.tensor([0, 40, 7])
    for name, v in given.items():
        if v.dim() == 3 and name != "state":
            v[0], v[2, 7:] = math.nan, math.nan
        given[name] = v.requires_grad_()
    y, after = selective_scan(**given, softplus=True, lengths=lengths, form=form)
    assert torch.equal(after[0].view(torch.int32), given["state"][0].view(torch.int32))
    assert not y[0].any()
    assert not y[2, 7:].any()
    (y.sum() + after.sum()).backward()
    for v in given.values():
        assert v.grad.isfinite().all()
    assert not given["x"].grad[2, 7:].any()
    assert not given["step"].grad[0].any()


@pytest.mark.parametrize("form", FORMS)
def test_steps_and_rates_of_any_size_neither_overflow_nor_lose_the_gradient(form):
    x = torch.ones(1, 50, 16)
    step = torch.logspace(-30, 30, 50)[None, :, None].expand(1, 50, 16).clone().requires_grad_()
    rates = torch.full((16, 2), -1e3)
    y, state = selective_scan(x, step, rates, torch.ones(1, 50, 2), torch.ones(1, 50, 2), form=form)
    found, sizes = y[0, :, 0].double(), step[0, :, 0].double()
    tiny, huge = sizes < 1e-9, sizes > 1
    assert torch.allclose(found[tiny], 2 * sizes.cumsum(0)[tiny], rtol=1e-5, atol=0)  # nothing is forgotten
    assert torch.allclose(found[huge], 2 * sizes[huge], rtol=1e-6)  # all that was before is
    (grad,) = torch.autograd.grad(y[0, -1, 0], step)
    assert grad[0, -1, 0] == pytest.approx(2)
    assert state.isfinite().all()


def test_softplus_and_silu_are_exact_over_their_whole_range():
    values = torch.cat((torch.linspace(-80, 80, 4001), torch.tensor([0.0, -0.0, 1e-30]))).reshape(1, 1, -1)
    ones = torch.ones_like(values)
    channels = values.shape[-1]
    rates, single = torch.zeros(channels, 1), torch.ones(1, 1, 1)
    y, _ = selective_scan(ones, values, rates, single, single, softplus=True, form="fused")
    assert torch.allclose(y.double(), torch.nn.functional.softplus(values.double()), rtol=5e-7, atol=0)
    y, _ = selective_scan(ones, ones, rates, single, single, gate=values, form="fused")
    assert torch.allclose(y.double(), torch.nn.functional.silu(values.double()), rtol=5e-7, atol=1e-36)


@pytest.mark.parametrize("form", [*FORMS, "auto"])
@pytest.mark.parametrize("length", [1, 40])
def test_autocast_changes_no_sum(form, length):
    given = {name: v.requires_grad_() for name, v in draw(2, length, 5, 4, dtype=torch.float32).items()}
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found = selective_scan(**given, softplus=True, form=form)
        results.append((*found, *torch.autograd.grad(found[0].sum() + found[1].sum(), list(given.values()))))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("form", TORCH)
def test_gradients_by_finite_differences(form):
    given = draw(2, 4, 2, 2)

    def call(*values):
        return selective_scan(
            **dict(zip(given, values, strict=True)), softplus=True, lengths=torch.tensor([4, 2]), form=form
        )

    assert gradcheck(call, [v.requires_grad_() for v in given.values()])


def test_the_fused_form_gives_the_same_digits_on_any_number_of_threads():
    given = {n: v.requires_grad_() for n, v in draw(2, 40, 300, 4, torch.float32).items()}
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            outputs = selective_scan(**given, softplus=True, form="fused")
            found.append((*outputs, *torch.autograd.grad(sum(v.sum() for v in outputs), list(given.values()))))
    finally:
        torch.set_num_threads(threads)
    for one, three in zip(*found, strict=True):
        assert torch.equal(one, three)


@pytest.mark.parametrize("used", [0, 1])
def test_the_fused_form_has_the_gradient_of_what_is_used_alone(used):
    given = draw(2, 40, 20, 3)
    exact = {n: v.requires_grad_() for n, v in given.items()}
    mine = {n: v.detach().float().requires_grad_() for n, v in given.items()}
    selective_scan(**exact, softplus=True, form="recurrent")[used].sum().backward()
    selective_scan(**mine, softplus=True, form="fused")[used].sum().backward()
    for name, v in mine.items():
        want = torch.zeros_like(exact[name]) if exact[name].grad is None else exact[name].grad
        assert torch.allclose(v.grad.double(), want, rtol=1e-4, atol=1e-4), name


def test_wrong_arguments_are_refused():
    given = draw(2, 3, 4, 5)
    with pytest.raises(InvalidArgument, match=r"read must be \[2, 3, 5\]"):
        selective_scan(**given | {"read": given["read"][:, :2]})
    with pytest.raises(InvalidArgument, match=r"expand must be \[4, R\]"):
        selective_scan(**given, expand=torch.randn(3, 2))
    with pytest.raises(InvalidArgument, match=r"step must be \[2, 3, 2\]"):
        selective_scan(**given, expand=torch.randn(4, 2))
    with pytest.raises(InvalidArgument, match="form must be"):
        selective_scan(**given, form="dense")
    with pytest.raises(InvalidArgument, match="between 0 and 3"):
        selective_scan(**given, lengths=torch.tensor([1, 4]))
    with pytest.raises(InvalidArgument, match=r"lengths must be integers, got torch\.float32"):
        selective_scan(**given, lengths=torch.tensor([1.0, 2.5]))
    with pytest.raises(InvalidArgument, match=r"x must be floating point, got torch\.int64"):
        selective_scan(**given | {"x": given["x"].long()})
    with pytest.raises(InvalidArgument, match="x must be"):
        selective_scan(**given | {"x": given["x"][0]})
    with pytest.raises(Unsupported, match="form='chunked'"):
        selective_scan(**given, form="fused")
