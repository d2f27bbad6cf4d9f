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
    query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, log: Tensor | None, state: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, Hq, Lq, Dv]`` (not normalised) and the final state; arguments as for ``scan.chunked``."""
    batch, heads, length, _ = key.shape
    groups = query.shape[1] // heads
    reads = kernel.features(query).unflatten(1, (heads, groups))
    writes = kernel.features(key)
    factors = None
    if log is not None:
        factors = torch.diff(log, dim=-1, prepend=torch.zeros_like(log[..., :1])).exp().to(key.dtype)
    outs: list[Tensor] = []
    for t in range(length):
        if factors is not None:
            state = state * factors[:, :, t, None, None]
        state = torch.addcmul(state, writes[:, :, t].unsqueeze(-1), value[:, :, t].unsqueeze(-2))
        if causal:
            outs.append(reads[:, :, :, t] @ state)
    if causal:
        out = torch.stack(outs, 3) if outs else value.new_zeros(batch, heads, groups, 0, value.shape[-1])
    else:
        out = reads @ state.unsqueeze(2)
    return out.flatten(1, 2), state


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
