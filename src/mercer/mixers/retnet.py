"""Retention: linear attention with a fixed decay for each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from mercer.mixers.base import Mixer
from mercer.mixers.decayed_sum import decayed_sum
from mercer.mixers.head_norm import HeadNorm
from mercer.mixers.head_sizes import turned_key_and_value
from mercer.nn.rotary import Rotary, Turns


class Retention(Mixer):
    """Multi-scale retention,

        S_t = g_h S_{t-1} + (turn_t k_t) v_t^T,   o_t = K^(-1/2) S_t^T turn_t q_t,   g_h = 1 - 2^(-5 - h),
        y_t = W_o (silu(W_g x_t) * norm(o_t))

    with q, k and v linear in x, h = 0, 1, ... the head, turn_t rotary positions, and norm over each head alone.

    dim: channels of x and y. heads: a divisor of dim, with dim / heads an even number. value_expand: channels of v and
    o in multiples of dim; value_expand dim / heads must be a whole number. norm: "layer" (the paper's group norm, with
    weights and biases) or "rms" (weights alone). rope_base: of the rates of rotary positions.

    The state S [B, heads, K, V] is kept as seen from the token that comes next: turning is relative, so that no
    position has to be known, and none grows.

    Source: Sun et al. 2023, arXiv 2307.08621.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        value_expand: float = 2.0,
        norm: Literal["layer", "rms"] = "layer",
        norm_eps: float = 1e-5,
        rope_base: float = 10000.0,
    ) -> None:
        super().__init__()
        self.key_dim, self.value_dim = turned_key_and_value(dim, heads, value_expand)
        self.dim, self.heads, self.rope_base = dim, heads, rope_base
        self.rotary = Rotary(self.key_dim, base=rope_base)
        self.qkv = nn.Linear(dim, 2 * dim + heads * self.value_dim, bias=False)
        self.gate = nn.Linear(dim, heads * self.value_dim, bias=False)
        self.norm = HeadNorm(heads, self.value_dim, kind=norm, eps=norm_eps, bias=norm == "layer")
        self.output = nn.Linear(heads * self.value_dim, dim, bias=False)

    def start(self, generator: torch.Generator | None = None) -> None:
        """Nothing: the decays are fixed, and the linear layers have no start of their own."""

    @property
    def kind(self) -> str:
        return f"retnet({self.dim}, heads={self.heads}, value={self.value_dim}, base={self.rope_base:g})"

    def mix(
        self, x: Tensor, lengths: Tensor | None, past: Mapping[str, Tensor] | None, *carried: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        batch, length, _ = x.shape
        wide = torch.promote_types(x.dtype, torch.float32)
        parts = self.qkv(x).to(wide).split((self.dim, self.dim, self.heads * self.value_dim), -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)) for part in parts)
        turns = self.rotary.first_turns(length, heads=1, dtype=wide, device=x.device)
        query, key = (_turned(part, turns, 2) for part in (query, key))
        out, sums = decayed_sum(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            self._log_rates(x.device),
            lengths=lengths,
            past=None if past is None else past["sums"].to(wide),
            scale=self.key_dim**-0.5,
        )
        steps = torch.full((batch,), length, device=x.device) if lengths is None else lengths
        normed = self.norm(out.transpose(1, 2).flatten(2))
        gate = nn.functional.silu(self.gate(x).to(wide))
        # Where the next token stands is 0 for the next call.
        back = self.rotary.turns(-steps.unsqueeze(1), dtype=wide)
        return self.output((gate * normed).to(x.dtype)), {"sums": _turned(sums, back, 3)}

    def _log_rates(self, device: torch.device) -> Tensor:
        """log(1 - 2^(-5 - h)), [heads] in float64."""
        return torch.log1p(-(2.0 ** -(5 + torch.arange(self.heads, dtype=torch.float64)))).to(device)


def _turned(x: Tensor, turns: Turns, at: int) -> Tensor:
    """Queries or keys [B, L, H, K] turned by their positions with at=2, or S [B, H, K, V] by its row's with at=3."""
    half = x.shape[-1 if at == 2 else 2] // 2
    cos, sin = turns.cos[..., :half].unsqueeze(at), turns.behind[..., half:].unsqueeze(at)
    first, second = x.chunk(2, -1 if at == 2 else 2)
    turned = (torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin))
    return torch.cat(turned, -1 if at == 2 else 2)
