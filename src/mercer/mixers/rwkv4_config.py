"""The options of RWKV-4's time mixing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from mercer.mixers.mixer_config import MixerConfig

if TYPE_CHECKING:
    from mercer.mixers.rwkv4 import RWKV4


class RWKV4Config(MixerConfig):
    """RWKV-4 (Peng et al. 2023, arXiv 2305.13048): see `mercer.mixers.rwkv4.RWKV4`. Its blocks have
    `feedforward="rwkv4"`. It has no heads.
    """

    width: Annotated[int, Field(ge=1)] | None = None
    """Channels that are averaged; None: as many as the model's."""

    def build(self, dim: int, heads: int, *, layer: int, layers: int) -> RWKV4:
        from mercer.mixers.rwkv4 import RWKV4

        return RWKV4(dim, width=self.width, layer=layer, layers=layers)
