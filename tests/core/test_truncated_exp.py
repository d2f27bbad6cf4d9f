"""The truncated exponential against arbitrary precision, and the golden numbers of its analysis."""

import math

import mpmath
import pytest
import torch

from mercer.core.kernels import Elu, Taylor
from mercer.core.truncated_exp import truncated_exp
from mercer.ops import attention

POINTS = sorted({x / 4 for x in range(-240, 241, 3)} | {-0.1, -0.01, -1e-3, 1e-3, 0.1, -1.5960716379833215})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_orders_0_to_80_between_minus_60_and_60(dtype: torch.dtype):
    """20 units in the last place. Odd orders cross 0, where exp and its remainder cancel: 20 units of those."""
    s = torch.tensor(POINTS, dtype=dtype)
    with mpmath.workprec(400):
        exact = [mpmath.mpf(x) for x in s.tolist()]
        exponential = [mpmath.exp(x) for x in exact]
        term = [mpmath.mpf(1)] * len(exact)
        total = list(term)
        for order in range(81):
            if order:
                term = [t * x / order for t, x in zip(term, exact, strict=True)]
                total = [a + t for a, t in zip(total, term, strict=True)]
            got = truncated_exp(s, order)
            assert got.dtype == dtype
            for x, value, want, e in zip(exact, got.tolist(), total, exponential, strict=True):
                size = abs(want) if order % 2 == 0 else e + abs(e - want)
                error = abs(mpmath.mpf(value) - want) / size / torch.finfo(dtype).eps
                assert error <= 20, f"order {order} at {float(x)}: {float(error):.1f} units"


def test_the_argument_is_not_changed():
    s = torch.linspace(-20, 20, 9)
    for order in (0, 1, 4, 7):
        truncated_exp(s, order)
        Taylor(order).profile(s)
        Taylor(order).derivative(s)
        assert torch.equal(s, torch.linspace(-20, 20, 9))


@pytest.mark.parametrize("order", [0, 1, 2, 3, 4, 5, 9, 20])
def test_the_derivative_is_one_order_less(order: int):
    s = torch.linspace(-9, 9, 37, dtype=torch.float64)
    expected = torch.zeros_like(s) if order == 0 else truncated_exp(s, order - 1)
    torch.testing.assert_close(Taylor(order).derivative(s), expected, rtol=1e-13, atol=0)
    profile, slope = Taylor(order).profile_and_derivative(s)
    torch.testing.assert_close(profile, truncated_exp(s, order), rtol=1e-12, atol=1e-14)
    if slope is not None:
        torch.testing.assert_close(slope, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("order", "minimum"), [(2, 0.5), (4, 0.27), (10, 0.047)])
def test_even_truncations_are_positive(order: int, minimum: float):
    s = torch.linspace(-60, 60, 240_001, dtype=torch.float64)
    least = float(truncated_exp(s, order).min())
    assert float(f"{least:.2g}") == minimum
    assert Taylor(order).positive
    assert not Taylor(order + 1).positive


def test_an_odd_order_makes_an_average_of_568_percent():
    """Scores 0 and -2.4 with values 1 and 0: order 3 gives the "average" 5.68, softmax 0.917."""
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor([0, -2.4], dtype=torch.float64).view(1, 1, 2, 1)
    v = torch.tensor([1, 0], dtype=torch.float64).view(1, 1, 2, 1)
    assert f"{float(attention(q, k, v, kernel=Taylor(3, signed=True))):.3g}" == "5.68"
    assert f"{float(attention(q, k, v)):.3g}" == "0.917"
    for form in ("chunked", "recurrent"):
        out = attention(q, k, v, kernel=Taylor(3, signed=True), form=form, path="features")
        assert float(out) == pytest.approx(1 / 0.176, rel=1e-12)


@pytest.mark.parametrize(("x", "smallest"), [(2, 8), (5, 13), (8, 18), (12, 24), (-2, 10), (-5, 21), (-8, 31)])
def test_smallest_order_for_a_thousandth(x: float, smallest: int):
    s = torch.tensor([x], dtype=torch.float64)
    errors = [abs(float(truncated_exp(s, order)) / math.exp(x) - 1) for order in range(smallest + 1)]
    assert errors[-1] <= 1e-3
    assert min(errors[:-1]) > 1e-3


def test_elu_keeps_its_digits_in_bfloat16():
    phi = Elu().map_query(torch.tensor([-8.0], dtype=torch.bfloat16))
    assert float(phi) == float(torch.tensor(3.357e-4, dtype=torch.bfloat16))
