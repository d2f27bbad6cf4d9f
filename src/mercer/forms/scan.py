"""The chunked form of finite kernels: a feature state carried from chunk to chunk.

With G the cumulative log-decay, S_0 the initial state, and chunks of C tokens that begin after time s and end at time
e,

    o_i = sum_{j <= i in chunk} exp(G_i - G_j) f(q_i . k_j) v_j  +  exp(G_i - G_s) phi(q_i) S_s
    S_e = exp(G_e - G_s) S_s + sum_{j in chunk} exp(G_e - G_j) phi(k_j) v_j^T

Every exponent is 0 or less. Only one state exists at a time. The backward pass sweeps twice: forwards, making the
states again for the queries' gradients, and backwards, carrying the state's gradient for those of keys and values; so
its memory is linear in the length too. The gradient of the decay is what a token read less what it wrote, dG_i =
sum_{j<i} w_ij dw_ij - sum_{j>i} w_ji dw_ji, plus <dS, S> at the end; a token's own pair is in neither sum, so that
nothing cancels where gates are small.

Shapes here: heads are merged into the batch, N = B * H; the g query heads of a group share a state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mercer.core.first_order import DENSE, first_order
from mercer.core.kernels import Kernel
from mercer.core.support import FEATURE_CHUNK

WORKSPACE = 8 * 2**20
"""Bytes that the features of one chunk may take: heads and batch rows run in slabs that fit, chunks shorten if one
head does
not."""


def chunked(
    query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, log: Tensor | None, state: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, Hq, Lq, Dv]`` (not normalised) and the final state ``[B, H, F, Dv]``.

    Args:
        query: mapped and scaled, ``[B, Hq, Lq, D]``; causal calls have Lq = Lk.
        key: mapped, ``[B, H, Lk, D]``.
        value: ``[B, H, Lk, Dv]``, zero where a token is not there.
        log: cumulative log-decay after each token, ``[b, h, Lk]`` float64 with b and h 1 or B and H, or None.
        state: the initial state ``[B, H, F, Dv]``.
        causal: False: every query reads the state of all keys.
    """
    function = _Causal if causal else _Full
    out, final = function.apply(query, key, value, log, state, kernel)  # pyright: ignore[reportGeneralTypeIssues]
    return out, final


@dataclass(frozen=True)
class _Cut:
    """How a call is cut: batch rows and heads into slabs whose chunk of features fits the workspace, tokens into
    chunks.
    """

    batch: int
    heads: int
    groups: int
    features: int  # bytes of one token's features

    @property
    def chunk(self) -> int:
        return max(1, min(FEATURE_CHUNK, WORKSPACE // (self.groups * self.features)))

    def slabs(self) -> Iterator[tuple[slice, slice, slice]]:
        """Batch rows, key heads and query heads."""
        together = max(1, WORKSPACE // (self.groups * self.features * self.chunk))
        rows = max(1, together // self.heads) if together >= self.heads else 1
        heads = min(self.heads, together)
        for row in range(0, self.batch, rows):
            for head in range(0, self.heads, heads):
                stop = min(head + heads, self.heads)
                yield (
                    slice(row, min(row + rows, self.batch)),
                    slice(head, stop),
                    slice(head * self.groups, stop * self.groups),
                )


def _cut(query: Tensor, key: Tensor, state: Tensor) -> _Cut:
    batch, heads = key.shape[:2]
    return _Cut(batch, heads, query.shape[1] // heads, state.shape[2] * state.element_size())


def _pull(kernel: Kernel, x: Tensor, grad: Tensor) -> Tensor:
    """The gradient with respect to x of <phi(x), grad>."""
    if torch.compiler.is_compiling():  # which traces no backward pass inside another
        pull: Any = torch.func.vjp(kernel.features, x)[1]
        return pull(grad)[0]
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        features = kernel.features(x)
        if features is x:
            return grad
        if not features.requires_grad:  # constant features, such as those of Taylor(0)
            return torch.zeros_like(x)
        (out,) = torch.autograd.grad(features, x, grad)
    return out


class _Sequence:
    """The tensors of a slab, cut into chunks, with heads merged into the batch."""

    def __init__(self, key: Tensor, log: Tensor | None, groups: int, chunk: int) -> None:
        self.batch, self.heads, self.length, _ = key.shape
        self.groups, self.chunk = groups, chunk
        self.log = None if log is None else log.expand(self.batch, self.heads, self.length)
        self.grad_log: Tensor | None = None  # where asked for: the gradient of log, summed in float64

    def fold(self, x: Tensor, at: slice) -> Tensor:
        """Chunk of a tensor ``[B, H, L, *]`` as ``[N, C, *]``; of one with query heads, those of a group stacked:
        ``[N, g C, *]``.
        """
        return x[:, :, at].reshape(self.batch * self.heads, -1, x.shape[-1])

    def unfold(self, x: Tensor, like: Tensor) -> Tensor:
        """Back to ``[B, H or Hq, C, *]``."""
        return x.view(self.batch, like.shape[1], -1, x.shape[-1])

    def chunks(self, length: int, backwards: bool = False) -> Iterator[slice]:
        starts = range(0, length, self.chunk)
        for start in reversed(starts) if backwards else starts:
            yield slice(start, min(start + self.chunk, length))

    def decays(self, at: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """exp of (G_i - G_j) [N, gC, C], (G_i - G_s) [N, gC, 1], (G_e - G_j) [N, C, 1] and (G_e - G_s) [N, 1, 1]."""
        if self.log is None:
            return None
        log = self.log[:, :, at].reshape(self.batch * self.heads, -1)
        if at.start:
            log = log - self.log[:, :, at.start - 1].reshape(-1, 1)
        inside = (log.unsqueeze(2) - log.unsqueeze(1)).clamp_(max=0).to(dtype).exp_().repeat(1, self.groups, 1)
        since = log.to(dtype).exp().unsqueeze(-1)  # not in place: in float64 the cast is the tensor itself
        until = (log[:, -1:] - log).to(dtype).exp_().unsqueeze(-1)
        return inside, since.repeat(1, self.groups, 1), until, since[:, -1:]

    def add_reads(self, at: slice, rows: Tensor) -> None:
        """Add to the gradient of log what the queries of a chunk read, ``[N, g C]``."""
        if self.grad_log is not None:
            self.grad_log[:, :, at] += rows.view(self.batch, self.heads, self.groups, -1).sum(2)

    def add_writes(self, at: slice, columns: Tensor) -> None:
        """Take from the gradient of log what the keys of a chunk wrote, ``[N, C]``."""
        if self.grad_log is not None:
            self.grad_log[:, :, at] -= columns.view(self.batch, self.heads, -1)

    def hide(self, weight: Tensor) -> Tensor:
        """Zero the future inside a chunk, in place; ``[N, g C, C]``."""
        length = weight.shape[2]
        weight.view(-1, length, length).tril_()
        return weight


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, log: Tensor | None, state: Tensor, kernel: Kernel
    ) -> tuple[Tensor, Tensor]:
        cut = _cut(query, key, state)
        out = query.new_empty(*query.shape[:3], value.shape[-1])
        final = torch.empty_like(state)
        for rows, heads, query_heads in cut.slabs():
            q, k, v = query[rows, query_heads], key[rows, heads], value[rows, heads]
            sequence = _Sequence(k, _part(log, rows, heads), cut.groups, cut.chunk)
            carry = state[rows, heads].flatten(0, 1).clone()
            _causal_rows(sequence, kernel, q, k, v, carry, out[rows, query_heads])
            final[rows, heads] = carry.view(*k.shape[:2], *carry.shape[1:])
        ctx.kernel = kernel
        ctx.save_for_backward(query, key, value, log, state, final)
        return out, final

    @staticmethod
    @first_order(instead=DENSE)
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        query, key, value, log, state, final = ctx.saved_tensors
        grad_out, grad_final = grads
        cut = _cut(query, key, state)
        totals = tuple(torch.empty_like(x) for x in (query, key, value, state))
        grad_log = None
        if log is not None and ctx.needs_input_grad[3]:
            grad_log = torch.zeros(key.shape[:3], dtype=torch.float64, device=key.device)
        for rows, heads, query_heads in cut.slabs():
            at = ((rows, query_heads), (rows, heads), (rows, heads))
            parts = tuple(x[i] for x, i in zip((query, key, value), at, strict=True))
            into = tuple(x[i] for x, i in zip(totals[:3], at, strict=True))
            do = grad_out[rows, query_heads]
            sequence = _Sequence(parts[1], _part(log, rows, heads), cut.groups, cut.chunk)
            if grad_log is not None:
                sequence.grad_log = grad_log[rows, heads]
            _read_gradients(sequence, ctx.kernel, parts, do, state[rows, heads].flatten(0, 1).clone(), into[0])
            carry = grad_final[rows, heads].flatten(0, 1).clone()
            _write_gradients(sequence, ctx.kernel, parts, do, carry, into)
            totals[3][rows, heads] = carry.view(*parts[1].shape[:2], *carry.shape[1:])
        if grad_log is not None:
            if grad_log.shape[-1]:
                grad_log[..., -1] += (final.double() * grad_final.double()).sum((-2, -1))
            grad_log = grad_log.sum_to_size(log.shape)
        return totals[0], totals[1], totals[2], grad_log, totals[3], None


def _part(log: Tensor | None, rows: slice, heads: slice) -> Tensor | None:
    if log is None:
        return None
    log = log[rows] if log.shape[0] > 1 else log
    return log[:, heads] if log.shape[1] > 1 else log


def _causal_rows(
    sequence: _Sequence, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, carry: Tensor, out: Tensor
) -> None:
    """Outputs of a slab, chunk by chunk; ``carry`` ``[N, F, Dv]`` becomes the final state."""
    for at in sequence.chunks(sequence.length):
        q, k, v = sequence.fold(query, at), sequence.fold(key, at), sequence.fold(value, at)
        weight = sequence.hide(kernel.profile(q @ k.transpose(1, 2)))
        decays = sequence.decays(at, q.dtype)
        read, write = kernel.features(q), kernel.features(k)
        if decays is None:
            rows = torch.baddbmm(weight @ v, read, carry)
            carry.baddbmm_(write.transpose(1, 2), v)
        else:
            inside, since, until, whole = decays
            rows = torch.baddbmm(weight.mul_(inside) @ v, read * since, carry)
            carry.mul_(whole).baddbmm_(write.transpose(1, 2), v * until)
        out[:, :, at] = sequence.unfold(rows, query)


def _read_gradients(
    sequence: _Sequence, kernel: Kernel, parts: tuple[Tensor, ...], grad_out: Tensor, carry: Tensor, into: Tensor
) -> None:
    """Forwards: the states again, and from them the gradients of the queries that read them."""
    query, key, value = parts
    for at in sequence.chunks(sequence.length):
        q, k, v = sequence.fold(query, at), sequence.fold(key, at), sequence.fold(value, at)
        decays = sequence.decays(at, q.dtype)
        grad_read = sequence.fold(grad_out, at) @ carry.transpose(1, 2)
        write = kernel.features(k)
        if decays is not None:
            grad_read.mul_(decays[1])
            if sequence.grad_log is not None:
                sequence.add_reads(at, (grad_read * kernel.features(q)).sum(-1, dtype=torch.float64))
            carry.mul_(decays[3]).baddbmm_(write.transpose(1, 2), v * decays[2])
        else:
            carry.baddbmm_(write.transpose(1, 2), v)
        into[:, :, at] = sequence.unfold(_pull(kernel, q, grad_read), query)


def _write_gradients(
    sequence: _Sequence,
    kernel: Kernel,
    parts: tuple[Tensor, ...],
    grad_out: Tensor,
    grad_carry: Tensor,
    into: tuple[Tensor, ...],
) -> None:
    """Backwards: the state's gradient, and from it those of the keys and values that wrote; the pairs inside chunks
    too.
    """
    query, key, value = parts
    for at in sequence.chunks(sequence.length, backwards=True):
        q, k, v = sequence.fold(query, at), sequence.fold(key, at), sequence.fold(value, at)
        do = sequence.fold(grad_out, at)
        decays = sequence.decays(at, q.dtype)
        weight, slope = kernel.profile_and_derivative(q @ k.transpose(1, 2))
        weight = sequence.hide(weight)
        grad_weight = sequence.hide(do @ v.transpose(1, 2))
        read, write = kernel.features(q), kernel.features(k)
        sent = v
        if decays is not None:
            inside, since, until, _ = decays
            weight = weight.mul_(inside)
            if sequence.grad_log is not None:
                length = weight.shape[2]
                pairs = (weight * grad_weight).view(-1, length, length).tril_(-1).view(weight.shape)
                sequence.add_reads(at, pairs.sum(2, dtype=torch.float64))
                sequence.add_writes(at, pairs.sum(1, dtype=torch.float64))
            grad_weight = grad_weight.mul_(inside)
            sent, read = v * until, read * since
        grad_score = grad_weight if slope is None else grad_weight.mul_(slope)
        into[0][:, :, at] += sequence.unfold(grad_score @ k, query)
        grad_write = sent @ grad_carry.transpose(1, 2)
        grad_sent = write @ grad_carry
        if decays is not None:
            grad_sent.mul_(decays[2])
            if sequence.grad_log is not None:
                sequence.add_writes(at, (grad_sent * v).sum(-1, dtype=torch.float64))
            grad_carry.mul_(decays[3])
        into[1][:, :, at] = sequence.unfold(_pull(kernel, k, grad_write).baddbmm(grad_score.transpose(1, 2), q), key)
        into[2][:, :, at] = sequence.unfold(grad_sent.baddbmm_(weight.transpose(1, 2), do), key)
        grad_carry.baddbmm_(read.transpose(1, 2), do)


class _Full(torch.autograd.Function):
    """Without an order: S of all keys, read by all queries."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, log: Tensor | None, state: Tensor, kernel: Kernel
    ) -> tuple[Tensor, Tensor]:
        cut = _cut(query, key, state)
        out = query.new_empty(*query.shape[:3], value.shape[-1])
        final = torch.empty_like(state)
        for rows, heads, query_heads in cut.slabs():
            q, k, v = query[rows, query_heads], key[rows, heads], value[rows, heads]
            sequence = _Sequence(k, None, cut.groups, cut.chunk)
            carry = state[rows, heads].flatten(0, 1).clone()
            for at in sequence.chunks(k.shape[2]):
                carry.baddbmm_(kernel.features(sequence.fold(k, at)).transpose(1, 2), sequence.fold(v, at))
            into = out[rows, query_heads]
            for at in sequence.chunks(q.shape[2]):
                into[:, :, at] = sequence.unfold(kernel.features(sequence.fold(q, at)) @ carry, q)
            final[rows, heads] = carry.view(*k.shape[:2], *carry.shape[1:])
        ctx.kernel = kernel
        ctx.save_for_backward(query, key, value, final)
        return out, final

    @staticmethod
    @first_order(instead=DENSE)
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        query, key, value, final = ctx.saved_tensors
        kernel: Kernel = ctx.kernel
        grad_out, grad_final = grads
        cut = _cut(query, key, final)
        grad_query, grad_key, grad_value, grad_state = (torch.empty_like(x) for x in (query, key, value, final))
        for rows, heads, query_heads in cut.slabs():
            query_part, k, v = query[rows, query_heads], key[rows, heads], value[rows, heads]
            sequence = _Sequence(k, None, cut.groups, cut.chunk)
            carry, grad_carry = final[rows, heads].flatten(0, 1), grad_final[rows, heads].flatten(0, 1).clone()
            into = grad_query[rows, query_heads], grad_key[rows, heads], grad_value[rows, heads]
            for at in sequence.chunks(query_part.shape[2]):
                q, do = sequence.fold(query_part, at), sequence.fold(grad_out[rows, query_heads], at)
                into[0][:, :, at] = sequence.unfold(_pull(kernel, q, do @ carry.transpose(1, 2)), query_part)
                grad_carry.baddbmm_(kernel.features(q).transpose(1, 2), do)
            for at in sequence.chunks(k.shape[2]):
                key_rows, sent = sequence.fold(k, at), sequence.fold(v, at)
                into[1][:, :, at] = sequence.unfold(_pull(kernel, key_rows, sent @ grad_carry.transpose(1, 2)), k)
                into[2][:, :, at] = sequence.unfold(kernel.features(key_rows) @ grad_carry, v)
            grad_state[rows, heads] = grad_carry.view(*k.shape[:2], *grad_carry.shape[1:])
        return grad_query, grad_key, grad_value, None, grad_state, None
