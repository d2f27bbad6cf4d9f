"""The matrix recurrence in chunks, by matrix products.

With G_t the log-decay summed from the beginning of a chunk to token t, E_t = G_t - g_t, S_0 the state before it, and
r_t = b_t^T S_{t-1} what a token removes, everything that a token reads is

    x_t^T S_{t-1} = (x_t exp(E_t))^T S_0 + sum_{j<t} sum_c x_tc exp(E_tc - G_jc) (k_jc v_j + a_jc r_j)

Taken with x = b this is a triangular system (1 - A_ba) R = A_bk V + (b exp(E)) S_0, whose solution R = U + W S_0 makes
a chunk one affine map of its state (the WY form); with x = q exp(g), or x = q where there is a bonus, it is the output
less the token's own part. Every exponent is 0 or less: pairs inside a block of 16 tokens have exponents of their own,
and those of two blocks are taken relative to the end of the block before the later one. Exponents are float64 until
they are small. Segments of the sequence are made again in the backward pass, so memory is linear in the length.

Source: Yang et al. 2024, arXiv 2406.06484 (the WY form of the delta rule); Yang et al. 2023, arXiv 2312.06635
(secondary chunks).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

CHUNK = 64
BLOCK = 16
WORKSPACE = 32 * 2**20
"""Bytes that the exponentials of the pairs inside blocks may take: segments are as long as that allows."""
LEAST_LOG = -1e4
"""Log-decays below it are taken for it, so that differences of infinite ones are none; exp is 0 in any case."""


def chunked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log: Tensor | None,
    remove: tuple[Tensor, Tensor] | None,
    bonus: Tensor | None,
    state: Tensor,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, H, L, V]`` and the final state, all in one dtype; differentiable.

    Args:
        query: scaled, ``[B, H, L, K]``; 0 for absent tokens, as key, log and remove are.
        key: ``[B, H, L, K]``.
        value: ``[B, H, L, V]``.
        log: log-decay ``[B, H, L, K or 1]`` or None.
        remove: a and b, ``[B, H, L, K]`` each, or None.
        bonus: ``[H, K]`` or None.
        state: ``[B, H, K, V]``.
        lengths: ``[B]``, or None.
    """
    batch, heads, length, dim = key.shape
    chunk = CHUNK if length > CHUNK else -(-length // BLOCK) * BLOCK
    if log is not None:
        log = log.clamp_min(LEAST_LOG)
    outs: list[Tensor] = []
    for start, stop in _segments(batch * heads * dim * key.element_size(), chunk, length):
        at = slice(start, stop)
        parts = (query[:, :, at], key[:, :, at], value[:, :, at])
        log_part, a, b = (None if x is None else x[:, :, at] for x in (log, *(remove or (None, None))))
        left = None if lengths is None else lengths - start
        if stop - start < length and torch.is_grad_enabled():
            out, state = checkpoint(
                _segment,
                chunk,
                state,
                *parts,
                log_part,
                a,
                b,
                bonus,
                left,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        else:
            out, state = _segment(chunk, state, *parts, log_part, a, b, bonus, left)
        outs.append(out)
    return (torch.cat(outs, 2), state) if outs else (torch.zeros_like(value), state.clone())


def _segments(token: int, chunk: int, length: int) -> Iterator[tuple[int, int]]:
    """Runs of whole chunks whose pairs inside blocks, `token` bytes for each, fit the workspace."""
    if not length:
        return
    step = chunk * max(1, WORKSPACE // max(1, token * BLOCK * chunk))
    for start in range(0, length, step):
        yield start, min(start + step, length)


def _segment(
    chunk: int,
    state: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    bonus: Tensor | None,
    left: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Some chunks. left: ``[B]``, how many tokens of each row are there, or None."""
    length = query.shape[2]
    own = (query * key if bonus is None else query * key * bonus[:, None]).sum(-1)
    q, k, v, own_key = (_cut(x, chunk) for x in (query, key, value, own.unsqueeze(-1)))
    reads, writes, since, until, whole, logs = [q], [k], None, None, None, None
    if log is not None:
        logs = _Logs(_cut(log.double(), chunk))
        since, until, whole = (x.to(q.dtype).exp() for x in (logs.before, logs.total - logs.after, logs.total))
        if bonus is None:
            reads = [q * _cut(log, chunk).exp()]
    if a is not None and b is not None:
        reads.append(_cut(b, chunk))
        writes.append(_cut(a, chunk))
    pairs = _pairs(torch.stack(reads, -3), torch.stack(writes, -3), logs)
    if since is not None and until is not None:
        reads, writes = [x * since for x in reads], [x * until for x in writes]
    rows = torch.baddbmm(*_flat(own_key * v, pairs[..., 0, 0, :, :], v)).view_as(v)
    read, added = reads[0], writes[0].mT @ v
    change = None
    if a is not None:
        # [U | W]: what is removed, as an affine map of the state
        right = torch.cat((pairs[..., 1, 0, :, :] @ v, reads[1]), -1)
        solved = torch.linalg.solve_triangular(
            _identity(pairs) - pairs[..., 1, 1, :, :], right, upper=False, unitriangular=True
        )
        u, w = solved.split((v.shape[-1], k.shape[-1]), -1)
        own_removed = _cut((query * a).sum(-1, keepdim=True), chunk) if bonus is None else None
        removed = pairs[..., 0, 1, :, :] @ solved
        if own_removed is not None:
            removed = removed + own_removed * solved
        rows, read = rows + removed[..., : v.shape[-1]], read + removed[..., v.shape[-1] :]
        added, change = added + writes[1].mT @ u, writes[1].mT @ w
    states: list[Tensor] = []
    for c in range(q.shape[2]):
        states.append(state)
        new = state if whole is None else whole[:, :, c].mT * state
        if change is not None:
            new = new + change[:, :, c] @ state
        new = new + added[:, :, c]
        state = new if left is None else torch.where((left > c * chunk)[:, None, None, None], new, state)
    rows = rows + read @ torch.stack(states, 2)
    return rows.flatten(2, 3)[:, :, :length], state


def _cut(x: Tensor, chunk: int) -> Tensor:
    """``[B, H, L, *]`` as ``[B, H, chunks, C, *]``, zeros beyond the end."""
    beyond = -x.shape[2] % chunk
    x = pad(x, (0, 0, 0, beyond)) if beyond else x
    return x.unflatten(2, (-1, chunk))


def _flat(added: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return added.flatten(0, 2), left.flatten(0, 2), right.flatten(0, 2)


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


class _Logs:
    """Log-decays summed from the beginning of each chunk, float64 ``[B, H, chunks, C, K or 1]``: before a token, after
    it, and over the chunk, ``[B, H, chunks, 1, K or 1]``.
    """

    def __init__(self, log: Tensor) -> None:
        self.after = log.cumsum(-2)
        self.before = pad(self.after[..., :-1, :], (0, 0, 1, 0))
        self.total = self.after[..., -1:, :]


def _pairs(reads: Tensor, writes: Tensor, logs: _Logs | None) -> Tensor:
    """sum_c x_tc exp(E_tc - G_jc) y_jc for j < t, else 0: ``[B, H, chunks, X, Y, C, C]``.

    reads are x ``[B, H, chunks, X, C, K]``, writes y ``[B, H, chunks, Y, C, K]``.
    """
    size = reads.shape[-2]
    if logs is None or logs.after.shape[-1] == 1:
        products = reads.unsqueeze(-3) @ writes.unsqueeze(-4).mT
        if logs is not None:
            exponents = (logs.before - logs.after.mT).clamp_max(0).to(reads.dtype)
            products = products * exponents.exp()[..., None, None, :, :]
        return products.tril(-1)
    blocks = size // BLOCK
    x, y = (z.unflatten(-2, (blocks, BLOCK)) for z in (reads, writes))
    before, after = (z.unflatten(-2, (blocks, BLOCK)) for z in (logs.before, logs.after))
    inside = (before.unsqueeze(-2) - after.unsqueeze(-3)).clamp_max(0).to(reads.dtype).exp()  # [.., blocks, t, j, K]
    weighed = inside.unsqueeze(-5) * y.unsqueeze(-3)  # [.., Y, blocks, t, j, K]
    own = torch.einsum("...ymtjk,...xmtk->...xymtj", weighed, x).tril(-1)
    rows: list[Tensor] = []
    for i in range(blocks):
        parts = [own[..., i, :, :]]
        if i:
            start = before[..., i, :1, :]  # before the block's first token
            late = (x[..., i, :, :] * (before[..., i, :, :] - start).to(x.dtype).exp().unsqueeze(-3)).unsqueeze(-3)
            early = (start.unsqueeze(-3) - after[..., :i, :, :]).flatten(-3, -2).to(x.dtype).exp()
            early = (y[..., :i, :, :].flatten(-3, -2) * early.unsqueeze(-3)).unsqueeze(-4)
            parts.insert(0, late @ early.mT)
        rest = size - (i + 1) * BLOCK
        rows.append(pad(torch.cat(parts, -1), (0, rest)))
    return torch.cat(rows, -2)
