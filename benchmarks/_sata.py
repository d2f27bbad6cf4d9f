"""Symmetry-aware Taylor attention in plain torch, from its mathematics: a method to compare with, no one else's code.

(q.k / c)^p / p! = sum over i_1 <= ... <= i_p of  C_i  (q_i1 ... q_ip) (k_i1 ... k_ip),  c = sqrt(D), where

    C_i = 1 / (c^p  prod_j count_j(i)!)

counts in how many orders the same monomial appears. Only the sorted index tuples are kept, tightly packed in one vector
of C(D + p - 1, p) monomials, made by gathering the p factors and multiplying them. Terms are evaluated one after the
other, each as linear attention over chunks of tokens with a state of [monomials, Dv + 1]; the last column is the
denominator. Gradients are autograd's.

Source: Heinsen and Kozachkov 2026, "Self-Attention at Constant Cost per Token via Symmetry-Aware Taylor Approximation".
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from itertools import combinations_with_replacement

import torch
from torch import Tensor

CHUNK = 64


@lru_cache(maxsize=16)
def tuples(dim: int, degree: int) -> tuple[Tensor, Tensor]:
    """Sorted index tuples ``[monomials, degree]`` and their coefficients ``[monomials]`` (float64)."""
    chosen = list(combinations_with_replacement(range(dim), degree))
    orders = [math.prod(math.factorial(n) for n in Counter(one).values()) for one in chosen]
    coefficients = 1 / (torch.tensor(orders, dtype=torch.float64) * math.sqrt(dim) ** degree)
    return torch.tensor(chosen, dtype=torch.long).view(len(chosen), degree), coefficients


def sata_attention(query: Tensor, key: Tensor, value: Tensor, order: int, chunk: int = CHUNK) -> Tensor:
    """Causal attention with the Taylor polynomial of ``order`` for exp, ``[B, H, L, D] -> [B, H, L, Dv]``.

    States and totals are kept in float32 (float64 for float64), products are made in the dtype of the inputs.
    """
    batch, heads, length, dim = query.shape
    extended = torch.cat((value, value.new_ones(batch, heads, length, 1)), -1)
    sums = torch.float64 if query.dtype == torch.float64 else torch.float32
    total = torch.zeros_like(extended, dtype=sums)
    for degree in range(order + 1):
        index, coefficient = tuples(dim, degree)
        index, coefficient = index.to(query.device), coefficient.to(query)
        state = total.new_zeros(batch, heads, len(coefficient), extended.shape[-1])
        rows: list[Tensor] = []
        parts = (x.split(chunk, 2) for x in (query, key, extended))
        for q, k, v in zip(*parts, strict=True):
            phi_q, phi_k = q[..., index].prod(-1) * coefficient, k[..., index].prod(-1)
            rows.append((phi_q @ phi_k.mT).tril() @ v + phi_q @ state.to(phi_q.dtype))
            state = state + phi_k.mT @ v  # half precision is promoted
        total = total + torch.cat(rows, 2)
    return (total[..., :-1] / total[..., -1:]).to(query.dtype)
