"""The chunked form of finite kernels: a feature state carried from chunk to chunk.

With G the cumulative log-decay, S_0 the initial state, and chunks of C tokens that begin after time s and end at time
e,

    o_i = sum_{j <= i in chunk} exp(G_i - G_j) f(q_i . k_j) v_j  +  exp(G_i - G_s) phi(q_i) S_s
    S_e = exp(G_e - G_s) S_s + sum_{j in chunk} exp(G_e - G_j) phi(k_j) v_j^T

Every exponent is 0 or less. Only one state exists at a time. The backward pass sweeps twice: forwards, making the
states again for the queries' gradients, and backwards, carrying the state's gradient for those of keys and values; so
its memory is linear in the length too. The gradient of the decay needs no pairs at all: dG_i = <do_i, o_i> - <dv_i,
v_i>, plus <dS, S> at the end.

Shapes here: heads are merged into the batch, N = B * H; the g query heads of a group share a state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mercer.core.kernels import Kernel
from mercer.core.support import FEATURE_CHUNK

WORKSPACE = 32 * 2**20
"""Bytes that the features of one chunk may take; chunks shorten to fit."""


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


def _chunk_length(query: Tensor, key: Tensor, state: Tensor) -> int:
    """Tokens per chunk: FEATURE_CHUNK, fewer if the features of a chunk would pass the workspace."""
    rows = query.shape[0] * max(query.shape[1], key.shape[1])
    return max(1, min(FEATURE_CHUNK, WORKSPACE // (rows * state.shape[2] * state.element_size())))


def _pull(kernel: Kernel, x: Tensor, grad: Tensor) -> Tensor:
    """The gradient with respect to x of <phi(x), grad>."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        features = kernel.features(x)
        if features is x:
            return grad
        (out,) = torch.autograd.grad(features, x, grad)
    return out


@dataclass
class _Sequence:
    """The tensors of a call, cut into chunks with heads merged into the batch."""

    query: Tensor
    key: Tensor
    value: Tensor
    log: Tensor | None
    chunk: int

    def __post_init__(self) -> None:
        batch, heads, length, _ = self.key.shape
        self.batch, self.heads, self.length = batch, heads, length
        self.groups = self.query.shape[1] // heads
        if self.log is not None:
            self.log = self.log.expand(batch, heads, length)
        mask = torch.ones(self.chunk, self.chunk, dtype=torch.bool, device=self.key.device).triu_(1)
        self.future = mask.repeat(self.groups, 1)

    def keys(self, x: Tensor, at: slice) -> Tensor:
        """Chunk of a key-side tensor, ``[N, C, *]``."""
        return x[:, :, at].reshape(self.batch * self.heads, -1, x.shape[-1])

    def queries(self, x: Tensor, at: slice) -> Tensor:
        """Chunk of a query-side tensor with the group's heads stacked as rows, ``[N, g C, *]``."""
        return x[:, :, at].reshape(self.batch * self.heads, -1, x.shape[-1])

    def unqueries(self, x: Tensor) -> Tensor:
        """Back to ``[B, Hq, C, *]``."""
        return x.view(self.batch, self.heads * self.groups, -1, x.shape[-1])

    def unkeys(self, x: Tensor) -> Tensor:
        return x.view(self.batch, self.heads, -1, x.shape[-1])

    def chunks(self, backwards: bool = False) -> Iterator[slice]:
        starts = range(0, self.length, self.chunk)
        for start in reversed(starts) if backwards else starts:
            yield slice(start, min(start + self.chunk, self.length))

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

    def hide(self, weight: Tensor) -> Tensor:
        """Zero the future inside a chunk, in place; ``[N, g C, C]``."""
        length = weight.shape[2]
        if length == self.chunk:
            return weight.masked_fill_(self.future, 0)
        mask = torch.ones(length, length, dtype=torch.bool, device=weight.device).triu_(1)
        return weight.masked_fill_(mask.repeat(self.groups, 1), 0)


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, log: Tensor | None, state: Tensor, kernel: Kernel
    ) -> tuple[Tensor, Tensor]:
        sequence = _Sequence(query, key, value, log, _chunk_length(query, key, state))
        out = query.new_empty(*query.shape[:3], value.shape[-1])
        carry = state.flatten(0, 1).clone()
        for at in sequence.chunks():
            q, k, v = sequence.queries(query, at), sequence.keys(key, at), sequence.keys(value, at)
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
            out[:, :, at] = sequence.unqueries(rows)
        final = carry.view(state.shape)
        ctx.kernel = kernel
        ctx.save_for_backward(query, key, value, log, state, out, final)
        return out, final

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        query, key, value, log, state, out, final = ctx.saved_tensors
        kernel: Kernel = ctx.kernel
        grad_out, grad_final = grads
        sequence = _Sequence(query, key, value, log, _chunk_length(query, key, state))
        grad_query = torch.empty_like(query)
        grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
        carry = state.flatten(0, 1).clone()
        for at in sequence.chunks():  # forwards: what the queries read
            q, k, v, do = (
                sequence.queries(query, at),
                sequence.keys(key, at),
                sequence.keys(value, at),
                sequence.queries(grad_out, at),
            )
            decays = sequence.decays(at, q.dtype)
            grad_read = do @ carry.transpose(1, 2)
            write = kernel.features(k)
            if decays is not None:
                grad_read.mul_(decays[1])
                carry.mul_(decays[3]).baddbmm_(write.transpose(1, 2), v * decays[2])
            else:
                carry.baddbmm_(write.transpose(1, 2), v)
            grad_query[:, :, at] = sequence.unqueries(_pull(kernel, q, grad_read))
        grad_carry = grad_final.flatten(0, 1).clone()
        for at in sequence.chunks(backwards=True):  # backwards: what keys and values wrote
            q, k, v, do = (
                sequence.queries(query, at),
                sequence.keys(key, at),
                sequence.keys(value, at),
                sequence.queries(grad_out, at),
            )
            decays = sequence.decays(at, q.dtype)
            weight, slope = kernel.profile_and_derivative(q @ k.transpose(1, 2))
            weight = sequence.hide(weight)
            grad_weight = sequence.hide(do @ v.transpose(1, 2))
            read, write = kernel.features(q), kernel.features(k)
            sent = v
            if decays is not None:
                inside, since, until, _ = decays
                weight.mul_(inside)
                grad_weight.mul_(inside)
                sent, read = v * until, read * since
            grad_score = grad_weight if slope is None else grad_weight.mul_(slope)
            grad_query[:, :, at] += sequence.unqueries(grad_score @ k)
            grad_write = sent @ grad_carry.transpose(1, 2)
            grad_sent = write @ grad_carry
            if decays is not None:
                grad_sent.mul_(decays[2])
                grad_carry.mul_(decays[3])
            grad_key[:, :, at] = sequence.unkeys(_pull(kernel, k, grad_write).baddbmm(grad_score.transpose(1, 2), q))
            grad_value[:, :, at] = sequence.unkeys(grad_sent.baddbmm_(weight.transpose(1, 2), do))
            grad_carry.baddbmm_(read.transpose(1, 2), do)
        grad_log = None
        if log is not None and ctx.needs_input_grad[3]:
            grad_log = _log_gradient(sequence, log, (out, grad_out), (value, grad_value), (final, grad_final))
        return grad_query, grad_key, grad_value, grad_log, grad_carry.view(state.shape), None


def _log_gradient(
    sequence: _Sequence,
    log: Tensor,
    outs: tuple[Tensor, Tensor],
    values: tuple[Tensor, Tensor],
    finals: tuple[Tensor, Tensor],
) -> Tensor:
    def dot(pair: tuple[Tensor, Tensor]) -> Tensor:
        return (pair[0].double() * pair[1].double()).sum(-1)

    grad = dot(outs).view(sequence.batch, sequence.heads, sequence.groups, -1).sum(2) - dot(values)
    if sequence.length:
        grad[..., -1] += dot(finals).sum(-1)
    return grad.sum_to_size(log.shape)


class _Full(torch.autograd.Function):
    """Without an order: S of all keys, read by all queries."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, log: Tensor | None, state: Tensor, kernel: Kernel
    ) -> tuple[Tensor, Tensor]:
        chunk = _chunk_length(query, key, state)
        keys, queries = _Sequence(query, key, value, None, chunk), _Sequence(query, key, value, None, chunk)
        queries.length = query.shape[2]
        carry = state.flatten(0, 1).clone()
        for at in keys.chunks():
            carry.baddbmm_(kernel.features(keys.keys(key, at)).transpose(1, 2), keys.keys(value, at))
        out = query.new_empty(*query.shape[:3], value.shape[-1])
        for at in queries.chunks():
            out[:, :, at] = queries.unqueries(kernel.features(queries.queries(query, at)) @ carry)
        final = carry.view(state.shape)
        ctx.kernel, ctx.chunk = kernel, chunk
        ctx.save_for_backward(query, key, value, final)
        return out, final

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        query, key, value, final = ctx.saved_tensors
        kernel: Kernel = ctx.kernel
        grad_out, grad_final = grads
        keys, queries = (_Sequence(query, key, value, None, ctx.chunk) for _ in range(2))
        queries.length = query.shape[2]
        carry, grad_carry = final.flatten(0, 1), grad_final.flatten(0, 1).clone()
        grad_query, grad_key, grad_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for at in queries.chunks():
            q, do = queries.queries(query, at), queries.queries(grad_out, at)
            grad_query[:, :, at] = queries.unqueries(_pull(kernel, q, do @ carry.transpose(1, 2)))
            grad_carry.baddbmm_(kernel.features(q).transpose(1, 2), do)
        for at in keys.chunks():
            k, v = keys.keys(key, at), keys.keys(value, at)
            grad_key[:, :, at] = keys.unkeys(_pull(kernel, k, v @ grad_carry.transpose(1, 2)))
            grad_value[:, :, at] = keys.unkeys(kernel.features(k) @ grad_carry)
        return grad_query, grad_key, grad_value, None, grad_carry.view(final.shape), None
