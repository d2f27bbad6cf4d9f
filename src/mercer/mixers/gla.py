"""Gated linear attention: a decay from the data for each channel of the keys."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mercer.mixers.base import Mixer
from mercer.mixers.head_norm import HeadNorm
from mercer.mixers.head_sizes import key_and_value
from mercer.mixers.matrix_recurrence import matrix_recurrence


class GatedLinearAttention(Mixer):
    """With q, k, v and a gate linear in x, for each head

        S_t = diag(a_t) S_{t-1} + k_t v_t^T,   o_t = K^(-1/2) S_t^T q_t,
        log a_t = logsigmoid(W_2 W_1 x_t + b) / temperature,
        y_t = W_o (silu(W_g x_t) * norm(o_t))

    norm: RMS over each head, with one weight for all heads.

    dim: channels of x and y. heads: how many. key_expand, value_expand: channels of all q (and k), and of all v, in
    multiples of dim; each must give heads of whole size. rank: of W_2 W_1. temperature: above 1 decays start near 1.

    State: the sums S [B, heads, K, V].

    Source: Yang et al. 2023, arXiv 2312.06635.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        key_expand: float = 0.5,
        value_expand: float = 1.0,
        rank: int = 16,
        temperature: float = 16.0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.dim, self.heads, self.temperature = dim, heads, temperature
        self.key_dim, self.value_dim = key_and_value("gla", dim, heads, key_expand, value_expand)
        keys, values = heads * self.key_dim, heads * self.value_dim
        self.qkv = nn.Linear(dim, 2 * keys + values, bias=False)
        self.gate = nn.Linear(dim, values, bias=False)
        self.decay_in = nn.Linear(dim, rank, bias=False)
        self.decay_out = nn.Linear(rank, keys)
        self.norm = HeadNorm(heads, self.value_dim, eps=norm_eps, shared=True)
        self.output = nn.Linear(values, dim, bias=False)

    def start(self, generator: torch.Generator | None = None) -> None:
        """Nothing: it is all linear layers, which have no start of their own."""

    @property
    def kind(self) -> str:
        return f"gla({self.dim}, heads={self.heads}, key={self.key_dim}, value={self.value_dim})"

    def mix(
        self, x: Tensor, lengths: Tensor | None, past: Mapping[str, Tensor] | None, *carried: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        wide = torch.promote_types(x.dtype, torch.float32)
        keys, values = self.heads * self.key_dim, self.heads * self.value_dim
        logits = self.decay_out(self.decay_in(x)).to(wide)
        log_decay = nn.functional.logsigmoid(logits) / self.temperature
        query, key, value = self.qkv(x).to(wide).split((keys, keys, values), -1)
        query, key, value, log_decay = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (query, key, value, log_decay)
        )
        out, sums = matrix_recurrence(
            query,
            key,
            value,
            log_decay=log_decay,
            scale=self.key_dim**-0.5,
            state=None if past is None else past["sums"].to(wide),
            lengths=lengths,
        )
        normed = self.norm(out.transpose(1, 2).flatten(2))
        gated = nn.functional.silu(self.gate(x).to(wide)) * normed
        return self.output(gated.to(x.dtype)), {"sums": sums}
