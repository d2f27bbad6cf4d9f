"""Mamba-2: a state-space model that is linear attention with a decay from the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from mercer.mixers.base import Mixer
from mercer.mixers.decayed_sum import decayed_sum
from mercer.mixers.head_norm import HeadNorm
from mercer.mixers.head_sizes import mamba2_sizes, steps_in_order
from mercer.mixers.short_convolution import ShortConvolution
from mercer.mixers.steps import decay_of, draw_log_rate, draw_step_bias, rates


class Mamba2(Mixer):
    """State-space duality,

        [z | xBC | dt] = W_in u,   [x | B | C] = silu(conv(xBC)),   dt = clip(softplus(dt + step_bias)),
        S_t = exp(-dt_t exp(log_rate)) S_{t-1} + B_t (dt_t x_t)^T,   o_t = S_t^T C_t + skip x_t,
        y = W_out norm(o * silu(z))

    with dt, log_rate and skip one number a head: the linear kernel with queries C, keys B and values dt x, `Decay` by
    token, and no normaliser.

    dim: channels of u and y. state: N, of B and C. head_dim: P, of a head of x. expand: x and z have expand dim
    channels, a multiple of P. groups: B and C are shared by heads / groups neighbouring heads. norm_groups: so many
    groups of channels are normed alone; default groups. width: of the convolution. step_least, step_most: what dt is
    clipped to; default 0 and no end. norm_before_gate: norm(o) * silu(z) instead. bias: in W_in and W_out;
    convolution_bias: default True.

    At first exp(log_rate) is uniform from 1 to 16, softplus(step_bias) log-uniform from 0.001 to 0.1, and skip 1.

    State: the sums S [B, heads, N, P], and the last width - 1 inputs of the convolution.

    Source: Dao & Gu 2024, arXiv 2405.21060.
    """

    undecayed: ClassVar[tuple[str, ...]] = ("log_rate", "step_bias", "skip")

    def __init__(
        self,
        dim: int,
        *,
        state: int = 128,
        head_dim: int = 64,
        expand: int = 2,
        groups: int = 1,
        norm_groups: int | None = None,
        width: int = 4,
        step_least: float = 0.0,
        step_most: float | None = None,
        norm_before_gate: bool = False,
        norm_eps: float = 1e-5,
        bias: bool = False,
        convolution_bias: bool = True,
    ) -> None:
        super().__init__()
        steps_in_order(step_least, step_most)
        inner, heads, normed = mamba2_sizes(dim, head_dim, expand, groups, norm_groups)
        self.dim, self.inner, self.heads, self.head_dim = dim, inner, heads, head_dim
        self.state, self.groups, self.norm_before_gate = state, groups, norm_before_gate
        self.step_least, self.step_most = step_least, step_most
        convolved = inner + 2 * groups * state
        self.input = nn.Linear(dim, inner + convolved + heads, bias=bias)
        self.convolution = ShortConvolution(convolved, width, bias=convolution_bias)
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.step_bias = nn.Parameter(torch.empty(heads))
        self.skip = nn.Parameter(torch.empty(heads))
        self.norm = HeadNorm(normed, inner // normed, eps=norm_eps)
        self.output = nn.Linear(inner, dim, bias=bias)
        self.start()

    @torch.no_grad()
    def start(self, generator: torch.Generator | None = None) -> None:
        """Rates and time steps as in the reference."""
        draw_log_rate(self.log_rate, 1.0, 16.0, generator)
        draw_step_bias(self.step_bias, generator)
        self.skip.fill_(1.0)

    @property
    def kind(self) -> str:
        return (
            f"mamba2({self.dim}, state={self.state}, heads={self.heads}, head_dim={self.head_dim}, "
            f"groups={self.groups}, width={self.convolution.width})"
        )

    def mix(
        self, x: Tensor, lengths: Tensor | None, past: Mapping[str, Tensor] | None, *carried: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        wide = torch.promote_types(x.dtype, torch.float32)
        convolved = self.convolution.channels
        gate, convolved, step = self.input(x).split((self.inner, convolved, self.heads), -1)
        convolved, tail = self.convolution(convolved, lengths, None if past is None else past["tail"])
        scanned = self.groups * self.state
        values, keys, queries = convolved.to(wide).split((self.inner, scanned, scanned), -1)
        step = nn.functional.softplus(step.to(wide) + self.step_bias.to(wide)).clamp(self.step_least, self.step_most)
        if lengths is not None:  # the past of a row stays as it is where no token is
            real = torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(1)
            step = step.masked_fill(~real.unsqueeze(-1), 0)
        out, sums = self._scan(values, keys, queries, step, lengths, None if past is None else past["sums"].to(wide))
        gated = nn.functional.silu(gate.to(wide))
        normed = self.norm(out) * gated if self.norm_before_gate else self.norm(out * gated)
        return self.output(normed.to(x.dtype)), {"sums": sums, "tail": tail}

    def _scan(
        self,
        values: Tensor,
        keys: Tensor,
        queries: Tensor,
        step: Tensor,
        lengths: Tensor | None,
        past: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """o [B, L, inner] and S [B, H, N, P]. values: [B, L, inner]; keys, queries: [B, L, groups N]; step: [B, L, H].

        Groups are rows of the batch, so that the heads of a group read the same keys and nothing is copied for them.
        """
        batch, length, _ = values.shape
        groups, share = self.groups, self.heads // self.groups
        heads = values.view(batch, length, groups, share, self.head_dim).permute(0, 2, 3, 1, 4).flatten(0, 1)
        key, query = (
            part.view(batch, length, groups, 1, self.state).permute(0, 2, 3, 1, 4).flatten(0, 1)
            .expand(-1, share, -1, -1)
            for part in (keys, queries)
        )  # fmt: skip
        steps = step.view(batch, length, groups, share).permute(0, 2, 3, 1).flatten(0, 1)
        rate = rates(self.log_rate, step.dtype).view(groups, share, 1).repeat(batch, 1, 1)
        out, sums = decayed_sum(
            query,
            key,
            heads * steps.unsqueeze(-1),
            decay_of(steps * rate),
            lengths=lengths if lengths is None or groups == 1 else lengths.repeat_interleave(groups),
            past=None if past is None else past.reshape(batch * groups, share, self.state, self.head_dim),
        )
        skipped = out + heads * self.skip.to(out.dtype).view(groups, share, 1, 1).repeat(batch, 1, 1, 1)
        joined = skipped.view(batch, groups, share, length, self.head_dim).permute(0, 3, 1, 2, 4).flatten(2)
        return joined, sums.view(batch, self.heads, self.state, self.head_dim)
