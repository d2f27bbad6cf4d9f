"""Caches that share a buffer: every one that was kept stays what it was, to the bit, whatever comes after it."""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from tests.tolerance import assert_close
from torch import Tensor

from mercer.core import growth
from mercer.core.kernels import Exp, Taylor
from mercer.core.mixed import Mixed
from mercer.core.normalizers import Sum
from mercer.core.reference import reference_attention
from mercer.core.state import CacheState, MixedState, State
from mercer.core.structures import Causal, Padding, Structure, Window
from mercer.ops import attention

BATCH, HEADS, KEY_HEADS, DIM, WIDTH = 2, 4, 2, 3, 5


@dataclass
class Kept:
    """A cache, and what it must hold."""

    state: CacheState
    keys: Tensor
    values: Tensor
    valid: Tensor

    def check(self) -> None:
        state = self.state
        first = self.keys.shape[2] - state.keys.shape[2]
        assert torch.equal(state.keys, self.keys[:, :, first:])
        assert torch.equal(state.values, self.values[:, :, first:])
        assert torch.equal(state.present, self.valid[:, first:])
        assert torch.equal(state.length, self.valid.sum(1))


def token(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(BATCH, HEADS, count, DIM, generator=generator)
    k = torch.randn(BATCH, KEY_HEADS, count, DIM, generator=generator)
    return q, k, torch.randn(BATCH, KEY_HEADS, count, WIDTH, generator=generator)


def append(kept: Kept | None, count: int, window: int | None, holes: bool, generator: torch.Generator) -> Kept:
    """Go on from a cache; outputs must be those of the whole sequence."""
    q, k, v = token(count, generator)
    structure: Structure = Causal() if window is None else Window.last(window)
    valid = torch.ones(BATCH, count, dtype=torch.bool)
    if holes and count:
        valid = torch.rand(BATCH, count, generator=generator) > 0.4
    whole = structure if valid.all() else structure & Padding(valid)
    out, state = attention(
        q, k, v, structure=whole, state=None if kept is None else kept.state, return_state=True, path="pairs"
    )
    assert isinstance(state, CacheState)
    hidden = ~valid[:, None, :, None]
    k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    if kept is not None:
        k, v, valid = torch.cat((kept.keys, k), 2), torch.cat((kept.values, v), 2), torch.cat((kept.valid, valid), 1)
    queries = torch.cat((q.new_zeros(BATCH, HEADS, k.shape[2] - count, DIM), q), 2).double()
    expected = reference_attention(queries, k.double(), v.double(), Exp(), Sum(), structure & Padding(valid))
    assert_close(out, expected[:, :, k.shape[2] - count :], k.shape[2])
    return Kept(state, k, v, valid)


def again(state: CacheState, way: str) -> CacheState:
    """The same cache by another way."""
    if way == "select":
        return state.select(torch.arange(BATCH))
    if way == "saved":
        loaded = State.from_tensors(load(save(state.tensors())))
        assert isinstance(loaded, CacheState)
        return loaded
    ways = {"detach": state.detach, "clone": state.clone, "to": lambda: state.to("cpu")}
    ways |= {"copy": lambda: copy.copy(state), "deepcopy": lambda: copy.deepcopy(state)}
    return ways[way]()


WAYS = ("select", "saved", "detach", "clone", "to", "copy", "deepcopy")


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(0, 30), st.sampled_from((0, 1, 1, 1, 2, 3, 7)), st.booleans()),
            st.tuples(st.just("look"), st.integers(0, 30), st.integers(0, 3)),
            st.tuples(st.just("again"), st.integers(0, 30), st.sampled_from(WAYS)),
        ),
        min_size=1,
        max_size=24,
    ),
    window=st.sampled_from((None, None, 1, 3, 6)),
    recorded=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_kept_cache_stays_as_it_was(steps: list, window: int | None, recorded: bool, seed: int):
    """Branches of branches, from caches old and new; with few free places, so that buffers are changed often."""
    generator = torch.Generator().manual_seed(seed)
    least, growth.LEAST_SPARE = growth.LEAST_SPARE, 3
    try:
        with torch.set_grad_enabled(recorded):
            kept = [append(None, 2, window, False, generator)]
            for kind, which, *rest in steps:
                at = kept[which % len(kept)]
                if kind == "append":
                    count, holes = rest
                    kept.append(append(at, count, window, holes, generator))
                elif kind == "look":  # a call that leaves no state
                    attention(*token(rest[0], generator), structure=Causal() if window is None else Window.last(window),
                              state=at.state, path="pairs")  # fmt: skip
                else:
                    kept.append(Kept(again(at.state, rest[0]), at.keys, at.values, at.valid))
                for one in kept:
                    one.check()
    finally:
        growth.LEAST_SPARE = least


def step(state: State | None, tokens: tuple[Tensor, Tensor, Tensor], **options) -> tuple[Tensor, CacheState]:
    out, after = attention(*tokens, structure=Causal(), state=state, return_state=True, **options)
    assert isinstance(after, CacheState)
    return out, after


def test_a_step_moves_no_cached_token(generator: torch.Generator):
    with torch.inference_mode():
        _, state = step(None, token(10, generator))
        spare = growth.spare(10)
        for _ in range(spare):
            _, after = step(state, token(1, generator))
            assert after.keys.data_ptr() == state.keys.data_ptr()
            assert after.values.data_ptr() == state.values.data_ptr()
            state = after
        _, after = step(state, token(1, generator))  # no place is left
        assert after.keys.data_ptr() != state.keys.data_ptr()
        assert after.keys.shape[2] == 11 + spare


def test_a_window_moves_the_others_when_places_are_used_up(generator: torch.Generator):
    moved, state = 0, None
    steps, window = 400, 20
    for _ in range(steps):
        _, after = attention(*token(1, generator), structure=Window.last(window), state=state, return_state=True)
        assert isinstance(after, CacheState)
        assert after.keys.shape[2] <= window
        assert after.spot is not None
        moved += state is not None and after.spot.room is not state.spot.room
        assert after.spot.room.capacity <= 2 * (window + growth.spare(window))
        state = after
    assert moved <= steps // growth.LEAST_SPARE + 1


def test_a_buffer_is_left_when_most_of_it_was_dropped(generator: torch.Generator):
    """A window after a long prefill: the state does not hold the memory of what cannot be seen any more."""
    _, state = step(None, token(600, generator))
    _, after = attention(*token(1, generator), structure=Window.last(5), state=state, return_state=True)
    assert isinstance(after, CacheState)
    assert after.keys.shape[2] == 4
    assert after.keys.untyped_storage().nbytes() < state.keys.untyped_storage().nbytes() / 4
    assert after.nbytes == 4 * BATCH * KEY_HEADS * (DIM + WIDTH) * 4 + 8 * BATCH


def test_a_state_shows_its_tokens_only(generator: torch.Generator):
    _, state = step(None, token(9, generator))
    tensors = state.tensors()
    assert all(t.is_contiguous() for t in tensors.values())
    assert tensors["keys"].untyped_storage().nbytes() == BATCH * KEY_HEADS * 9 * DIM * 4
    assert copy.deepcopy(state).keys.untyped_storage().nbytes() == BATCH * KEY_HEADS * 9 * DIM * 4
    assert state.clone().keys.untyped_storage().nbytes() == BATCH * KEY_HEADS * 9 * DIM * 4


def test_the_callers_tensors_are_not_held(generator: torch.Generator):
    tokens = token(6, generator)
    _, state = step(None, tokens)
    before = state.keys.clone()
    tokens[1].zero_()
    assert torch.equal(state.keys, before)
    loaded = State.from_tensors(tensors := state.tensors())
    step(loaded, token(1, generator))
    assert tensors["keys"].shape[2] == 6
    assert torch.equal(tensors["keys"], before)


@pytest.mark.parametrize("which", ["cached", "new", "query"])
def test_gradients_through_caches_that_go_on(which: str, generator: torch.Generator):
    """What autograd saved of a step is not changed by later steps, and gradients are those of the whole sequence."""
    parts = [token(n, generator) for n in (5, 1, 1, 3, 1)]
    wanted = {"cached": [parts[0][1]], "new": [parts[2][1], parts[2][2]], "query": [p[0] for p in parts]}[which]
    for x in wanted:
        x.requires_grad_()
    outs, state = [], None
    for tokens in parts:
        out, state = step(state, tokens)
        outs.append(out)
    with torch.no_grad():
        step(state, token(1, generator))  # goes on in the same buffer, if it can
    q, k, v = (torch.cat(x, 2).double() for x in zip(*parts, strict=True))
    expected = reference_attention(q, k, v, Exp(), Sum(), Causal())
    out = torch.cat(outs, 2)
    cotangent = torch.randn(out.shape, generator=generator)
    got = torch.autograd.grad(out, wanted, cotangent)
    want = torch.autograd.grad(expected, wanted, cotangent.double())
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, 22)


def test_modes_may_change_between_steps(generator: torch.Generator):
    """A cache made in inference mode is continued outside it, for a gradient too, and the other way round."""
    parts = [token(2, generator) for _ in range(4)]
    with torch.inference_mode():
        first, state = step(None, parts[0])
    query = parts[1][0].requires_grad_()
    second, state = step(state, parts[1])
    with torch.inference_mode():
        third, state = step(state, parts[2])
    with torch.no_grad():
        fourth, state = step(state, parts[3])
    (gradient,) = torch.autograd.grad(second.sum(), [query])
    assert torch.isfinite(gradient).all()
    q, k, v = (torch.cat([x.detach() for x in xs], 2).double() for xs in zip(*parts, strict=True))
    outs = torch.cat([x.detach().clone() for x in (first, second, third, fourth)], 2)
    assert_close(outs, reference_attention(q, k, v, Exp(), Sum(), Causal()), 8)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own forward mode uses it
def test_forward_gradients_pass(generator: torch.Generator):
    from torch.autograd import forward_ad

    with torch.no_grad():
        _, state = step(None, token(3, generator))
    q, k, v = token(1, generator)
    with forward_ad.dual_level():
        out, after = step(state, (q, forward_ad.make_dual(k, torch.ones_like(k)), v), form="dense")
        assert forward_ad.unpack_dual(out).tangent is not None
        assert forward_ad.unpack_dual(after.keys).tangent is not None


def test_threads_that_go_on_from_one_cache(generator: torch.Generator):
    """Each gets its own continuation, whoever takes the free places first."""
    _, state = step(None, token(8, generator))
    branches = [token(1, generator) for _ in range(16)]

    def go(tokens: tuple[Tensor, Tensor, Tensor]) -> CacheState:
        with torch.no_grad():
            return step(state, tokens)[1]

    with ThreadPoolExecutor(8) as pool:
        states = list(pool.map(go, branches))
    for (_, k, v), after in zip(branches, states, strict=True):
        assert torch.equal(after.keys, torch.cat((state.keys, k), 2))
        assert torch.equal(after.values, torch.cat((state.values, v), 2))
    assert sum(s.spot.room is state.spot.room for s in states) == 1


def test_mixed_caches_stay_as_they_were(generator: torch.Generator):
    kernel = Mixed(Exp(), Taylor(2), 4)
    state, kept = None, []
    with torch.no_grad():
        for _ in range(30):
            _, state = attention(
                *token(1, generator), kernel=kernel, structure=Causal(), path="features", state=state,
                return_state=True,
            )  # fmt: skip
            assert isinstance(state, MixedState)
            kept.append((state, state.clone()))
            attention(*token(1, generator), kernel=kernel, structure=Causal(), path="features", state=state)
        assert len({s.near.keys.untyped_storage().data_ptr() for s, _ in kept}) < 5
    for one, copied in kept:
        for a, b in zip(one.tensors().values(), copied.tensors().values(), strict=True):
            assert torch.equal(a, b)


def test_selected_rows_leave_out_places_that_are_padding_in_all_of_them(generator):
    """The rest of a batch that was padded in front is as short as its own longest row, and its next step the same."""
    q, k, v = (torch.randn(3, 2, 9, 4, generator=generator) for _ in range(3))
    padding = torch.arange(8) >= torch.tensor([0, 3, 5]).unsqueeze(1)
    options = {"structure": Causal() & Padding(padding), "return_state": True}
    _, state = attention(q[:, :, :8], k[:, :, :8], v[:, :, :8], **options)
    whole, _ = attention(q[:, :, 8:], k[:, :, 8:], v[:, :, 8:], structure=Causal(), state=state, return_state=True)
    for rows, length, masked in (([1, 2], 5, True), ([2, 1], 5, True), ([2], 3, False), ([0, 2], 8, True)):
        chosen = state.select(torch.tensor(rows))
        assert (chosen.keys.shape[2], chosen.valid is not None) == (length, masked)
        assert chosen.length.tolist() == [[8, 5, 3][row] for row in rows]
        given = (x[rows][:, :, 8:] for x in (q, k, v))
        out, _ = attention(*given, structure=Causal(), state=chosen, return_state=True)
        torch.testing.assert_close(out, whole[rows])
    assert state.keys.shape[2] == 8
