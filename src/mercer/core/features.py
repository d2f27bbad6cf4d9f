"""Symmetric monomials: explicit features of polynomial kernels.

For a vector x of dimension D the degree-n block holds one entry per multi-index a with |a| = n,

    phi_a(x) = x^a / sqrt(a!),        so that   <phi(x), phi(y)> = (x . y)^n / n!

by the multinomial theorem. There are C(D + n - 1, n) of them instead of D^n, in lexicographic order: first those with
the smallest coordinate 0, then 1, and so on. A degree-n monomial whose smallest coordinate is i is x_i times a degree
n - 1 monomial whose smallest is i or more, and those stand together at the end of the block before. So each block is
made of D products of runs.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mercer.core.constant_result import constant_result
from mercer.core.first_order import DENSE, first_order


def monomial_count(dim: int, degree: int) -> int:
    """Number of monomials of exactly ``degree`` in ``dim`` variables, C(dim + degree - 1, degree)."""
    return math.comb(dim + degree - 1, degree)


def monomials(x: Tensor, degree: int) -> list[Tensor]:
    """Blocks phi_0(x), ..., phi_degree(x) with <phi_n(x), phi_n(y)> = (x . y)^n / n!.

    Args:
        x: ``[..., D]``.
        degree: highest degree, at least 0.

    Returns:
        ``degree + 1`` tensors; block n is ``[..., C(D + n - 1, n)]``.
    """
    blocks = [torch.ones_like(x[..., :1])]
    if degree >= 1:
        blocks.append(x)
    for n in range(2, degree + 1):
        raised = _raised(x, blocks[-1], n) if torch.compiler.is_compiling() else _Raise.apply(x, blocks[-1], n)
        assert isinstance(raised, Tensor)
        blocks.append(raised)
    return blocks


def _raised(x: Tensor, below: Tensor, degree: int) -> Tensor:
    """The same as :class:`_Raise` without writing into views, which ``torch.compile`` cannot trace."""
    runs = [x[..., i : i + 1] * below[..., start:] for i, start in enumerate(_starts(x.shape[-1], degree))]
    return torch.cat(runs, -1) * _weights(x.shape[-1], degree).to(x)


class _Raise(torch.autograd.Function):
    """The block of degree n from x and the block of degree n - 1 (n of 2 or more)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, below: Tensor, degree: int) -> Tensor:
        starts, weight = _starts(x.shape[-1], degree), _weights(x.shape[-1], degree)
        out = x.new_empty(*x.shape[:-1], len(weight))
        for i, (start, stop) in enumerate(_runs(starts, below.shape[-1], len(weight))):
            torch.mul(x[..., i : i + 1], below[..., starts[i] :], out=out[..., start:stop])
        ctx.save_for_backward(x, below)
        ctx.degree = degree
        return out.mul_(weight.to(x))

    @staticmethod
    @first_order(instead=DENSE)
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        x, below = ctx.saved_tensors
        starts, weight = _starts(x.shape[-1], ctx.degree), _weights(x.shape[-1], ctx.degree)
        grad = grads[0] * weight.to(x)
        grad_x, grad_below = torch.empty_like(x), torch.zeros_like(below)
        for i, (start, stop) in enumerate(_runs(starts, below.shape[-1], len(weight))):
            part = grad[..., start:stop]
            torch.sum(part * below[..., starts[i] :], -1, out=grad_x[..., i])
            grad_below[..., starts[i] :].addcmul_(part, x[..., i : i + 1])
        return grad_x, grad_below, None


def _runs(starts: list[int], below: int, total: int) -> list[tuple[int, int]]:
    """Where the products with x_0, x_1, ... stand in a block: run i holds the monomials whose smallest coordinate is
    i.
    """
    stops = list(accumulate(below - s for s in starts))
    assert stops[-1] == total
    return list(pairwise([0, *stops]))


def _starts(dim: int, degree: int) -> list[int]:
    """Where the monomials of degree - 1 with smallest coordinate i or more begin: behind those of the others."""
    every = monomial_count(dim, degree - 1)
    return [every - monomial_count(dim - i, degree - 1) for i in range(dim)]


@constant_result
def _weights(dim: int, degree: int) -> Tensor:
    """The factors of :func:`raising_table`; a constant to ``torch.compile``, which cannot trace how they are found."""
    return raising_table(dim, degree)[1]


@lru_cache(maxsize=64)
def raising_table(dim: int, degree: int) -> tuple[list[int], Tensor]:
    """For each i, where the monomials of degree - 1 with smallest coordinate i or more begin; and the factor of each
    new monomial.

    Multiplying by x_i raises the exponent of i to some m, so 1 / sqrt(a!) changes by 1 / sqrt(m).
    """
    smallest, exponent = np.arange(dim), np.ones(dim, dtype=np.int64)  # of degree 1
    starts: list[int] = []
    for _ in range(degree - 1):
        starts = np.searchsorted(smallest, np.arange(dim)).tolist()
        raised = [np.where(smallest[s:] == i, exponent[s:], 0) + 1 for i, s in enumerate(starts)]
        smallest = np.repeat(np.arange(dim), [len(r) for r in raised])
        exponent = np.concatenate(raised)
    return starts, torch.from_numpy(np.sqrt(1.0 / exponent))
