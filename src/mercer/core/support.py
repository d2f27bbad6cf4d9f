"""One table of what works: kernel x normaliser x structure x form x path.

:func:`unsupported` is the rule; the dispatcher asks it before anything runs, the contract tests walk :func:`table`,
and the documentation prints it. A cell that does not work has a reason that says what would.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mercer.core.kernels import Kernel, Power, Taylor
from mercer.core.merged import Merged
from mercer.core.mixed import Mixed
from mercer.core.normalizers import Normalizer

FORMS = ("dense", "chunked", "recurrent")
PATHS = ("pairs", "features")
FEATURE_MEMORY_LIMIT = 2**30
"""Bytes that one call's feature state, or the features of one chunk, may take: 1 GiB."""
FEATURE_CHUNK = 64
"""Tokens per chunk of the feature path, at most."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call that decide what is possible and what it costs."""

    batch: int
    query_heads: int
    key_heads: int
    query_length: int
    key_length: int
    dim: int
    value_dim: int
    past_length: int = 0
    itemsize: int = 4  # of the accumulators
    cache_itemsize: int = 4  # of keys and values as they came
    device: str = "cpu"
    holes: bool = False  # whether the cache also holds keys that are not there (padding)
    trained: bool = False  # whether a gradient is wanted of queries, keys, values, the state or the kernel
    log_sums: bool = False  # whether the logarithms of the sums of weights are wanted too
    bfloat16: bool = False  # whether they are bfloat16, which some backends multiply as it is


def sums_weights(kernel: Kernel, normalizer: Normalizer) -> bool:
    """Whether rows sum their weights: for denominators, or to know that exponentials did not all vanish."""
    parts = (kernel.near, kernel.far) if isinstance(kernel, Mixed) else (kernel,)
    return normalizer.needs_denominator or any(part.log_features for part in parts)


def unsupported(
    kernel: Kernel,
    normalizer: Normalizer,
    merged: Merged,
    form: str,
    path: str,
    sizes: Sizes | None = None,
    stateful: bool = False,
) -> str | None:
    """Why a combination does not work, as a sentence that says what would; None if it works."""
    signs = kernel.positive or kernel.allows_negative_denominator or normalizer.takes_any_sign
    if normalizer.needs_denominator and not signs:
        even = "an even order, " if isinstance(kernel, Taylor | Power) else ""
        return (
            f"{kernel} takes negative values, so {normalizer} may divide by zero or change sign: use L2(), RMS() or "
            f"Clamped(), {even}or say signed=True to the kernel."
        )
    if stateful and merged.right not in (None, 0):
        return (
            f"A state cannot serve a window that looks {merged.right} tokens ahead: use right=0 or & Causal(), or run "
            "the whole sequence at once."
        )
    if stateful:
        for pattern in merged.patterns:
            reason = pattern.ends
            if reason is not None:
                return f"{pattern} {reason}, so a state cannot continue it: run the whole sequence at once."
    if isinstance(kernel, Mixed) and merged.relative is not None:
        return f"{kernel} keeps far keys as features, which {merged.relative} cannot weigh: use {kernel.near} alone."
    for part in merged.pairwise:
        if stateful:
            return f"{part} says nothing of the tokens in a state: run the whole sequence at once."
        if isinstance(kernel, Mixed):
            return f"{kernel} is not computed under {part}: use {kernel.near} alone."
    if isinstance(kernel, Mixed) and merged.patterns:
        return f"{kernel} has a window of its own: leave {merged.patterns[0]} out, or use {kernel.near} alone."
    if isinstance(kernel, Mixed):
        if not merged.causal:
            return f"{kernel} tells near keys from far ones by their distance back: add Causal()."
        if merged.left is not None:
            return f"{kernel} has a window of its own: leave Window out, or use {kernel.near} alone."
        if form == "dense" and path == "features":
            return "The dense form looks at pairs: use path='pairs', or form='chunked' for features."
    if path == "pairs" and sizes is not None and merged.decay is not None and sizes.past_length:
        late = sizes.query_length - sizes.key_length
        return _late_queries(late) if late > 0 else None
    if path == "features":
        return _features_unsupported(kernel, merged, form, sizes, stateful)
    if form == "recurrent" and merged.right not in (None, 0):
        return f"The recurrent form cannot look {merged.right} tokens ahead: use form='chunked' or 'dense'."
    return None


def _late_queries(late: int) -> str:
    return f"{late} queries stand on cached keys, whose decay is not kept for queries: pass as many keys as queries."


def _features_unsupported(kernel: Kernel, merged: Merged, form: str, sizes: Sizes | None, stateful: bool) -> str | None:
    if form == "dense":
        return "The dense form looks at pairs: use path='pairs', or form='chunked' for features."
    if kernel.feature_dim(1) is None:
        return f"{kernel} has no finite feature map: use path='pairs', or a finite kernel such as Taylor(4)."
    if merged.relative is not None:
        return f"A feature state cannot weigh pairs by their distance, as {merged.relative} does: use path='pairs'."
    if merged.pairwise:
        return f"{merged.pairwise[0]} differs from pair to pair, which a feature state cannot: use path='pairs'."
    if merged.patterns:
        return f"A feature state holds all keys, and {merged.patterns[0]} shows some of them: use path='pairs'."
    if merged.left is not None:
        return "A feature state cannot forget what leaves a window: use path='pairs', or Decay instead of Window."
    if merged.right not in (None, 0):
        return f"A feature state cannot look {merged.right} tokens ahead: use path='pairs'."
    if merged.right is None and merged.alibi is not None:
        return "Alibi without a causal structure weighs every pair by its distance: use path='pairs', or add Causal()."
    if sizes is None:
        return None
    if stateful and merged.right == 0 and sizes.query_length > sizes.key_length:
        return (
            f"{sizes.query_length} causal queries against {sizes.key_length} new keys would read states from before "
            "this one: "
            "use path='pairs', or pass as many keys as queries."
        )
    features = kernel.feature_dim(sizes.dim)
    assert features is not None
    heads = merged.weight_heads(sizes.query_heads, sizes.key_heads)
    needed = sizes.itemsize * max(
        merged.entries(sizes.batch) * heads * features * (sizes.value_dim + 1),
        features * sizes.query_heads // sizes.key_heads,
    )
    if needed > FEATURE_MEMORY_LIMIT:
        return (
            f"{kernel} at head dimension {sizes.dim} has {features:,} features, a state of {needed / 2**30:,.1f} GiB "
            f"(limit {FEATURE_MEMORY_LIMIT / 2**30:.0f} GiB): use path='pairs', a lower order or a smaller head "
            "dimension."
        )
    return None


def table(
    kernels: dict[str, Kernel], normalizers: dict[str, Normalizer], structures: dict[str, Merged]
) -> Iterator[tuple[str, str, str, str, str, str | None]]:
    """Every cell: names of kernel, normaliser, structure, form and path, and the reason why not (None if it works)."""
    for kernel_name, kernel in kernels.items():
        for normalizer_name, normalizer in normalizers.items():
            for structure_name, structure in structures.items():
                for form in FORMS:
                    for path in PATHS:
                        reason = unsupported(kernel, normalizer, structure, form, path)
                        yield kernel_name, normalizer_name, structure_name, form, path, reason
