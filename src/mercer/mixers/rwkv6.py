"""RWKV-6's time mixing: RWKV-5 whose decays, and what is mixed of two tokens, depend on the data."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from mercer.errors import InvalidArgument
from mercer.mixers.low_rank import LowRank
from mercer.mixers.rwkv5 import RWKV5
from mercer.mixers.rwkv_start import depth, ramp
from mercer.mixers.steps import decay_of, rates

READ = 5
"""What is read of a token: its decay, key, value, receptance and gate."""


class RWKV6(RWKV5):
    """Time mixing of RWKV-6 (Finch): `RWKV5` with, for each of d, k, v, r and g,

        x^i_t = x_t + (x_{t-1} - x_t) * (m_i + B_i tanh(A_i z_t)),   z_t = x_t + (x_{t-1} - x_t) * m_z,
        w_t = exp(-exp(decay + D' tanh(D x^d_t))),   S_t = diag(w_t) S_{t-1} + k_t v_t^T

    mix_rank, decay_rank: channels inside the maps of the mixing (32 in the paper's smaller models) and of the decay
    (64). The rest as for `RWKV5`. The maps start as nearly nothing: A_i and D as 0, B_i and D' within 0.01.

    Source: Peng et al. 2024, arXiv 2404.05892.
    """

    undecayed: ClassVar[tuple[str, ...]] = ("decay", "bonus")
    name = "rwkv6"

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        mix_rank: int = 32,
        decay_rank: int = 64,
        norm_eps: float = 64e-5,
        layer: int = 0,
        layers: int = 1,
    ) -> None:
        super().__init__(dim, heads, norm_eps=norm_eps, layer=layer, layers=layers)
        if mix_rank < 1:
            raise InvalidArgument(f"rwkv6 needs a mix_rank of at least 1, got {mix_rank}")
        self.mix_all, self.mix_decay = (nn.Parameter(torch.empty(dim)) for _ in range(2))
        self.mix_down = nn.Linear(dim, READ * mix_rank, bias=False)
        self.mix_up = nn.Parameter(torch.empty(READ, mix_rank, dim))
        self.decay_map = LowRank(dim, decay_rank, dim, activation="tanh", bias=False)
        self.start()

    @torch.no_grad()
    def start(self, generator: torch.Generator | None = None) -> None:
        super().start(generator)
        if not hasattr(self, "decay_map"):  # in the middle of being made
            return
        _, back = depth(self.layer, self.layers)
        for mix in (self.mix_all, self.mix_decay):
            mix.copy_(1 - ramp(self.dim) ** back)
        self.mix_down.weight.zero_()
        self.decay_map.down.weight.zero_()
        for weight in (self.mix_up, self.decay_map.up.weight):
            weight.uniform_(-0.01, 0.01, generator=generator)

    def _read(self, x: Tensor, step: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        inner = torch.tanh(self.mix_down(x + step * self.mix_all.to(x.dtype))).unflatten(-1, (READ, -1))
        moved = torch.einsum("blir,ird->ibld", inner, self.mix_up.to(inner.dtype))
        shares = (self.mix_decay, self.mix_key, self.mix_value, self.mix_receptance, self.mix_gate)
        decay, key, value, receptance, gate = (
            x + step * (share.to(x.dtype) + more) for share, more in zip(shares, moved, strict=True)
        )
        log_rate = self.decay.to(wide).flatten() + self.decay_map(decay).to(wide)
        read = (self.receptance(receptance), self.key(key), self.value(value), self.gate(gate))
        return read, decay_of(rates(log_rate, wide)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
