"""The real-gated linear recurrent unit, and the recurrent block of Griffin around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mercer.mixers.base import Mixer
from mercer.mixers.head_sizes import check_blocks
from mercer.mixers.linear_recurrence import linear_recurrence
from mercer.mixers.short_convolution import ShortConvolution
from mercer.nn.start import HasStart

POWER = 8.0
"""c of the paper: what the gate r is multiplied by in the exponent."""
STEEPEST = 1000.0
"""Largest slope of the square root, as in the authors' code: at a = 1 it has none."""


class RGLRU(Mixer):
    """A gated branch, and one through a short convolution and a linear recurrence of single channels,

        u = conv(W_x x + b_x),     r = sigmoid(A_r u + b_r),     i = sigmoid(A_i u + b_i),
        log a_t = -8 r_t softplus(decay),     h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t u_t),
        y = W_o (gelu(W_g x + b_g) * h) + b_o

    with A_r and A_i block-diagonal and gelu by its tanh approximation. The first token of a sequence is taken whole,
    h_1 = i_1 u_1, since there is no past to make room for (so the authors' code; the paper does not say). In the
    paper's terms a = sigmoid(-decay)^(8 r).

    dim: channels of x and y. width: of u and h. blocks: of each gate's matrix, a divisor of width. conv: inputs that
    the convolution looks at. bias: b_x, b_g and b_o.

    Initial values: at r = 1 decays a are uniform between 0.9 and 0.999; the blocks of the gates come from
    N(0, 1 / their inputs), and their biases are 0.

    State: `recurrence`, h [B, width]; `conv`, the convolution's last inputs [B, conv - 1, width]; `begun` [B], 1 once
    a row has had a token.

    Source: De et al. 2024, arXiv 2402.19427.
    """

    def __init__(self, dim: int, width: int, *, blocks: int, conv: int = 4, bias: bool = True) -> None:
        super().__init__()
        check_blocks(width, blocks)
        self.dim, self.width = dim, width
        self.input = nn.Linear(dim, 2 * width, bias=bias)  # the gate's rows first
        self.conv = ShortConvolution(width, conv, activation=None)
        self.input_gate, self.decay_gate = BlockDiagonal(width, blocks), BlockDiagonal(width, blocks)
        self.decay = nn.Parameter(torch.empty(width))
        self.output = nn.Linear(width, dim, bias=bias)
        self.start()

    @torch.no_grad()
    def start(self, generator: torch.Generator | None = None) -> None:
        """Draw the decays. The gates and the convolution draw their own."""
        whole = 0.9 + (0.999 - 0.9) * torch.rand(self.width, generator=generator, dtype=torch.float64)
        rate = -whole.log() / POWER
        self.decay.copy_(torch.expm1(rate).log())  # softplus of it is the rate

    @property
    def kind(self) -> str:
        return f"rg-lru({self.dim}, width={self.width}, conv={self.conv.width})"

    def mix(
        self, x: Tensor, lengths: Tensor | None, past: Mapping[str, Tensor] | None, *carried: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        wide = torch.promote_types(x.dtype, torch.float32)
        gate, value = self.input(x).chunk(2, -1)
        u, tail = self.conv(value, lengths, None if past is None else past["conv"])
        log_decay = -POWER * self.decay_gate(u).to(wide).sigmoid() * nn.functional.softplus(self.decay.to(wide))
        room = _BoundedRoot.apply(-torch.expm1(2 * log_decay))
        batch, length, _ = x.shape
        begun = x.new_zeros(batch, dtype=torch.int64) if past is None else past["begun"]
        whole = (begun == 0).unsqueeze(1) & (torch.arange(length, device=x.device) == 0)
        room = room.masked_fill(whole.unsqueeze(-1), 1)
        gated = room * self.input_gate(u).to(wide).sigmoid() * u.to(wide)
        state = None if past is None else past["recurrence"].to(wide)
        h, last = linear_recurrence(log_decay, gated, state=state, lengths=lengths)
        y = nn.functional.gelu(gate, approximate="tanh") * h.to(gate.dtype)
        had = torch.ones_like(begun) if lengths is None else (lengths > 0).to(begun.dtype)
        return self.output(y), {"recurrence": last, "conv": tail, "begun": torch.maximum(begun, had)}


class BlockDiagonal(HasStart):
    """y = x A + b with A block-diagonal: `weight` [blocks, in, out], `bias` [blocks, out], widths of x and y equal."""

    undecayed = ("bias",)

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(blocks, width // blocks, width // blocks))
        self.bias = nn.Parameter(torch.empty(blocks, width // blocks))
        self.start()

    @torch.no_grad()
    def start(self, generator: torch.Generator | None = None) -> None:
        """Draw the blocks from N(0, 1 / inputs); biases are 0."""
        self.weight.normal_(std=self.weight.shape[1] ** -0.5, generator=generator)
        self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., width]; returns the same shape."""
        blocks, inner, _ = self.weight.shape
        rows = x.reshape(-1, blocks, inner).transpose(0, 1)
        out = torch.baddbmm(self.bias.unsqueeze(1), rows, self.weight)
        return out.transpose(0, 1).reshape(x.shape)


class _BoundedRoot(torch.autograd.Function):
    """sqrt(x), with a slope of at most STEEPEST."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] / (4 * x).clamp_min(STEEPEST**-2).sqrt()
