"""The truncated exponential T_p(s) = sum_{n=0..p} s^n / n!, accurate for every sign and size of s.

Summing the series at s < 0 cancels: at s = -4 and p = 10 three digits of float32 are gone. Three evaluations without
cancellation cover the line (the remainder R_p is the tail of the series, T_p = exp - R_p):

    s >= 0              Horner, all terms positive
    -(p + 2) <= s < 0   exp(s) - s^(p+1)/(p+1)! * (1 + s/(p+2) (1 + s/(p+3) (1 + ...)))
    s < -(p + 2)        s^p/p! * (1 + p/s (1 + (p-1)/s (1 + ...)))

For even p the remainder is negative below zero, so the second line adds two positive numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mercer.errors import Unsupported

PLAIN_HORNER = 4
"""Up to this order plain Horner loses at most 20 units in the last place, and is used for its speed."""


def truncated_exp(s: Tensor, order: int) -> Tensor:
    """T_order(s), elementwise; float32 or float64."""
    if order <= PLAIN_HORNER:
        return _horner(s, order)
    if torch.is_grad_enabled() and s.requires_grad:
        raise Unsupported(
            f"The truncated exponential of order {order} is not recorded by autograd (its steps are in place): take "
            f"Taylor.derivative, or an order of {PLAIN_HORNER} or less for second derivatives."
        )
    split = -float(order + 2)
    above = _horner(s.clamp(min=0), order)
    middle = _exp_minus_remainder(s.clamp(min=split, max=0), order)
    below = _descending(s.clamp(max=split), order)
    return torch.where(s >= 0, above, torch.where(s >= split, middle, below))


def _horner(s: Tensor, order: int) -> Tensor:
    if order == 0:
        return torch.ones_like(s)
    out, one = (s / order).add_(1), s.new_ones(())
    recorded = torch.is_grad_enabled() and s.requires_grad  # then no step may overwrite the one before
    for n in range(order - 1, 0, -1):
        out = torch.addcmul(one, out, s, value=1 / n, out=None if recorded else out)
    return out


def _exp_minus_remainder(s: Tensor, order: int) -> Tensor:
    series = torch.ones_like(s)
    for n in range(_tail_terms(order, s.dtype), 1, -1):
        series.mul_(s).div_(order + n).add_(1)
    for n in range(1, order + 2):  # times s^(p+1)/(p+1)!, factor by factor: no overflow on the way
        series.mul_(s).div_(n)
    return s.exp().sub_(series)


def _descending(s: Tensor, order: int) -> Tensor:
    out = torch.ones_like(s)
    for n in range(1, order + 1):
        out.mul_(n).div_(s).add_(1)
    for n in range(1, order + 1):
        out.mul_(s).div_(n)
    return out


def _tail_terms(order: int, dtype: torch.dtype) -> int:
    """Terms after which the tail of the middle branch is below the rounding error at its far end |s| = p + 2."""
    term, n = 1.0, 1
    while term > torch.finfo(dtype).eps / 4:
        n += 1
        term *= (order + 2) / (order + n)
    return n
