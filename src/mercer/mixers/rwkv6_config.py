"""The options of RWKV-6's time mixing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from mercer.mixers.head_sizes import head_size
from mercer.mixers.mixer_config import MixerConfig, Positive

if TYPE_CHECKING:
    from mercer.mixers.rwkv6 import RWKV6


class RWKV6Config(MixerConfig):
    """RWKV-6 (Peng et al. 2024, arXiv 2404.05892): see `mercer.mixers.rwkv6.RWKV6`. Its blocks have
    `feedforward="rwkv4"` and a `hidden` of 3.5 dim.
    """

    heads: Positive | None = None
    """None: as many as the model's attentions. The paper's heads have 64 channels."""
    mix_rank: Positive = 32
    """Channels inside the maps that say how much of the token before is mixed in."""
    decay_rank: Positive = 64
    """Channels inside the map of the decay."""
    norm_eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 64e-5
    """Of the norm of each head."""

    def check(self, dim: int, heads: int) -> None:
        head_size("rwkv6", "key", dim, 1.0, heads if self.heads is None else self.heads)

    def build(self, dim: int, heads: int, *, layer: int, layers: int) -> RWKV6:
        from mercer.mixers.rwkv6 import RWKV6

        return RWKV6(
            dim,
            heads if self.heads is None else self.heads,
            mix_rank=self.mix_rank,
            decay_rank=self.decay_rank,
            norm_eps=self.norm_eps,
            layer=layer,
            layers=layers,
        )
