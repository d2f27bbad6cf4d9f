"""The options of RWKV-7's time mixing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from mercer.mixers.head_sizes import head_size
from mercer.mixers.mixer_config import MixerConfig, Positive

if TYPE_CHECKING:
    from mercer.mixers.rwkv7 import RWKV7


class RWKV7Config(MixerConfig):
    """RWKV-7 (Peng et al. 2025, arXiv 2503.14456): see `mercer.mixers.rwkv7.RWKV7`. Its blocks have
    `feedforward="rwkv7"`.
    """

    heads: Positive | None = None
    """None: as many as the model's attentions. The paper's heads have 64 channels."""
    decay_rank: Positive | None = None
    """Channels inside the map of the decay; None: 2.5 sqrt(dim) to the nearest multiple of 32, at least 32."""
    rate_rank: Positive | None = None
    """Inside the map of the rates of correction; None: the same."""
    value_rank: Positive | None = None
    """Inside the map of the share of the first layer's values; None: the same with 1.7 sqrt(dim)."""
    gate_rank: Positive | None = None
    """Inside the map of the gate; None: the same with 5 sqrt(dim)."""
    norm_eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 64e-5
    """Of the norm of each head."""

    def check(self, dim: int, heads: int) -> None:
        head_size("rwkv7", "key", dim, 1.0, heads if self.heads is None else self.heads)

    def build(self, dim: int, heads: int, *, layer: int, layers: int) -> RWKV7:
        from mercer.mixers.rwkv7 import RWKV7

        return RWKV7(
            dim,
            heads if self.heads is None else self.heads,
            decay_rank=self.decay_rank,
            rate_rank=self.rate_rank,
            value_rank=self.value_rank,
            gate_rank=self.gate_rank,
            norm_eps=self.norm_eps,
            layer=layer,
            layers=layers,
        )
