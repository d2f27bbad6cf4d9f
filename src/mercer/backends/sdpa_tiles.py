"""torch's fused attention on bfloat16 as it is, on processors that multiply it in tiles.

Elsewhere on the CPU torch is no quicker in bfloat16 than in float32, which :mod:`mercer.backends.sdpa` computes in.
"""

import torch
from torch import Tensor

from mercer.core.layout import Layout
from mercer.core.merged import Merged
from mercer.core.normalizers import Normalizer, Sum
from mercer.runtime.processor import multiplies_tiles

TILES = multiplies_tiles()
"""Whether torch multiplies bfloat16 in tiles here. Asked once, since torch.compile cannot trace the question."""


def serves(normalizer: Normalizer, merged: Merged, device: str, *dtypes: torch.dtype) -> bool:
    """Whether a call that torch's fused attention computes goes there as bfloat16: on a CPU with tiles, without a mask,
    which would have to be rounded, and where rows are not divided again.
    """
    narrow = all(dtype == torch.bfloat16 for dtype in dtypes)
    return TILES and narrow and device == "cpu" and type(normalizer) is Sum and not merged.pairwise


def sdpa_tiles(query: Tensor, key: Tensor, value: Tensor, scale: float, layout: Layout) -> Tensor:
    """Rows divided by their sums, ``[B, Hq, Lq, Dv]`` in bfloat16."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = layout.right == 0 and layout.query_length > 1
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)
