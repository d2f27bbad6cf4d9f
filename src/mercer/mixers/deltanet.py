"""DeltaNet: a state that is corrected towards each value instead of added to."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mercer.mixers.base import Mixer
from mercer.mixers.head_norm import HeadNorm
from mercer.mixers.head_sizes import key_and_value
from mercer.mixers.matrix_recurrence import matrix_recurrence
from mercer.mixers.short_convolution import ShortConvolution

UNIT_EPS = 1e-6
"""Added to the squared length of a query or key before it is divided by, so that a zero one stays zero."""


class DeltaNet(Mixer):
    """Linear attention with the delta rule: for each head, with q, k and v linear in x, each through a short
    convolution and silu, q and k then of length 1,

        S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T,   o_t = K^(-1/2) S_t^T q_t,   beta_t = sigmoid(w_b x_t),
        y_t = W_o norm(o_t)

    norm: RMS over each head, with one weight for all heads.

    dim: channels of x and y. heads: how many. key_expand, value_expand: channels of all q (and k), and of all v, in
    multiples of dim; each must give heads of whole size. width: of the convolutions. twice: beta = 2 sigmoid(w_b x).
    gate: y_t = W_o (silu(W_g x_t) * norm(o_t)).

    State: the sums S [B, heads, K, V], and the last width - 1 inputs of the convolutions.

    Source: Yang et al. 2024, arXiv 2406.06484; Schlag et al. 2021, arXiv 2102.11174.
    """

    name = "deltanet"

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        key_expand: float = 1.0,
        value_expand: float = 1.0,
        width: int = 4,
        twice: bool = False,
        gate: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.dim, self.heads, self.twice = dim, heads, twice
        self.key_dim, self.value_dim = key_and_value(self.name, dim, heads, key_expand, value_expand)
        keys, values = heads * self.key_dim, heads * self.value_dim
        self.qkv = nn.Linear(dim, 2 * keys + values, bias=False)
        self.convolution = ShortConvolution(2 * keys + values, width, bias=False)
        self.beta = nn.Linear(dim, heads, bias=False)
        self.gate = nn.Linear(dim, values, bias=False) if gate else None
        self.norm = HeadNorm(heads, self.value_dim, eps=norm_eps, shared=True)
        self.output = nn.Linear(values, dim, bias=False)

    def start(self, generator: torch.Generator | None = None) -> None:
        """Nothing: the linear layers have no start of their own, and the convolution has its own."""

    @property
    def kind(self) -> str:
        sizes = f"key={self.key_dim}, value={self.value_dim}, width={self.convolution.width}"
        return f"{self.name}({self.dim}, heads={self.heads}, {sizes})"

    def mix(
        self, x: Tensor, lengths: Tensor | None, past: Mapping[str, Tensor] | None, *carried: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        wide = torch.promote_types(x.dtype, torch.float32)
        keys, values = self.heads * self.key_dim, self.heads * self.value_dim
        convolved, tail = self.convolution(self.qkv(x), lengths, None if past is None else past["tail"])
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in convolved.to(wide).split((keys, keys, values), -1)
        )
        query, key = _unit(query), _unit(key)
        beta = torch.sigmoid(self.beta(x).to(wide)).transpose(1, 2)
        if self.twice:
            beta = 2 * beta
        out, sums = matrix_recurrence(
            query,
            key,
            value,
            log_decay=self._log_decay(x),
            delta=beta,
            scale=self.key_dim**-0.5,
            state=None if past is None else past["sums"].to(wide),
            lengths=lengths,
        )
        normed = self.norm(out.transpose(1, 2).flatten(2))
        if self.gate is not None:
            normed = nn.functional.silu(self.gate(x).to(wide)) * normed
        return self.output(normed.to(x.dtype)), {"sums": sums, "tail": tail}

    def _log_decay(self, x: Tensor) -> Tensor | None:
        """[B, H, L], what the state fades by before a token corrects it; None: it does not."""
        return None


def _unit(x: Tensor) -> Tensor:
    """x / |x| over the last dimension."""
    return x * (x.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt()
