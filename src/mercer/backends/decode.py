"""Softmax attention of a few queries against a key/value cache, on the CPU, in one pass (extra `cpu`).

    out = softmax(scale q k^T - slope |i - j|) v  over the keys that a query sees

What a decoding step costs is reading its cache, so keys and values are read once, in their own dtype, by all queries
that share them, from wherever they stand: a cache is a view of a larger buffer. Sums are float32. There is no gradient.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from mercer.backends.sharing import installed, share, share_each, threads_for
from mercer.core.kernels import Exp, Kernel
from mercer.core.merged import Merged
from mercer.core.normalizers import Normalizer
from mercer.core.support import Sizes
from mercer.core.work import SHORTEST_RANGE, few
from mercer.errors import InvalidArgument, Unsupported

LEAST_ENTRIES = 1 << 16
"""Numbers of keys and values from which nobody minds that a compiler starts: a quarter of a megabyte in float32."""
ALONE = 3 << 22
"""Bytes of keys and values up to which one thread is quicker than waking others."""
LARGE = 1 << 24
"""Bytes from which threads take range after range, so that none waits for one that is held up; below, equal runs."""
ITEMS = 64
"""Ranges over all heads, where there are keys enough: several for each thread, whatever their number."""

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def serves(kernel: Kernel, normalizer: Normalizer, merged: Merged, sizes: Sizes) -> bool:
    """Whether the kernel computes this combination: few queries that want no gradient, on the CPU."""
    slopes = None if merged.alibi is None else merged.alibi.slopes
    return (
        type(kernel) is Exp
        and normalizer.scale_invariant
        and normalizer.takes_divided_rows
        and merged.decay is None
        and merged.relative is None
        and merged.documents is None
        and not merged.patterns
        and not merged.pairwise
        and not (slopes is not None and torch.is_grad_enabled() and slopes.requires_grad)
        and few(sizes)
        and sizes.key_length + sizes.past_length > 0
        and sizes.batch > 0
        and sizes.device == "cpu"
        and sizes.itemsize == 4
        and not torch.compiler.is_compiling()
        and installed()
    )


def worth_while(sizes: Sizes) -> bool:
    """Whether there is work enough to pay for the kernel's start."""
    keys = sizes.batch * sizes.key_heads * (sizes.key_length + sizes.past_length)
    return keys * (sizes.dim + sizes.value_dim) >= LEAST_ENTRIES


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    left: int | None = None,
    right: int | None = None,
    bounds: Tensor | None = None,
    valid: Tensor | None = None,
    slopes: Tensor | None = None,
    position: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and log-sums of a few queries. No argument is changed, nothing of the cache is copied.

    Args:
        query: ``[B, Hq, L, D]``; float32, bfloat16 or float16, as keys and values; Hk divides Hq.
        key: ``[B, Hk, n, D]``, any strides but of the last dimension.
        value: ``[B, Hk, n, Dv]``, likewise.
        scale: of the inner products.
        left: how many keys before its own place a query sees; the last query stands at the last key. Default: all.
        right: how many after it. Default: all.
        bounds: ``[1 or B, L, 3]`` int64, in place of these two: the first key that a query sees, the first key after
            them, and the query's own position.
        valid: ``[1 or B, n]`` bool: which keys are there. Default: all.
        slopes: ``[Hq]``: what the score loses for each token of distance. Default: nothing.
        position: ``[1 or B, n]``: positions of keys, below 2^31; only distances are read. Default: 0, 1, 2, ...

    Returns:
        ``out [B, Hq, L, Dv]`` and the logarithms of the sums of weights ``[B, Hq, L]``, both float32. A query that sees
        nothing has zeros and minus infinity.

    Raises:
        InvalidArgument: shapes or dtypes that do not fit.
        Unsupported: another device than the CPU, or a gradient that is wanted of any tensor.
    """
    _check(query, key, value, left, right, bounds, valid, slopes, position)
    return decode_checked(
        query, key, value, scale, left=left, right=right, bounds=bounds, valid=valid, slopes=slopes, position=position
    )


def decode_checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    left: int | None = None,
    right: int | None = None,
    bounds: Tensor | None = None,
    valid: Tensor | None = None,
    slopes: Tensor | None = None,
    position: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`decode` of arguments that were checked where the call began: every layer asks at every token."""
    from mercer.backends import decode_kernels as kernels

    batch, heads, keys, dim = key.shape
    _, query_heads, queries, _ = query.shape
    width, group = value.shape[3], query_heads // heads
    kind, size = _KINDS[query.dtype], query.element_size()
    seen = _band(queries, keys, left, right) if bounds is None else bounds.flatten().tolist()
    first, stop = (seen[0], seen[1]) if len(seen) == 3 else _reach(seen)
    first = max(first, 0)
    stop = max(first, min(keys, stop))
    (query, at_query), (key, at_key), (value, at_value) = (_rows(x, size) for x in (query, key, value))
    # Names hold on to what the kernel is given addresses of.
    valid = None if valid is None else valid.contiguous()
    position = None if position is None else position.to(torch.int32).contiguous()
    slopes = None if slopes is None else slopes.detach().to(torch.float32).contiguous()
    span, items, together, every, room, parts = _cut(batch * heads, stop - first, group * queries, dim, width, kind)
    total = batch * heads * items
    moved = batch * heads * (stop - first) * (dim + width) * size
    threads = 1 if moved <= ALONE else threads_for(total)
    scratch = torch.empty(parts + threads * room)
    out, log_sum = torch.empty(batch, query_heads, queries, width), torch.empty(batch, query_heads, queries)
    address = scratch.data_ptr()
    numbers = [
        *at_query, *at_key, *at_value, *_by_row(valid, keys), *_by_row(position, 4 * keys),
        0 if bounds is None or bounds.shape[0] == 1 else 3 * queries, 0 if slopes is None else slopes.data_ptr(),
        address, out.data_ptr(), log_sum.data_ptr(), heads, group, queries, dim, width, first, stop, span, items, *seen,
    ]  # fmt: skip
    table, work = np.array(numbers, np.int64), address + 4 * parts
    run, finish = kernels.compiled(kind, together)
    if threads == 1:
        run(table, scale, every, work, 0, total)
    else:

        def part(thread: int, start: int, stop: int) -> None:
            run(table, scale, every, work + 4 * thread * room, start, stop)

        if moved < LARGE:
            share(total, part)
        else:
            share_each(total, lambda thread, item: part(thread, item, item + 1))
    finish(table, every, 0, batch * heads)
    return out, log_sum


@lru_cache(maxsize=256)
def _cut(heads: int, keys: int, rows: int, dim: int, width: int, kind: int) -> tuple[int, int, int, int, int, int]:
    """Keys of a range, ranges of a head, rows that go together, rows with those that fill up the last of these, floats
    of scratch of a thread, and of what all ranges leave. The layers of a model ask for the same.
    """
    from mercer.backends import decode_kernels as kernels

    span, items = _ranges(heads, keys)
    together = rows if rows < 3 else 4
    every = -(-rows // together) * together
    parts = heads * items * every * kernels.pitch(width, kind)
    return span, items, together, every, kernels.room(every, dim, kind), parts


def _reach(seen: list[int]) -> tuple[int, int]:
    """The first key that any query sees, and the first after all of them, of `bounds`."""
    some = [(low, high) for low, high in zip(seen[::3], seen[1::3], strict=True) if low < high]
    return min((low for low, _ in some), default=0), max((high for _, high in some), default=0)


def _band(queries: int, keys: int, left: int | None, right: int | None) -> list[int]:
    """What queries see that stand at the last keys, in the order of `bounds`."""
    rows: list[int] = []
    for here in range(keys - queries, keys):
        first = 0 if left is None else max(here - left, 0)
        rows += (first, keys if right is None else max(min(here + right + 1, keys), first), here)
    return rows


def _ranges(heads: int, keys: int) -> tuple[int, int]:
    """Keys of a range, a multiple of 16, and how many ranges a head has; by sizes alone."""
    wanted = min(-(-ITEMS // heads), max(keys // SHORTEST_RANGE, 1))  # each leaves as much as some keys
    span = -(-keys // wanted)
    span = max(-(-span // 16) * 16, 16)
    return span, max(-(-keys // span), 1)


def _rows(x: Tensor, size: int) -> tuple[Tensor, tuple[int, int, int, int]]:
    """The tensor, with the numbers of a row side by side; and where it stands: its address, and its strides in bytes
    over batch rows, heads and tokens.
    """
    if x.stride(3) != 1 and x.shape[3] != 1:
        x = x.contiguous()
    batch, head, token, _ = x.stride()
    return x, (x.data_ptr(), batch * size, head * size, token * size)


def _by_row(x: Tensor | None, step: int) -> tuple[int, int]:
    """An address, 0 for nothing, and how many bytes batch rows are apart."""
    return (0, 0) if x is None else (x.data_ptr(), 0 if x.shape[0] == 1 else step)


def _check(
    query: Tensor, key: Tensor, value: Tensor, left: int | None, right: int | None, bounds: Tensor | None,
    valid: Tensor | None, slopes: Tensor | None, position: Tensor | None,
) -> None:  # fmt: skip
    """Raise InvalidArgument or Unsupported for what the kernel would misread or lose: it checks nothing."""
    given: list[Any] = [query, key, value]
    if any(x.ndim != 4 for x in given) or not _fit(query.shape, key.shape, value.shape):
        raise InvalidArgument(
            "decode: query, key and value must be [B, Hq, L, D], [B, Hk, n, D] and [B, Hk, n, Dv], where Hk divides Hq "
            f"and none of B, Hk, L, D and Dv is 0; they are {list(query.shape)}, {list(key.shape)} and "
            f"{list(value.shape)}."
        )
    if bounds is not None and (left is not None or right is not None):
        raise InvalidArgument("decode: give either bounds or left and right.")
    batch, keys = key.shape[0], key.shape[2]
    shapes = (
        ("bounds", bounds, (query.shape[2], 3), torch.int64),
        ("valid", valid, (keys,), torch.bool),
        ("position", position, (keys,), torch.int64),
    )
    for name, x, shape, dtype in shapes:
        if x is not None and (x.dtype != dtype or x.shape[0] not in (1, batch) or tuple(x.shape[1:]) != shape):
            raise InvalidArgument(
                f"decode: {name} must be {dtype} [1 or {batch}, {', '.join(map(str, shape))}], not {x.dtype} "
                f"{list(x.shape)}."
            )
    if slopes is not None and slopes.shape != (query.shape[1],):
        raise InvalidArgument(
            f"decode: slopes must be [{query.shape[1]}], one per query head, not {list(slopes.shape)}."
        )
    if query.dtype not in _KINDS or key.dtype != query.dtype or value.dtype != query.dtype:
        raise InvalidArgument(
            "decode: query, key and value must all be float32, bfloat16 or float16, not "
            f"{query.dtype}, {key.dtype} and {value.dtype}."
        )
    recorded = torch.is_grad_enabled()
    for x in (query, key, value, bounds, valid, slopes, position):
        if x is None:
            continue
        if not x.is_cpu:
            raise Unsupported("decode computes on the CPU: use backend='torch' for anything else.")
        if (recorded and x.requires_grad) or forward_ad.unpack_dual(x).tangent is not None:
            raise Unsupported("decode has no gradient: use backend='torch', or torch.no_grad().")


def _fit(query: torch.Size, key: torch.Size, value: torch.Size) -> bool:
    batch, heads, keys, dim = key
    return (
        query[0] == batch > 0
        and query[3] == dim > 0
        and query[2] > 0
        and value[:3] == (batch, heads, keys)
        and value[3] > 0
        and heads > 0
        and query[1] > 0
        and query[1] % heads == 0
    )
