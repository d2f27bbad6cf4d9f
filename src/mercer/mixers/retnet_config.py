"""The options of retention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from mercer.mixers.head_sizes import turned_key_and_value
from mercer.mixers.mixer_config import MixerConfig

if TYPE_CHECKING:
    from mercer.mixers.retnet import Retention


class RetNetConfig(MixerConfig):
    """Retention (Sun et al. 2023, arXiv 2307.08621): see `mercer.mixers.retnet.Retention`. It has as many heads as the
    model's attentions.
    """

    value_expand: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    """Channels of all values, in multiples of the model's. Queries and keys have as many as the model."""
    norm: Literal["layer", "rms"] = "layer"
    """What normalises each head: the paper's group normalisation, or the RMS norm of its later code."""
    norm_eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-5
    rope_base: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10000.0
    """Base of the rates at which queries and keys turn with their positions."""

    def check(self, dim: int, heads: int) -> None:
        turned_key_and_value(dim, heads, self.value_expand)

    def build(self, dim: int, heads: int, *, layer: int, layers: int) -> Retention:
        from mercer.mixers.retnet import Retention

        return Retention(
            dim,
            heads,
            value_expand=self.value_expand,
            norm=self.norm,
            norm_eps=self.norm_eps,
            rope_base=self.rope_base,
        )
