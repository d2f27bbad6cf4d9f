"""Cross entropy of a linear layer whose logits are never held all at once."""

from typing import Any

import torch
from torch import Tensor

from mercer.core.first_order import first_order
from mercer.errors import InvalidArgument

SMALL = 2**21
"""Numbers that may always be held at once: 8 MiB in float32, about what a core's cache holds."""


def default_block(vocabulary: int, dim: int) -> int:
    """Tokens whose logits are no more numbers than the weight has, or than SMALL if that is more."""
    return max(dim, SMALL // vocabulary)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    block: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Cross entropy, in nats, of logits = hidden weight^T against targets, by blocks of tokens.

        loss = mean over kept tokens t of  logsumexp_v(h_t . w_v) - h_t . w_{y_t}

    hidden: [..., dim]; weight: [vocabulary, dim]; targets: int64 [...], where `ignore_index` marks tokens that count
    nowhere and cost nothing. reduction: "mean" over the kept tokens (0 if there are none) or "sum". Returns a scalar,
    float32 for inputs of 16 or 32 bits and float64 for float64.

    Memory: the logits of `block` tokens (block vocabulary numbers; with the default of `default_block` never more than
    the weight has, or 8 MiB in float32), which become probabilities in place on the CPU and take as much again on other
    devices and for 16-bit inputs; and the two gradients, which are computed block by block in the forward pass and only
    scaled in the backward pass. Softmax statistics and the sum of the weight's gradient over blocks are float32 at
    least. Under autocast the product runs in autocast's dtype.
    """
    vocabulary, dim = weight.shape
    if hidden.shape[-1] != dim or hidden.shape[:-1] != targets.shape:
        raise InvalidArgument(
            f"hidden must be [..., {dim}] with targets of its leading shape, "
            f"got hidden {list(hidden.shape)} and targets {list(targets.shape)}"
        )
    if reduction not in ("mean", "sum"):
        raise InvalidArgument(f'reduction must be "mean" or "sum", got {reduction!r}')
    block = default_block(vocabulary, dim) if block is None else block
    if block < 1:
        raise InvalidArgument(f"block must be at least 1 token, got {block}")
    hidden, targets = hidden.reshape(-1, dim), targets.reshape(-1)
    keep = targets != ignore_index
    if not bool(keep.all()):
        rows = keep.nonzero()[:, 0]
        hidden, targets = hidden.index_select(0, rows), targets.index_select(0, rows)
    if targets.numel() and (int(targets.min()) < 0 or int(targets.max()) >= vocabulary):
        raise InvalidArgument(
            f"targets must lie in 0..{vocabulary - 1} or be {ignore_index}, "
            f"got values from {int(targets.min())} to {int(targets.max())}"
        )
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    factor = 1 / max(targets.numel(), 1) if reduction == "mean" else 1.0
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, block, factor, torch.is_grad_enabled())
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """With p = softmax(h W^T): dL/dh = (p - onehot) W and dL/dW = (p - onehot)^T h, a block of tokens at a time."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, block: int, factor: float, differentiate: bool
    ) -> Tensor:
        want_hidden, want_weight = (differentiate and need for need in ctx.needs_input_grad[:2])
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        overwritten = targets.numel() > 0 and weight.dtype == wide  # by the first block, with beta=0
        make = torch.empty_like if overwritten else torch.zeros_like
        grad_weight = make(weight, dtype=wide) if want_weight else None
        for start in range(0, targets.numel(), block):
            part, wanted = hidden[start : start + block], targets[start : start + block, None]
            logits = (part @ weight.t()).to(wide)
            # log sum exp = largest logit - log of the largest probability; softmax is one fused pass over its input.
            above = logits.amax(1, keepdim=True) - logits.gather(1, wanted)
            # The CPU's softmax reads a number before it writes the one at its place (test_loss.py watches that).
            probability = torch.softmax(logits, 1, out=logits if logits.device.type == "cpu" else None)
            del logits
            loss += (above - probability.amax(1, keepdim=True).log_()).sum() * factor
            if grad_hidden is None and grad_weight is None:
                continue
            probability.mul_(factor).scatter_add_(1, wanted, loss.new_full((1, 1), -factor).expand_as(wanted))
            delta = probability.to(hidden.dtype)
            del probability
            if grad_hidden is not None:
                torch.mm(delta, weight, out=grad_hidden[start : start + block])
            if grad_weight is not None and grad_weight.dtype == delta.dtype:
                grad_weight.addmm_(delta.t(), part, beta=0 if start == 0 else 1)
            elif grad_weight is not None:
                grad_weight += delta.t() @ part
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        return loss

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = (None if g is None else g * grad.to(g.dtype) for g in ctx.saved_tensors)
        return grad_hidden, grad_weight, None, None, None, None
