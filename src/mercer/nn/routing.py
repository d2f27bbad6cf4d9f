"""Which experts serve a token, and with what weight; the losses that keep a router balanced and its logits small."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mercer.errors import InvalidArgument


@dataclass(frozen=True, eq=False)
class Routing:
    """What a router decided in one call of one layer.

    logits: [B, L, E], float32 at least. chosen: integers [B, L, k], the experts of each token, the best first. weights:
    [B, L, k], their shares in the token's output. kept: bool [B, L, k], False where an expert was full or the token is
    padding. padding: bool [B, L], True for real tokens, or None if all are.
    """

    logits: Tensor
    chosen: Tensor
    weights: Tensor
    kept: Tensor
    padding: Tensor | None = None


def route(
    logits: Tensor, chosen: int, *, renormalise: bool, capacity: int | None = None, padding: Tensor | None = None
) -> Routing:
    """The `chosen` experts with the largest logits [B, L, E] of each token.

    With T their set, renormalise=True weighs them by exp(l_e) / sum_{i in T} exp(l_i), which sums to 1 (Mixtral), and
    False by exp(l_e) / sum_{i = 1..E} exp(l_i), their probability among all experts (Switch Transformer, Jamba).

    capacity: an expert takes that many of a sequence's tokens, the earliest ones first, and no others; no later token
    takes an earlier one's place. padding: bool [B, L], True for real tokens; others take no place.

    Source: Shazeer et al. 2017, arXiv 1701.06538; Fedus et al. 2022, arXiv 2101.03961; Jiang et al. 2024, arXiv
    2401.04088.
    """
    best, experts = logits.topk(chosen, -1)
    weights = best.softmax(-1) if renormalise else logits.softmax(-1).gather(-1, experts)
    kept = torch.ones_like(experts, dtype=torch.bool) if padding is None else padding.unsqueeze(-1).expand_as(experts)
    if capacity is not None:
        kept = kept & (_queue(experts, kept, logits.shape[-1]) < capacity)
    return Routing(logits, experts, weights, kept, padding)


def _queue(experts: Tensor, there: Tensor, count: int) -> Tensor:
    """How many choices of the same expert in the same sequence come before each choice [B, L, k] that is there."""
    batch, length, chosen = experts.shape
    row = torch.arange(batch, device=experts.device).view(-1, 1, 1)
    group = torch.where(there, row * count + experts, batch * count).flatten()
    order = group.argsort(stable=True)
    sizes = group.bincount(minlength=batch * count + 1)
    first = sizes.cumsum(0) - sizes
    place = torch.arange(len(group), device=experts.device) - first[group[order]]
    return torch.empty_like(place).scatter_(0, order, place).view(batch, length, chosen)


def balance_loss(*routings: Routing) -> Tensor:
    """E sum_e f_e P_e: f_e the choices of expert e a token, P_e its mean probability among all experts.

    It is k, the experts of a token, where all are used alike, and E where one serves all tokens; its gradient goes
    through P. Padding counts in neither mean, and choices count whether or not the expert had room for them. Of several
    routings, of layers or batches with equally many experts, all tokens count as those of one.

    Returns a scalar, 0 without tokens. Source: Fedus et al. 2022 (Switch Transformer), arXiv 2101.03961, eq. 4.
    """
    experts = _experts(routings)
    chosen, mean, tokens = [], [], []
    for routing in routings:
        real = _real(routing)
        share = real.unsqueeze(-1).expand_as(routing.chosen).flatten()
        chosen.append(routing.logits.new_zeros(experts).scatter_add(0, routing.chosen.flatten(), share))
        mean.append((routing.logits.softmax(-1) * real.unsqueeze(-1)).sum((0, 1)))
        tokens.append(real.sum())
    total = torch.stack(tokens).sum().clamp_min(1)
    return experts * (torch.stack(chosen).sum(0) * torch.stack(mean).sum(0)).sum() / total.square()


def z_loss(*routings: Routing) -> Tensor:
    """The mean over all real tokens of (log sum_e exp(l_e))^2, which keeps the logits of routers small.

    Returns a scalar, 0 without tokens. Source: Zoph et al. 2022 (ST-MoE), arXiv 2202.08906, eq. 5.
    """
    _experts(routings)
    reals = [_real(routing) for routing in routings]
    sums = [(r.logits.logsumexp(-1).square() * real).sum() for r, real in zip(routings, reals, strict=True)]
    return torch.stack(sums).sum() / torch.stack([real.sum() for real in reals]).sum().clamp_min(1)


def _real(routing: Routing) -> Tensor:
    """1 for real tokens and 0 for padding, [B, L], in the dtype of the logits."""
    if routing.padding is None:
        return torch.ones_like(routing.logits[..., 0])
    return routing.padding.to(routing.logits.dtype)


def _experts(routings: tuple[Routing, ...]) -> int:
    counts = {routing.logits.shape[-1] for routing in routings}
    if len(counts) != 1:
        raise InvalidArgument(
            f"a loss of routers needs routings of equally many experts, at least one, got {sorted(counts)}"
        )
    return counts.pop()
