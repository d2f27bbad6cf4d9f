"""The fused recurrent step: every state entry read once and written once, into a new state."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tolerance import assert_close
from torch import Tensor

from mercer.backends import step
from mercer.backends.step import recurrent_step
from mercer.core.features import monomials
from mercer.core.kernels import Elu, Kernel, Power, Relu, Taylor
from mercer.errors import InvalidArgument, Unsupported

pytest.importorskip("numba")

KERNELS: dict[str, Kernel] = {
    "elu": Elu(),
    "relu": Relu(),
    "constant": Taylor(0),
    "taylor1": Taylor(1),
    "taylor2": Taylor(2),
    "taylor3": Taylor(3),
    "taylor5": Taylor(5),
    "power1": Power(1),
    "power2": Power(2),
    "power3": Power(3),
}


def draw(*size: int, generator: torch.Generator) -> Tensor:
    return torch.randn(size, generator=generator)


def loop(
    query: Tensor, key: Tensor, value: Tensor, log: Tensor, weight: Tensor, state: Tensor, mass: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """S' = g S + w phi(k) v^T and z' = g z + w phi(k), token by token in float64, from features ``[B, H, L, F]``."""
    groups = query.shape[1] // key.shape[1]
    rate = torch.diff(log, dim=-1, prepend=torch.zeros_like(log[..., :1])).exp()
    outs, denominators = [], []
    for t in range(key.shape[2]):
        added = key[:, :, t] * weight[..., t, None]
        state = rate[..., t, None, None] * state + added.unsqueeze(-1) * value[:, :, t].unsqueeze(-2)
        mass = rate[..., t, None] * mass + added
        read = query[:, :, t].unflatten(1, (-1, groups))
        outs.append(torch.einsum("bhgf,bhfd->bhgd", read, state).flatten(1, 2))
        denominators.append(torch.einsum("bhgf,bhf->bhg", read, mass).flatten(1, 2))
    return torch.stack(outs, 2), torch.stack(denominators, 2), state, mass


def compare(
    kernel: Kernel, batch: int, heads: int, groups: int, length: int, dim: int, width: int, seed: int,
    dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    features = kernel.feature_dim(dim)
    assert features is not None
    query = draw(batch, heads * groups, length, dim, generator=generator).to(dtype)
    key = draw(batch, heads, length, dim, generator=generator).to(dtype)
    value = draw(batch, length, heads, width, generator=generator).to(dtype).transpose(1, 2)
    log = draw(batch, 1, length, generator=generator).double().abs().neg().cumsum(-1)
    weight = torch.rand(1, heads, length, generator=generator)
    state, mass = (
        draw(batch, heads, features, width, generator=generator),
        torch.rand(batch, heads, features, generator=generator),
    )
    given = (query, key, value, log, weight, state, mass)
    kept = [x.clone() for x in given]
    scale = dim**-0.5 / 2
    out, denominator, after, mass_after = recurrent_step(
        query, key, value, coefficients=kernel.polynomial() or (), map=kernel.fused_map or "", scale=scale, log=log,
        weight=weight, state=state, mass_state=mass, mass=True, divide=False,
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True)), "an argument was changed"
    expected = loop(
        kernel.features(kernel.scaled_query(query.double(), scale)),
        kernel.features(kernel.scaled_key(key.double(), scale)),
        value.double(), log.expand(batch, heads, length), weight.double().expand(batch, heads, length),
        state.double(), mass.double(),
    )  # fmt: skip
    names = ("out", "denominator", "state", "mass")
    for name, a, b in zip(names, (out, denominator, after, mass_after), expected, strict=True):
        assert a is not None
        assert a.dtype == torch.float32
        assert_close(a, b, features, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel(kernel: str, dtype: torch.dtype):
    compare(KERNELS[kernel], 2, 2, 3, 3, 5, 7, seed=0, dtype=dtype)


@settings(max_examples=60, deadline=None)
@given(
    kernel=st.sampled_from(sorted(KERNELS)),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    groups=st.integers(1, 5),
    length=st.integers(1, 3),
    dim=st.integers(1, 9),
    width=st.integers(1, 150),
    seed=st.integers(0, 1000),
)
def test_sizes(kernel: str, batch: int, heads: int, groups: int, length: int, dim: int, width: int, seed: int):
    compare(KERNELS[kernel], batch, heads, groups, length, dim, width, seed)


@pytest.mark.parametrize("dim", [16, 17, 33, 64])
def test_long_runs_of_monomials(dim: int):
    """Runs longer than a vector, and blocks of the state that do not come out even."""
    compare(Taylor(2), 1, 1, 2, 1, dim, 64, seed=dim)
    compare(Power(2), 1, 2, 1, 2, dim, 65, seed=dim)


def test_features_are_those_of_the_library(generator: torch.Generator):
    """A state that is one value of 1 is phi(k): the same numbers in the same order."""
    key = draw(1, 1, 1, 6, generator=generator)
    one = torch.ones(1, 1, 1, 1)
    _, _, state, _ = recurrent_step(key, key, one, coefficients=(1, 1, 0.5, 1 / 6), mass=False, divide=False)
    assert_close(state[0, 0, :, 0], torch.cat(monomials(key[0, 0, 0], 3), -1), 1)


def test_degrees_may_be_missing(generator: torch.Generator):
    query, key = draw(1, 1, 1, 4, generator=generator), draw(1, 1, 1, 4, generator=generator)
    one = torch.ones(1, 1, 1, 1)
    out, _, state, _ = recurrent_step(query, key, one, coefficients=(2.0, 0.0, 0.0, 3.0), mass=False, divide=False)
    assert state.shape == (1, 1, 1 + 20, 1)
    assert_close(out.flatten(), 2 + 3 * (query * key).sum() ** 3 * torch.ones(1), 20)


def test_divides_and_gives_zero_for_zero(generator: torch.Generator):
    q, k, v = (draw(1, 2, 1, 8, generator=generator) for _ in range(3))
    k[0, 0] = 0
    out, denominator, _, mass = recurrent_step(q.abs(), k.abs(), v, mass=True, divide=True)
    assert denominator is None
    assert mass is not None
    assert not out[0, 0].any()
    assert_close(out[0, 1], v[0, 1], 8)


def test_it_starts_from_nothing_and_can_add_nothing(generator: torch.Generator):
    q, k, v = (draw(2, 2, 0, 4, generator=generator) for _ in range(3))
    given, mass = draw(2, 2, 4, 4, generator=generator), draw(2, 2, 4, generator=generator)
    for state, z in ((None, None), (given, mass)):
        out, _, after, after_mass = recurrent_step(q, k, v, state=state, mass_state=z, mass=True, divide=True)
        assert out.shape == (2, 2, 0, 4)
        assert after_mass is not None
        assert torch.equal(after, torch.zeros(2, 2, 4, 4) if state is None else given)
        assert torch.equal(after_mass, torch.zeros(2, 2, 4) if z is None else mass)
        assert after is not given
    assert recurrent_step(q[:0], k[:0], v[:0], mass=False, divide=False)[2].shape == (0, 2, 4, 4)


def test_digits_do_not_depend_on_threads(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch):
    q, k, v = (draw(3, 3, 1, 16, generator=generator) for _ in range(3))
    options = {"coefficients": (1.0, 1.0, 0.5), "mass": True, "divide": True}
    alone = recurrent_step(q, k, v, **options)
    monkeypatch.setattr(step, "ALONE", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    shared = recurrent_step(q, k, v, **options)
    for a, b in zip(alone, shared, strict=True):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")  # torch's own, in its forward mode
def test_what_it_cannot_do_it_refuses(generator: torch.Generator):
    q, k, v = (draw(1, 2, 1, 4, generator=generator) for _ in range(3))
    plain = {"mass": False, "divide": False}
    for message, parts, options in (
        ("must be .B, Hq, L, D", (q, k[:, :, :, :3], v), {}),
        ("must be .B, Hq, L, D", (q[:, :1], k, v), {}),
        ("map must be one of", (q, k, v), {"map": "tanh"}),
        ("one of them positive", (q, k, v), {"coefficients": (0.0, -1.0)}),
        ("one of them positive", (q, k, v), {"coefficients": ()}),
        ("needs mass=True", (q, k, v), {"divide": True}),
        ("say mass=True", (q, k, v), {"mass_state": torch.zeros(1, 2, 4)}),
        ("state must be float32", (q, k, v), {"state": torch.zeros(1, 2, 3, 4)}),
        ("state must be float32", (q, k, v), {"state": torch.zeros(1, 2, 4, 4, dtype=torch.float64)}),
        ("log must be", (q, k, v), {"log": torch.zeros(1, 3, 1)}),
        ("weight must be", (q, k, v), {"weight": torch.zeros(1, 2, 2)}),
    ):
        with pytest.raises(InvalidArgument, match=message):
            recurrent_step(*parts, **plain | options)
    with pytest.raises(Unsupported, match="float32 on the CPU"):
        recurrent_step(q.double(), k.double(), v.double(), **plain)
    with pytest.raises(Unsupported, match="float32 on the CPU"):
        recurrent_step(q.to("meta"), k, v, **plain)
    state = torch.zeros(1, 2, 4, 4, requires_grad=True)
    with pytest.raises(Unsupported, match="no gradient"):
        recurrent_step(q, k, v, state=state, **plain)
    with torch.no_grad():
        recurrent_step(q, k, v, state=state, **plain)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(Unsupported, match="no gradient"):
            recurrent_step(dual, k, v, **plain)
