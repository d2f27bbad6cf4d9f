"""RWKV-4's time mixing: a weighted average whose weights fade by channel, behind a gate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from mercer.errors import InvalidArgument
from mercer.mixers.base import Mixer
from mercer.mixers.rwkv_start import check_depth, depth, orthogonal, ramp, slope, zigzag
from mercer.mixers.steps import decay_of, rates
from mercer.mixers.token_shift import token_shift
from mercer.mixers.wkv import wkv
from mercer.nn.product import as_vectors, product


class RWKV4(Mixer):
    """Time mixing of RWKV-4:

        k_t = W_k (m_k x_t + (1 - m_k) x_{t-1}),   v_t and r_t likewise with m_v and m_r,
        y_t = W_o (sigmoid(r_t) * wkv(k, v)_t)

    where wkv is `mercer.mixers.wkv.wkv` with log-decays -exp(decay) and the bonus u of the token itself, both a number
    for each channel.

    dim: channels of x and y. width: channels of k, v and r; None: dim. layer, layers: which of how many, for the
    initial values: decays from exp(-5) to exp(3) over the channels, more of them slow in later layers; bonuses of
    log 0.3 and half a unit around it; W_k, W_r and W_o are 0.

    State: the sums num and den, relative to exp(peak), each [B, width] in float32, and the last token [B, dim].

    Source: Peng et al. 2023, arXiv 2305.13048.
    """

    undecayed: ClassVar[tuple[str, ...]] = ("decay", "bonus")

    def __init__(self, dim: int, *, width: int | None = None, layer: int = 0, layers: int = 1) -> None:
        super().__init__()
        self.dim, self.width = dim, dim if width is None else width
        if dim < 1 or self.width < 1:
            raise InvalidArgument(f"rwkv4 needs dim and width of at least 1, got {dim} and {self.width}")
        check_depth("rwkv4", layer, layers)
        self.layer, self.layers = layer, layers
        self.mix_key, self.mix_value, self.mix_receptance = (nn.Parameter(torch.empty(dim)) for _ in range(3))
        self.decay, self.bonus = (nn.Parameter(torch.empty(self.width)) for _ in range(2))
        self.key, self.value, self.receptance = (nn.Linear(dim, self.width, bias=False) for _ in range(3))
        self.output = nn.Linear(self.width, dim, bias=False)
        self.start()

    @torch.no_grad()
    def start(self, generator: torch.Generator | None = None) -> None:
        far, back = depth(self.layer, self.layers)
        self.mix_key.copy_(ramp(self.dim) ** back)
        self.mix_value.copy_(ramp(self.dim) ** back + 0.3 * far)
        self.mix_receptance.copy_(ramp(self.dim) ** (0.5 * back))
        self.decay.copy_(-5 + 8 * slope(self.width) ** (0.7 + 1.3 * far))
        self.bonus.copy_(math.log(0.3) + zigzag(self.width, 0.5))
        orthogonal(self.value.weight, 1.0, generator)
        for layer in (self.key, self.receptance, self.output):
            layer.weight.zero_()

    @property
    def kind(self) -> str:
        return f"rwkv4({self.dim}, width={self.width})"

    def mix(
        self, x: Tensor, lengths: Tensor | None, past: Mapping[str, Tensor] | None, *carried: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        wide = torch.promote_types(x.dtype, torch.float32)
        before, last = token_shift(x, lengths, None if past is None else past["last"])
        before, now = as_vectors(before, x)
        key, value, receptance = (
            product(layer, torch.lerp(before, now, share.to(x.dtype)))
            for layer, share in (
                (self.key, self.mix_key),
                (self.value, self.mix_value),
                (self.receptance, self.mix_receptance),
            )
        )
        tokens = (*x.shape[:2], self.width)
        average, (num, den, peak) = wkv(
            key.view(tokens),
            value.to(wide).view(tokens),
            log_decay=decay_of(rates(self.decay, wide)),
            bonus=self.bonus,
            state=None if past is None else (past["num"], past["den"], past["peak"]),
            lengths=lengths,
        )
        y = product(self.output, (torch.sigmoid(receptance) * average.view(receptance.shape)).to(x.dtype))
        return y.view(x.shape), {"last": last, "num": num, "den": den, "peak": peak}
