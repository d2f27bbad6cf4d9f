"""Right to the last digit where a formula taken literally would not be."""

import math

import pytest
import torch
from tests.tolerance import assert_close

from mercer.core.kernels import Cosine, Elu, Exp, Kernel, Power, Taylor
from mercer.core.log_weights import Alibi, Decay, RelativeBias
from mercer.core.normalizers import L2, Identity, Sum
from mercer.core.pairwise import Bias
from mercer.core.structures import Causal, Documents
from mercer.errors import NonFinite
from mercer.ops import attention

FORMS = [("dense", "pairs"), ("chunked", "pairs"), ("chunked", "features"), ("recurrent", "features")]


@pytest.mark.parametrize(("form", "path"), FORMS)
@pytest.mark.parametrize("rate", [0.99, 0.5, 0.05, 1e-3])
def test_gradients_of_small_gates_keep_their_digits(rate: float, form: str, path: str, generator: torch.Generator):
    """Nearly all that a token reads is its own value, which says nothing about the gate."""
    q, k, v, upstream = (torch.randn(1, 2, 200, 4, generator=generator) for _ in range(4))

    def gradient(dtype: torch.dtype, form: str, path: str) -> torch.Tensor:
        rates = torch.full((1, 2, 200), rate, dtype=torch.float64, requires_grad=True)
        out = attention(
            *(x.to(dtype) for x in (q, k, v)),
            kernel=Taylor(2),
            normalizer=Identity(),
            structure=Causal() & Decay(rates),
            form=form,
            path=path,
        )
        (grad,) = torch.autograd.grad((out * upstream).sum(), rates)
        return grad

    expected = gradient(torch.float64, "recurrent", "features")
    got = gradient(torch.float32, form, path)
    assert float((got - expected).abs().max() / expected.abs().max()) < 200 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(("form", "path"), FORMS)
@pytest.mark.parametrize(("kernel", "size"), [(Elu(), -46.0), (Power(4), 1e-5)], ids=str)
def test_sums_below_the_normal_range_still_divide(kernel: Kernel, size: float, form: str, path: str):
    q = k = torch.full((1, 1, 3, 4), size)
    v = torch.ones(1, 1, 3, 2)
    out = attention(q, k, v, kernel=kernel, structure=Causal(), form=form, path=path)
    # Subnormal sums have few digits, but the quotient of equal ones is 1.
    torch.testing.assert_close(out, v, rtol=0.05, atol=0)


@pytest.mark.parametrize("size", [1e-20, 1e-14, 1.0, 1e18])
def test_cosine_does_not_depend_on_length(size: float):
    x = torch.full((1, 1, 1, 4), size)
    out = attention(x, x, torch.ones(1, 1, 1, 2), kernel=Cosine(), normalizer=Identity())
    torch.testing.assert_close(out, torch.ones(1, 1, 1, 2))


@pytest.mark.parametrize(("form", "path"), [*FORMS, ("recurrent", "pairs")])
@pytest.mark.parametrize("kernel", [Exp(), Taylor(2), Elu()], ids=str)
def test_autocast_around_a_call_changes_nothing(kernel: Kernel, form: str, path: str, generator: torch.Generator):
    """Sums are float32 inside, forwards and in a backward pass that runs inside the block too."""
    if path == "features" and kernel == Exp():
        pytest.skip("Exp has no features")
    inputs = [torch.randn(1, 2, 40, 4, generator=generator, requires_grad=True) for _ in range(3)]

    def run() -> list[torch.Tensor]:
        out = attention(*inputs, kernel=kernel, normalizer=L2(), structure=Causal(), form=form, path=path)
        return [out, *torch.autograd.grad(out.sin().sum(), inputs)] if form == "chunked" else [out]

    plain = run()
    with torch.autocast("cpu", torch.bfloat16):
        inside = run()
    for a, b in zip(inside, plain, strict=True):
        assert a.dtype == torch.float32
        assert_close(a, b, 40, form)


@pytest.mark.parametrize("around", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("kernel", "path"), [(Exp(), "pairs"), (Taylor(2), "features")], ids=str)
def test_autocast_around_packed_documents_changes_nothing(kernel, path, dtype, around, generator: torch.Generator):
    """Rows of the one half precision under autocast to the other were refused by torch where they are put back."""
    tensors = [torch.randn(1, 2, 9, 4, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    options = {"kernel": kernel, "path": path, "structure": Causal() & Documents(torch.tensor([0, 2, 2, 9]))}

    plain = attention(*tensors, **options, return_state=True, return_lse=True)
    with torch.autocast("cpu", around):
        found = attention(*tensors, **options, return_state=True, return_lse=True)
    for actual, expected in ((found[0], plain[0]), (found[2], plain[2])):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    grads = [torch.autograd.grad(out.float().square().sum() + lse.sum(), tensors) for out, _, lse in (found, plain)]
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


@pytest.mark.parametrize("normalizer", [Sum(), L2(), Identity()], ids=str)
def test_a_polynomial_out_of_range_is_an_error_with_a_cause(normalizer: Sum | L2 | Identity):
    q = torch.full((1, 1, 2, 4), 1e6)
    with pytest.raises(NonFinite, match=r"Taylor.*all inputs are finite.*lower order"):
        attention(q, q, q, kernel=Taylor(4), normalizer=normalizer, structure=Causal())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("form", ["dense", "chunked"])
@pytest.mark.parametrize("kernel", [Exp(), Taylor(2)], ids=str)
def test_a_log_weight_that_is_not_finite_is_an_input(kernel: Kernel, form: str, bad: float):
    """It was reported as if all inputs were finite; minus infinity, the weight 0, is not at fault."""
    tensor = torch.zeros(1, 1, 3, 3)
    tensor[0, 0, 0, 1] = -math.inf
    tensor[0, 0, 2, 1] = bad
    q = torch.ones(1, 1, 3, 4)
    out = attention(q, q, q, kernel=kernel, structure=Bias(tensor), form=form)
    assert out[0, 0, :2].isfinite().all()
    assert not out[0, 0, 2].isfinite().any()
    tensor[0, 0, 2, 1] = 0
    with pytest.raises(NonFinite, match="all inputs are finite"):
        attention(1e30 * q, 1e30 * q, q, kernel=Taylor(2), structure=Bias(tensor), form=form)


@pytest.mark.parametrize("part", ["slopes", "table", "rate", "log_rate"])
def test_a_tensor_that_turned_nan_in_a_structure_is_an_input(part: str):
    """Structures look at their tensors when they are made, and an optimiser may change them afterwards."""
    tensor = torch.full((1, 2) if part == "table" else (1,), -0.5 if part == "log_rate" else 0.5)
    made = {"slopes": Alibi, "table": RelativeBias, "rate": Decay, "log_rate": Decay}[part](**{part: tensor})
    tensor.fill_(math.nan)
    q = torch.ones(1, 1, 3, 4)
    assert not attention(q, q, q, structure=Causal() & made, form="chunked", backend="torch").isfinite().all()


def test_what_comes_in_as_nan_goes_out_as_nan():
    q = torch.ones(1, 1, 3, 4)
    v = torch.tensor([1.0, 1.0, float("nan")]).view(1, 1, 3, 1)
    assert bool(torch.isnan(attention(q, q, v, normalizer=Identity())).all())


def test_zero_values_under_an_infinite_factor_are_zero():
    q = torch.full((1, 1, 2, 4), 20.0)
    assert not attention(q, q, torch.zeros(1, 1, 2, 3), normalizer=Identity(), scale=1.0).any()
