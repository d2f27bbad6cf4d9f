"""Cross entropy of a linear layer whose logits are never held all at once."""

from typing import Any

import torch
from torch import Tensor

from mercer.core.first_order import first_order
from mercer.errors import InvalidArgument
from mercer.nn.autocast import to_autocast

SMALL = 2**21
"""Numbers that may always be held at once: 8 MiB in float32, about what a core's cache holds."""

FLOAT16 = 2.0**15
"""What float16 differences of probabilities are multiplied with: 1 stays finite, 1e-9 does not vanish."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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

    hidden: [..., dim]; weight: [vocabulary, dim], in hidden's dtype; targets: integers [...], where `ignore_index`
    marks tokens that count nowhere and cost nothing. reduction: "mean" over the kept tokens (0 if there are none) or
    "sum". Returns a scalar, float32 for inputs of 16 or 32 bits and float64 for float64.

    Memory: the logits of `block` tokens (block vocabulary numbers; with the default of `default_block` never more than
    the weight has, or 8 MiB in float32), which become probabilities in place on the CPU and take as much again on other
    devices and for 16-bit inputs; and the two gradients, which are computed block by block in the forward pass and only
    scaled in the backward pass. For 16-bit inputs the gradients are float32 until then, so that they are rounded once
    and only after the factor of a loss scaler: 4 bytes a number of hidden and weight, kept, and as much again for the
    weight while the forward pass runs.

    Softmax statistics and all sums are float32 at least. Logits are products in the inputs' dtype, or in autocast's.
    For gradients of 16-bit inputs CUDA rounds the probabilities of a block to 16 bits and multiplies into float32;
    other devices multiply in float32.
    """
    hidden, weight = to_autocast(hidden, weight)
    _check(hidden, weight, targets)
    vocabulary, dim = weight.shape
    if reduction not in ("mean", "sum"):
        raise InvalidArgument(f'reduction must be "mean" or "sum", got {reduction!r}')
    block = default_block(vocabulary, dim) if block is None else block
    if block < 1:
        raise InvalidArgument(f"block must be at least 1 token, got {block}")
    hidden, targets = hidden.reshape(-1, dim), targets.reshape(-1).long()
    keep = targets != ignore_index
    if not bool(keep.all()):
        rows = keep.nonzero()[:, 0]
        hidden, targets = hidden.index_select(0, rows), targets.index_select(0, rows)
    if targets.numel() and (int(targets.min()) < 0 or int(targets.max()) >= vocabulary):
        raise InvalidArgument(
            f"targets must lie in 0..{vocabulary - 1} or be {ignore_index}, "
            f"got values from {int(targets.min())} to {int(targets.max())}"
        )
    factor = 1 / max(targets.numel(), 1) if reduction == "mean" else 1.0
    with torch.autocast(hidden.device.type, enabled=False):  # it would round the float32 products below
        loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, block, factor, torch.is_grad_enabled())
    return loss


def _check(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    if weight.dim() != 2 or not weight.numel():
        raise InvalidArgument(f"weight must be [vocabulary, dim], neither of them 0, got {list(weight.shape)}")
    if not hidden.dim() or hidden.shape[-1] != weight.shape[1] or hidden.shape[:-1] != targets.shape:
        raise InvalidArgument(
            f"hidden must be [..., {weight.shape[1]}] with targets of its leading shape, "
            f"got hidden {list(hidden.shape)} and targets {list(targets.shape)}"
        )
    if hidden.dtype != weight.dtype or hidden.dtype not in DTYPES:
        raise InvalidArgument(
            f"hidden and weight must share one of the dtypes {', '.join(map(str, DTYPES))}, "
            f"got hidden {hidden.dtype} and weight {weight.dtype}"
        )
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise InvalidArgument(f"targets must be integers (indices of the vocabulary), got {targets.dtype}")
    if not hidden.device == weight.device == targets.device:
        raise InvalidArgument(
            f"hidden, weight and targets must be on one device, "
            f"got {hidden.device}, {weight.device} and {targets.device}"
        )


def _multiplies_into_float32(device: torch.device) -> bool:
    """Whether torch multiplies 16-bit matrices into a float32 one there (CUDA, from torch 2.8 on)."""
    return device.type == "cuda" and torch.version.cuda is not None and hasattr(torch.ops.aten.mm, "dtype")


class _LinearCrossEntropy(torch.autograd.Function):
    """With p = softmax(h W^T): dL/dh = (p - onehot) W and dL/dW = (p - onehot)^T h, a block of tokens at a time.

    Gradients are kept in `wide` and times factor / ctx.rest. float16 has no room for p / tokens: where p - onehot is
    rounded to it, it carries FLOAT16 in place of the factor, and the backward pass has the rest to apply.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, block: int, factor: float, differentiate: bool
    ) -> Tensor:
        want_hidden, want_weight = (differentiate and need for need in ctx.needs_input_grad[:2])
        wide = torch.promote_types(hidden.dtype, torch.float32)
        narrow = hidden.dtype != wide and _multiplies_into_float32(hidden.device)
        carried = FLOAT16 if narrow and hidden.dtype == torch.float16 else factor
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden, dtype=wide) if want_hidden else None
        make = torch.empty_like if targets.numel() else torch.zeros_like  # the first block overwrites, with beta=0
        grad_weight = make(weight, dtype=wide) if want_weight else None
        other = weight if narrow or grad_hidden is None else weight.to(wide)
        for start in range(0, targets.numel(), block):
            part, wanted = hidden[start : start + block], targets[start : start + block, None]
            logits = (part @ weight.t()).to(wide)
            # log sum exp = largest logit - log of the largest probability; softmax is one fused pass over its input.
            above = logits.amax(1, keepdim=True) - logits.gather(1, wanted)
            # The CPU's softmax reads a number before it writes the one at its place (test_loss.py watches that).
            delta = torch.softmax(logits, 1, out=logits if logits.device.type == "cpu" else None)
            del logits
            loss += (above - delta.amax(1, keepdim=True).log_()).sum() * factor
            if grad_hidden is None and grad_weight is None:
                continue
            delta.mul_(carried).scatter_add_(1, wanted, loss.new_full((1, 1), -carried).expand_as(wanted))
            if narrow:
                delta = delta.to(hidden.dtype)
            if grad_hidden is not None:
                _product(delta, other, grad_hidden[start : start + block], narrow, add=False)
            if grad_weight is not None:
                _product(delta.t(), part if narrow else part.to(wide), grad_weight, narrow, add=start > 0)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.rest, ctx.dtype = factor / carried, hidden.dtype
        return loss

    @staticmethod
    @first_order(instead="torch.nn.functional.cross_entropy of the logits")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad * ctx.rest
        grad_hidden, grad_weight = (
            None if g is None else torch.mul(g, grad, out=torch.empty_like(g, dtype=ctx.dtype))
            for g in ctx.saved_tensors
        )
        return grad_hidden, grad_weight, None, None, None, None


def _product(a: Tensor, b: Tensor, out: Tensor, narrow: bool, *, add: bool) -> None:
    """out = a b, or out += a b; narrow: a and b have 16 bits and out 32."""
    if not narrow:
        out.addmm_(a, b, beta=1 if add else 0)
    elif add:
        out += torch.mm(a, b, out_dtype=out.dtype)
    else:
        out.copy_(torch.mm(a, b, out_dtype=out.dtype))
