"""What each way of computing has to do, counted before it runs; :mod:`mercer.core.machine` knows how long that takes.

| way | form, path, backend | an item is |
|---|---|---|
| dense | dense or recurrent, pairs, torch | a pair, hidden ones included |
| tiles, exp_tiles | chunked, pairs, torch; the latter for exponential kernels | a pair of a tile |
| sdpa | chunked, pairs, sdpa or flex | a visible pair; under a mask, any pair |
| fused_softmax | chunked, pairs, numba | a visible pair; under a pattern, a pair of a tile |
| fused_decode | the same, where few queries want no gradient | a visible pair |
| cache | beside any of these, where keys and values are kept | - |
| scan | chunked, features, torch | an operator that is called |
| fused_scan | chunked, features, numba | a query |
| step | recurrent, features, torch | an operator that is called |
| fused_step | recurrent, features, numba | a key |
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mercer.core import cost
from mercer.core.kernels import Kernel
from mercer.core.merged import Merged
from mercer.core.mixed import Mixed
from mercer.core.support import FEATURE_CHUNK, Sizes

WAYS = (
    *("dense", "tiles", "exp_tiles", "sdpa", "fused_softmax", "fused_decode", "cache"),
    *("scan", "fused_scan", "step", "fused_step"),
)
FUSED = ("fused_softmax", "fused_decode", "fused_scan", "fused_step")

FEW, FEW_ROWS = 8, 64
"""Queries, and queries times the heads that share a key head, up to which fused attention without a gradient reads keys
and values as they stand: from more on it packs them first."""
SHORTEST_RANGE = 256
"""Keys of a head that such a call gives to one thread at least."""

TILE_ROWS = 64
"""Queries of a tile: where the structure cuts a tile of pairs, half of this many a query are computed in vain."""
FUSED_BLOCK = 16
"""Tokens of a block of the fused scan: the pairs inside it are computed as pairs."""
SHORTEST_RUN = 512
"""Keys of a head that fused attention gives to one thread at least, in its backward pass."""
SCAN_WORKSPACE = 8 * 2**20
"""Bytes that the features of a chunk may take in the scan of torch operators."""
SCAN_OPERATORS = 12
"""Operators that such a chunk calls, besides those that expand features."""
STEP_OPERATORS = 4
"""Operators of a further token in the recurrent form; those of the first are part of the call."""
LOG_PASSES = 4
"""An entry whose logarithm is kept is made in about four times the passes of any other: maxima, their differences, and
the exponential of each side."""
LOG_CALLS = 1.5
"""And its maxima, sums and differences take about that many calls of a step."""
MAP_CALLS = 1 / 16
"""An operator of a map, as of ``Kernel.map_work``, takes about that much of a call of a step."""
MIXED_CALLS = 2
"""The near part of a mixed row, and the joining of both."""
STEP_PASSES, FIRST_PASSES = 3, 4
"""How often a step of torch operators moves a state: read, written, read for the output; and once more each way at
the beginning and end, where S and z become one tensor and two again."""


@dataclass(frozen=True)
class Work:
    """Counts of one way.

    Attributes:
        calls: how often it is called; not a whole number where operators beside it are counted in calls.
        items: things that are no products; which, the table above says.
        entries: entries of mapped or expanded queries and keys that torch's elementwise operators make.
        flops: floating-point operations of products.
        bytes: what is moved: queries, keys, values, outputs; caches that are copied; states.
    """

    calls: float
    items: int
    entries: int
    flops: int
    bytes: int


@dataclass(frozen=True)
class Part:
    """One way, its work, and how many pieces of it threads can share: key heads over the batch, or smaller ones."""

    way: str
    work: Work
    heads: int


def few(sizes: Sizes) -> bool:
    """Whether fused attention takes a call as a step of decoding: few queries, and no gradient."""
    rows = sizes.query_length * sizes.query_heads // sizes.key_heads
    return 0 < sizes.query_length <= FEW and rows <= FEW_ROWS and not sizes.trained


def way_of(kernel: Kernel, form: str, path: str, backend: str) -> str:
    """The way of a form, path and backend."""
    if path == "features":
        if form == "recurrent":
            return "fused_step" if backend == "numba" else "step"
        return "fused_scan" if backend == "numba" else "scan"
    if form != "chunked":
        return "dense"
    if backend != "torch":
        return {"sdpa": "sdpa", "flex": "sdpa", "numba": "fused_softmax"}[backend]
    return "exp_tiles" if kernel.exponential else "tiles"


def parts(
    kernel: Kernel, merged: Merged, sizes: Sizes, form: str, path: str, backend: str, mass: bool, stateful: bool
) -> list[Part]:
    """What a call consists of: one part, or for ``Mixed`` one near and one far; and what comes with them: the cache,
    the logarithms of features, learned maps.

    Args:
        kernel, merged, sizes, form, path, backend: of the call.
        mass: whether denominators are needed.
        stateful: whether a state is returned.
    """
    heads = sizes.batch * sizes.key_heads
    if not isinstance(kernel, Mixed):
        logs = [Part("step", Work(LOG_CALLS, 0, 0, 0, 0), heads)] if kernel.log_features else []
        beside = [*logs, *_maps(kernel, sizes)]
        way = way_of(kernel, form, path, backend)
        if path == "features":
            return [Part(way, _features(way, kernel, merged, sizes, form, mass), heads), *beside]
        if way == "fused_softmax" and few(sizes) and merged.documents is None and not merged.patterns:
            way = "fused_decode"
            heads *= max((sizes.key_length + sizes.past_length) // SHORTEST_RANGE, 1)
        elif way == "fused_softmax":
            heads *= -(-sizes.key_length // SHORTEST_RUN)
        return [Part(way, _pairs(way, kernel, merged, sizes, form), heads), *beside, *_cache(merged, sizes, stateful)]
    near = replace(merged, left=kernel.window - 1)
    near_form = "dense" if form == "recurrent" else form
    first = way_of(kernel.near, near_form, "pairs", "torch")
    work = _pairs(first, kernel.near, near, sizes, form)
    joined = [Part(first, replace(work, calls=MIXED_CALLS * work.calls), heads), *_maps(kernel.near, sizes)]
    if path == "features":
        alone = replace(sizes, past_length=0)
        kept = _cache(replace(merged, left=kernel.window), sizes, stateful)
        return [*joined, *parts(kernel.far, merged, alone, form, path, backend, mass, stateful), *kept]
    far = replace(merged, right=-kernel.window)
    way = way_of(kernel.far, near_form, "pairs", "torch")
    beyond = [Part(way, _pairs(way, kernel.far, far, sizes, form), heads), *_maps(kernel.far, sizes)]
    return [*joined, *beyond, *_cache(merged, sizes, stateful)]


def _maps(kernel: Kernel, sizes: Sizes) -> list[Part]:
    """The operators and products that map queries and keys, cached keys included."""
    operators, flops = kernel.map_work(sizes.dim)
    if not operators and not flops:
        return []
    keys = sizes.key_heads * (sizes.key_length + sizes.past_length)
    tokens = sizes.batch * (sizes.query_heads * sizes.query_length + keys)
    return [Part("step", Work(operators * MAP_CALLS, 0, 0, tokens * flops, 0), sizes.batch * sizes.key_heads)]


def _cache(merged: Merged, sizes: Sizes, stateful: bool) -> list[Part]:
    """Keeping keys and values: new ones are copied, and where a gradient is wanted the old ones with them."""
    if not stateful:
        return []
    bytes_ = 2 * cost.cache_bytes(merged, sizes)
    if sizes.past_length and not sizes.trained:
        kept = sizes.key_length + sizes.past_length
        kept = kept if merged.left is None else min(kept, merged.left)
        bytes_ = bytes_ // max(kept, 1) * min(sizes.key_length, kept)
    return [Part("cache", Work(1, 0, 0, 0, bytes_), sizes.batch * sizes.key_heads)]


def _pairs(way: str, kernel: Kernel, merged: Merged, sizes: Sizes, form: str) -> Work:
    queries, keys = sizes.query_length, sizes.key_length + sizes.past_length
    pairs = cost.visible_pairs(merged, sizes)
    masked = way == "sdpa" and bool(merged.pairwise)  # under a mask no pair is left out
    if masked or (way == "dense" and form == "dense"):
        pairs = queries * keys
    elif merged.patterns:
        pairs = cost.computed_pairs(merged, sizes)
    elif way in ("tiles", "exp_tiles"):
        cut = sum(side is not None for side in (merged.left, merged.right))
        pairs = min(pairs + cut * queries * TILE_ROWS // 2, queries * keys) if pairs else 0
    if way == "fused_softmax":  # 16 queries at a time, whether they are there or not
        pairs = pairs * (-(-queries // FUSED_BLOCK) * FUSED_BLOCK) // queries
    mapped = kernel.mapped_dim(sizes.dim)
    items = sizes.batch * sizes.query_heads * pairs
    past = sizes.batch * sizes.key_heads * sizes.past_length * (sizes.dim + sizes.value_dim) * sizes.cache_itemsize
    moved = cost.io_bytes(sizes) + past
    if masked:  # which is read too, once for all rows of the batch
        moved += sizes.query_heads * pairs * sizes.itemsize
    calls = max(queries, 1) if form == "recurrent" else 1
    return Work(calls, items, _mapped_entries(kernel, sizes), 2 * items * (mapped + sizes.value_dim), moved)


def _features(way: str, kernel: Kernel, merged: Merged, sizes: Sizes, form: str, mass: bool) -> Work:
    features = kernel.feature_dim(sizes.dim)
    assert features is not None
    chunk = FUSED_BLOCK if way == "fused_scan" else FEATURE_CHUNK
    flops = cost.feature_flops(kernel, merged, sizes, form, chunk)
    state = cost.feature_state_bytes(kernel, merged, sizes, mass)
    heads, steps = sizes.batch * sizes.key_heads, max(sizes.query_length, sizes.key_length)
    queries = sizes.batch * sizes.query_heads * sizes.query_length
    entries = 0
    if way not in FUSED or kernel.fused_map is None:
        entries = _mapped_entries(kernel, sizes)
    expanded = features != kernel.mapped_dim(sizes.dim)
    if way not in FUSED and expanded:
        entries += (queries + heads * sizes.key_length) * features
    runs = _runs(kernel, sizes.dim) if expanded else 0
    if way == "scan":
        group = sizes.query_heads // sizes.key_heads
        token = group * features * sizes.itemsize
        length = max(1, min(FEATURE_CHUNK, SCAN_WORKSPACE // token))
        together = max(1, SCAN_WORKSPACE // (token * length))
        items = -(-heads // together) * -(-steps // length) * (SCAN_OPERATORS + runs)
        states = FIRST_PASSES * state
    elif way == "fused_scan":
        items, states = queries, 2 * state
    elif way == "step":
        items = (steps - 1) * STEP_OPERATORS + runs
        states = (FIRST_PASSES + STEP_PASSES * steps) * state
    else:
        items, states = heads * sizes.key_length, 2 * max(steps, 1) * state
    return Work(1, max(items, 0), entries, flops, cost.io_bytes(sizes) + states)


def _mapped_entries(kernel: Kernel, sizes: Sizes) -> int:
    """Entries of mapped queries and keys, cached keys included, where there is a map."""
    own = type(kernel)
    if own.map_query is Kernel.map_query and own.scaled_query is Kernel.scaled_query:
        return 0
    keys = sizes.key_heads * (sizes.key_length + sizes.past_length)
    entries = sizes.batch * (sizes.query_heads * sizes.query_length + keys) * kernel.mapped_dim(sizes.dim)
    return entries * (LOG_PASSES if kernel.log_features else 1)


def _runs(kernel: Kernel, dim: int) -> int:
    """Operators that expand queries and keys: a run of products for each coordinate and degree above 1."""
    coefficients = kernel.polynomial()
    degrees = 1 if coefficients is None else max(len(coefficients) - 2, 0)
    return 2 * degrees * (6 + (dim if coefficients is not None else 0))
