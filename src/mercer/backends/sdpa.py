"""torch's scaled dot-product attention as a backend of the chunked pairs form.

It serves exponential kernels under a scale-invariant normaliser: its rows, softmax(S) V, differ from exp(S) V by a
positive factor only, which ``Sum``, ``L2`` and ``RMS`` cancel. It takes what its fused kernels take, and no mask
tensor: that would be O(n^2) memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mercer.core.kernels import Exp, Kernel
from mercer.core.layout import Layout
from mercer.core.merged import Merged
from mercer.core.normalizers import Normalizer
from mercer.core.support import Sizes


def serves(kernel: Kernel, normalizer: Normalizer, merged: Merged, sizes: Sizes) -> bool:
    """Whether the fused kernels compute this combination."""
    if type(kernel) is not Exp or sizes.dim != sizes.value_dim or sizes.log_sums:
        return False
    if not normalizer.scale_invariant or not normalizer.takes_divided_rows:
        return False
    if (
        merged.patterns
        or merged.pairwise
        or merged.left is not None
        or merged.weighted
        or merged.padding is not None
        or merged.documents is not None
    ):
        return False
    keys = sizes.key_length + sizes.past_length
    if not keys or not sizes.query_length or sizes.holes:
        return False
    return merged.right is None or (merged.right == 0 and (sizes.query_length == 1 or sizes.query_length == keys))


def sdpa(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
    """Rows already divided by their sums, ``[B, Hq, Lq, Dv]``; ``query`` is scaled."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = layout.right == 0 and layout.query_length > 1
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=1.0)
