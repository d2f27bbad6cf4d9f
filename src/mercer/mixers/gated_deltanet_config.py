"""The options of gated DeltaNet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from mercer.mixers.head_sizes import key_and_value
from mercer.mixers.mixer_config import MixerConfig, Positive, Ratio

if TYPE_CHECKING:
    from mercer.mixers.gated_deltanet import GatedDeltaNet


class GatedDeltaNetConfig(MixerConfig):
    """Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): see `mercer.mixers.gated_deltanet.GatedDeltaNet`."""

    heads: Positive | None = None
    """None: as many as the model's attentions."""
    key_expand: Ratio = 0.75
    """Channels of all queries, and of all keys, in multiples of the model's."""
    value_expand: Ratio = 1.5
    """Channels of all values, in multiples of the model's."""
    width: Positive = 4
    """Of the short convolutions on queries, keys and values."""
    twice: bool = False
    """Let what is removed reach twice of what stands there, beta = 2 sigmoid (Grazzi et al. 2024, arXiv 2411.12537)."""
    norm_eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-5

    def check(self, dim: int, heads: int) -> None:
        own = heads if self.heads is None else self.heads
        key_and_value("gated-deltanet", dim, own, self.key_expand, self.value_expand)

    def build(self, dim: int, heads: int, *, layer: int, layers: int) -> GatedDeltaNet:
        from mercer.mixers.gated_deltanet import GatedDeltaNet

        return GatedDeltaNet(
            dim,
            heads if self.heads is None else self.heads,
            key_expand=self.key_expand,
            value_expand=self.value_expand,
            width=self.width,
            twice=self.twice,
            norm_eps=self.norm_eps,
        )
