"""Exact softmax attention under sparse patterns on the CPU, forward and backward, by Numba kernels (extra `cpu`).

The same rows and log-sums as of `mercer.backends.softmax`, in O(n) memory, over the pairs that a schedule
(`mercer.core.schedule`) has: its tiles are turned into a program once, which is kept with it. Batch rows that stand
alike share a program, and so do heads that see the same; others have programs of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mercer.backends import sparse_table as at
from mercer.backends.sharing import share_each, threads_for
from mercer.backends.softmax import Tables, check, laid_out, rows_of, scratch
from mercer.backends.sparse_program import LANES, Program, by_head, program
from mercer.core.first_order import DENSE, first_order
from mercer.core.layout import Layout
from mercer.core.places import Geometry, firsts
from mercer.core.schedule import schedule
from mercer.core.structures import Window, intersection

ROWS = 256
"""Queries of a tile: the more, the less often its keys are packed, and hidden pairs are left out 16 by 16 anyway."""
ITEMS, CHUNK = 64, 16
"""Items of the forward pass for each thread at least, if there are so many tiles, and most tiles of an item."""
RUNS = 8
"""Items that the backward pass makes if it can by splitting the tiles of a head. Each run has gradients of all keys and
values to itself, which are added up at the end."""


@dataclass(frozen=True, eq=False)
class Job:
    """A program, and for whom.

    Attributes:
        program: who sees whom.
        rows: ``[rows, 3]``: batch entries, and how many of their queries and keys are there.
        head: the one query head whose program it is; None: all.
        shift: the position of query 0 less that of key 0.
    """

    program: Program
    rows: NDArray[np.int64]
    head: int | None
    shift: int


def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, layout: Layout, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Rows and their log-sums; both are differentiable in query, key and value, once.

    Args:
        query, key, value, scale, dtype: as of :func:`mercer.backends.softmax.softmax_attention`.
        layout: with patterns, without decay, documents, or log-weights of pairs; tokens that are not there stand behind
            the others in each row.

    Returns:
        ``out [B, Hq, Lq, Dv]``, 0 in a row that sees nothing, and ``log_sum [B, Hq, Lq]`` float32, -infinity there.

    Raises:
        InvalidArgument: shapes that do not fit.
        Unsupported: float64, or another device than the CPU.
    """
    check(query, key, value)
    found = list(jobs(layout, query.shape[0], query.shape[1])) if query.numel() and key.numel() else []
    slopes = None if layout.slopes is None else layout.slopes.detach().float().contiguous()
    return _Sparse.apply(query, key, value, scale, found, slopes, query.dtype if dtype is None else dtype)  # pyright: ignore[reportReturnType]


def jobs(layout: Layout, batch: int, heads: int) -> Iterator[Job]:
    """What a layout gives to do: a job for all rows and heads, or for each group of those that are alike."""
    simple = intersection((*layout.patterns, Window(layout.left, layout.right)))
    patterns = {p for together in simple for p in together}
    own_rows, own_heads = any(p.per_row for p in patterns), any(p.per_head for p in patterns)
    needs_length = any(p.needs_length for p in patterns)
    groups: dict[tuple[int, int, int, int], list[tuple[int, int, int]]] = {}
    sides = (layout.query_position, layout.query_valid), (layout.key_position, layout.key_valid)
    (query_firsts, queries), (key_firsts, keys) = ((firsts(*side), _counts(*side)) for side in sides)
    assert layout.total is not None
    totals: list[int] = layout.total[:, 0].tolist()
    for row in range(batch):
        first_query, first_key = (x[row if len(x) > 1 else 0] for x in (query_firsts, key_firsts))
        here, there, total = (x[row if len(x) > 1 else 0] for x in (queries, keys, totals))
        if first_query is None or first_key is None or not here or not there:
            continue  # it has nothing to see, or nobody who sees
        name = (first_query, first_key, total if needs_length else 0, row if own_rows else -1)
        groups.setdefault(name, []).append((row, here, there))
    for (first_query, first_key, total, row), members in groups.items():
        geometry = Geometry(
            first_query, layout.query_length, first_key, layout.key_length, (total,), layout.batch, (0, heads)
        )
        own = [(geometry, members, row)]
        if row < 0 and any(p.asks for p in patterns):  # only the answer says whether rows differ
            tiles = schedule(simple, geometry, ROWS).tiles
            if any(k.asked for tile in tiles for k in tile.keys):
                own = [(geometry, [one], one[0]) for one in members]
        for place, those, which in own:
            terms = simple
            if which >= 0:
                terms, place = tuple(tuple(p.in_row(which) for p in one) for one in simple), replace(place, rows=1)
            limits = np.array(those, dtype=np.int64)
            shared = None if own_heads else schedule(terms, place, ROWS)
            apart = shared is None or by_head(shared)
            for head in range(heads) if apart else (0,):
                here = place if shared is not None else replace(place, heads=(head, head + 1))
                made = program(schedule(terms, here, ROWS), here, head, layout.weighing)
                yield Job(made, limits, head if apart else None, first_query - first_key)


def _counts(positions: Tensor, valid: Tensor | None) -> list[int]:
    return [positions.shape[1]] if valid is None else valid.sum(1).tolist()


class _Sparse(torch.autograd.Function):
    """Saves the inputs as they came, the rows, and their log-sums: rounded rows only if all products are."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        found: list[Job],
        slopes: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        out, log_sum = _Pass(query, key, value, scale, found, slopes).forward(dtype)
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.call = scale, found, slopes
        ctx.set_materialize_grads(False)
        return out.to(dtype), log_sum

    @staticmethod
    @first_order(instead=DENSE)
    def backward(ctx: Any, grad_out: Tensor | None, grad_log_sum: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_sum = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros(1).expand_as(out)
        grads = _Pass(query, key, value, *ctx.call).backward(out, log_sum, grad_out, grad_log_sum)
        return *grads, None, None, None, None


class _Pass(Tables):
    """The tables of the jobs of a call."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, found: list[Job], slopes: Tensor | None
    ) -> None:
        super().__init__(query, key, value, scale, at.TENSORS, at.SIZES)
        self.jobs = found
        self.group = query.shape[1] // key.shape[1]
        if slopes is not None:
            self.put(at.SLOPES, slopes)
        self.sizes[: at.KEY_HEAD] = self.group, key.shape[3], value.shape[3], self.narrow

    def enter(self, job: Job) -> tuple[int, int]:
        """Put a job's numbers in the table; gives its key heads over all of its rows, and how many share one."""
        heads, members = self.key.shape[1], self.group
        first, member = 0, 0
        if job.head is not None:
            first, member, heads, members = job.head // self.group, job.head % self.group, 1, 1
        self.sizes[at.KEY_HEAD : at.MEMBERS + 1] = first, heads, member, members
        self.sizes[at.SHIFT] = job.shift
        return len(job.rows) * heads, members

    def run(self, kernel: Any, job: Job, cuts: NDArray[np.int64], items: int, size: int) -> None:
        """All items of a pass of a job."""
        work, made = scratch(threads_for(items), size), job.program
        arrays = self.tensors, self.sizes, made.tiles, made.queries, made.keys, made.codes, made.masks, made.weights
        share_each(
            items, lambda thread, item: kernel(*arrays, job.rows, cuts, self.scale, work[thread].data_ptr(), item)
        )

    def whole(self) -> bool:
        """Whether the first passes fill the rows of all queries."""
        batch, heads, length = self.query.shape[:3]
        there = sum(int(job.rows[:, 1].sum()) * (heads if job.head is None else 1) for job in self.jobs)
        return there == batch * heads * length and all(job.program.whole for job in self.jobs)

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rows, in ``dtype`` if products are of that too, else in float32; and their log-sums."""
        batch, heads, length, dim = self.query.shape
        width = self.value.shape[3]
        again = any(len(job.program.passes) > 2 for job in self.jobs)
        rounded = self.narrow and dtype == torch.bfloat16
        out = laid_out(self.query, width, torch.bfloat16 if rounded and not again else torch.float32)
        log_sum = torch.full((batch, heads, length), -torch.inf)
        if not self.whole():
            out.zero_()
        self.put(at.OUT, out)
        self.put(at.LOG_SUM, log_sum)
        if self.jobs:
            from mercer.backends.sparse_kernels import compiled, room

            attend, _ = compiled()
            for job in self.jobs:
                count, members = self.enter(job)
                made = job.program
                size = room(dim, width, made.most, members)
                for start, stop in zip(made.passes, made.passes[1:], strict=False):
                    chunk = max(1, min(CHUNK, count * (stop - start) // (ITEMS * torch.get_num_threads())))
                    self.sizes[at.START : at.CHUNK + 1] = start, stop, chunk
                    self.run(attend, job, _NO_CUTS, count * -(-(stop - start) // chunk), size)
        return out.to(dtype) if rounded else out, log_sum

    def backward(
        self, out: Tensor, log_sum: Tensor, grad_out: Tensor, grad_log_sum: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.put(at.OUT, rows_of(out))
        self.put(at.UPSTREAM, rows_of(grad_out))
        self.put(at.LOG_SUM, log_sum.float().contiguous())
        if grad_log_sum is not None:
            self.put(at.LOG_UPSTREAM, grad_log_sum.float().contiguous())
        grad_query = laid_out(self.query, self.query.shape[3], torch.float32)
        if not self.whole():
            grad_query.zero_()
        splits = max((self.splits(job) for job in self.jobs), default=1)
        self.put(at.GRAD_QUERY, grad_query)
        parts: list[Tensor] = []
        for row, stride, x in ((at.GRAD_KEY, at.KEY_STRIDE, self.key), (at.GRAD_VALUE, at.VALUE_STRIDE, self.value)):
            batch, heads, length, width = x.shape
            part = torch.zeros(splits, batch, length, heads, width).transpose(2, 3)
            self.put(row, part[0])
            self.sizes[stride] = part.stride(0) * 4
            parts.append(part)
        if self.jobs:
            from mercer.backends.sparse_backward import room
            from mercer.backends.sparse_kernels import compiled

            _, retrace = compiled()
            for job in self.jobs:
                count, members = self.enter(job)
                made, own = job.program, self.splits(job)
                size = room(self.key.shape[3], self.value.shape[3], made.most, members)
                self.sizes[at.SPLIT], self.sizes[at.SPLITS] = 0, own
                for start, stop in zip(made.passes, made.passes[1:], strict=False):
                    self.run(retrace, job, _cuts(made, start, stop, own), count * own, size)
        grads = grad_query, *(part[0] if splits == 1 else part.sum(0) for part in parts)
        query, key, value = (g.to(x.dtype) for g, x in zip(grads, (self.query, self.key, self.value), strict=True))
        return query, key, value

    def splits(self, job: Job) -> int:
        """Runs of tiles that the backward pass makes: more where there are few heads."""
        heads = len(job.rows) * (self.key.shape[1] if job.head is None else 1)
        most = max(stop - start for start, stop in zip(job.program.passes, job.program.passes[1:], strict=False))
        return max(1, min(-(-RUNS // heads), most))


_NO_CUTS = np.zeros(1, np.int64)


def _cuts(made: Program, start: int, stop: int, splits: int) -> NDArray[np.int64]:
    """Where a pass is cut into runs of about the same work."""
    done = np.cumsum(made.work[start:stop] + LANES * LANES)
    if not len(done):  # nobody sees anything
        return np.full(splits + 1, start, np.int64)
    inner = np.searchsorted(done, done[-1] * np.arange(1, splits) / splits)
    return np.concatenate(([start], start + inner, [stop])).astype(np.int64)
