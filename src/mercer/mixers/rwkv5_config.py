"""The options of RWKV-5's time mixing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from mercer.mixers.head_sizes import head_size
from mercer.mixers.mixer_config import MixerConfig

if TYPE_CHECKING:
    from mercer.mixers.rwkv5 import RWKV5


class RWKV5Config(MixerConfig):
    """RWKV-5 (Peng et al. 2024, arXiv 2404.05892): see `mercer.mixers.rwkv5.RWKV5`. Its blocks have
    `feedforward="rwkv4"` and a `hidden` of 3.5 dim.
    """

    heads: Annotated[int, Field(ge=1)] | None = None
    """None: as many as the model's attentions. The paper's heads have 64 channels."""
    norm_eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 64e-5
    """Of the norm of each head."""

    def check(self, dim: int, heads: int) -> None:
        head_size("rwkv5", "key", dim, 1.0, heads if self.heads is None else self.heads)

    def build(self, dim: int, heads: int, *, layer: int, layers: int) -> RWKV5:
        from mercer.mixers.rwkv5 import RWKV5

        own = heads if self.heads is None else self.heads
        return RWKV5(dim, own, norm_eps=self.norm_eps, layer=layer, layers=layers)
