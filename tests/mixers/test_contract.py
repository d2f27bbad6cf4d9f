"""What every mixer does: pieces agree with the whole, absent tokens are absent, states are values."""

from collections.abc import Sequence

import pytest
import torch
from tests.mixers.cases import CASES, DIM, build, inputs
from torch import Tensor
from torch.testing import assert_close

from mercer.core.mixer_state import MixerState
from mercer.core.state import State
from mercer.core.structures import Documents, Window
from mercer.errors import InvalidArgument, Unsupported
from mercer.mixers.base import Mixer
from mercer.mixers.names import mixer_names

TIGHT = {"rtol": 1e-9, "atol": 1e-11}
each = pytest.mark.parametrize("case", CASES)


def test_every_mixer_is_here():
    assert {name for name, _ in CASES.values()} == set(mixer_names())


def _parts(state: State) -> dict[str, Tensor]:
    assert isinstance(state, MixerState)
    return dict(state.parts)


def _pieces(mixer: Mixer, x: Tensor, sizes: Sequence[int], state: State | None = None) -> tuple[Tensor, State]:
    outs = []
    for piece in x.split(list(sizes), 1):
        out, state = mixer(piece, state=state, return_state=True)
        outs.append(out)
    assert state is not None
    return torch.cat(outs, 1), state


@each
def test_pieces_agree_with_the_whole(case):
    mixer, x = build(case), inputs(2, 21)
    whole, last = mixer(x, return_state=True)
    assert whole.shape == x.shape
    for sizes in [(1,) * 21, (20, 1), (1, 20), (2, 0, 3, 16), (17, 4)]:
        out, state = _pieces(mixer, x, sizes)
        assert_close(out, whole, **TIGHT)
        assert_close(_parts(state), _parts(last), **TIGHT)
        assert state.length.tolist() == [21, 21]


@each
def test_long_sequences_cross_every_chunk(case):
    mixer, x = build(case), inputs(1, 300, seed=3)
    whole, last = mixer(x, return_state=True)
    out, state = _pieces(mixer, x, (129, 1, 63, 107))
    assert_close(out, whole, rtol=1e-7, atol=1e-9)
    assert_close(_parts(state), _parts(last), rtol=1e-7, atol=1e-9)


@each
def test_the_past_does_not_see_the_future(case):
    mixer, x = build(case), inputs(1, 20)
    changed = x.clone()
    changed[:, 12:] = 50 * inputs(1, 8, seed=9)
    assert_close(mixer(changed)[:, :12], mixer(x)[:, :12], **TIGHT)
    assert not torch.allclose(mixer(changed)[:, 12:], mixer(x)[:, 12:])


@each
def test_earlier_tokens_matter(case):
    """A mixer that forgot its state would pass all the rest."""
    mixer, x = build(case), inputs(1, 12)
    changed = x.clone()
    changed[:, 2] += 3
    assert float((mixer(changed) - mixer(x))[:, 8:].detach().abs().max()) > 1e-6
    _, state = mixer(x[:, :6], return_state=True)
    assert float((mixer(x[:, 6:], state=state) - mixer(x[:, 6:]))[:, -1].detach().abs().max()) > 1e-7


MASKS = {
    "left": [[0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0, 1, 1]],
    "right": [[1, 1, 1, 1, 1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0, 0, 0]],
    "inside": [[1, 0, 1, 1, 0, 0, 1, 0, 1, 1], [0, 1, 1, 0, 1, 0, 1, 1, 1, 0]],
    "none real": [[0] * 10, [1, 1, 1, 1, 0, 1, 1, 1, 1, 1]],
}


@each
@pytest.mark.parametrize("place", MASKS)
@pytest.mark.parametrize("begun", [False, True])
def test_masked_tokens_are_absent(case, place, begun):
    mixer, x = build(case), inputs(2, 10)
    padding = torch.tensor(MASKS[place], dtype=torch.bool)
    before = None
    if begun:
        _, before = mixer(inputs(2, 5, seed=4), return_state=True)
    poisoned = x.masked_fill(~padding.unsqueeze(-1), torch.nan).requires_grad_()
    out, state = mixer(poisoned, padding=padding, state=before, return_state=True)
    assert (out[~padding] == 0).all()
    out.square().sum().backward()
    assert poisoned.grad is not None
    assert (poisoned.grad[~padding] == 0).all()
    for row in range(2):
        real = x[row : row + 1, padding[row]].requires_grad_()
        own = None if before is None else before.select(torch.tensor([row]))
        alone, after = mixer(real, state=own, return_state=True)
        assert_close(out[row : row + 1, padding[row]], alone, **TIGHT)
        assert_close(_parts(state.select(torch.tensor([row]))), _parts(after), **TIGHT)
        if real.shape[1]:
            (grad,) = torch.autograd.grad(alone.square().sum(), real)
            assert_close(poisoned.grad[row : row + 1, padding[row]], grad, **TIGHT)
    assert state.length.tolist() == [int(n) + 5 * begun for n in padding.sum(1)]


@each
def test_a_masked_step_leaves_the_state_to_the_bit(case):
    mixer, x = build(case, dtype=torch.float32), inputs(2, 9, dtype=torch.float32)
    _, before = mixer(x[:, :5], return_state=True)
    padding = torch.tensor([[False] * 4, [True, False, True, True]])
    _, after = mixer(x[:, 5:], padding=padding, state=before, return_state=True)
    for name, part in _parts(before).items():
        assert torch.equal(part[0], _parts(after)[name][0]), name


@each
def test_documents_are_calls_of_their_own(case):
    mixer, x = build(case), inputs(2, 14)
    offsets = torch.tensor([0, 1, 1, 9, 14])
    out, state = mixer(x, structure=Documents(offsets), return_state=True)
    more, later = mixer(x, structure=Documents(offsets), state=state, return_state=True)
    for b in range(2):
        for d, (start, stop) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False)):
            own = x[b : b + 1, start:stop]
            alone, after = mixer(own, return_state=True)
            entry = torch.tensor([b * 4 + d])
            assert_close(out[b : b + 1, start:stop], alone, **TIGHT)
            assert_close(_parts(state.select(entry)), _parts(after), **TIGHT)
            again, last = mixer(own, state=after, return_state=True)
            assert_close(more[b : b + 1, start:stop], again, **TIGHT)
            assert_close(_parts(later.select(entry)), _parts(last), **TIGHT)


@each
def test_batch_is_alone(case):
    mixer, x = build(case), inputs(3, 11)
    together = mixer(x)
    for row in range(3):
        assert_close(together[row : row + 1], mixer(x[row : row + 1]), **TIGHT)


@each
def test_float32_is_near_float64(case):
    x = inputs(2, 40)
    exact, last = build(case)(x, return_state=True)
    mixer = build(case, dtype=torch.float32)
    out, state = mixer(x.float(), return_state=True)
    assert out.dtype == torch.float32
    assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    for name, part in _parts(state).items():
        assert part.dtype in (torch.float32, torch.int64), name
        assert_close(part.double(), _parts(last)[name].double(), rtol=1e-5, atol=1e-5)


@each
def test_gradients_in_float32_are_near_those_in_float64(case):
    grads = []
    for dtype in (torch.float64, torch.float32):
        mixer, x = build(case, dtype=dtype), inputs(2, 40).to(dtype).requires_grad_()
        _, state = mixer(inputs(2, 3, seed=5).to(dtype), return_state=True)
        out, after = mixer(x, state=state, return_state=True)
        loss = out.square().mean() + sum(
            part.square().mean() for part in _parts(after).values() if part.is_floating_point()
        )
        loss.backward()
        assert x.grad is not None
        named = {name: p.grad for name, p in mixer.named_parameters()}
        assert all(grad is not None for grad in named.values()), [n for n, g in named.items() if g is None]
        grads.append({"x": x.grad} | named)
    for name, exact in grads[0].items():
        near = grads[1][name].double()
        assert float((near - exact).norm()) <= 2e-5 * float(exact.norm()) + 1e-7, name


@each
def test_sums_stay_float32_under_bfloat16(case):
    mixer, x = build(case, dtype=torch.bfloat16), inputs(1, 12, dtype=torch.bfloat16)
    out, state = mixer(x, return_state=True)
    assert out.dtype == torch.bfloat16
    assert any(part.dtype == torch.float32 for part in _parts(state).values())
    exact = build(case)(x.double())
    assert float((out.detach().double() - exact.detach()).norm() / exact.detach().norm()) < 0.1
    again, _ = mixer(x[:, :5], return_state=True)
    assert_close(out[:, :5], again, rtol=0.05, atol=0.05)


@each
def test_sums_stay_float32_inside_autocast(case):
    mixer, x = build(case, dtype=torch.float32), inputs(1, 40, dtype=torch.float32)
    exact, last = mixer(x, return_state=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, state = mixer(x, return_state=True)
        again, _ = _pieces(mixer, x, (33, 1, 6))
    assert {name: part.dtype for name, part in _parts(state).items()} == {n: p.dtype for n, p in _parts(last).items()}
    for found in (out, again):
        assert float((found - exact).detach().norm() / exact.detach().norm()) < 0.1
    out.float().square().mean().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in mixer.parameters())


@each
@pytest.mark.parametrize("length", [1, 9])
def test_no_sequences(case, length):
    mixer, x = build(case), inputs(2, length)[:0].requires_grad_()
    out, state = mixer(x, return_state=True)
    more, state = mixer(x, state=state, padding=torch.ones(0, length, dtype=torch.bool), return_state=True)
    assert out.shape == more.shape == x.shape
    assert state.batch == 0
    (out.sum() + more.sum()).backward()
    assert x.grad is not None


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_states_of_another_precision_are_taken(case, dtype):
    other = torch.float64 if dtype == torch.float32 else torch.float32
    x = inputs(2, 9)
    _, state = build(case, dtype=other)(x[:, :5].to(other), return_state=True)
    out, after = build(case, dtype=dtype)(x[:, 5:].to(dtype), state=state, return_state=True)
    assert out.dtype == dtype
    assert {part.dtype for part in _parts(after).values() if part.is_floating_point()} == {dtype}
    assert_close(out.double(), build(case)(x)[:, 5:], rtol=2e-4, atol=2e-4)


@each
def test_gradients_through_states(case):
    mixer, x = build(case), inputs(1, 8).requires_grad_()
    whole = mixer(x)
    (wanted,) = torch.autograd.grad(whole[:, 6:].square().sum(), x)
    out, _ = _pieces(mixer, x, (3, 2, 3))
    (found,) = torch.autograd.grad(out[:, 6:].square().sum(), x)
    assert_close(found, wanted, rtol=1e-8, atol=1e-10)


@each
def test_gradcheck(case):
    mixer = build(case)
    _, before = mixer(inputs(1, 2, seed=7), return_state=True)
    parts = {n: p.detach().requires_grad_(p.is_floating_point()) for n, p in _parts(before).items()}
    names = list(parts)

    def call(x: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        state = MixerState(mixer.kind, dict(zip(names, values, strict=True)), before.length)
        out, after = mixer(x, state=state, return_state=True)
        return (out, *(part for part in _parts(after).values() if part.is_floating_point()))

    x = inputs(1, 3, seed=8).requires_grad_()
    assert torch.autograd.gradcheck(call, (x, *parts.values()), eps=1e-6, atol=1e-5, rtol=1e-3, fast_mode=True)


@each
def test_states_are_values(case):
    mixer, x = build(case), inputs(2, 10)
    _, kept = mixer(x[:, :4], return_state=True)
    copies = {name: part.clone() for name, part in _parts(kept).items()}
    with torch.no_grad():
        first, _ = _pieces(mixer, x[:, 4:], (1,) * 6, kept)
        second = mixer(x[:, 4:], state=kept)
    assert_close(first, second, **TIGHT)
    assert_close(_parts(kept), copies, rtol=0, atol=0)


@each
def test_states_are_saved_loaded_and_selected(case):
    mixer, x = build(case), inputs(2, 9)
    _, state = mixer(x[:, :5], return_state=True)
    again = State.from_tensors(state.tensors())
    assert_close(mixer(x[:, 5:], state=again), mixer(x[:, 5:], state=state), rtol=0, atol=0)
    turned = state.select(torch.tensor([1, 0, 1]))
    assert_close(mixer(x[[1, 0, 1], 5:], state=turned), mixer(x[:, 5:], state=state)[[1, 0, 1]], **TIGHT)


@each
def test_refusals(case):
    mixer, x = build(case), inputs(2, 4)
    _, state = mixer(x, return_state=True)
    with pytest.raises(InvalidArgument, match=r"expects \[B, L, 16\]"):
        mixer(x[..., :3])
    with pytest.raises(InvalidArgument, match="expects floating-point numbers"):
        mixer(torch.ones(1, 2, DIM, dtype=torch.int64))
    with pytest.raises(InvalidArgument, match="the state is of other"):
        mixer(x, state=MixerState("other", state.parts, state.length))
    with pytest.raises(InvalidArgument, match="the state has 2 sequences and the input 1"):
        mixer(x[:1], state=state)
    with pytest.raises(Unsupported, match="has a state instead of pairs"):
        mixer(x, structure=Window.last(3))
    with pytest.raises(InvalidArgument, match=r"padding must be a bool tensor of shape \[2, 4\]"):
        mixer(x, padding=torch.ones(2, 3, dtype=torch.bool))
    assert mixer.dim == DIM
