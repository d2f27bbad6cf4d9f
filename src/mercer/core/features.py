"""Symmetric monomials: explicit features of polynomial kernels.

For a vector x of dimension D the degree-n block holds one entry per multi-index a with |a| = n,

    phi_a(x) = x^a / sqrt(a!),        so that   <phi(x), phi(y)> = (x . y)^n / n!

by the multinomial theorem. There are C(D + n - 1, n) of them instead of D^n. Each block is made from the one before by one
gather and one product: every monomial of degree n is a monomial of degree n - 1 times a coordinate that is not smaller than
its largest.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


def monomial_count(dim: int, degree: int) -> int:
    """Number of monomials of exactly ``degree`` in ``dim`` variables, C(dim + degree - 1, degree)."""
    return math.comb(dim + degree - 1, degree)


@lru_cache(maxsize=64)
def _tables(dim: int, degree: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For each degree 1..degree: parent index, new coordinate, and weight sqrt(parent a! / a!) = sqrt(1 / a_coordinate)."""
    tables: list[tuple[Tensor, Tensor, Tensor]] = []
    last = np.zeros(1, dtype=np.int64)  # largest coordinate of each monomial of the previous degree
    power = np.zeros(1, dtype=np.int64)  # its exponent
    for _ in range(degree):
        repeats = dim - last
        parent = np.repeat(np.arange(last.size), repeats)
        start = np.repeat(np.cumsum(repeats) - repeats, repeats)
        coordinate = last[parent] + (np.arange(parent.size) - start)
        exponent = np.where(coordinate == last[parent], power[parent], 0) + 1
        weight = np.sqrt(1.0 / exponent)
        tables.append((torch.from_numpy(parent), torch.from_numpy(coordinate), torch.from_numpy(weight)))
        last, power = coordinate, exponent
    return tables


def monomials(x: Tensor, degree: int) -> list[Tensor]:
    """Blocks phi_0(x), ..., phi_degree(x) with <phi_n(x), phi_n(y)> = (x . y)^n / n!.

    Args:
        x: ``[..., D]``.
        degree: highest degree, at least 0.

    Returns:
        ``degree + 1`` tensors; block n is ``[..., C(D + n - 1, n)]``.
    """
    blocks = [torch.ones_like(x[..., :1])]
    for parent, coordinate, weight in _tables(x.shape[-1], degree):
        device = x.device
        left = blocks[-1].index_select(-1, parent.to(device))
        right = x.index_select(-1, coordinate.to(device))
        blocks.append(left * right * weight.to(device, x.dtype))
    return blocks
