"""A short causal convolution of every channel with itself, and its tail as a state."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from mercer.backends import short_convolution as fused
from mercer.errors import InvalidArgument
from mercer.nn.activations import ACTIVATIONS
from mercer.nn.start import HasStart


class ShortConvolution(HasStart):
    """y_t[c] = f(bias[c] + sum_i weight[c, i] x_{t-width+1+i}[c]) for i in 0..width-1, inputs before the first being 0.

    channels: C. width: how many inputs an output looks at, the newest last; at least 1. bias: whether there is one;
    default True. activation: f, "silu" or None for none; default "silu".

    `weight` is [C, width] and `bias` [C]. Both start uniform in +-1 / sqrt(width), as torch's Conv1d does.

    Sums are float32 at least, and so is the tail; outputs have the dtype of x.

    Source: Gu & Dao 2023, arXiv 2312.00752, which has it before a state-space model; Conv1d with groups=C otherwise.
    """

    def __init__(
        self, channels: int, width: int, *, bias: bool = True, activation: Literal["silu"] | None = "silu"
    ) -> None:
        super().__init__()
        for name, count in (("channels", channels), ("width", width)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidArgument(f"a short convolution needs {name} of at least 1, got {count!r}")
        if activation not in ("silu", None):
            raise InvalidArgument(f"a short convolution's activation must be 'silu' or None, got {activation!r}")
        self.channels, self.width, self.activation = channels, width, activation
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.start()

    @torch.no_grad()
    def start(self, generator: torch.Generator | None = None) -> None:
        """Draw the weight, then the bias."""
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                parameter.uniform_(-(self.width**-0.5), self.width**-0.5, generator=generator)

    def forward(self, x: Tensor, lengths: Tensor | None = None, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x: [B, L, C]. lengths: [B] integers, how many tokens of each row are real, the first ones; None for all.
        past: the tail that an earlier call gave, [B, width - 1, C]; None where nothing went before.

        Returns y [B, L, C], 0 behind a row's length, and the last width - 1 real inputs of each row, older ones
        first, [B, width - 1, C] in float32 (float64 for float64 inputs); a row without tokens keeps its tail.
        """
        if (
            lengths is not None
            and x.shape[0]
            and not torch.compiler.is_compiling()  # values are not looked at there
            and not 0 <= int(lengths.min()) <= int(lengths.max()) <= x.shape[1]
        ):
            raise InvalidArgument(f"lengths must be between 0 and {x.shape[1]}, got {lengths.tolist()}")
        if x.numel() and x.numel() >= fused.LEAST and fused.serves(x, self.weight, self.bias, past):
            return fused.short_convolution(x, self.weight, self.bias, self.activation == "silu", past, lengths)
        before = self.width - 1
        wide = torch.promote_types(x.dtype, torch.float32)
        if past is None:
            past = x.new_zeros(x.shape[0], before, self.channels, dtype=wide)
        padded = torch.cat((past.to(wide), x.to(wide)), 1)
        weight = self.weight.to(wide)
        out = padded[:, before:] * weight[:, before]
        for i in range(before):
            out = torch.addcmul(out, padded[:, i : i + x.shape[1]], weight[:, i])
        if self.bias is not None:
            out = out + self.bias.to(wide)
        if self.activation is not None:
            out = ACTIVATIONS[self.activation].apply(out)
        if lengths is None:
            return out.to(x.dtype), padded[:, x.shape[1] :]
        out = out.masked_fill((torch.arange(x.shape[1], device=x.device) >= lengths[:, None])[..., None], 0)
        last = lengths[:, None] + torch.arange(before, device=x.device)
        return out.to(x.dtype), padded.gather(1, last[..., None].expand(-1, -1, self.channels))

    def extra_repr(self) -> str:
        return f"{self.channels}, width={self.width}, bias={self.bias is not None}, activation={self.activation!r}"
