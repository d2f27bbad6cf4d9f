"""The options of Mamba-2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator

from mercer.mixers.head_sizes import mamba2_sizes, steps_in_order
from mercer.mixers.mixer_config import MixerConfig, Positive

if TYPE_CHECKING:
    from mercer.mixers.mamba2 import Mamba2


class Mamba2Config(MixerConfig):
    """Mamba-2 (Dao & Gu 2024, arXiv 2405.21060): see `mercer.mixers.mamba2.Mamba2`. It has expand dim / head_dim heads,
    whatever the number of the model's attentions.
    """

    state: Positive = 128
    """Numbers that each channel remembers, N."""
    head_dim: Positive = 64
    """Channels of a head."""
    expand: Positive = 2
    """Channels inside, in multiples of the model's."""
    groups: Positive = 1
    """Groups of heads that share B and C, a divisor of the heads."""
    norm_groups: Positive | None = None
    """Groups of channels that are normed alone; None: as many as `groups`."""
    width: Positive = 4
    """Of the short convolution."""
    step_least: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Least time step dt."""
    step_most: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Largest time step; None: any."""
    norm_before_gate: bool = False
    """Whether the norm comes before the gate, norm(y) * silu(z), or after it, norm(y * silu(z))."""
    norm_eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-5
    bias: bool = False
    """Biases in the two linear layers."""
    convolution_bias: bool = True

    @model_validator(mode="after")
    def _steps_are_in_order(self) -> Self:
        steps_in_order(self.step_least, self.step_most)
        return self

    def check(self, dim: int, heads: int) -> None:
        mamba2_sizes(dim, self.head_dim, self.expand, self.groups, self.norm_groups)

    def build(self, dim: int, heads: int, *, layer: int, layers: int) -> Mamba2:
        from mercer.mixers.mamba2 import Mamba2

        return Mamba2(
            dim,
            state=self.state,
            head_dim=self.head_dim,
            expand=self.expand,
            groups=self.groups,
            norm_groups=self.norm_groups,
            width=self.width,
            step_least=self.step_least,
            step_most=self.step_most,
            norm_before_gate=self.norm_before_gate,
            norm_eps=self.norm_eps,
            bias=self.bias,
            convolution_bias=self.convolution_bias,
        )
