r"""How well the Taylor polynomial $T_p$ of the exponential is it, at one score and over a range of them.

The relative error $|T_p(s) e^{-s} - 1|$ grows with |s| on either side of 0, so what is needed over a range is what is
needed at its ends. Below 0 it first grows with the order and needs about three times as many terms as above.

If it is at most $\delta < 1$ at every score that a row sees, the weights of that row under ``Sum`` differ from
softmax's by at most $\delta / (1 - \delta)$ in total variation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mercer.core.truncated_exp import truncated_exp
from mercer.errors import InvalidArgument

ORDER_LIMIT = 200
"""Highest order that is looked at."""


def truncation_error(score: Tensor, order: int) -> Tensor:
    """|T_order(s) / exp(s) - 1|, elementwise, float64."""
    if isinstance(order, bool) or not isinstance(order, int) or order < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"truncation_error: order must be an integer of 0 or more, not {order!r}.")
    score = score.detach().double()
    return (truncated_exp(score, order) * (-score).exp() - 1).abs()


def truncation_order(low: float, high: float, tolerance: float, limit: int = ORDER_LIMIT) -> int | None:
    """The smallest order whose relative error is at most ``tolerance`` at every score from ``low`` to ``high``.

    None if it is above ``limit``. Below about 1e-12 rounding of float64 decides.

    Raises:
        InvalidArgument: ends that are not finite and in order, or a tolerance that is not positive.
    """
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise InvalidArgument(f"truncation_order: low {low!r} and high {high!r} must be finite and in order.")
    if not tolerance > 0:
        raise InvalidArgument(f"truncation_order: tolerance must be above 0, not {tolerance!r}.")
    ends = torch.tensor([low, high], dtype=torch.float64)
    for order in range(limit + 1):
        if bool((truncation_error(ends, order) <= tolerance).all()):
            return order
    return None
