"""Running sums over a sequence that several processes hold, and masks that all of them have to know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mercer.core.first_order import first_order
from mercer.distributed.links import Link, everyone
from mercer.distributed.sharding import Sharding


def cumulative(x: Tensor, sharding: Sharding, link: Link) -> Tensor:
    """The running sum along the last dimension, over the tokens of all processes in their order; differentiable.

    ``x`` is ``[b, h, size]`` float64, the part of this process.
    """
    return _Cumulative.apply(x, sharding, link)  # pyright: ignore[reportReturnType]


class _Cumulative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sharding: Sharding, link: Link) -> Tensor:
        ctx.call = sharding, link
        return _sums(x, sharding, link, backwards=False)

    @staticmethod
    @first_order(instead="one process with form='dense'")
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return _sums(grads[0].contiguous(), *ctx.call, backwards=True), None, None


def _sums(x: Tensor, sharding: Sharding, link: Link, backwards: bool) -> Tensor:
    """Sums of everything up to each token, or from each token on."""
    pieces = x.split([stop - start for start, stop in sharding.pieces(link.rank)], -1)
    own = torch.stack([piece.sum(-1) for piece in pieces]).contiguous()
    answers = everyone(link, "sums", own.view(-1).view(torch.uint8))
    totals: dict[int, Tensor] = {}
    for rank, answer in enumerate(answers):
        totals |= zip(sharding.held(rank), answer.view(own.dtype).view(own.shape), strict=True)
    parts: list[Tensor] = []
    for index, piece in zip(sharding.held(link.rank), pieces, strict=True):
        others = [totals[i] for i in (range(index + 1, sharding.chunks) if backwards else range(index))]
        before = torch.stack(others).sum(0) if others else torch.zeros_like(own[0])
        inside = piece.flip(-1).cumsum(-1).flip(-1) if backwards else piece.cumsum(-1)
        parts.append(inside + before.unsqueeze(-1))
    return torch.cat(parts, -1)


def whole_mask(mask: Tensor, sharding: Sharding, link: Link) -> Tensor:
    """``[B, length]`` bool from every process's ``[B, size]``."""
    batch = mask.shape[0]
    sizes = [batch * sharding.size(rank) for rank in range(link.size)]
    answers = everyone(link, "masks", mask.contiguous().view(torch.uint8).view(-1), sizes)
    return sharding.unshard([answer.view(torch.bool).view(batch, -1) for answer in answers], 1)


def gather(x: Tensor, sharding: Sharding, link: Link, dim: int) -> Tensor:
    """The whole tensor on every process, from each one's part; cut from the graph."""
    part = x.detach().movedim(dim, 0).contiguous()
    rest = part[:1].numel() if part.shape[0] else part.new_empty(1, *part.shape[1:]).numel()
    sizes = [sharding.size(rank) * rest * part.element_size() for rank in range(link.size)]
    answers = everyone(link, "gather", part.view(-1).view(torch.uint8), sizes)
    parts = [answer.view(part.dtype).view(-1, *part.shape[1:]) for answer in answers]
    return sharding.unshard(parts, 0).movedim(0, dim)
