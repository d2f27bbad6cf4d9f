"""RWKV's channel mixing: a feed-forward that also sees the token before, and so has a state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mercer.errors import InvalidArgument
from mercer.mixers.base import Mixer
from mercer.mixers.rwkv_start import check_depth, depth, orthogonal, ramp
from mercer.mixers.token_shift import token_shift
from mercer.nn.product import as_vectors, product


class ChannelMixing(Mixer):
    """The feed-forward of RWKV-4, and with a smaller `hidden` of RWKV-5 and 6:

        k = m_k x_t + (1 - m_k) x_{t-1},   r = m_r x_t + (1 - m_r) x_{t-1},   y_t = sigmoid(W_r r) * W_v relu(W_k k)^2

    dim: channels of x and y. hidden: channels inside; None: 4 dim. layer, layers: which of how many; the mixing starts
    further in the past in the first. W_r and W_v start as 0.

    The shares m_k and m_r, [dim], are those of the token itself.

    State: the last token [B, dim].

    Source: Peng et al. 2023, arXiv 2305.13048.
    """

    name = "rwkv4-channels"

    def __init__(self, dim: int, hidden: int | None = None, *, layer: int, layers: int) -> None:
        super().__init__()
        self.dim, self.hidden = dim, _hidden(self.name, dim, hidden)
        check_depth(self.name, layer, layers)
        self.layer, self.layers = layer, layers
        self.mix_key, self.mix_receptance = (nn.Parameter(torch.empty(dim)) for _ in range(2))
        self.key = nn.Linear(dim, self.hidden, bias=False)
        self.receptance = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(self.hidden, dim, bias=False)
        self.start()

    @torch.no_grad()
    def start(self, generator: torch.Generator | None = None) -> None:
        _, back = depth(self.layer, self.layers)
        self.mix_key.copy_(ramp(self.dim) ** back)
        self.mix_receptance.copy_(ramp(self.dim) ** back)
        orthogonal(self.key.weight, 1.0, generator)
        self.receptance.weight.zero_()
        self.value.weight.zero_()

    @property
    def kind(self) -> str:
        return f"{self.name}({self.dim})"

    def mix(
        self, x: Tensor, lengths: Tensor | None, past: Mapping[str, Tensor] | None, *carried: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        before, last = token_shift(x, lengths, None if past is None else past["last"])
        before, now = as_vectors(before, x)
        key = product(self.key, torch.lerp(before, now, self.mix_key.to(x.dtype)))
        receptance = product(self.receptance, torch.lerp(before, now, self.mix_receptance.to(x.dtype)))
        y = torch.sigmoid(receptance) * product(self.value, key.relu().square())
        return y.view(x.shape), {"last": last}


class UngatedChannelMixing(Mixer):
    """The feed-forward of RWKV-7, which has no gate:

        y_t = W_v relu(W_k (x_t + (x_{t-1} - x_t) * m))^2

    Arguments and state as of `ChannelMixing`; here the share m, [dim], is that of the token before. W_v starts as 0.

    Source: Peng et al. 2025, arXiv 2503.14456.
    """

    name = "rwkv7-channels"

    def __init__(self, dim: int, hidden: int | None = None, *, layer: int, layers: int) -> None:
        super().__init__()
        self.dim, self.hidden = dim, _hidden(self.name, dim, hidden)
        check_depth(self.name, layer, layers)
        self.layer, self.layers = layer, layers
        self.mix_key = nn.Parameter(torch.empty(dim))
        self.key = nn.Linear(dim, self.hidden, bias=False)
        self.value = nn.Linear(self.hidden, dim, bias=False)
        self.start()

    @torch.no_grad()
    def start(self, generator: torch.Generator | None = None) -> None:
        _, back = depth(self.layer, self.layers)
        self.mix_key.copy_(1 - ramp(self.dim) ** back**4)
        bound = 0.5 * self.dim**-0.5
        self.key.weight.uniform_(-bound, bound, generator=generator)
        self.value.weight.zero_()

    @property
    def kind(self) -> str:
        return f"{self.name}({self.dim})"

    def mix(
        self, x: Tensor, lengths: Tensor | None, past: Mapping[str, Tensor] | None, *carried: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        before, last = token_shift(x, lengths, None if past is None else past["last"])
        before, now = as_vectors(before, x)
        key = product(self.key, torch.lerp(now, before, self.mix_key.to(x.dtype)))
        return product(self.value, key.relu().square()).view(x.shape), {"last": last}


def _hidden(name: str, dim: int, hidden: int | None) -> int:
    hidden = 4 * dim if hidden is None else hidden
    if dim < 1 or hidden < 1:
        raise InvalidArgument(f"{name} needs dim and hidden of at least 1, got {dim} and {hidden}")
    return hidden
