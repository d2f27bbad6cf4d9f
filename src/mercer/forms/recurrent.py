"""The recurrent form: one token at a time, in ordinary differentiable torch operations.

With features a step is a rank-one update of the state and a read; with pairs it is one query against the keys it may
see.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mercer.core.kernels import Kernel
from mercer.core.layout import Layout
from mercer.forms.dense import dense


def features(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel,
    log: Tensor | None,
    weight: Tensor | None,
    valid: Tensor | None,
    state: Tensor,
    mass: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Numerators ``[B, Hq, Lq, Dv]``, denominators ``[B, Hq, Lq]`` if there is a mass, and the final state and mass.

    Queries, keys and values are mapped; ``log`` and ``weight`` are ``[b, h, L]`` with h the heads of the state,
    ``valid`` is ``[b, L]``; the state is ``[B, H, F, Dv]``, the mass ``[B, H, F]``.
    """
    heads, length = key.shape[1], key.shape[2]
    groups = query.shape[1] // heads
    reads = kernel.features(query).unflatten(1, (heads, groups))
    writes = kernel.features(key)
    if valid is not None:
        writes = writes.masked_fill(~valid[:, None, :, None], 0)
    if weight is not None:
        writes = writes * weight.unsqueeze(-1)
    factors = None
    if log is not None:
        factors = torch.diff(log, dim=-1, prepend=torch.zeros_like(log[..., :1])).exp().to(key.dtype)
    outs: list[Tensor] = []
    sums: list[Tensor] = []
    for t in range(length):
        if factors is not None:
            state = state * factors[:, :, t, None, None]
            mass = None if mass is None else mass * factors[:, :, t, None]
        state = torch.addcmul(state, writes[:, :, t].unsqueeze(-1), value[:, :, t].unsqueeze(-2))
        mass = None if mass is None else mass + writes[:, :, t]
        if causal:
            outs.append(reads[:, :, :, t] @ state)
            if mass is not None:
                sums.append((reads[:, :, :, t] @ mass.unsqueeze(-1)).squeeze(-1))
    if causal and length:
        out, total = torch.stack(outs, 3), None if mass is None else torch.stack(sums, 3)
    else:
        out = reads @ state.unsqueeze(2)
        total = None if mass is None else (reads @ mass[:, :, None, :, None]).squeeze(-1)
    return out.flatten(1, 2), None if total is None else total.flatten(1, 2), state, mass


def pairs(
    query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, layout: Layout, needs_denominator: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Numerator, denominator and log row factor, as of ``dense``, row by row."""
    rows = [
        dense(
            query[:, :, i : i + 1],
            key[:, :, low:high],
            value[:, :, low:high],
            kernel,
            layout,
            needs_denominator,
            (i, i + 1),
            (low, high),
        )
        for i in range(layout.query_length)
        for low, high in [layout.span(i, i + 1)]
    ]
    if not rows:
        return dense(query, key, value, kernel, layout, needs_denominator)
    numerator, denominator, peak = zip(*rows, strict=True)
    return (
        torch.cat(numerator, 2),
        torch.cat(denominator, 2) if needs_denominator else None,
        torch.cat(peak, 2) if kernel.exponential else None,
    )
