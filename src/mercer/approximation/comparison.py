"""Kernels beside softmax, row by row: what is summed up before anything is estimated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mercer.approximation.rows import Rows
from mercer.core.kernels import Exp, Kernel
from mercer.core.normalizers import Normalizer


@dataclass(frozen=True, eq=False)
class Comparison:
    """Sums over the batch for each kernel, query head and row.

    Attributes:
        wrong: |o - o*|^2, ``[kernels, Hq, R]``.
        size: |o*|^2, ``[Hq, R]``.
        variation: half of sum_j |w_j / sum w - p_j|, ``[kernels, Hq, R]``; 1 for a row whose weights are all 0.
        seen: batch entries in which the row sees any key, ``[R]``.
        negative: mean over rows of sum_j |min(w_j, 0)| / sum_j |w_j|, ``[kernels]``.
        not_positive: share of rows whose weights sum to 0 or less, ``[kernels]``.
    """

    wrong: Tensor
    size: Tensor
    variation: Tensor
    seen: Tensor
    negative: Tensor
    not_positive: Tensor


def compare(
    rows: Rows, kernels: Sequence[Kernel], scale: float | None, normalizer: Normalizer, softmax_scale: float
) -> Comparison:
    """Each kernel at ``scale`` (None: its own) against ``Exp`` at ``softmax_scale``, both under ``normalizer``."""
    heads, count = rows.query.shape[1:3]
    wrong, variation = (rows.query.new_zeros(len(kernels), heads, count) for _ in range(2))
    size = rows.query.new_zeros(heads, count)
    negative, not_positive = (rows.query.new_zeros(len(kernels)) for _ in range(2))
    for block in rows.blocks():
        seen = rows.seen[:, None, block]
        weight, factor = rows.weights(Exp(), softmax_scale, block)
        exact = rows.outputs(normalizer, weight, factor, block)
        share = weight / weight.sum(-1, keepdim=True).masked_fill(~seen.unsqueeze(-1), 1)
        size[:, block] = exact.square().sum((0, 3))
        for place, kernel in enumerate(kernels):
            weight, factor = rows.weights(kernel, scale, block)
            out = rows.outputs(normalizer, weight, factor, block)
            wrong[place, :, block] = (out - exact).square().sum((0, 3))
            total, absolute = weight.sum(-1), weight.abs().sum(-1)
            apart = (weight / total.masked_fill(total == 0, 1).unsqueeze(-1) - share).abs().sum(-1) / 2
            variation[place, :, block] = apart.masked_fill(absolute == 0, 1).where(seen, 0).sum(0)
            below = weight.clamp(max=0).sum(-1).neg() / absolute.masked_fill(absolute == 0, 1)
            negative[place] += below.where(seen, 0).sum()
            not_positive[place] += ((total <= 0) & seen).sum()
    rows_seen = max(1, int(rows.seen.sum()) * heads)
    return Comparison(wrong, size, variation, rows.seen.sum(0), negative / rows_seen, not_positive / rows_seen)


@dataclass(frozen=True)
class Scores:
    """The scores scale q.k over all pairs that the measured rows see."""

    low: float
    mean: float
    deviation: float
    high: float


def scores_seen(rows: Rows, scale: float) -> Scores:
    """Least, mean, standard deviation and largest score."""
    low, high = torch.inf, -torch.inf
    first = second = 0.0
    pairs = 0
    for block in rows.blocks():
        score, hidden = _scores(rows, scale, block)
        known = score[~hidden.expand_as(score)]
        if known.numel():
            low, high = min(low, float(known.min())), max(high, float(known.max()))
            first, second = first + float(known.sum()), second + float(known.square().sum())
            pairs += known.numel()
    mean = first / pairs
    return Scores(low, mean, max(second / pairs - mean * mean, 0.0) ** 0.5, high)


def attended_pairs(rows: Rows, scale: float, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Queries and keys ``[count, D]`` of pairs as softmax attends to them: a row at random, then a key by its weight.

    Without a structure's log-weights: the weights are softmax's of the scores alone, over the visible keys.
    """
    generator = torch.Generator().manual_seed(seed)
    heads, length = rows.query.shape[1:3]
    known = rows.seen[:, None].expand(-1, heads, -1).flatten().nonzero().squeeze(1).cpu()
    chosen = known[torch.randint(len(known), (count,), generator=generator)]
    place, head, row = (
        chosen // (heads * length), chosen // length % heads, chosen % length
    )  # fmt: skip
    at = torch.rand(count, generator=generator, dtype=torch.float64)
    columns = torch.zeros(count, dtype=torch.int64)
    for block in rows.blocks():
        inside = ((row >= block.start) & (row < block.stop)).nonzero().squeeze(1)
        if len(inside):
            score, hidden = _scores(rows, scale, block)
            share = score.masked_fill(hidden, -torch.inf)[place[inside], head[inside], row[inside] - block.start]
            edges = share.softmax(-1).cumsum(-1).cpu()
            found = torch.searchsorted(edges, (at[inside] * edges[:, -1]).unsqueeze(1), right=True).squeeze(1)
            columns[inside] = found.clamp(max=edges.shape[1] - 1)
    return rows.query[place, head, row], rows.key[place, head // rows.groups, columns]


def _scores(rows: Rows, scale: float, block: slice) -> tuple[Tensor, Tensor]:
    key = rows.key.repeat_interleave(rows.groups, 1)
    visible = rows.layout.visible(block, slice(0, key.shape[2]))
    score = scale * (rows.query[:, :, block] @ key.mT)
    return score, score.new_zeros((), dtype=torch.bool) if visible is None else ~visible
