"""The position-wise network of a block: two matrices and a non-linearity, or a gated pair."""

from typing import Any

import torch
from torch import Tensor, nn

from mercer.core.first_order import first_order
from mercer.errors import InvalidArgument
from mercer.nn.autocast import to_autocast

KINDS = ("swiglu", "gelu", "gelu_tanh", "relu")


class FeedForward(nn.Module):
    """x -> W_out f(W_in x), from dim to hidden channels and back.

    kind="relu": f = max(0, x). "gelu": f = x Phi(x), exact; "gelu_tanh": the tanh approximation that GPT-2 uses.
    "swiglu" (Shazeer 2020): f = silu(a) * b, where W_in yields the gate a and the value b, stored as one matrix
    [2 hidden, dim] with the rows of the gate first, so that one product computes both.
    hidden: default 4 dim, and for swiglu 8/3 dim rounded up to a multiple of 32 (about the same number of weights).
    """

    def __init__(self, dim: int, hidden: int | None = None, *, kind: str = "swiglu", bias: bool = False) -> None:
        super().__init__()
        if kind not in KINDS:
            raise InvalidArgument(f"the feed-forward kind must be one of {', '.join(KINDS)}, got {kind!r}")
        hidden = default_hidden(dim, kind) if hidden is None else hidden
        if dim < 1 or hidden < 1:
            raise InvalidArgument(f"a feed-forward needs dim and hidden of at least 1, got {dim} and {hidden}")
        self.kind = kind
        self.input = nn.Linear(dim, 2 * hidden if kind == "swiglu" else hidden, bias=bias)
        self.output = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., dim]; returns [..., dim]."""
        if self.kind == "swiglu":
            return self.output(gated_linear(x, self.input.weight, self.input.bias))
        h = self.input(x)
        if self.kind == "relu":
            return self.output(torch.relu(h))
        return self.output(nn.functional.gelu(h, approximate="tanh" if self.kind == "gelu_tanh" else "none"))


def default_hidden(dim: int, kind: str) -> int:
    """4 dim, or for swiglu 8/3 dim rounded up to a multiple of 32."""
    return -(-8 * dim // 96) * 32 if kind == "swiglu" else 4 * dim


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(x G^T) * (x U^T) for weight = [G; U]: x [..., dim], weight [2h, dim], bias [2h] or None; returns [..., h].

    Under autocast it runs in autocast's dtype, as a linear layer does.
    """
    x, weight = to_autocast(x, weight)
    bias = None if bias is None else to_autocast(bias)[0]
    out: Tensor = _GatedLinear.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    return out.view(*x.shape[:-1], out.shape[-1])


class _GatedLinear(torch.autograd.Function):
    """Gate and value live in two contiguous planes, so the elementwise passes run at full speed in both directions.

    One wide product would leave them as the halves of each row, where the same passes take up to twice as long.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        hidden = weight.shape[0] // 2
        planes = x.new_empty(2, x.shape[0], hidden)
        for i, plane in enumerate(planes):
            rows = slice(i * hidden, (i + 1) * hidden)
            if bias is None:
                torch.mm(x, weight[rows].t(), out=plane)
            else:
                torch.addmm(bias[rows], x, weight[rows].t(), out=plane)
        ctx.save_for_backward(x, weight, planes)
        return nn.functional.silu(planes[0]).mul_(planes[1])

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, planes = ctx.saved_tensors
        hidden = weight.shape[0] // 2
        gate, value = planes
        deltas = (torch.ops.aten.silu_backward(grad * value, gate), nn.functional.silu(gate).mul_(grad))
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (deltas[0] @ weight[:hidden]).addmm_(deltas[1], weight[hidden:])
        if ctx.needs_input_grad[1]:
            grad_weight = torch.empty_like(weight)
            for i, delta in enumerate(deltas):
                torch.mm(delta.t(), x, out=grad_weight[i * hidden : (i + 1) * hidden])
        if ctx.needs_input_grad[2]:
            grad_bias = torch.cat([delta.sum(0) for delta in deltas])
        return grad_x, grad_weight, grad_bias
