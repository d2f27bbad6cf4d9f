"""RWKV-5's time mixing: heads of matrix states that fade by channel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from mercer.mixers.base import Mixer
from mercer.mixers.head_norm import HeadNorm
from mercer.mixers.head_sizes import head_size
from mercer.mixers.matrix_recurrence import matrix_recurrence
from mercer.mixers.rwkv_start import check_depth, depth, orthogonal, ramp, slope, zigzag
from mercer.mixers.steps import decay_of, rates
from mercer.mixers.token_shift import token_shift


class RWKV5(Mixer):
    """Time mixing of RWKV-5 (Eagle): with r, k, v and g each linear in x_t + (x_{t-1} - x_t) * m for an m of its own,
    in heads,

        o_t = (S_{t-1} + diag(u) k_t v_t^T)^T r_t,   S_t = diag(w) S_{t-1} + k_t v_t^T,   w = exp(-exp(decay)),
        y_t = W_o (silu(g_t) * norm(o_t))

    norm: layer norm over each head alone. u and decay are a number for each key channel of each head.

    dim: channels of x, y, r, k, v and g. heads: a divisor of dim; the paper has dim / 64. norm_eps: of the norm; the
    published models divide o by 8 before one of 1e-5, which is 64e-5. layer, layers: which of how many, for the
    initial values: decays from exp(-6) to exp(-1) over the channels, more of them slow in later layers; W_o is 0.

    State: the sums S [B, heads, K, K] in float32, and the last token [B, dim].

    Source: Peng et al. 2024, arXiv 2404.05892.
    """

    undecayed: ClassVar[tuple[str, ...]] = ("decay", "bonus")
    name = "rwkv5"

    def __init__(self, dim: int, heads: int, *, norm_eps: float = 64e-5, layer: int = 0, layers: int = 1) -> None:
        super().__init__()
        self.dim, self.heads, self.head_dim = dim, heads, head_size(self.name, "key", dim, 1.0, heads)
        check_depth(self.name, layer, layers)
        self.layer, self.layers = layer, layers
        self.mix_receptance, self.mix_key, self.mix_value, self.mix_gate = (
            nn.Parameter(torch.empty(dim)) for _ in range(4)
        )
        self.decay, self.bonus = (nn.Parameter(torch.empty(heads, self.head_dim)) for _ in range(2))
        self.receptance, self.key, self.value, self.gate, self.output = (
            nn.Linear(dim, dim, bias=False) for _ in range(5)
        )
        self.norm = HeadNorm(heads, self.head_dim, kind="layer", eps=norm_eps, bias=True)
        self.start()

    @torch.no_grad()
    def start(self, generator: torch.Generator | None = None) -> None:
        far, back = depth(self.layer, self.layers)
        own = ramp(self.dim) ** back
        self.mix_key.copy_(1 - own)
        self.mix_value.copy_(1 - own - 0.3 * far)
        for mix in (self.mix_receptance, self.mix_gate):
            mix.copy_(1 - ramp(self.dim) ** (0.5 * back))
        self.decay.copy_((-6 + 5 * slope(self.dim) ** (0.7 + 1.3 * far)).view_as(self.decay))
        self.bonus.copy_((far * (1 - slope(self.dim)) + zigzag(self.dim, 0.1)).view_as(self.bonus))
        for layer, gain in ((self.receptance, 1.0), (self.key, 0.1), (self.value, 1.0), (self.gate, 0.1)):
            orthogonal(layer.weight, gain, generator)
        self.output.weight.zero_()
        self.norm.weight.fill_(((1 + self.layer) / self.layers) ** 0.7)

    @property
    def kind(self) -> str:
        return f"{self.name}({self.dim}, heads={self.heads})"

    def mix(
        self, x: Tensor, lengths: Tensor | None, past: Mapping[str, Tensor] | None, *carried: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        wide = torch.promote_types(x.dtype, torch.float32)
        before, last = token_shift(x, lengths, None if past is None else past["last"])
        (receptance, key, value, gate), log_decay = self._read(x, before - x)
        query, key, value = (
            part.to(wide).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (receptance, key, value)
        )
        out, sums = matrix_recurrence(
            query,
            key,
            value,
            log_decay=log_decay,
            bonus=self.bonus,
            state=None if past is None else past["sums"].to(wide),
            lengths=lengths,
        )
        normed = self.norm(out.transpose(1, 2).flatten(2))
        y = self.output((nn.functional.silu(gate.to(wide)) * normed).to(x.dtype))
        return y, {"last": last, "sums": sums}

    def _read(self, x: Tensor, step: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """r, k, v and g [B, L, dim] and the log-decay. step: from each token to the one before."""
        wide = torch.promote_types(x.dtype, torch.float32)
        receptance, key, value, gate = (
            layer(x + step * mix.to(x.dtype))
            for layer, mix in (
                (self.receptance, self.mix_receptance),
                (self.key, self.mix_key),
                (self.value, self.mix_value),
                (self.gate, self.mix_gate),
            )
        )
        return (receptance, key, value, gate), decay_of(rates(self.decay, wide))
