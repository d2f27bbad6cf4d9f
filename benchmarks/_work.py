"""Operations and bytes that a causal attention cannot do without, counted from its formula alone.

Two ways to compute K with F features are counted, and the cheaper one is the work of the case:

    state   S_i = S_{i-1} + phi(k_i) v_i^T, z alike; o_i = phi(q_i) S_i / phi(q_i) z_i    4 F (Dv + 1) a token
            backward: S again, dq from S, and dk, dv from the sum of phi(q) do^T          10 F (Dv + 1)
    pairs   scores and the average of the values, n (n + 1) / 2 pairs                     2 (D + Dv) a pair
            backward: the scores again, dp, dv, dq, dk                                    2 (3 D + 2 Dv)

Making the features, exponentials and the division are not counted: they are no products, and few. Bytes: queries, keys,
values and outputs once; backward reads them and the output's gradient again, and writes three gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of a call; values are as wide as keys."""

    batch: int
    heads: int
    length: int
    dim: int

    def __str__(self) -> str:
        return f"B={self.batch} H={self.heads} n={self.length:,} D={self.dim}"


def taylor_features(dim: int, order: int) -> int:
    """Symmetric monomials of degree 0 .. order: C(dim + order, order)."""
    return math.comb(dim + order, order)


def state_flops(shape: Shape, features: int, backward: bool) -> int:
    """Products of the recurrence, with its denominator."""
    rows = shape.batch * shape.heads * shape.length
    return rows * features * (shape.dim + 1) * (14 if backward else 4)


def pair_flops(shape: Shape, backward: bool) -> int:
    """Products over visible pairs."""
    pairs = shape.batch * shape.heads * shape.length * (shape.length + 1) // 2
    return pairs * shape.dim * (4 + (10 if backward else 0))


def least_flops(shape: Shape, features: int | None, backward: bool) -> int:
    """The cheaper way; a kernel without finite features (None) has pairs alone."""
    pairs = pair_flops(shape, backward)
    return pairs if features is None else min(pairs, state_flops(shape, features, backward))


def least_bytes(shape: Shape, itemsize: int, backward: bool) -> int:
    """What has to be moved at least once."""
    tensor = shape.batch * shape.heads * shape.length * shape.dim * itemsize
    return tensor * (4 + (8 if backward else 0))
