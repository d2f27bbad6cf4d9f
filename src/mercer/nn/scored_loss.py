"""Cross entropy of scores that any function makes of hidden states, whose logits are never held all at once."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mercer.errors import InvalidArgument


def scored_cross_entropy(
    score: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    block: int,
    reduction: str = "mean",
) -> Tensor:
    """As :func:`mercer.nn.loss.linear_cross_entropy`, for scores that are more than a product: with a bias, or capped.

    score: from [n, dim] to logits [n, vocabulary], differentiable. The logits of `block` tokens are held at once; the
    backward pass makes them again. Returns a scalar, in float32 at least.
    """
    if reduction not in ("mean", "sum"):
        raise InvalidArgument(f'reduction must be "mean" or "sum", got {reduction!r}')
    if block < 1:
        raise InvalidArgument(f"block must be at least 1 token, got {block}")
    hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).long()
    rows = (targets != ignore_index).nonzero()[:, 0]
    hidden, targets = hidden.index_select(0, rows), targets.index_select(0, rows)

    def one(part: Tensor, wanted: Tensor) -> Tensor:
        logits = score(part)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return nn.functional.cross_entropy(logits.to(wide), wanted, reduction="sum")

    losses = [
        checkpoint(one, part, wanted, use_reentrant=False)
        for part, wanted in zip(hidden.split(block), targets.split(block), strict=True)
    ]
    total = torch.stack(losses).sum() if len(rows) else hidden.sum() * 0
    return total / max(len(rows), 1) if reduction == "mean" else total
