"""The Numba scan of polynomial kernels against plain sums and against the torch scan, both in float64."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from tests.tolerance import assert_close

from mercer.backends import polynomial
from mercer.backends.polynomial import feature_count, polynomial_scan, serves
from mercer.core.kernels import Elu, Exp, Power, Relu, Taylor
from mercer.core.merged import merge
from mercer.core.structures import Causal, Full
from mercer.core.support import Sizes
from mercer.errors import InvalidArgument, Unsupported
from mercer.forms.scan import chunked

KERNELS = {
    "elu": (Elu(), (0.0, 1.0), "elu"),
    "relu": (Relu(), (0.0, 1.0), "relu"),
    "taylor0": (Taylor(0), (1.0,), "identity"),
    "taylor1": (Taylor(1, signed=True), (1.0, 1.0), "identity"),
    "taylor2": (Taylor(2), (1.0, 1.0, 1 / 2), "identity"),
    "taylor3": (Taylor(3, signed=True), (1.0, 1.0, 1 / 2, 1 / 6), "identity"),
    "taylor4": (Taylor(4), (1.0, 1.0, 1 / 2, 1 / 6, 1 / 24), "identity"),
    "power2": (Power(2), (0.0, 0.0, 1.0), "identity"),
    "power3": (Power(3, signed=True), (0.0, 0.0, 0.0, 1.0), "identity"),
}
DECAYS = ("none", "head", "token", "strong")


def draw(batch, heads, kv_heads, length, dim, width, dtype=torch.float32, seed=0):
    """Queries, keys and values with the strides that projections give, of size 1 after the scale."""
    make = torch.Generator().manual_seed(seed)
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, width))
    return [torch.randn(batch, length, *s, generator=make).to(dtype).transpose(1, 2).requires_grad_() for s in shapes]


def draw_states(kernel, batch, kv_heads, dim, width, seed=0):
    """A state that keys and values left behind, so that its masses are those of real features."""
    make = torch.Generator().manual_seed(seed + 1)
    features = kernel.features(kernel.map_key(torch.randn(batch, kv_heads, 5, dim, generator=make)))
    state = features.transpose(-1, -2) @ torch.randn(batch, kv_heads, 5, width, generator=make)
    return state.requires_grad_(), features.sum(2).requires_grad_()


def decay(kind, batch, kv_heads, length):
    steps = torch.arange(1, length + 1, dtype=torch.float64)
    if kind == "none":
        return None
    if kind == "head":
        return -steps * torch.linspace(0.01, 0.5, kv_heads, dtype=torch.float64)[None, :, None]
    if kind == "strong":
        return (-30 * steps)[None, None]
    return -torch.rand(batch, kv_heads, length, dtype=torch.float64).cumsum(-1)


def scanned(kernel, inputs, scale, log, weight, states):
    """Numerators, denominators, state and mass by the torch scan in float64; a weight stands on the values there."""
    query, key, value = (x.double() for x in inputs)
    extended = torch.cat((value, torch.ones_like(value[..., :1])), -1)
    if weight is not None:
        extended = extended * weight.double().unsqueeze(-1)
    if states is None:
        width = kernel.feature_dim(query.shape[-1])
        start = torch.zeros(*key.shape[:2], width, extended.shape[-1], dtype=torch.float64)
    else:
        start = torch.cat((states[0].double(), states[1].double().unsqueeze(-1)), -1)
    mapped = kernel.scaled_query(query, scale), kernel.scaled_key(key, scale)
    out, final = chunked(*mapped, extended, kernel, log, start, True)
    return out[..., :-1], out[..., -1], final[..., :-1], final[..., -1]


def compare(name, inputs, *, scale=None, log=None, weight=None, states=None, divide=False, mass=True):
    """Outputs, states and every gradient; returns what ran."""
    kernel, coefficients, map_name = KERNELS[name]
    dim, length, dtype = inputs[0].shape[-1], inputs[0].shape[2], inputs[0].dtype
    scale = (1.0 if map_name != "identity" else dim**-0.5) if scale is None else scale
    more = {} if states is None else {"state": states[0], "mass_state": states[1] if mass else None}
    got = polynomial_scan(
        *inputs,
        coefficients=coefficients,
        map=map_name,
        scale=scale,
        log=log,
        weight=weight,
        mass=mass,
        divide=divide,
        **more,
    )
    wanted = list(scanned(kernel, inputs, scale, log, weight, states))
    if divide:
        wanted[0] = wanted[0] / torch.where(wanted[1] == 0, 1, wanted[1]).unsqueeze(-1)
        assert got[1] is None
        assert got[0].dtype == dtype
        wanted[1] = None
    if not mass:
        assert got[1] is None
        assert got[3] is None
        wanted[1] = wanted[3] = None
    pairs = [(a, b) for a, b in zip(got, wanted, strict=True) if b is not None]
    terms = length + feature_count(dim, coefficients)
    for ours, theirs in pairs:
        assert_close(ours, theirs, terms, f"{name}, forward", dtype if divide else None)
    make = torch.Generator().manual_seed(7)
    upstream = [torch.randn(a.shape, generator=make).to(a.dtype) for a, _ in pairs]
    leaves = [*inputs, *((states if mass else states[:1]) if states is not None else ())]
    ours = torch.autograd.grad([a for a, _ in pairs], leaves, upstream, allow_unused=True)
    theirs = torch.autograd.grad([b for _, b in pairs], leaves, [u.double() for u in upstream], allow_unused=True)
    for x, a, b in zip(leaves, ours, theirs, strict=True):
        expected = torch.zeros_like(x) if b is None else b
        assert a.dtype == x.dtype
        assert a.shape == x.shape
        assert_close(a, expected, terms, f"{name}, gradient", x.dtype)
    return (*got, *ours)


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel(name):
    compare(name, draw(2, 2, 2, 37, 5, 7))
    if KERNELS[name][0].positive:  # others may divide by almost nothing
        compare(name, draw(2, 2, 2, 37, 5, 7), divide=True)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("name", ["elu", "taylor2"])
def test_every_length_around_blocks(name, length):
    compare(name, draw(1, 2, 2, length, 6, 16), divide=True)
    compare(name, draw(1, 2, 2, length, 6, 16), mass=False)


@pytest.mark.parametrize(("dim", "width"), [(1, 1), (15, 17), (16, 16), (17, 33), (64, 64), (32, 5)])
@pytest.mark.parametrize("name", ["elu", "power2"])
def test_every_width_around_vectors(name, dim, width):
    compare(name, draw(1, 2, 2, 35, dim, width), divide=name == "elu")


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (6, 2)])
@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("name", ["elu", "taylor2"])
def test_groups_decays_and_initial_states(name, kind, heads, kv_heads):
    states = draw_states(KERNELS[name][0], 2, kv_heads, 6, 9)
    log = decay(kind, 2, kv_heads, 40)
    compare(name, draw(2, heads, kv_heads, 40, 6, 9), log=log, states=states, divide=True)
    compare(name, draw(2, heads, kv_heads, 40, 6, 9), log=log, states=states, mass=False)


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("name", ["relu", "taylor2", "power2"])
def test_what_stands_behind_a_weight_of_zero_is_absent(name, kind):
    """At both ends and inside; not even NaN shows, and its gradient is 0."""
    weight = torch.rand(2, 1, 50) + 0.1
    weight[0, 0, :3] = weight[0, 0, 20:24] = weight[0, 0, -18:] = 0
    weight[1, 0, 17] = 0
    inputs = draw(2, 2, 2, 50, 6, 9)
    compare(name, inputs, log=decay(kind, 2, 2, 50), weight=weight)
    hidden = (weight == 0).unsqueeze(-1).expand(-1, 2, -1, -1)
    spoiled = [inputs[0], *(x.detach().masked_fill(hidden, math.nan).requires_grad_() for x in inputs[1:])]
    _, coefficients, map_name = KERNELS[name]
    options = {"coefficients": coefficients, "map": map_name, "weight": weight, "mass": True, "divide": True}
    results = []
    for given_inputs in (inputs, spoiled):
        out = polynomial_scan(*given_inputs, **options)[0]
        results.append((out, *torch.autograd.grad(out.square().sum(), given_inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    for gradient in results[1][2:]:
        assert not gradient.masked_select(hidden).any()


def test_rows_without_weight_are_zero_with_finite_gradients():
    inputs = draw(1, 1, 1, 20, 4, 4)
    weight = torch.ones(1, 1, 20)
    weight[..., :18] = 0
    out = polynomial_scan(*inputs, coefficients=(0.0, 1.0), map="elu", weight=weight, mass=True, divide=True)[0]
    assert not out[0, 0, :18].any()
    gradients = torch.autograd.grad(out.sum(), inputs)
    assert all(g.isfinite().all() for g in gradients)
    assert not gradients[0][0, 0, :18].any()


@pytest.mark.parametrize("name", ["elu", "relu", "taylor2"])
def test_bfloat16_is_widened_and_rounded_once(name):
    compare(name, draw(2, 4, 2, 50, 16, 20, torch.bfloat16), divide=True, states=None)


def test_other_dtypes_and_strides_give_the_same_digits():
    inputs = draw(2, 2, 2, 33, 6, 9)
    options = {"coefficients": (1.0, 1.0, 0.5), "scale": 0.3, "mass": True, "divide": True}
    expected = polynomial_scan(*inputs, **options)[0]
    plain = [x.detach().contiguous() for x in inputs]
    sideways = [x.detach().transpose(-1, -2).contiguous().transpose(-1, -2) for x in inputs]
    for other in (plain, sideways):
        assert torch.equal(polynomial_scan(*other, **options)[0], expected)
    halves = [x.detach().half() for x in inputs]
    out = polynomial_scan(*halves, **options)[0]
    assert out.dtype == torch.float16
    assert torch.equal(out, polynomial_scan(*(x.float() for x in halves), **options)[0].half())
    one = inputs[1].detach()[:, :1].expand(-1, 2, -1, -1)
    assert torch.equal(
        polynomial_scan(inputs[0], one, inputs[2], **options)[0],
        polynomial_scan(inputs[0], one.contiguous(), inputs[2], **options)[0],
    )


def test_plain_sums():
    """The formula itself, with weights and decay, without any scan."""
    query, key, value = (x.detach() for x in draw(1, 1, 1, 40, 5, 6))
    weight, log = torch.rand(1, 1, 40), decay("token", 1, 1, 40)
    out, denominator, _, _ = polynomial_scan(
        query,
        key,
        value,
        coefficients=(1.0, 1.0, 0.5),
        scale=0.4,
        log=log,
        weight=weight,
        mass=True,
        divide=False,
    )
    score = 0.4 * (query[0, 0].double() @ key[0, 0].double().T)
    gap = (log[0, 0][:, None] - log[0, 0][None]).clamp(max=0)
    pairs = ((1 + score + score**2 / 2) * gap.exp() * weight[0, 0].double()).tril()
    assert_close(out[0, 0], pairs @ value[0, 0].double(), 40, "outputs")
    assert_close(denominator[0, 0], pairs.sum(-1), 40, "denominators")


def test_a_state_goes_on_where_the_first_call_stopped():
    inputs = [x.detach() for x in draw(1, 2, 2, 50, 6, 9)]
    options = {"coefficients": (1.0, 1.0, 0.5), "scale": 0.3, "mass": True, "divide": True}
    whole = polynomial_scan(*inputs, **options)
    first = polynomial_scan(*(x[:, :, :21] for x in inputs), **options)
    rest = polynomial_scan(*(x[:, :, 21:] for x in inputs), **options, state=first[2], mass_state=first[3])
    assert_close(torch.cat((first[0], rest[0]), 2), whole[0], 50, "outputs")
    assert_close(rest[2], whole[2], 50, "state")
    assert_close(rest[3], whole[3], 50, "mass")


def test_no_tokens_leave_the_state_as_it_was():
    state, masses = draw_states(Taylor(2), 1, 2, 4, 3)
    empty = [torch.randn(1, 2, 0, n) for n in (4, 4, 3)]
    out, _, final, final_mass = polynomial_scan(
        *empty, coefficients=(1.0, 1.0, 0.5), state=state, mass_state=masses, mass=True, divide=True
    )
    assert out.shape == (1, 2, 0, 3)
    assert torch.equal(final, state)
    assert torch.equal(final_mass, masses)
    grads = torch.autograd.grad((final.sum(), final_mass.sum()), (state, masses))
    assert all((g == 1).all() for g in grads)


def test_the_digits_do_not_depend_on_the_number_of_threads():
    inputs, before, results = draw(2, 6, 3, 40, 16, 16), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out = polynomial_scan(*inputs, coefficients=(1.0, 1.0, 0.5), scale=0.25, mass=True, divide=True)[0]
            results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_the_digits_do_not_depend_on_how_many_heads_go_together(monkeypatch):
    inputs, results = draw(2, 6, 3, 40, 16, 16), []
    for space in (0, 4 * 153 * 16 * 2, 1 << 20):  # one head, two, all
        monkeypatch.setattr(polynomial, "STATES", space)
        out = polynomial_scan(*inputs, coefficients=(1.0, 1.0, 0.5), scale=0.25, mass=True, divide=True)
        results.append((out[0], out[2], *torch.autograd.grad(out[0].square().sum(), inputs)))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_the_gradient_of_a_decay_is_made_of_any_number_of_tokens_at_a_time(monkeypatch, tokens):
    monkeypatch.setattr(polynomial, "SLAB", tokens * 2 * 6 * 9)
    inputs, weight = draw(2, 6, 3, 20, 5, 9), (torch.rand(2, 1, 20) > 0.3).float()
    log = decay("token", 2, 3, 20).requires_grad_()
    ours = polynomial_scan(*inputs, coefficients=(0.0, 0.0, 1.0), log=log, weight=weight, mass=False, divide=False)
    right = scanned(Power(2), inputs, 1.0, log, weight, None)
    upstream = torch.randn(2, 6, 20, 9)
    found, wanted = (torch.autograd.grad(x, log, u)[0] for x, u in ((ours[0], upstream), (right[0], upstream.double())))
    assert_close(found, wanted, 20 + feature_count(5, (0.0, 0.0, 1.0)), "gradient of the decay", torch.float32)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_is_not_finite_shows_and_the_past_does_not_see_it(which):
    inputs = [x.detach().clone() for x in draw(1, 1, 1, 40, 16, 16)]
    inputs[which][0, 0, 20, 3] = math.nan
    out = polynomial_scan(*inputs, coefficients=(0.0, 1.0), map="elu", mass=True, divide=True)[0]
    assert out[0, 0, 20].isnan().any()
    assert out[0, 0, :16].isfinite().all()  # blocks before its own


def test_second_derivatives_are_refused():
    inputs = draw(1, 1, 1, 4, 2, 2)
    out = polynomial_scan(*inputs, coefficients=(0.0, 1.0), mass=False, divide=False)[0]
    with pytest.raises(Unsupported, match="Second derivatives"):
        torch.autograd.grad(out.sum(), inputs, create_graph=True)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["elu", "taylor2", "power2"]),
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 50),
    st.integers(1, 20),
    st.integers(1, 20),
    st.sampled_from(DECAYS),
    st.booleans(),
    st.booleans(),
    st.integers(0, 9),
)
def test_any_shape(name, batch, kv_heads, group, length, dim, width, kind, started, weighted, seed):
    states = draw_states(KERNELS[name][0], batch, kv_heads, dim, width, seed) if started else None
    weight = (torch.rand(batch, 1, length) > 0.3).float() if weighted else None
    inputs = draw(batch, group * kv_heads, kv_heads, length, dim, width, seed=seed)
    compare(name, inputs, log=decay(kind, batch, kv_heads, length), weight=weight, states=states)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"coefficients": (0.0, 0.0)}, "one of them positive"),
        ({"coefficients": (1.0, -1.0)}, "0 or more"),
        ({"map": "gelu"}, "identity, elu, relu"),
        ({"divide": True, "mass": False}, "needs mass=True"),
        ({"mass": False, "mass_state": torch.zeros(1, 2, 3)}, "say mass=True"),
        ({"log": torch.zeros(1, 2, 4)}, "log must be"),
        ({"weight": torch.zeros(5)}, "weight must be"),
        ({"state": torch.zeros(1, 2, 4, 3)}, "state must be float32"),
        ({"mass_state": torch.zeros(1, 2, 3).double()}, "mass_state must be float32"),
        ({"query": torch.zeros(1, 3, 5, 3)}, "Hk divides Hq"),
        ({"value": torch.zeros(1, 2, 5, 0)}, "1 or more"),
    ],
)
def test_bad_input_is_named(change, message):
    given_options = {
        "query": torch.zeros(1, 4, 5, 3),
        "key": torch.zeros(1, 2, 5, 3),
        "value": torch.zeros(1, 2, 5, 3),
        "coefficients": (0.0, 1.0),
        "mass": True,
        "divide": False,
    }
    options = given_options | change
    inputs = [options.pop(x) for x in ("query", "key", "value")]
    with pytest.raises(InvalidArgument, match=message):
        polynomial_scan(*inputs, **options)


def test_what_has_no_gradient_here_is_refused():
    inputs = draw(1, 1, 1, 4, 2, 2)
    log = torch.zeros(1, 1, 4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(Unsupported, match="mass=False only"):
        polynomial_scan(*inputs, coefficients=(0.0, 1.0), log=log, mass=True, divide=True)
    with pytest.raises(Unsupported, match="float32 values"):
        polynomial_scan(
            *inputs[:2], inputs[2].bfloat16(), coefficients=(0.0, 1.0), log=log, mass=False, divide=False
        )  # fmt: skip
    with pytest.raises(Unsupported, match="no gradient for weight"):
        polynomial_scan(*inputs, coefficients=(0.0, 1.0), weight=log + 1, mass=False, divide=False)
    with pytest.raises(Unsupported, match="backend='torch'"):
        polynomial_scan(*(x.double() for x in inputs), coefficients=(0.0, 1.0), mass=False, divide=False)


def test_what_is_served():
    causal, sizes = merge(Causal()), Sizes(1, 2, 2, 8, 8, 64, 64)
    assert serves(Elu(), causal, sizes)
    assert serves(Taylor(2), causal, sizes)
    assert not serves(Taylor(4), causal, sizes)  # 814,385 features
    assert not serves(Exp(), causal, sizes)
    assert not serves(Elu(), merge(Full()), sizes)
    assert not serves(Elu(), causal, replace(sizes, itemsize=8))
    assert not serves(Elu(), causal, replace(sizes, device="cuda"))
