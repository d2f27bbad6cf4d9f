"""The matrix recurrence on the CPU, forward and backward, fused (extra `cpu`).

    S_t = diag(exp(g_t)) S_{t-1} + a_t (b_t^T S_{t-1}) + k_t v_t^T,        o_t = scale q_t^T S_t

with a bonus o_t = scale q_t^T (S_{t-1} + diag(u) k_t v_t^T), and with the delta rule a = -beta k, b = exp(g) k and
beta k for k, in products over blocks of 16 tokens. Heads go to threads, or slices of 64 columns of the value where
heads are few: rows of S^T are independent. All sums are float32. For the backward pass the state before every 64th
token is kept, and what each token removed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from mercer.backends import matrix_scan_table as at
from mercer.backends.sharing import installed, share, threads_for, transformed
from mercer.core.first_order import first_order
from mercer.errors import InvalidArgument, Unsupported

ALONE = 1 << 19
"""Entries times tokens up to which one thread is quicker than waking others."""


def serves(query: Tensor, key: Tensor, value: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels compute a call of these tensors: float32 sums on the CPU, not for a compiler or `torch.func`,
    no forward-mode derivative."""
    tensors = [x for x in (query, key, value, *others) if x is not None]
    return (
        not torch.compiler.is_compiling()  # a compiler makes its own kernels of torch's form
        and installed()
        and not transformed()
        and torch.float64 not in (query.dtype, key.dtype, value.dtype)
        and all(x.is_cpu and forward_ad.unpack_dual(x).tangent is None for x in tensors)
    )


def refuse_growth(grows: bool) -> None:
    """Refuse log-decays of which some are above 0."""
    if grows:
        raise InvalidArgument("matrix_recurrence: every log_decay must be 0 or less: a state may fade, never grow.")


def matrix_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_decay: Tensor | None = None,
    remove: tuple[Tensor, Tensor] | None = None,
    delta: Tensor | None = None,
    bonus: Tensor | None = None,
    scale: float = 1.0,
    state: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, H, L, V]`` in the dtype of ``value`` and the final state ``[B, H, K, V]``; first derivatives.

    Shapes are checked by :func:`mercer.mixers.matrix_recurrence.matrix_recurrence`, whose arguments these are.

    Args:
        query: ``[B, H, L, K]``, any float dtype but float64, any strides.
        key: ``[B, H, L, K]``.
        value: ``[B, H, L, V]``.
        log_decay: ``[B, H, L, K or 1]``, 0 or less.
        remove: a and b, ``[B, H, L, K]`` each.
        delta: beta, ``[B, H, L]``; no `remove` and no bonus beside it.
        bonus: ``[H, K]``.
        scale: put on the queries.
        state: float32 ``[B, H, K, V]``; default 0. It is not changed.
        lengths: ``[B]`` integers: later tokens are not looked at.

    Raises:
        Unsupported: where :func:`serves` says no.
        InvalidArgument: a log-decay above 0.
    """
    a, b = (None, None) if remove is None else remove
    if not serves(query, key, value, log_decay, a, b, delta, bonus, state, lengths):
        reason = "needs the extra cpu: pip install 'mercer[cpu]'" if not installed() else (
            "computes in float32 on the CPU, outside of torch.compile and torch.func, without forward-mode derivatives"
        )  # fmt: skip
        raise Unsupported(f"The fused matrix recurrence {reason}; use form='chunked' or form='recurrent' instead.")
    query, key, value = _rows(query), _rows(key), _rows(value)
    log, a, b = (None if x is None else _rows(x) for x in (log_decay, a, b))
    beta = None if delta is None else _rows(delta.unsqueeze(-1))
    if bonus is not None:
        bonus = bonus.resolve_neg().float().contiguous()
    if state is not None:
        state = state.resolve_neg().contiguous()
    given = (query, key, value, log, a, b, beta, bonus, state)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given):
        out, final = _Scan.apply(*given, lengths, float(scale))  # pyright: ignore[reportGeneralTypeIssues]
    else:
        out, final, *_ = _forward(*given, lengths, float(scale), keep=False)
    return out.to(value.dtype), final


def _forward(
    query: Tensor, key: Tensor, value: Tensor, log: Tensor | None, a: Tensor | None, b: Tensor | None,
    beta: Tensor | None, bonus: Tensor | None, state: Tensor | None, lengths: Tensor | None, scale: float, *,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Outputs, the final state and, to keep for the backward pass, what was removed and some states."""
    from mercer.backends import matrix_scan_kernels as kernels

    batch, heads, length, dim = key.shape
    width = value.shape[-1]
    out = _empty(value, lengths, value.dtype)
    final = torch.empty(batch, heads, dim, width)
    removed = kept = None
    if keep:
        if a is not None or beta is not None:
            removed = torch.empty(batch, heads, length, width)
        kept = torch.empty(batch, heads, -(-length // at.OUTER), -(-dim // 4) * 4 * _padded(width))
    inputs = {at.QUERY: query, at.KEY: key, at.VALUE: value, at.LOG: log, at.A: a, at.B: b, at.BETA: beta}
    table = inputs | {
        at.BONUS: bonus,
        at.STATE: state,
        at.OUT: out,
        at.FINAL: final,
        at.REMOVED: removed,
        at.KEPT: kept,
    }
    _run(kernels.compiled_forward(), kernels.room, table, lengths, scale)
    return out, final, removed, kept


class _Scan(torch.autograd.Function):
    """Saves the inputs as they came, states and what was removed."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, log: Tensor | None, a: Tensor | None, b: Tensor | None,
        beta: Tensor | None, bonus: Tensor | None, state: Tensor | None, lengths: Tensor | None, scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        inputs = (query, key, value, log, a, b, beta, bonus, state, lengths)
        out, final, removed, kept = _forward(*inputs, scale, keep=True)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, removed, kept)
        return out, final

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        from mercer.backends import matrix_scan_backward, matrix_scan_kernels

        query, key, value, log, a, b, beta, bonus, state, lengths, removed, kept = ctx.saved_tensors
        batch, heads = key.shape[:2]
        if grad_out is None:
            grad_out = torch.zeros(1).expand(value.shape)
        parts = _parts(batch * heads, value.shape[-1])

        def gradient(x: Tensor | None, *shape: int) -> Tensor | None:
            """Of something that all columns of the value have a share in: exact until all is added up."""
            if x is None:
                return None
            dtype = x.dtype if parts == 1 else torch.float32
            return torch.zeros(parts, *shape, dtype=dtype) if lengths is not None else torch.empty(
                parts, *shape, dtype=dtype
            )  # fmt: skip

        shared = {which: gradient(x, *x.shape) if x is not None else None for which, x in (
            (at.GRAD_QUERY, query), (at.GRAD_KEY, key), (at.GRAD_LOG, log), (at.GRAD_A, a), (at.GRAD_B, b),
            (at.GRAD_BETA, beta),
        )}  # fmt: skip
        grad_bonus = None if bonus is None else torch.zeros(parts, batch, *bonus.shape)
        grad_value = _empty(value, lengths, value.dtype)
        grad_state = None if state is None else torch.empty_like(state)
        inputs = {at.QUERY: query, at.KEY: key, at.VALUE: value, at.LOG: log, at.A: a, at.B: b, at.BETA: beta}
        table = inputs | {
            at.BONUS: bonus,
            at.REMOVED: removed,
            at.KEPT: kept,
            at.UPSTREAM: _rows(grad_out),
            at.GRAD_VALUE: grad_value,
        }
        table |= {
            at.GRAD_FINAL: None if grad_final is None else grad_final.resolve_neg().contiguous(),
            at.GRAD_STATE: grad_state,
        }
        table |= shared | {at.GRAD_BONUS: grad_bonus}
        _run(matrix_scan_kernels.compiled_backward(), matrix_scan_backward.room, table, lengths, ctx.scale)

        def joined(x: Tensor | None, like: Tensor | None) -> Tensor | None:
            if x is None or like is None:
                return None
            out = x[0]
            for more in x[1:]:
                out = out + more
            return out.to(like.dtype)

        grads = [joined(shared[which], x) for which, x in (
            (at.GRAD_QUERY, query), (at.GRAD_KEY, key), (at.GRAD_LOG, log), (at.GRAD_A, a), (at.GRAD_B, b),
            (at.GRAD_BETA, beta),
        )]  # fmt: skip
        total = joined(grad_bonus, bonus)
        grads.insert(2, grad_value)
        return *grads, None if total is None else total.sum(0), grad_state, None, None


def _run(
    kernel: Any, room: Callable[[int, int], int], table: dict[int, Tensor | None], lengths: Tensor | None, scale: float
) -> None:
    """Run a kernel over its items, an equal run of them a thread, each with scratch of its own."""
    value, key, log = table[at.VALUE], table[at.KEY], table[at.LOG]
    assert value is not None
    assert key is not None
    batch, heads, length, dim = key.shape
    numbers: list[int] = []
    for row in range(at.TENSORS):
        x = table.get(row)
        if x is None:
            numbers += _ABSENT
            continue
        half = x.dtype == torch.bfloat16
        # A bonus is the same for every row of the batch, and gradients that parts share have one more dimension.
        strides = [(2 if half else 4) * n for n in (0, *x.stride())]
        first = 0 if row == at.BONUS else 2 if row in at.BY_PART else 1
        numbers += (x.data_ptr(), half, *(*strides[first:], 0, 0)[:3], strides[1] if row in at.BY_PART else 0)
    tensors = np.array(numbers, np.int64)
    channels = log is not None and log.shape[-1] == dim and dim > 1
    width = value.shape[-1]
    parts = _parts(batch * heads, width)
    items = batch * heads * parts
    sizes = np.array((heads, length, dim, width, channels, parts, 0), np.int64)
    counts = np.full(batch, length, np.int64) if lengths is None else lengths.to(torch.int64).contiguous().numpy()
    threads = 1 if batch * heads * length * dim * width <= ALONE else threads_for(items)
    pitch = -(-room(dim, -(-_slices(width) // parts)) // 64) * 16  # floats, whole lines
    work = torch.empty(threads * pitch)
    address = work.data_ptr()
    tables = [x.ctypes.data for x in (tensors, sizes, counts)]

    def part(thread: int, start: int, stop: int) -> None:
        kernel(*tables, scale, address + 4 * thread * pitch, start, stop)

    if threads == 1:
        part(0, 0, items)
    else:
        share(items, part)
    refuse_growth(bool(sizes[at.GROWS]))


_ABSENT = (0,) * at.COLUMNS


def _parts(heads: int, width: int) -> int:
    """How many parts the slices of a head are."""
    return _slices(width) if heads < at.SPREAD else 1


def _slices(width: int) -> int:
    return -(-width // at.SLICE)


def _padded(width: int) -> int:
    """Columns of all slices, the last one of 1, 2 or 4 vectors."""
    whole, rest = divmod(width, at.SLICE)
    return whole * at.SLICE + next(n for n in (0, 16, 32, 64) if n >= rest)


def _empty(like: Tensor, lengths: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`[B, H, L, V]`, in memory `[B, L, H, V]` as projections read it; zeros where some tokens are absent."""
    batch, heads, length, width = like.shape
    made = torch.empty if lengths is None else torch.zeros
    return made(batch, length, heads, width, dtype=dtype).transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """In float32 or bfloat16, the numbers of a row side by side."""
    x = x.resolve_neg()  # as the imaginary part of a conjugate has it: negative, and its memory not
    x = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
