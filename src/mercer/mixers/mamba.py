"""Mamba: a state-space model whose steps, inputs and outputs are chosen by the token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from mercer.errors import InvalidArgument
from mercer.mixers.base import Mixer
from mercer.mixers.head_sizes import mamba_inner
from mercer.mixers.selective_scan import selective_scan
from mercer.mixers.short_convolution import ShortConvolution
from mercer.mixers.steps import draw_step_bias, rates
from mercer.nn.experts import ExpertLinear
from mercer.nn.norms import RMSNorm


class Mamba(Mixer):
    """A selective state-space model of every channel alone,

        [x | z] = W_in u,   x = silu(conv(x)),   [r | B | C] = W_select x,   dt = softplus(W_step r + b_step),
        h_t[n] = exp(-dt_t exp(log_rate[n])) h_{t-1}[n] + dt_t x_t B_t[n],   o_t = sum_n C_t[n] h_t[n] + skip x_t,
        y = W_out (o * silu(z))

    with N numbers h, N rates and a skip for each of `inner` channels, and B and C for all of them together.

    dim: channels of u and y. state: N. inner: channels of x and z; default expand dim. rank: numbers r that the steps
    of all channels are made of; default dim / 16, rounded up. width: of the convolution. bias: in W_in and W_out;
    convolution_bias: default True.

    heads: with more than one, each has its own share of the channels and its own W_select, and r, B and C of its own
    (Zamba).

    inner_norms: RMS norms of r, B and C, "learned" with a weight for each number (Jamba) or "plain" without (Falcon
    Mamba), with norm_eps; default none.

    At first exp(log_rate[n]) is n + 1 for n from 0, skip 1, softplus(b_step) log-uniform from 0.001 to 0.1, and W_step
    uniform in +-rank^(-1/2).

    State: the numbers h [B, N, inner], and the last width - 1 inputs of the convolution.

    Source: Gu & Dao 2023, arXiv 2312.00752; Lieber et al. 2024, arXiv 2403.19887, and Zuo et al. 2024, arXiv
    2410.05355, for the norms; Glorioso et al. 2024, arXiv 2405.16712, for the heads.
    """

    undecayed: ClassVar[tuple[str, ...]] = ("log_rate", "skip")
    unpacked: ClassVar[tuple[str, ...]] = ("select", "step")

    def __init__(
        self,
        dim: int,
        *,
        state: int = 16,
        expand: int = 2,
        inner: int | None = None,
        rank: int | None = None,
        heads: int = 1,
        width: int = 4,
        bias: bool = False,
        convolution_bias: bool = True,
        inner_norms: Literal["learned", "plain"] | None = None,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        inner = mamba_inner(dim, expand, inner, heads)
        rank = math.ceil(dim / 16) if rank is None else rank
        if inner_norms not in (None, "learned", "plain"):
            raise InvalidArgument(f"inner_norms must be 'learned', 'plain' or None, got {inner_norms!r}")
        self.dim, self.inner, self.state, self.rank, self.heads = dim, inner, state, rank, heads
        self.inner_norms, self.norm_eps = inner_norms, norm_eps
        self.input = nn.Linear(dim, 2 * inner, bias=bias)
        self.convolution = ShortConvolution(inner, width, bias=convolution_bias)
        chosen = rank + 2 * state
        self.select: nn.Linear | ExpertLinear = (
            nn.Linear(inner, chosen, bias=False) if heads == 1 else ExpertLinear(heads, inner // heads, chosen)
        )
        self.step = nn.Linear(rank, inner)
        self.log_rate = nn.Parameter(torch.empty(inner, state))
        self.skip = nn.Parameter(torch.empty(inner))
        learned = inner_norms == "learned"
        self.step_norm = RMSNorm(rank, eps=norm_eps) if learned else None
        self.write_norm = RMSNorm(state, eps=norm_eps) if learned else None
        self.read_norm = RMSNorm(state, eps=norm_eps) if learned else None
        self.output = nn.Linear(inner, dim, bias=bias)
        self.start()

    @torch.no_grad()
    def start(self, generator: torch.Generator | None = None) -> None:
        """Rates and time steps as in the paper."""
        self.log_rate.copy_(torch.arange(1, self.state + 1, dtype=torch.float32).log().expand(self.inner, -1))
        self.skip.fill_(1.0)
        self.step.weight.uniform_(-(self.rank**-0.5), self.rank**-0.5, generator=generator)
        draw_step_bias(self.step.bias, generator)

    @property
    def kind(self) -> str:
        heads = "" if self.heads == 1 else f", heads={self.heads}"
        return f"mamba({self.dim}, state={self.state}, inner={self.inner}, width={self.convolution.width}{heads})"

    def mix(
        self, x: Tensor, lengths: Tensor | None, past: Mapping[str, Tensor] | None, *carried: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mixed, after = self._mixed(x, lengths, past)
        return self.output(mixed), after

    def _mixed(
        self, x: Tensor, lengths: Tensor | None, past: Mapping[str, Tensor] | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What W_out is given, and the parts of the state."""
        inputs, gate = self.input(x).chunk(2, -1)
        convolved, tail = self.convolution(inputs, lengths, None if past is None else past["tail"])
        before = None if past is None else past["sums"]
        if isinstance(self.select, nn.Linear):
            mixed, sums = self._scan(slice(None), self.select.weight, convolved, gate, lengths, before)
        else:
            size = self.inner // self.heads
            scanned = [
                self._scan(slice(h * size, (h + 1) * size), weight, convolved, gate, lengths, before)
                for h, weight in enumerate(self.select.weight)
            ]
            mixed, sums = (torch.cat(parts, -1) for parts in zip(*scanned, strict=True))
        return mixed, {"sums": sums, "tail": tail}

    def _scan(
        self, own: slice, select: Tensor, x: Tensor, gate: Tensor, lengths: Tensor | None, sums: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What comes out of the channels `own`, and their numbers h. select: W_select of these."""
        x = x[..., own]
        selected = nn.functional.linear(x, select)
        step, write, read = selected.split((self.rank, self.state, self.state), -1)
        if self.inner_norms == "plain":
            step, write, read = (
                nn.functional.rms_norm(v, v.shape[-1:], eps=self.norm_eps) for v in (step, write, read)
            )
        elif self.step_norm is not None and self.write_norm is not None and self.read_norm is not None:
            step, write, read = self.step_norm(step), self.write_norm(write), self.read_norm(read)
        wide = torch.promote_types(x.dtype, torch.float32)
        return selective_scan(
            x,
            step,
            -rates(self.log_rate[own], wide),
            write,
            read,
            skip=self.skip[own],
            gate=gate[..., own],
            bias=self.step.bias[own],
            softplus=True,
            expand=self.step.weight[own],
            state=None if sums is None else sums[..., own],
            lengths=lengths,
        )
