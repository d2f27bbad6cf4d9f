"""Some rows of an attention, weights and outputs, in float64 and in memory proportional to rows times keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from mercer.core.counts import keys_seen
from mercer.core.kernels import Kernel
from mercer.core.layout import Layout, layout, tokens
from mercer.core.merged import Merged
from mercer.core.mixed import Mixed
from mercer.core.normalizers import Normalizer
from mercer.forms.log_features import lower

_WEIGHTS = 2**23
"""Weights held at once, 64 MiB in float64."""
_KEYS = 1024
"""Keys whose features are held at once."""


class Rows:
    """The queries at the positions ``index`` against all keys, under any structure.

    float64 throughout, so that what is found is the error of a kernel and not that of the arithmetic.

    Args:
        query, key, value: as of :func:`mercer.attention`.
        merged: the structure.
        index: ``[R]`` positions among the queries.
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, merged: Merged, index: Tensor) -> None:
        batch, heads, length, _ = query.shape
        own = tokens(merged, batch, heads, key.shape[1], length, key.shape[2], query.device)
        whole = layout(merged, own)
        self.layout = replace(
            whole,
            query_position=whole.query_position[:, index],
            query_valid=None if whole.query_valid is None else whole.query_valid[:, index],
            query_document=None if whole.query_document is None else whole.query_document[index],
            query_log=None if whole.query_log is None else whole.query_log[:, :, index],
            offset=None,
        )
        self.index, self.groups = index, heads // key.shape[1]
        self.query = _present(query[:, :, index], self.layout.query_valid).double()
        self.key, self.value = (_present(x, own.key_valid).double() for x in (key, value))
        self.count = keys_seen(merged, own, None, torch.float64)[:, :, index]

    @property
    def seen(self) -> Tensor:
        """Which rows see any key, ``[B, R]``; the others are zero under every kernel and count for nothing."""
        return (self.count[:, 0] > 0).expand(self.query.shape[0], -1)

    def blocks(self) -> Iterator[slice]:
        """Ranges of rows whose weights fit into memory."""
        batch, heads, rows, _ = self.query.shape
        step = max(1, _WEIGHTS // max(1, batch * heads * self.key.shape[2]))
        for start in range(0, rows, step):
            yield slice(start, min(start + step, rows))

    def weights(self, kernel: Kernel, scale: float | None, rows: slice) -> tuple[Tensor, Tensor | None]:
        """w_ij K(q_i, k_j) ``[B, Hq, r, Lk]``, 0 where hidden, and the log factor ``[B, Hq, r]`` taken out of each row
        (None: none was). ``scale`` None is the kernel's own.
        """
        if not isinstance(kernel, Mixed):
            return self._weights(kernel, scale, rows, self.layout)
        left = self.layout.left
        band = replace(self.layout, left=kernel.window - 1 if left is None else min(kernel.window - 1, left))
        near, near_factor = self._weights(kernel.near, scale, rows, band)
        far, far_factor = self._weights(kernel.far, scale, rows, replace(self.layout, right=-kernel.window))
        zero = near.new_zeros(near.shape[:-1])
        near_factor, far_factor = (zero if f is None else f for f in (near_factor, far_factor))
        if kernel.log_ratio is not None:
            near_factor = near_factor + kernel.log_ratio.detach().to(zero).view(1, -1, 1)
        factor = torch.maximum(near_factor, far_factor)
        near, far = (
            w * (f - factor).exp().unsqueeze(-1) for w, f in ((near, near_factor), (far, far_factor))
        )  # fmt: skip
        return near + far, factor

    def _weights(
        self, kernel: Kernel, scale: float | None, rows: slice, layout: Layout
    ) -> tuple[Tensor, Tensor | None]:
        scale = kernel.default_scale(self.query.shape[-1]) if scale is None else scale
        keys = self.key.shape[2]
        query = kernel.scaled_query(self.query[:, :, rows], scale)
        factor: Tensor | None = None
        if kernel.log_features:
            query, factor = lower(query)
        score = query.new_empty(*query.shape[:3], keys)
        log = layout.bias(rows, slice(0, keys), slice(None), slice(None), torch.float64)
        peaks: list[Tensor] = []
        for start in range(0, keys, _KEYS):
            key = kernel.scaled_key(self.key[:, :, start : start + _KEYS], scale)
            if kernel.log_features:
                key, peak = lower(key)
                peaks.append(peak)
            score[..., start : start + _KEYS] = query @ self._grouped(key).mT
        if peaks:
            peak = self._grouped(torch.cat(peaks, -1)).unsqueeze(2)
            log = peak if log is None else peak + log
        if kernel.exponential:
            log = score if log is None else score + log
        visible = layout.visible(rows, slice(0, keys))
        hidden = None if visible is None else ~visible
        weight = torch.ones_like(score) if kernel.exponential else kernel.profile(score)
        if log is not None:
            log = log.expand_as(score)
            log = log if hidden is None else log.masked_fill(hidden, -torch.inf)
            top = log.amax(-1) if keys else log.new_zeros(log.shape[:-1])
            top = top.masked_fill(top == -torch.inf, 0)
            weight = weight * (log - top.unsqueeze(-1)).exp()
            factor = top if factor is None else factor + top
        return weight if hidden is None else weight.masked_fill(hidden, 0), factor

    def outputs(self, normalizer: Normalizer, weight: Tensor, factor: Tensor | None, rows: slice) -> Tensor:
        """The outputs ``[B, Hq, r, Dv]`` that these weights give."""
        numerator = weight @ self._grouped(self.value)
        denominator: Tensor | None = None
        if normalizer.needs_denominator:
            denominator = weight.sum(-1)
        elif normalizer.needs_count:
            denominator = self.count[:, :, rows]
        local = normalizer.map_tokens(lambda gate: gate[:, :, self.index[rows]])
        if factor is None or normalizer.scale_invariant:
            return local.apply(numerator, denominator)
        return local.apply_factored(numerator, denominator, factor)

    def _grouped(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.groups, 1) if self.groups > 1 else x


def _present(x: Tensor, valid: Tensor | None) -> Tensor:
    """Zeros where a token is not there: what stands in the padding must not matter, not even NaN."""
    return x if valid is None else x.masked_fill(~valid[:, None, :, None], 0)
