"""Rotary positions of a part of a head, with scalings: the definition, the fused split, distances, far positions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nn.test_rotary import by_complex_numbers

from mercer.errors import InvalidArgument
from mercer.nn import NTK, DynamicNTK, LinearScaling, Llama3, Proportional, Rotary, YaRN
from mercer.nn.rotary import heads_per_run, split_and_turn

SCALINGS = [None, LinearScaling(3.0), NTK(3.0), YaRN(3.0, 100), Llama3(3.0, 100), Proportional(0.5)]


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(("dim", "turned"), [(6, 2), (6, 4), (7, 4), (16, 8)])
def test_the_first_channels_turn_as_a_head_of_their_own_and_the_others_stay(dim, turned, pairing):
    x = torch.randn(2, 5, 3, dim)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 9, 1000, 100_000, 1_000_000]])
    found = Rotary(dim, base=500.0, pairing=pairing, turned=turned)(x, positions)
    expected = by_complex_numbers(x[..., :turned], positions, 500.0, pairing)
    torch.testing.assert_close(found[..., :turned].double(), expected, rtol=0, atol=2e-6)
    assert torch.equal(found[..., turned:], x[..., turned:])


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("scaling", [None, YaRN(4.0, 16)], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "turned"), [(4, 2, 6, 4), (6, 1, 4, 2), (2, 2, 96, 24)])
def test_the_fused_split_equals_turning_the_parts(heads, kv_heads, dim, turned, scaling, pairing):
    rotary = Rotary(dim, pairing=pairing, turned=turned, scaling=scaling)
    run, cpu = heads_per_run(dim, heads, kv_heads), torch.device("cpu")
    turns = rotary.first_turns(5, heads=run, dtype=torch.float64, device=cpu)
    qkv = torch.randn(2, 5, heads + 2 * kv_heads, dim, dtype=torch.float64, requires_grad=True)
    positions = torch.arange(5)[None]
    fused = split_and_turn(qkv, heads, kv_heads, turns)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 2)
    plain = (rotary(q, positions), rotary(k, positions), v)
    weights = [torch.randn_like(part) for part in plain]
    for ours, expected in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-14)
    got, expected = (torch.autograd.grad(parts, qkv, weights)[0] for parts in (fused, plain))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)


@settings(max_examples=60, deadline=None)
@given(
    scaling=st.sampled_from(SCALINGS),
    pairing=st.sampled_from(["half", "interleaved"]),
    sizes=st.sampled_from([(4, 4), (8, 8), (8, 4), (11, 6)]),
    base=st.sampled_from([10.0, 1e4, 1e6]),
    one=st.integers(0, 200_000),
    other=st.integers(0, 200_000),
    shift=st.integers(1, 100_000),
)
def test_products_depend_on_the_distance_only(scaling, pairing, sizes, base, one, other, shift):
    dim, turned = sizes
    rotary = Rotary(dim, base=base, pairing=pairing, turned=turned, scaling=scaling)
    generator = torch.Generator().manual_seed(one)
    q, k = torch.randn(2, 1, 1, 1, dim, generator=generator, dtype=torch.float64)

    def product(i, j):
        return (rotary(q, torch.tensor([[i]])) * rotary(k, torch.tensor([[j]]))).sum().item()

    assert product(one, other) == pytest.approx(product(one + shift, other + shift), abs=1e-8)
    assert product(one, one) == pytest.approx(product(0, 0), abs=1e-8)


@settings(max_examples=30, deadline=None)
@given(length=st.integers(1, 500), shift=st.integers(0, 500), per_token=st.booleans())
def test_products_depend_on_the_distance_and_the_length(length, shift, per_token):
    rotary = Rotary(8, scaling=DynamicNTK(2.0, 64, per_token=per_token))
    x = torch.randn(1, 1, 1, 8, dtype=torch.float64)
    lengths = torch.tensor([[length]])
    pairs = [(at + 3, at) for at in (0, shift)]
    near, far = (
        (rotary(x, torch.tensor([[i]]), lengths) * rotary(x, torch.tensor([[j]]), lengths)).sum() for i, j in pairs
    )
    assert near.item() == pytest.approx(far.item(), abs=1e-9)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_case_20_angles_at_position_100_000_are_exact(scaling):
    """A float32 product of position and rate would be off by some thousandths of a radian there."""
    at = torch.tensor([[100_000, 100_003]])
    rotary = Rotary(64, scaling=scaling)
    exact = rotary.turns(at, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        turned = rotary.turns(at, dtype=dtype)
        for ours, wanted in zip(turned[:3], exact[:3], strict=True):
            assert torch.equal(ours, wanted.to(dtype))
    if scaling is None:
        rates = 10000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
        careless = (at[0, :, None].float() * rates.float()).cos()
        assert (careless.double() - exact.cos[0, :, :32]).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"turned": 3}, "even number of channels from 2 to those of a head, 8; got 3"),
        ({"turned": 0}, "got 0"),
        ({"turned": 10}, "got 10"),
        ({"max_length": 0}, "max_length of rotary positions must be 1 or more"),
        ({"scaling": {"rope_type": "yarn"}}, "must be an object such as YaRN"),
        ({"base": float("inf")}, "base of rotary positions must be positive"),
    ],
)
def test_bad_arguments_are_refused(values, message):
    with pytest.raises(InvalidArgument, match=message):
        Rotary(8, **values)


def test_positions_that_do_not_fit_are_answered_with_the_layout():
    with pytest.raises(InvalidArgument, match=r"\[2, 3\] or \[1, 3\] for x \[B, L, H, D\] = \[2, 3, 5, 8\], got \[5\]"):
        Rotary(8)(torch.zeros(2, 3, 5, 8), torch.arange(5))
