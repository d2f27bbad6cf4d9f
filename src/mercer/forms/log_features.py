"""Features given as logarithms: exponentials of any size without overflow, and without looking ahead.

A kernel with ``log_features`` has K(q, k) = sum_f exp(b_f + a_f), b = log phi(q) and a = log phi(k). With B_i the
largest b of query i and A_j the largest a of key j, phi(q_i) = exp(B_i) exp(b - B_i) and phi(k_j) = exp(A_j) exp(a -
A_j), where the second factors lie in (0, 1]. The first ones are log-weights of rows and keys like any other:

    w_ij = exp(L_i - L_j) exp(A_j) = exp(R_i) exp(L_i - L_j + A_j - R_i),    R_i = max over j <= i of (A_j + L_i - L_j),

L the cumulative log-decay. The last exponent is 0 or less for every key that query i sees. exp(R_i + B_i) is a factor
of the whole row: scale-invariant normalisers cancel it, the others get it back. R is a *running* maximum, so no query
depends on a key behind it, and a feature state is kept relative to the R of its last token.

All of A, B and R are constants of the computation, not functions to differentiate: the result does not depend on them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mercer.core.layout import Layout


def lower(log_features: Tensor) -> tuple[Tensor, Tensor]:
    """exp(a - A) ``[B, H, L, F]`` and A ``[B, H, L]`` in float64, A the largest entry of each token."""
    peak = log_features.detach().amax(-1)
    return (log_features - peak.unsqueeze(-1)).exp(), peak.double()


def weigh_pairs(layout: Layout, key_peak: Tensor, query_peak: Tensor) -> tuple[Layout, Tensor]:
    """The layout with exp(A_j - R_i) among its log-weights, and the log factor R_i + B_i ``[B, Hq, Lq]`` of each row.

    Args:
        layout: of all keys, cached ones included.
        key_peak: A ``[B, Hk, Lk]``.
        query_peak: B ``[B, Hq, Lq]``.
    """
    groups = query_peak.shape[1] // key_peak.shape[1]
    key_peak = key_peak.repeat_interleave(groups, 1)
    layout = _without_slopes(layout)
    query_log, key_log = layout.query_log, layout.key_log
    before = key_peak if key_log is None else key_peak - key_log.detach()
    if layout.key_valid is not None:
        before = before.masked_fill(~layout.key_valid.unsqueeze(1), -torch.inf)
    highest = _highest(layout, before)  # of A_j - L_j over what each query may see: R_i - L_i
    highest = highest.masked_fill(highest == -torch.inf, 0)
    # A little above the maximum, so that rounding makes no exponent positive: layouts cut those off, and gradients too.
    steps = torch.zeros_like(highest) if query_log is None else query_log.detach()
    # (At most 1, which is little beside what rounding takes from numbers beyond 10^12, and leaves the row above 0.)
    row = highest + steps + (1e-12 * (1 + highest.abs() + steps.abs())).clamp(max=1)
    query_log = -row if query_log is None else query_log - row
    key_log = -key_peak if key_log is None else key_log - key_peak
    return replace(layout, query_log=query_log, key_log=key_log), row + query_peak


def _without_slopes(layout: Layout) -> Layout:
    """ALiBi under a causal structure as a cumulative log-decay, so that it takes part in the running maximum."""
    if layout.slopes is None or layout.slopes.dim() == 2 or layout.right is None or layout.right > 0:
        return layout
    slopes = layout.slopes.double().view(1, -1, 1)
    query_log, key_log = (-slopes * x.unsqueeze(1) for x in (layout.query_position, layout.key_position))
    if layout.query_log is not None and layout.key_log is not None:
        query_log, key_log = query_log + layout.query_log, key_log + layout.key_log
    return replace(layout, slopes=None, query_log=query_log, key_log=key_log)


def _highest(layout: Layout, before: Tensor) -> Tensor:
    """The largest of ``before`` ``[B, H, Lk]`` among the keys that a query may see, ``[B, H, Lq]``.

    Among exactly those: a larger one out of sight, under a window or in another document, would leave a row with
    nothing but zeros.
    """
    keys, queries = layout.key_length, layout.query_length
    if not before.numel():
        return before.new_full((*before.shape[:2], queries), -torch.inf)
    if layout.left is None and layout.right is None and layout.key_document is None:
        return before.amax(-1, keepdim=True).expand(-1, -1, queries)
    first, last = _reach(layout)
    shape = (*before.shape[:2], queries)
    if layout.left is None and layout.key_document is None:
        at = last.clamp(min=0).unsqueeze(1).expand(shape)
        return before.cummax(-1).values.gather(-1, at).masked_fill((last < 0).unsqueeze(1), -torch.inf)
    longest = keys
    if layout.offset is not None and layout.left is not None and layout.right is not None:
        longest = min(keys, layout.left + layout.right + 1)
    count = last - first + 1
    best, width = before.new_full(shape, -torch.inf), 1
    while width <= longest:  # ``before`` holds the largest of ``width`` neighbours; two such runs cover a reach
        end = before.shape[-1] - 1
        runs = (before.gather(-1, x.clamp(0, end).unsqueeze(1).expand(shape)) for x in (first, last + 1 - width))
        here = (count >= width) & (count < 2 * width)
        best = torch.where(here.unsqueeze(1), torch.maximum(*runs), best)
        before = torch.maximum(before[..., :-width], before[..., width:])
        width *= 2
    return best


def _reach(layout: Layout) -> tuple[Tensor, Tensor]:
    """The first and the last key that each query may see, ``[b, Lq]``; the last comes before the first if there is
    none. Keys that are not there may stand between them.
    """
    document = 1 << 40  # more than any position
    query, key = layout.query_position, layout.key_position
    start = torch.zeros_like(query)
    if layout.query_document is not None and layout.key_document is not None:
        start = (layout.query_document * document).expand_as(query)
        key = key + layout.key_document * document
    first = start if layout.left is None else start + (query - layout.left).clamp(min=0)
    stop = start + (document if layout.right is None else (query + layout.right + 1).clamp(min=0))
    key = key.expand(query.shape[0], -1).contiguous()
    return torch.searchsorted(key, first.contiguous()), torch.searchsorted(key, stop.contiguous()) - 1


@dataclass(frozen=True)
class Running:
    """Log-weights of the feature path.

    Attributes:
        log: cumulative log-decay relative to the running maximum, ``[B, H, Lk]`` float64, 0 or less; None without an
            order.
        weight: exp(A_j - R_j) of each key, 0 where it is not there, ``[B, H, Lk]``.
        start: what the initial state is multiplied by, ``[B, H]`` (1 with an order: ``log`` does it there).
        row: R_i of each key's step, ``[B, H, Lk]``, or of all keys, ``[B, H, 1]``, without an order.
        first: R of the initial state, ``[B, H]``.
        final: R after the last key, ``[B, H]``; minus infinity if nothing was seen yet.
    """

    log: Tensor | None
    weight: Tensor
    start: Tensor
    row: Tensor
    first: Tensor
    final: Tensor


def weigh_features(
    key_peak: Tensor, log: Tensor | None, valid: Tensor | None, past: Tensor | None, causal: bool
) -> Running:
    """Running maxima for the feature path.

    Args:
        key_peak: A ``[B, H, Lk]`` float64.
        log: cumulative log-decay L ``[b, h, Lk]``, or None.
        valid: ``[b, Lk]``, or None.
        past: R of the initial state ``[B, H]``, or None without one.
        causal: whether queries see keys in their order; otherwise all of them.
    """
    batch, heads, length = key_peak.shape
    empty = key_peak.new_full((batch, heads), -torch.inf)
    past = empty if past is None else past
    steps = key_peak.new_zeros(1, 1, length) if log is None else log.detach()
    before = key_peak - steps
    if valid is not None:
        before = before.masked_fill(~valid.unsqueeze(1), -torch.inf)
    joined = torch.cat((past.unsqueeze(-1), before), -1)
    highest = joined.cummax(-1).values if causal else joined.amax(-1, keepdim=True).expand(-1, -1, length + 1)
    last = highest[..., -1]
    final = last + steps[..., -1] if length else last
    # Where nothing has been seen the state is zero and any reference will do: the first one that comes.
    finite = highest.masked_fill(highest == -torch.inf, torch.inf).amin(-1, keepdim=True)
    highest = torch.maximum(highest, finite.masked_fill(finite == torch.inf, 0))
    at, first = highest[..., 1:], highest[..., 0]
    weight = (before - at).exp()
    row = at + steps
    if not causal:
        start = (past - first).exp()
        return Running(None, weight, start, first.unsqueeze(-1), first, final)
    relative = first.unsqueeze(-1) - row
    moved = relative if log is None else log + relative
    return Running(moved, weight, torch.ones_like(first), row, first, final)
