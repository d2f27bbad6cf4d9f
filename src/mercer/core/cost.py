"""Operations and bytes of a call, counted before it runs."""

from __future__ import annotations

from mercer.core.kernels import Kernel
from mercer.core.merged import Merged
from mercer.core.places import Geometry
from mercer.core.schedule import Schedule, schedule
from mercer.core.structures import Window, intersection
from mercer.core.support import FEATURE_CHUNK, Sizes


def visible_pairs(merged: Merged, sizes: Sizes) -> int:
    """Query-key pairs of one head and batch row that the structure leaves visible, padding and documents not
    deducted.
    """
    queries, keys = sizes.query_length, sizes.key_length + sizes.past_length
    shift = keys - queries
    if merged.patterns:
        return _scheduled(merged, sizes).visible
    left = keys + queries if merged.left is None else merged.left
    right = keys + queries if merged.right is None else merged.right
    # Rows i see keys max(0, i + shift - left) .. min(keys - 1, i + shift + right): sum both bounds as arithmetic
    # series.
    high = _clamped_sum(shift + right + 1, queries, keys)
    low = _clamped_sum(shift - left, queries, keys)
    return max(0, high - low)


def computed_pairs(merged: Merged, sizes: Sizes) -> int:
    """Pairs of one head and batch row in the tiles of a pattern, hidden ones of these tiles included."""
    return _scheduled(merged, sizes).pairs


def _scheduled(merged: Merged, sizes: Sizes) -> Schedule:
    """The schedule of a call without padding; where it depends on the call's own tokens, of what may be visible."""
    keys = sizes.key_length + sizes.past_length
    shift = keys - sizes.query_length
    heads = (0, 1) if any(p.per_head for p in merged.patterns) else (0, sizes.query_heads)
    geometry = Geometry(shift, sizes.query_length, 0, keys, (keys,), sizes.batch, heads)
    patterns = tuple(p.planned() for p in merged.patterns)
    return schedule(intersection((*patterns, Window(merged.left, merged.right))), geometry)


def _clamped_sum(start: int, count: int, limit: int) -> int:
    """sum over i < count of min(max(start + i, 0), limit)."""
    first, last = max(0, -start), min(count, max(0, limit - start))
    rising = range(start + first, start + last)
    inside = (rising.start + rising.stop - 1) * len(rising) // 2 if len(rising) else 0
    return inside + limit * (count - min(count, max(0, limit - start)))


def pair_flops(kernel: Kernel, merged: Merged, sizes: Sizes) -> int:
    """Floating-point operations of the pairs path: two products a visible pair, of mapped vectors and of values."""
    products = kernel.mapped_dim(sizes.dim) + sizes.value_dim
    return 2 * sizes.batch * sizes.query_heads * visible_pairs(merged, sizes) * products


def feature_flops(kernel: Kernel, merged: Merged, sizes: Sizes, form: str, chunk: int = FEATURE_CHUNK) -> int:
    """Floating-point operations of the feature path: state reads, state updates, and the pairs inside chunks."""
    features = kernel.feature_dim(sizes.dim)
    assert features is not None
    reads = sizes.query_heads * sizes.query_length * features * sizes.value_dim
    updates = sizes.key_heads * sizes.key_length * features * sizes.value_dim
    inside = 0
    if form == "chunked" and merged.causal:
        inside = (
            sizes.query_heads
            * sizes.query_length
            * min(chunk, sizes.key_length)
            * (kernel.mapped_dim(sizes.dim) + sizes.value_dim)
        )
    return 2 * sizes.batch * (reads + updates + inside)


def io_bytes(sizes: Sizes) -> int:
    """Bytes of the call's own tensors: queries, keys, values and outputs, each once."""
    queries = sizes.query_heads * sizes.query_length * (sizes.dim + sizes.value_dim)
    keys = sizes.key_heads * sizes.key_length * (sizes.dim + sizes.value_dim)
    return sizes.batch * sizes.cache_itemsize * (queries + keys)


def cache_bytes(merged: Merged, sizes: Sizes) -> int:
    """Bytes of keys and values that the next call needs."""
    kept = sizes.key_length + sizes.past_length
    if merged.left is not None:
        kept = min(kept, merged.left)
    return sizes.batch * sizes.key_heads * kept * (sizes.dim + sizes.value_dim) * sizes.cache_itemsize


def feature_state_bytes(kernel: Kernel, merged: Merged, sizes: Sizes, mass: bool) -> int:
    """Bytes of S and, with ``mass``, z."""
    features = kernel.feature_dim(sizes.dim)
    assert features is not None
    heads = merged.weight_heads(sizes.query_heads, sizes.key_heads)
    return merged.entries(sizes.batch) * heads * features * (sizes.value_dim + int(mass)) * sizes.itemsize
