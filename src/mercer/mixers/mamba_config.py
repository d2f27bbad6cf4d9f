"""The options of Mamba."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from mercer.mixers.head_sizes import mamba_inner
from mercer.mixers.mixer_config import MixerConfig, Positive

if TYPE_CHECKING:
    from mercer.mixers.mamba import Mamba


class MambaConfig(MixerConfig):
    """Mamba (Gu & Dao 2023, arXiv 2312.00752): see `mercer.mixers.mamba.Mamba`."""

    state: Positive = 16
    """Numbers that each channel remembers, N."""
    expand: Positive = 2
    """Channels inside, in multiples of the model's."""
    inner: Positive | None = None
    """Channels inside, in place of `expand`."""
    rank: Positive | None = None
    """Numbers that the time steps of all channels are made of; None: a sixteenth of the model's channels, rounded
    up."""
    heads: Positive = 1
    """Shares of the channels with a choice of their own, as in Zamba; the paper has none."""
    width: Positive = 4
    """Of the short convolution."""
    bias: bool = False
    """Biases in the first and the last linear layer."""
    convolution_bias: bool = True
    inner_norms: Literal["learned", "plain"] | None = None
    """RMS norms of what steps are made of, of B and of C: with weights, without, or none."""
    norm_eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6

    def check(self, dim: int, heads: int) -> None:
        mamba_inner(dim, self.expand, self.inner, self.heads)

    def build(self, dim: int, heads: int, *, layer: int, layers: int) -> Mamba:
        from mercer.mixers.mamba import Mamba

        return Mamba(
            dim,
            state=self.state,
            expand=self.expand,
            inner=self.inner,
            rank=self.rank,
            heads=self.heads,
            width=self.width,
            bias=self.bias,
            convolution_bias=self.convolution_bias,
            inner_norms=self.inner_norms,
            norm_eps=self.norm_eps,
        )
