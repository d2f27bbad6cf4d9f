"""The options of gated linear attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from mercer.mixers.head_sizes import key_and_value
from mercer.mixers.mixer_config import MixerConfig, Positive, Ratio

if TYPE_CHECKING:
    from mercer.mixers.gla import GatedLinearAttention


class GLAConfig(MixerConfig):
    """Gated linear attention (Yang et al. 2023, arXiv 2312.06635): see `mercer.mixers.gla.GatedLinearAttention`."""

    heads: Positive | None = None
    """None: as many as the model's attentions; the paper has 4."""
    key_expand: Ratio = 0.5
    """Channels of all queries, and of all keys, in multiples of the model's."""
    value_expand: Ratio = 1.0
    """Channels of all values, in multiples of the model's."""
    rank: Positive = 16
    """Of the map from a token to its decays."""
    temperature: Ratio = 16.0
    """What the logarithms of the decays are divided by."""
    norm_eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-5

    def check(self, dim: int, heads: int) -> None:
        own = heads if self.heads is None else self.heads
        key_and_value("gla", dim, own, self.key_expand, self.value_expand)

    def build(self, dim: int, heads: int, *, layer: int, layers: int) -> GatedLinearAttention:
        from mercer.mixers.gla import GatedLinearAttention

        return GatedLinearAttention(
            dim,
            heads if self.heads is None else self.heads,
            key_expand=self.key_expand,
            value_expand=self.value_expand,
            rank=self.rank,
            temperature=self.temperature,
            norm_eps=self.norm_eps,
        )
