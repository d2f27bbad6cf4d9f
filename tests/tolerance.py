"""The only place where tests say how close is close: from the dtype and the number of summed terms, nothing else.

The forms accumulate in float32 (float64 for float64 inputs) and round once on the way out, so a result may differ from
the float64 specification by one rounding of the stored dtype plus the roundings of a sum of ``terms`` products:

    tolerance = eps(stored) + 64 (8 + terms) eps(accumulated)

relative to the largest entry of the expected tensor, or to 1 if that is smaller: the test data are of size 1, and a
gradient that is 0 by cancellation (of a row that sees one key, say) has the error of its terms. 8 stands for the few
operations around the sum (scores, exponential or monomials, division), 64 for the condition of the test data, which
the builders of tests/contracts/cells.py keep moderate.

Fused attention that multiplies bfloat16 rounds more than the result, as such kernels do everywhere: the weights for the
product with the values (2 ``roundings`` in all), and for gradients also the rows that were kept and the slopes (4).
"""

import torch
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of ``dtype`` inputs are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def tolerance(dtype: torch.dtype, terms: int, roundings: int = 1) -> float:
    """Largest allowed error relative to the largest expected entry."""
    stored = roundings * torch.finfo(dtype).eps
    return stored + 64 * (8 + terms) * torch.finfo(accumulator(dtype)).eps


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max |actual - expected| / max(1, max |expected|). A non-finite result counts as infinitely wrong."""
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {list(actual.shape)}, expected {list(expected.shape)}")
    if not actual.numel():
        return 0.0
    if not bool(torch.isfinite(actual).all()):
        return float("inf")
    largest = float(expected.detach().double().abs().max())
    error = float((actual.detach().double() - expected.detach().double()).abs().max())
    return error / max(1.0, largest)


def assert_close(
    actual: Tensor, expected: Tensor, terms: int, what: str = "", dtype: torch.dtype | None = None, roundings: int = 1
) -> None:
    """``actual`` equals ``expected`` to the tolerance of ``dtype`` (default: the dtype of ``actual``) and ``terms``."""
    error = relative_error(actual, expected)
    allowed = tolerance(actual.dtype if dtype is None else dtype, terms, roundings)
    assert error <= allowed, f"{what}: relative error {error:.2e}, allowed {allowed:.2e}"
