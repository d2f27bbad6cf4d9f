"""The options of the real-gated linear recurrent unit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mercer.mixers.head_sizes import check_blocks
from mercer.mixers.mixer_config import MixerConfig, Positive

if TYPE_CHECKING:
    from mercer.mixers.rg_lru import RGLRU


class RGLRUConfig(MixerConfig):
    """The recurrent block of Griffin (De et al. 2024, arXiv 2402.19427): see `mercer.mixers.rg_lru.RGLRU`."""

    width: Positive | None = None
    """Channels of the recurrence; None: as many as the model. The paper has 4/3 of them, rounded."""
    blocks: Positive | None = None
    """Blocks on the diagonal of the gates' matrices, a divisor of the width; None: as many as the model's attentions
    have heads. The paper has 16."""
    conv: Positive = 4
    """Inputs that the short convolution looks at."""
    bias: bool = True
    """Biases of the three linear layers; the gates and the convolution always have theirs."""

    def check(self, dim: int, heads: int) -> None:
        check_blocks(dim if self.width is None else self.width, heads if self.blocks is None else self.blocks)

    def build(self, dim: int, heads: int, *, layer: int, layers: int) -> RGLRU:
        from mercer.mixers.rg_lru import RGLRU

        return RGLRU(
            dim,
            dim if self.width is None else self.width,
            blocks=heads if self.blocks is None else self.blocks,
            conv=self.conv,
            bias=self.bias,
        )
