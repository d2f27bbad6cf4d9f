"""Exact softmax attention on the CPU, forward and backward, by this library's own Numba kernels (extra `cpu`).

    o_i = sum_j p_ij v_j,   p_ij = exp(s_ij - log_sum_i),   s_ij = scale q_i . k_j - slope |i - j|

over the keys that a query sees, in O(n) memory. Products are of bfloat16 where query, key and value are bfloat16 and
the processor multiplies it, in the tile registers of AMX or else by AVX512-BF16 (weights are then rounded to bfloat16
for the second product, as fused kernels elsewhere do), and of float32 otherwise; scores, exponentials and sums are
always float32. Every sum is made by one thread in an order that depends on sizes only: the digits are the same for any
number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mercer.backends import softmax_table as at
from mercer.backends.sharing import installed, share, share_each, threads_for
from mercer.core.cost import visible_pairs
from mercer.core.first_order import DENSE, first_order
from mercer.core.kernels import Exp, Kernel
from mercer.core.layout import Layout
from mercer.core.merged import Merged
from mercer.core.normalizers import Normalizer
from mercer.core.places import Place
from mercer.core.structures import Pattern
from mercer.core.support import Sizes
from mercer.errors import InvalidArgument, Unsupported
from mercer.runtime.processor import multiplies_tiles

WIDEST = 256
"""Largest head dimension: up to it a block of keys and values and what is made of it fit the nearest caches."""
LEAST_PAIRS = 1 << 20
"""Query-key pairs over all heads below which the kernels' start is not worth while (about a millisecond of work)."""
LANES, CHUNK = 16, 16
"""Tokens of a tile; most tiles of queries in an item of the forward pass."""
RUNS = ((8, 32), (32, 512))
"""Items that the backward pass makes if it can by splitting the keys of a head, and tiles that are left in each run at
least: gradients of queries are written and read once more for each run, which short ones are only worth where threads
would idle."""


@dataclass(frozen=True, eq=False)
class Sight:
    """Which keys each query sees: those at positions from ``left`` before to ``right`` after its own.

    Attributes:
        query_at: positions of queries, ``[1 or B, Lq]`` integers; -2^28 to 2^28.
        key_at: positions of keys, ``[1 or B, Lk]``, on the same scale.
        left: how far a query sees back, None for no limit.
        right: how far it sees ahead, None for no limit; 0 is causal.
        query_valid: ``[1 or B, Lq]`` booleans; other queries see nothing. None: all.
        key_valid: ``[1 or B, Lk]`` booleans; other keys are seen by nobody. None: all.
        slopes: ``[Hq]``, the slope of the distance in the score; None for 0. No gradient.
    """

    query_at: Tensor
    key_at: Tensor
    left: int | None = None
    right: int | None = None
    query_valid: Tensor | None = None
    key_valid: Tensor | None = None
    slopes: Tensor | None = None

    @staticmethod
    def of(
        queries: int,
        keys: int,
        left: int | None = None,
        right: int | None = None,
        offset: int | None = None,
        counts: Tensor | None = None,
        slopes: Tensor | None = None,
    ) -> Sight:
        """Sight of queries and keys that stand in order.

        Args:
            queries: how many.
            keys: how many; key j stands at position j.
            left: as in the class.
            right: as in the class.
            offset: the position of query 0; by default keys - queries, so that the last query stands at the last key.
            counts: ``[B]``; only the first so many keys of a batch row are there. Positions stay as they are.
            slopes: as in the class.
        """
        first = keys - queries if offset is None else offset
        valid = None if counts is None else torch.arange(keys) < counts.unsqueeze(1)
        places = torch.arange(first, first + queries).unsqueeze(0), torch.arange(keys).unsqueeze(0)
        return Sight(*places, left, right, None, valid, slopes)

    @staticmethod
    def under(view: Layout) -> Sight:
        """Sight under a layout without documents and decay."""
        slopes = None if view.slopes is None else view.slopes.detach()
        return Sight(
            view.query_position, view.key_position, view.left, view.right, view.query_valid, view.key_valid, slopes
        )


def serves(kernel: Kernel, normalizer: Normalizer, merged: Merged, sizes: Sizes) -> bool:
    """Whether the kernels compute this combination: sums in float32 on the CPU, no decay, slopes without gradient.

    Packed documents come as padded batches; patterns have kernels of their own (:mod:`mercer.backends.sparse_softmax`).
    """
    slopes = None if merged.alibi is None else merged.alibi.slopes
    return (
        type(kernel) is Exp
        and normalizer.scale_invariant
        and normalizer.takes_divided_rows
        and merged.decay is None
        and merged.relative is None
        and not merged.pairwise
        and all(map(_weighs_alike, merged.patterns))
        and not (slopes is not None and slopes.requires_grad and torch.is_grad_enabled())
        and sizes.query_length > 0
        and sizes.key_length + sizes.past_length > 0
        and sizes.device == "cpu"
        and sizes.itemsize == 4
        and max(sizes.dim, sizes.value_dim) <= WIDEST
        and not torch.compiler.is_compiling()  # which cannot trace them
        and installed()
    )


def _weighs_alike(pattern: Pattern) -> bool:
    """Whether what a pattern weighs pairs by, if anything, is the same in all rows and heads."""
    if not pattern.weighs:
        return True
    at, two = torch.zeros(1, 1, 1, 1, dtype=torch.int64), torch.arange(2)
    weight = pattern.log_weight(Place(at, at, at + 1, two.view(2, 1, 1, 1), two.view(1, 2, 1, 1)))
    return weight is None or weight.shape[:2] == (1, 1)


def worth_while(sizes: Sizes, merged: Merged) -> bool:
    """Whether there is work enough to pay for the kernels' start."""
    keys = sizes.key_length + sizes.past_length
    pairs = visible_pairs(merged, sizes) if merged.patterns else sizes.query_length * keys
    return sizes.batch * sizes.query_heads * pairs >= LEAST_PAIRS


def narrow(*dtypes: torch.dtype) -> bool:
    """Whether products of these dtypes are computed in bfloat16."""
    if not installed() or any(dtype != torch.bfloat16 for dtype in dtypes):
        return False
    from mercer.backends.softmax_vectors import NARROW

    return NARROW


def tiled() -> bool:
    """Whether products in bfloat16 are computed in the tile registers of AMX: here by bands, not by patterns."""
    if not installed():
        return False
    from mercer.backends.softmax_vectors import TILES

    return TILES and multiplies_tiles()


def softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, sight: Sight, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Rows and their log-sums; both are differentiable in query, key and value, once.

    Args:
        query: ``[B, Hq, Lq, D]``, any float dtype but float64 and any strides; Hk divides Hq.
        key: ``[B, Hk, Lk, D]``.
        value: ``[B, Hk, Lk, Dv]``.
        scale: what inner products are multiplied by.
        sight: who sees whom.
        dtype: of the rows; default that of ``query``.

    Returns:
        ``out [B, Hq, Lq, Dv]``, 0 in a row that sees nothing, and ``log_sum [B, Hq, Lq]`` float32, -infinity there.

    Raises:
        InvalidArgument: shapes that do not fit.
        Unsupported: float64, or another device than the CPU.
    """
    _check(query, key, value, sight)
    return _Softmax.apply(query, key, value, scale, sight, query.dtype if dtype is None else dtype)  # pyright: ignore[reportReturnType]


def forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, sight: Sight, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """As :func:`softmax_attention`, without a gradient."""
    _check(query, key, value, sight)
    dtype = query.dtype if dtype is None else dtype
    out, log_sum = _Pass(query, key, value, scale, sight).forward(dtype)
    return out.to(dtype), log_sum


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    grad_out: Tensor,
    grad_log_sum: Tensor | None,
    scale: float,
    sight: Sight,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value.

    Args:
        query, key, value, scale, sight: of the call.
        out, log_sum: what it gave; or what a larger call gave that this one is a part of, with other keys elsewhere:
            then the gradients are what this part adds to those of the whole.
        grad_out: ``[B, Hq, Lq, Dv]``.
        grad_log_sum: ``[B, Hq, Lq]`` or None for 0.
        dtype: of the gradients; by default those of query, key and value. float32 leaves sums of parts unrounded.
    """
    _check(query, key, value, sight)
    return _Pass(query, key, value, scale, sight).backward(out, log_sum, grad_out, grad_log_sum, dtype)


class _Softmax(torch.autograd.Function):
    """Saves the inputs as they came, the rows, and their log-sums: rounded rows only if all products are."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, sight: Sight, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        out, log_sum = _Pass(query, key, value, scale, sight).forward(dtype)
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.scale, ctx.sight = scale, sight
        ctx.set_materialize_grads(False)
        return out.to(dtype), log_sum

    @staticmethod
    @first_order(instead=DENSE)
    def backward(ctx: Any, grad_out: Tensor | None, grad_log_sum: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros(1).expand_as(out)
        grads = _Pass(query, key, value, ctx.scale, ctx.sight).backward(out, log_sum, grad_out, grad_log_sum)
        return *grads, None, None, None


class Tables:
    """The tables that a call's kernels take, and the tensors that they point into; queries, keys and values come first.

    Args:
        query, key, value, scale: of the call.
        tensors, sizes: how many rows and entries the tables have.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, tensors: int, sizes: int) -> None:
        self.query, self.key, self.value = query, key, value
        self.scale = float(scale)
        self.tensors = np.zeros((tensors, 5), np.int64)
        self.sizes = np.zeros(sizes, np.int64)
        self.kept: list[Tensor] = []
        self.narrow = narrow(query.dtype, key.dtype, value.dtype)
        for row, x in enumerate((query, key, value)):
            self.put(row, rows_of(x))

    def put(self, row: int, x: Tensor) -> None:
        """Enter a tensor [B, H, L, ...], [b, L] or [H] in the table and keep it alive."""
        strides = [n * x.element_size() for n in x.stride()]
        if x.dim() == 2:  # positions: by batch entry, the same for all heads, where there is more than one
            strides = [strides[0] if x.shape[0] > 1 else 0, 0, strides[1]]
        self.tensors[row] = x.data_ptr(), x.dtype == torch.bfloat16, *(*strides, 0, 0)[:3]
        self.kept.append(x)


class _Pass(Tables):
    """The tables of a band."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, scale: float, sight: Sight) -> None:
        super().__init__(query, key, value, scale, at.TENSORS, at.SIZES)
        self.tiled = self.narrow and tiled()
        step = 2 if self.tiled else 1  # a product in tile registers is over 32 keys or queries
        queries, keys = (-(-x.shape[2] // (step * LANES)) * step for x in (query, key))
        self.tiles = queries, keys
        if not all(self.tiles):
            return
        queries = (sight.query_at, sight.query_valid, self.tiles[0], at.HIDDEN_QUERY)
        keys = (sight.key_at, sight.key_valid, self.tiles[1], at.HIDDEN_KEY)
        for rows, side in (
            ((at.QUERY_AT, at.QUERY_LOW, at.QUERY_HIGH), queries),
            ((at.KEY_AT, at.KEY_LOW, at.KEY_HIGH), keys),
        ):
            for row, x in zip(rows, _places(*side), strict=True):
                self.put(row, x)
        if sight.slopes is not None:
            self.put(at.SLOPES, sight.slopes.detach().float().contiguous())
        left, right = (at.UNLIMITED if x is None else min(x, at.UNLIMITED) for x in (sight.left, sight.right))
        batch, heads, length, dim = key.shape
        sizes = (batch, heads, query.shape[1] // heads, query.shape[2], length, dim, value.shape[3], left, right)
        self.sizes[: len(sizes)] = sizes
        self.sizes[at.NARROW] = self.narrow

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rows, in ``dtype`` if products are of that too, else in float32; and their log-sums."""
        if not self.query.numel() or not self.key.numel():
            return torch.zeros(*self.query.shape[:3], self.value.shape[3]), torch.full(self.query.shape[:3], -torch.inf)
        if self.tiled:
            from mercer.backends.tile_softmax import compiled, room
        else:
            from mercer.backends.softmax_kernels import compiled, room

        pack_keys, attend, _ = compiled()
        batch, heads, queries, dim = self.query.shape
        width, (query_tiles, key_tiles) = self.value.shape[3], self.tiles
        out = laid_out(self.query, width, dtype if self.narrow and dtype == torch.bfloat16 else torch.float32)
        log_sum = torch.empty(batch, heads, queries)
        self.put(at.OUT, out)
        self.put(at.LOG_SUM, log_sum)
        deep = 2 * LANES if self.tiled else LANES
        wide = -(-dim // deep) * deep, -(-width // LANES) * LANES
        packed = [
            torch.empty(self.key.shape[0] * self.key.shape[1] * key_tiles * LANES * n * (2 if self.narrow else 4) // 4)
            for n in wide
        ]
        self.sizes[at.PACKED_KEYS], self.sizes[at.PACKED_VALUES] = (x.data_ptr() for x in packed)
        # An item for each thread at least, where there are that many tiles; which items there are changes no digit.
        chunk = max(1, min(CHUNK, batch * heads * query_tiles // (4 * torch.get_num_threads())))
        self.sizes[at.CHUNK] = chunk
        items = batch * heads * -(-query_tiles // chunk)
        blocks = self.key.shape[0] * self.key.shape[1] * (key_tiles // 2 if self.tiled else key_tiles)
        work = scratch(threads_for(max(items, blocks)), room(dim, width, chunk))
        tables = self.tensors, self.sizes
        share(blocks, lambda thread, start, stop: pack_keys(*tables, work[thread].data_ptr(), start, stop))
        share_each(items, lambda thread, item: attend(*tables, self.scale, work[thread].data_ptr(), item))
        return out, log_sum

    def backward(
        self,
        out: Tensor,
        log_sum: Tensor,
        grad_out: Tensor,
        grad_log_sum: Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = self.query, self.key, self.value
        dtypes = [x.dtype if dtype is None else dtype for x in inputs]
        if not self.query.numel() or not self.key.numel():
            query, key, value = (torch.zeros(x.shape, dtype=kind) for x, kind in zip(inputs, dtypes, strict=True))
            return query, key, value
        if self.tiled:
            from mercer.backends.tile_backward import room
            from mercer.backends.tile_softmax import compiled
        else:
            from mercer.backends.softmax_backward import room
            from mercer.backends.softmax_kernels import compiled

        _, _, retrace = compiled()
        batch, heads, _, dim = self.key.shape
        width, (query_tiles, key_tiles) = self.value.shape[3], self.tiles
        self.put(at.OUT, rows_of(out))
        self.put(at.UPSTREAM, rows_of(grad_out))
        self.put(at.LOG_SUM, log_sum.float().contiguous())
        if grad_log_sum is not None:
            self.put(at.LOG_UPSTREAM, grad_log_sum.float().contiguous())
        splits = max(1, *(min(-(-items // (batch * heads)), key_tiles // tiles) for items, tiles in RUNS))
        split = -(-key_tiles // splits)
        split += split % 2 if self.tiled else 0
        splits = -(-key_tiles // split)
        self.sizes[at.SPLIT], self.sizes[at.SPLITS] = split, splits
        grads = [
            laid_out(x, x.shape[3], kind if kind == torch.bfloat16 else torch.float32)
            for x, kind in zip(inputs, dtypes, strict=True)
        ]
        parts = None
        if splits > 1:
            parts = torch.empty(splits, *self.query.shape)
            self.put(at.GRAD_QUERY, parts[0])
            self.sizes[at.GRAD_STRIDE] = parts.stride(0) * 4
        else:
            self.put(at.GRAD_QUERY, grads[0])
        self.put(at.GRAD_KEY, grads[1])
        self.put(at.GRAD_VALUE, grads[2])
        items = batch * heads * splits
        work = scratch(threads_for(items), room(dim, width, query_tiles, split))
        tables = self.tensors, self.sizes
        share_each(items, lambda thread, item: retrace(*tables, self.scale, work[thread].data_ptr(), item))
        if parts is not None:
            grads[0].copy_(parts.sum(0))
        query, key, value = (g.to(kind) for g, kind in zip(grads, dtypes, strict=True))
        return query, key, value


def scratch(threads: int, size: int) -> Tensor:
    """Memory for each thread, apart from that of the others."""
    return torch.empty(threads, size // 4 + 1024)


def _places(positions: Tensor, valid: Tensor | None, tiles: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of tokens up to a whole number of tiles, and the lowest and highest of each tile."""
    places = positions if valid is None else torch.where(valid, positions, hidden)
    missing = tiles * LANES - places.shape[1]
    places = torch.nn.functional.pad(places.to(torch.int32), (0, missing), value=hidden).contiguous()
    by_tile = places.view(-1, tiles, LANES)
    return places, by_tile.amin(2), by_tile.amax(2)


def laid_out(like: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Empty `[B, H, L, width]`, in memory `[B, L, H, width]` as projections read it."""
    batch, heads, length = like.shape[:3]
    return torch.empty(batch, length, heads, width, dtype=dtype).transpose(1, 2)


def rows_of(x: Tensor) -> Tensor:
    """In float32 or bfloat16, the numbers of a row side by side."""
    x = x.detach()
    x = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def check(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise InvalidArgument or Unsupported for tensors that the kernels would misread: they check nothing."""
    if any(x.dim() != 4 for x in (query, key, value)):
        raise InvalidArgument("softmax_attention: query, key and value must be [B, H, L, D].")
    batch, heads, _, dim = key.shape
    if (
        query.shape[0] != batch
        or query.shape[3] != dim
        or value.shape[:3] != key.shape[:3]
        or not heads
        or query.shape[1] % heads
        or not dim
        or not value.shape[3]
    ):
        shapes = f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        raise InvalidArgument(
            "softmax_attention: query, key and value must be [B, Hq, Lq, D], [B, Hk, Lk, D] and [B, Hk, Lk, Dv], where "
            f"Hk divides Hq and D and Dv are 1 or more; they are {shapes}."
        )
    if any(x.device.type != "cpu" or x.dtype == torch.float64 for x in (query, key, value)):
        raise Unsupported("softmax_attention computes in float32 on the CPU: use backend='torch' for anything else.")


def _check(query: Tensor, key: Tensor, value: Tensor, sight: Sight) -> None:
    """The same, and for what a sight says of them."""
    check(query, key, value)
    batch, length = key.shape[0], key.shape[2]
    if any(x is not None and x < 0 for x in (sight.left, sight.right)):
        raise InvalidArgument(f"softmax_attention: left and right must be 0 or more, not {sight.left}, {sight.right}.")
    for name, x, tokens in (
        ("query_at", sight.query_at, query.shape[2]),
        ("key_at", sight.key_at, length),
        ("query_valid", sight.query_valid, query.shape[2]),
        ("key_valid", sight.key_valid, length),
    ):
        if x is not None and (x.dim() != 2 or x.shape[0] not in (1, batch) or x.shape[1] != tokens):
            raise InvalidArgument(f"softmax_attention: {name} must be [1 or {batch}, {tokens}], not {list(x.shape)}.")
    if sight.slopes is not None and sight.slopes.shape != query.shape[1:2]:
        raise InvalidArgument(f"softmax_attention: slopes must be [{query.shape[1]}], not {list(sight.slopes.shape)}.")
