r"""Student's t-distribution, for confidence intervals."""

from __future__ import annotations

import math

from mercer.errors import InvalidArgument


def t_probability(t: float, freedom: int) -> float:
    r"""$P(|T| < t)$ for Student's t with an integer number of degrees of freedom.

    The finite sums of Abramowitz and Stegun 26.7.3 (odd) and 26.7.4 (even), with $\theta = \arctan(t/\sqrt\nu)$.
    """
    if freedom < 1:
        raise InvalidArgument(f"freedom is {freedom}; a t-distribution needs at least 1 degree of freedom.")
    theta = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(theta), math.cos(theta) ** 2
    odd = freedom % 2
    term = math.cos(theta) if odd else 1.0
    total = 0.0
    for index in range(1 + odd, freedom, 2):  # the powers of the cosine up to freedom - 2
        total += term
        term *= square * index / (index + 1)
    return 2 / math.pi * (theta + sine * total) if odd else sine * total


def t_quantile(confidence: float, freedom: int) -> float:
    """The t with ``t_probability(t, freedom) == confidence``, by bisection to the last digits of a double."""
    if not 0 < confidence < 1:
        raise InvalidArgument(f"confidence is {confidence}; it lies strictly between 0 and 1.")
    low, high = 0.0, 1.0
    while t_probability(high, freedom) < confidence:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if t_probability(middle, freedom) < confidence:
            low = middle
        else:
            high = middle
    return (low + high) / 2
