"""torch's scaled dot-product attention as a backend of the chunked pairs form.

It serves exponential kernels under a scale-invariant normaliser: its rows, softmax(S) V, differ from exp(S) V by a
positive factor only, which ``Sum``, ``L2`` and ``RMS`` cancel. It takes what its fused kernels take: all pairs or a
causal band; and where ``Bias`` or ``Mask`` has a tensor over the pairs, that tensor, with padding and the band written
into it. Without such a part it takes no mask: that would be O(n^2) memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mercer.core.kernels import Exp, Kernel
from mercer.core.layout import Layout
from mercer.core.merged import Merged
from mercer.core.normalizers import Normalizer
from mercer.core.support import Sizes

MASK_BYTES = 2**26
"""What the masks of a call may take at once where they differ by row of the batch."""


def serves(kernel: Kernel, normalizer: Normalizer, merged: Merged, sizes: Sizes) -> bool:
    """Whether torch's kernels compute this combination."""
    if type(kernel) is not Exp or sizes.dim != sizes.value_dim or sizes.log_sums:
        return False
    if not normalizer.scale_invariant or not normalizer.takes_divided_rows:
        return False
    if merged.patterns or merged.left is not None or merged.weighted or merged.documents is not None:
        return False
    keys = sizes.key_length + sizes.past_length
    if not keys or not sizes.query_length or sizes.holes or not sizes.batch:
        return False
    if merged.pairwise:
        return merged.right in (None, 0)
    if merged.padding is not None:
        return False
    return merged.right is None or (merged.right == 0 and (sizes.query_length == 1 or sizes.query_length == keys))


def worth_while(merged: Merged) -> bool:
    """Whether it is chosen unasked. Where a bias wants a gradient, torch has no fused kernel and keeps all scores."""
    return merged.bias is None or not (torch.is_grad_enabled() and merged.bias.tensor.requires_grad)


def sdpa(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
    """Rows already divided by their sums, ``[B, Hq, Lq, Dv]``; ``query`` is scaled."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if layout.pair_mask is not None or layout.pair_log is not None:
        return _masked(query, key, value, _of_one_row(layout))
    causal = layout.right == 0 and layout.query_length > 1
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=1.0)


def _masked(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
    """The same under a mask, for so many rows of the batch at once that theirs do not take too much."""
    batch = query.shape[0]
    told = (layout.pair_mask, layout.pair_log, layout.key_valid, layout.query_valid)
    together = batch
    if any(part is not None and part.shape[0] > 1 for part in told):
        heads = max(part.shape[1] for part in told[:2] if part is not None)
        row = heads * layout.query_length * layout.key_length * query.element_size()
        together = max(1, MASK_BYTES // row)
    rows = [slice(start, min(start + together, batch)) for start in range(0, batch, together)]
    found = [_under(query[r], key[r], value[r], *_mask(layout, r, query.dtype)) for r in rows]
    return found[0] if len(found) == 1 else torch.cat(found)


def _under(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, empty: Tensor | None) -> Tensor:
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=1.0)
    return out if empty is None else out.masked_fill(empty, 0)


def _mask(layout: Layout, rows: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Log-weights of all pairs, minus infinity for what is hidden, ``[b, h, Lq, Lk]`` (b, h may be 1); and which
    queries see nothing, ``[b, h, Lq, 1]``, or None: theirs are 0 here, since softmax has no row without weights.
    """
    queries, keys, every = slice(0, layout.query_length), slice(0, layout.key_length), slice(None)
    seen = layout.visible(queries, keys, rows)
    total = layout.given(layout.pair_log, queries, keys, rows, every)
    if total is not None and not torch.is_grad_enabled():
        total = total.detach()  # torch has no fused kernel for a mask that wants a gradient
    if total is None:
        assert seen is not None
        total = torch.zeros((), dtype=dtype, device=seen.device)
    total = total.to(dtype) if seen is None else torch.where(seen, total.to(dtype), -torch.inf)
    empty = total.detach().amax(-1, keepdim=True) == -torch.inf
    if not torch.compiler.is_compiling() and not bool(empty.any()):
        return total, None
    return total.masked_fill(empty, 0), empty


def _of_one_row(layout: Layout) -> Layout:
    """The same layout where all rows of the batch have one and the same padding, given as a view of it."""
    valid = layout.key_valid
    if valid is None or valid.shape[0] < 2 or valid.stride(0) != 0:
        return layout
    if layout.right is not None or layout.query_valid is not None:  # places differ too, or queries do
        return layout
    return replace(layout, key_valid=valid[:1])
