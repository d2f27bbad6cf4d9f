"""Gated DeltaNet: the delta rule on a state that fades by as much as the data say."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from mercer.mixers.deltanet import DeltaNet
from mercer.mixers.steps import decay_of, draw_log_rate, draw_step_bias, rates


class GatedDeltaNet(DeltaNet):
    """`DeltaNet` with a decay of the whole state before each token, and a gate on the output:

        S_t = alpha_t S_{t-1} + beta_t k_t (v_t - alpha_t S_{t-1}^T k_t)^T,   o_t = K^(-1/2) S_t^T q_t,
        alpha_t = exp(-exp(log_rate) softplus(w_a x_t + step_bias)),
        y_t = W_o (silu(W_g x_t) * norm(o_t))

    with log_rate and step_bias one number a head. Arguments as for `DeltaNet`, with heads half as wide in keys as in
    values.

    At first exp(log_rate) is uniform from 0 to 16 (never 0), and softplus(step_bias) log-uniform from 0.001 to 0.1.

    State: the sums S [B, heads, K, V], and the last width - 1 inputs of the convolutions.

    Source: Yang et al. 2024, arXiv 2412.06464.
    """

    undecayed: ClassVar[tuple[str, ...]] = ("log_rate", "step_bias")
    name = "gated-deltanet"

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        key_expand: float = 0.75,
        value_expand: float = 1.5,
        width: int = 4,
        twice: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(
            dim,
            heads,
            key_expand=key_expand,
            value_expand=value_expand,
            width=width,
            twice=twice,
            gate=True,
            norm_eps=norm_eps,
        )
        self.alpha = nn.Linear(dim, heads, bias=False)
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.step_bias = nn.Parameter(torch.empty(heads))
        self.start()

    @torch.no_grad()
    def start(self, generator: torch.Generator | None = None) -> None:
        """Rates and time steps as in the reference."""
        draw_log_rate(self.log_rate, 1e-3, 16.0, generator)
        draw_step_bias(self.step_bias, generator)

    def _log_decay(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        step = nn.functional.softplus(self.alpha(x).to(wide) + self.step_bias.to(wide))
        return decay_of(rates(self.log_rate, wide) * step).transpose(1, 2)
