"""The real-gated linear recurrent unit, and the recurrent block of Griffin around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mercer.mixers.base import Mixer
from mercer.mixers.head_sizes import check_blocks
from mercer.mixers.linear_recurrence import linear_recurrence
from mercer.mixers.segments import by_segments
from mercer.mixers.short_convolution import ShortConvolution
from mercer.nn.start import HasStart

POWER = 8.0
"""c of the paper: what the gate r is multiplied by in the exponent."""
STEEPEST = 1000.0
"""Largest slope of the square root, as in the authors' code: at a = 1 it has none."""
SEGMENT = 1 << 18
"""Numbers of u in a segment of tokens: a dozen tensors of its size are made on the way from u and the gate to h."""
FEWEST = 64
"""Tokens of a segment, however wide u is."""


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
        batch = x.shape[0]
        begun = x.new_zeros(batch, dtype=torch.int64) if past is None else past["begun"]
        state = x.new_zeros(batch, self.width, dtype=wide) if past is None else past["recurrence"].to(wide)

        def run(start: int, state: Tensor, along: Sequence[Tensor], across: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            (gate, u), (rate, *gates) = along, across
            real = None if lengths is None else (lengths - start).clamp(0, u.shape[1])
            log_decay = _blocks(u, *gates[:2]).to(wide).sigmoid() * rate
            room: Tensor = _Room.apply(log_decay)
            if start == 0:
                whole = (begun == 0).unsqueeze(1) & (torch.arange(u.shape[1], device=u.device) == 0)
                room = room.masked_fill(whole.unsqueeze(-1), 1)
            gated = room * _blocks(u, *gates[2:]).to(wide).sigmoid() * u.to(wide)
            h, last = linear_recurrence(log_decay, gated, state=state, lengths=real)
            return nn.functional.gelu(gate, approximate="tanh") * h.to(gate.dtype), last

        gates = (self.decay_gate.weight, self.decay_gate.bias, self.input_gate.weight, self.input_gate.bias)
        size = max(SEGMENT // max(batch * self.width, 1), FEWEST)
        rate = -POWER * nn.functional.softplus(self.decay.to(wide))
        y, last = by_segments(run, size, state, (gate, u), (rate, *gates))
        del gate, value, u  # without a gradient nobody else has them
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
        return _blocks(x, self.weight, self.bias)


def _blocks(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x A + b, of the parameters of `BlockDiagonal`."""
    blocks, inner, _ = weight.shape
    rows = x.reshape(-1, blocks, inner).transpose(0, 1)
    out = torch.baddbmm(bias.unsqueeze(1), rows, weight)
    return out.transpose(0, 1).reshape(x.shape)


class _Room(torch.autograd.Function):
    """sqrt(1 - a^2) from log a, where the root has a slope of at most STEEPEST."""

    @staticmethod
    def forward(ctx: Any, log_decay: Tensor) -> Tensor:
        root = (2 * log_decay).expm1_().neg_().sqrt_()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        return grads[0] * (root * root - 1) / root.clamp_min(0.5 / STEEPEST)
