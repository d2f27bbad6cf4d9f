"""State spaces against dense matrices in float64, and their forms against each other."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from mercer.errors import InvalidArgument
from mercer.mixers.diagonal_system import powers
from mercer.mixers.hippo import legs, normal_and_low_rank
from mercer.mixers.names import mixer_config
from mercer.mixers.s4 import S4
from mercer.mixers.s4d import S4D
from mercer.mixers.state_space import LONGEST, StateSpace, run

DIM = 3


def discrete(matrix: Tensor, write: Tensor, step: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """A and B of one channel in steps: the exact solution under a constant input, or the trapezoid's."""
    size = len(write)
    if rule == "zoh":
        whole = torch.zeros(size + 1, size + 1, dtype=matrix.dtype)
        whole[:size, :size], whole[:size, size] = matrix, write
        moved = torch.matrix_exp(whole * step)
        return moved[:size, :size], moved[:size, size]
    eye = torch.eye(size, dtype=matrix.dtype)
    left = eye - step / 2 * matrix
    return torch.linalg.solve(left, eye + step / 2 * matrix), torch.linalg.solve(left, step * write)


def impulse(matrix: Tensor, write: Tensor, read: Tensor, count: int) -> Tensor:
    """C A^l B by powers of the whole matrix."""
    out, x = [], write
    for _ in range(count):
        out.append((read * x).sum())
        x = matrix @ x
    return torch.stack(out)


def exact(mixer: StateSpace) -> StateSpace:
    """With initial values that were not rounded to float32."""
    mixer = mixer.double()
    mixer.start(torch.Generator().manual_seed(3))
    return mixer


@pytest.mark.parametrize("init", ["lin", "inv", "legs", "real"])
@pytest.mark.parametrize("rule", ["zoh", "bilinear"])
def test_a_diagonal_kernel_is_that_of_the_dense_system(init, rule):
    mixer = exact(S4D(DIM, state=8, init=init, rule=rule, step_least=0.01))
    number = torch.arange(4, dtype=torch.float64)
    rates = {
        "lin": torch.complex(torch.full((4,), -0.5, dtype=torch.float64), math.pi * number),
        "inv": torch.complex(torch.full((4,), -0.5, dtype=torch.float64), 8 / math.pi * (8 / (2 * number + 1) - 1)),
        "legs": torch.from_numpy(normal_and_low_rank(8)[0]),
        "real": -torch.arange(1, 9).to(torch.complex128),
    }[init]
    found = mixer.system(torch.float64).kernel(150).detach()
    for channel in range(DIM):
        read = mixer.read[channel].detach()
        step = mixer.log_step[channel].detach().exp()
        moved, write = discrete(torch.diag(rates), torch.ones_like(rates), step, rule)
        factors = read.squeeze(-1) if init == "real" else 2 * torch.view_as_complex(read)
        assert_close(found[channel], impulse(moved, write, factors, 150).real, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [2, 8, 64])
def test_legs_is_normal_minus_rank_one(size):
    rates, low, write, vectors = (torch.from_numpy(x) for x in normal_and_low_rank(size))
    matrix, whole = (torch.from_numpy(x) for x in legs(size))
    assert_close(rates.real, torch.full((size // 2,), -0.5, dtype=torch.float64))
    assert (rates.imag > 0).all()
    both = torch.cat((vectors, vectors.conj()), 1)
    low, rates = torch.cat((low, low.conj())), torch.cat((rates, rates.conj()))
    again = both @ (torch.diag(rates) - torch.outer(low, low.conj())) @ both.conj().T
    assert_close(again.real, matrix, rtol=1e-9, atol=1e-9)
    assert float(again.imag.abs().max()) < 1e-9
    assert_close((both @ torch.cat((write, write.conj()))).real, whole, rtol=1e-9, atol=1e-9)


def test_legs_by_hand():
    matrix, write = legs(3)
    assert_close(torch.from_numpy(matrix[0]), torch.tensor([-1.0, 0, 0], dtype=torch.float64))
    assert_close(torch.from_numpy(matrix[2]), torch.tensor([-(5**0.5), -(15**0.5), -3], dtype=torch.float64))
    assert_close(torch.from_numpy(write), torch.tensor([1, 3**0.5, 5**0.5], dtype=torch.float64))


@pytest.mark.parametrize("size", [4, 32])
@pytest.mark.parametrize("count", [1, 2, 37, 64, 65, 300])
def test_a_structured_kernel_is_that_of_the_dense_hippo_matrix(size, count):
    mixer = exact(S4(DIM, state=size))
    vectors = torch.from_numpy(normal_and_low_rank(size)[3])
    matrix, write = (torch.from_numpy(x) for x in legs(size))
    found = mixer.system(torch.float64).kernel(count).detach()
    for channel in range(DIM):
        read = 2 * (torch.view_as_complex(mixer.read[channel].detach()) @ vectors.conj().T).real
        moved, begun = discrete(matrix, write, mixer.log_step[channel].detach().exp(), "bilinear")
        assert_close(found[channel], impulse(moved, begun, read, count), rtol=1e-8, atol=1e-9)


def test_a_structured_state_is_that_of_the_dense_hippo_matrix(generator):
    mixer = exact(S4(DIM, state=8))
    vectors = torch.from_numpy(normal_and_low_rank(8)[3])
    matrix, write = (torch.from_numpy(x) for x in legs(8))
    u = torch.randn(1, 90, DIM, dtype=torch.float64, generator=generator)
    for form in ("recurrent", "chunked", "convolution"):
        _, state = run(mixer.system(torch.float64), u, form=form)
        pairs = torch.view_as_complex(state.detach().unflatten(-1, (-1, 2)))
        for channel in range(DIM):
            moved, begun = discrete(matrix, write, mixer.log_step[channel].detach().exp(), "bilinear")
            x = torch.zeros(8, dtype=torch.float64)
            for t in range(90):
                x = moved @ x + begun * u[0, t, channel]
            assert_close(2 * (vectors @ pairs[0, channel]).real, x, rtol=1e-9, atol=1e-9)


MIXERS = {
    "s4d": lambda: S4D(DIM, state=6),
    "s4d, real": lambda: S4D(DIM, state=3, init="real", rule="bilinear"),
    "s4": lambda: S4(DIM, state=6),
}


@pytest.mark.parametrize("name", MIXERS)
@settings(max_examples=15)
@given(
    length=st.sampled_from([1, 2, 63, 64, 65, 128, 150]),
    form=st.sampled_from(["chunked", "convolution"]),
    begun=st.booleans(),
    ragged=st.booleans(),
    seed=st.integers(0, 99),
)
def test_forms_agree_with_steps(name, length, form, begun, ragged, seed):
    generator = torch.Generator().manual_seed(seed)
    mixer = exact(MIXERS[name]())
    batch, size = 3, math.prod(mixer.shape)
    u = torch.randn(batch, length, DIM, dtype=torch.float64, generator=generator)
    state = torch.randn(batch, DIM, size, dtype=torch.float64, generator=generator)
    lengths = torch.randint(0, length + 1, (batch,), generator=generator)
    real = torch.ones(batch, length, 1) > 0
    if ragged:
        real = (torch.arange(length) < lengths.unsqueeze(1)).unsqueeze(-1)
    grads, results = [], []
    for how in ("recurrent", form):
        given = [u.clone().requires_grad_(), state.clone().requires_grad_()]
        system = mixer.system(torch.float64)
        y, after = run(
            system, given[0] * real, state=given[1] if begun else None, lengths=lengths if ragged else None, form=how
        )
        y = y * real
        results.append((y, after))
        weights = [torch.linspace(-1, 1, t.numel(), dtype=torch.float64).view_as(t) for t in (y, after)]
        wanted = [*given[: 1 + begun], *(p for n, p in mixer.named_parameters() if "output" not in n and n != "skip")]
        loss = sum((t * w).sum() for t, w in zip((y, after), weights, strict=True))
        grads.append(torch.autograd.grad(loss, wanted, allow_unused=not bool(real.any())))
    for a, b in zip(*results, strict=True):
        assert_close(b, a, rtol=1e-9, atol=1e-9)
    for a, b in zip(*grads, strict=True):
        if a is not None and b is not None:
            assert_close(b, a, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", MIXERS)
def test_long_inputs_go_in_pieces(name, generator):
    """Past what one transform takes, to 65,536 tokens, in float32, from a state and to one."""
    mixer = MIXERS[name]()
    u = torch.randn(1, 65_536, DIM, generator=generator)
    assert u.shape[1] > 2 * LONGEST
    with torch.no_grad():
        system = mixer.system(torch.float32)
        wanted = run(mixer.system(torch.float64), u.double(), form="chunked")
        first, state = run(system, u[:, :10_001], form="convolution")
        rest, last = run(system, u[:, 10_001:], state=state, form="chunked")
        pieces = torch.cat((first, rest), 1), last
        for found in (run(system, u, form="chunked"), run(system, u, form="convolution"), pieces):
            for a, b in zip(found, wanted, strict=True):
                assert float((a - b).abs().max()) < 1e-5 * float(b.abs().max())


def test_a_kernel_made_in_parts_has_the_same_gradients(monkeypatch):
    from mercer.mixers import low_rank_system

    mixer = exact(S4(5, state=4))
    weight = torch.linspace(-1, 1, 5 * 70, dtype=torch.float64).view(5, 70)
    found = []
    for held in (1 << 22, 300):  # all at once; two channels at a time
        monkeypatch.setattr(low_rank_system, "HELD", held)
        kernel = mixer.system(torch.float64).kernel(70)
        names = [p for n, p in mixer.named_parameters() if "output" not in n and n != "skip"]
        found.append((kernel, *torch.autograd.grad((kernel * weight).sum(), names)))
    for a, b in zip(*found, strict=True):
        assert_close(b, a, rtol=1e-12, atol=1e-12)


def test_powers_by_doubling():
    x = torch.tensor([0.5, -2.0, 0.0], dtype=torch.float64)
    assert_close(powers(x, 6), x.unsqueeze(1) ** torch.arange(6))
    assert powers(x, 1).tolist() == [[1.0]] * 3


def test_initial_values():
    mixer = mixer_config("s4d", {"step_least": 0.002, "step_most": 0.05}).build(4000, 4, layer=0, layers=1)
    assert isinstance(mixer, S4D)
    step = mixer.log_step.exp()
    assert float(step.min().detach()) >= 0.002 * (1 - 1e-6)
    assert float(step.max().detach()) <= 0.05 * (1 + 1e-6)
    middle = float(mixer.log_step.median().detach())
    assert abs(middle - math.log(0.01)) < 0.15  # log-uniform: the geometric mean is in the middle
    assert abs(float(mixer.read.square().sum(-1).mean().detach()) - 1) < 0.02
    assert mixer.output.out_features == 8000


def test_refusals():
    for name, options, message in (
        ("s4d", {"init": "hippo"}, "init must be .lin., .inv., .legs. or .real., not .hippo."),
        ("s4d", {"state": 0}, "state must be 1 or more, not 0"),
        ("s4d", {"step_least": 0.2}, "step_most 0.1 is below step_least 0.2"),
        ("s4", {"rule": "zoh"}, ".rule. is unknown; there are"),
        ("s4", {"form": "dense"}, "form must be .auto."),
    ):
        with pytest.raises(InvalidArgument, match=message):
            mixer_config(name, options)
    for make, message in (
        (lambda: S4D(4, state=5), "state must be even for init 'lin', not 5"),
        (lambda: S4(4, state=5), "state must be even, not 5"),
        (lambda: S4D(4, rule="euler"), "rule one of zoh, bilinear"),
        (lambda: S4(4, form="dense"), "form must be one of auto, recurrent"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            make()


@pytest.mark.parametrize("name", ["s4d", "s4"])
def test_steps_discretise_once_while_the_parameters_stay(name, monkeypatch):
    mixer, made = MIXERS[name](), []
    system = type(mixer).system
    monkeypatch.setattr(type(mixer), "system", lambda self, dtype: made.append(dtype) or system(self, dtype))
    x = torch.ones(1, 1, DIM)
    with torch.no_grad():
        _, state = mixer(x, return_state=True)
        before = mixer(x, state=state)
        assert len(made) == 1
        mixer.log_step.data.add_(1)  # which torch does not count as a change
        after = mixer(x, state=state)
        assert len(made) == 2
        mixer(x.expand(1, 40, DIM))  # its tables are larger than the parameters
        assert len(made) == 3
        assert torch.equal(mixer(x, state=state), after)
        assert len(made) == 3
    assert not torch.equal(after, before)
    mixer(x, state=state)
    assert len(made) == 4  # a gradient is wanted
