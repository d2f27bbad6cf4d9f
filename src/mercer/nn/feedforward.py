"""The position-wise network of a block: two matrices and a non-linearity, or a gated pair."""

from typing import Any

import torch
from torch import Tensor, nn

from mercer.core.first_order import first_order
from mercer.errors import InvalidArgument
from mercer.nn.activations import ACTIVATIONS, GATED, check_kind, default_hidden
from mercer.nn.autocast import to_autocast


class FeedForward(nn.Module):
    """x -> W_out f(W_in x), from dim to hidden channels and back.

    kind="relu": f = max(0, x). "gelu": f = x Phi(x), exact; "gelu_tanh": the tanh approximation that GPT-2 uses.
    "silu": f = x sigmoid(x), also called swish.
    Gated kinds (Shazeer 2020, arXiv 2002.05202): f = g(a) * b, where W_in yields the gate a and the value b, stored as
    one matrix [2 hidden, dim] with the rows of the gate first; g is silu for "swiglu", gelu for "geglu", gelu_tanh for
    "geglu_tanh" and relu for "reglu".
    hidden: default 4 dim, and for gated kinds 8/3 dim rounded up to a multiple of 32 (about as many weights).
    bias: adds biases to both matrices.
    """

    def __init__(self, dim: int, hidden: int | None = None, *, kind: str = "swiglu", bias: bool = False) -> None:
        super().__init__()
        check_kind(kind)
        hidden = default_hidden(dim, kind) if hidden is None else hidden
        if dim < 1 or hidden < 1:
            raise InvalidArgument(f"a feed-forward needs dim and hidden of at least 1, got {dim} and {hidden}")
        self.kind = kind
        self.input = nn.Linear(dim, 2 * hidden if kind in GATED else hidden, bias=bias)
        self.output = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor, *, added: Tensor | None = None) -> Tensor:
        """x: [..., dim]; returns [..., dim]. added: what this call adds to W_in x, as a low-rank adapter does."""
        if added is not None:
            inner = self.input(x) + added
            if self.kind not in GATED:
                return self.output(ACTIVATIONS[self.kind].apply(inner))
            gate, value = inner.chunk(2, -1)
            return self.output(ACTIVATIONS[GATED[self.kind]].apply(gate) * value)
        if self.kind in GATED:
            return self.output(gated_linear(x, self.input.weight, self.input.bias, gate=GATED[self.kind]))
        return self.output(ACTIVATIONS[self.kind].apply(self.input(x)))


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gate: str = "silu") -> Tensor:
    """g(x G^T) * (x U^T) for weight = [G; U]: x [..., dim], weight [2h, dim], bias [2h] or None; returns [..., h].

    gate: the name of g in `ACTIVATIONS`.
    Under autocast it runs in autocast's dtype, as a linear layer does.
    """
    x, weight = to_autocast(x, weight)
    bias = None if bias is None else to_autocast(bias)[0]
    out: Tensor = _GatedLinear.apply(x.reshape(-1, x.shape[-1]), weight, bias, gate)
    return out.view(*x.shape[:-1], out.shape[-1])


class _GatedLinear(torch.autograd.Function):
    """Gate and value live in two contiguous planes, so the elementwise passes run at full speed in both directions.

    One wide product would leave them as the halves of each row, where the same passes take up to twice as long.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gate: str) -> Tensor:
        hidden = weight.shape[0] // 2
        planes = x.new_empty(2, x.shape[0], hidden)
        for i, plane in enumerate(planes):
            rows = slice(i * hidden, (i + 1) * hidden)
            if bias is None:
                torch.mm(x, weight[rows].t(), out=plane)
            else:
                torch.addmm(bias[rows], x, weight[rows].t(), out=plane)
        ctx.save_for_backward(x, weight, planes)
        ctx.activation = ACTIVATIONS[gate]
        return ctx.activation.apply(planes[0]).mul_(planes[1])

    @staticmethod
    @first_order(instead="g(x G^T) * (x U^T) written out")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, planes = ctx.saved_tensors
        hidden = weight.shape[0] // 2
        gate, value = planes
        deltas = (ctx.activation.backward(grad * value, gate), ctx.activation.apply(gate).mul_(grad))
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (deltas[0] @ weight[:hidden]).addmm_(deltas[1], weight[hidden:])
        if ctx.needs_input_grad[1]:
            grad_weight = torch.empty_like(weight)
            for i, delta in enumerate(deltas):
                torch.mm(delta.t(), x, out=grad_weight[i * hidden : (i + 1) * hidden])
        if ctx.needs_input_grad[2]:
            grad_bias = torch.cat([delta.sum(0) for delta in deltas])
        return grad_x, grad_weight, grad_bias, None
