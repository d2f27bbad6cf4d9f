"""Causal softmax attention on the CPU, forward and backward, by this library's own Numba kernels (extra `cpu`).

Exact, O(n) memory, every head computed by one thread in one order: the same digits for any number of threads. Products,
exponentials and sums are float32; bfloat16 and float16 inputs are widened first and results rounded once. It serves
exponential kernels under scale-invariant normalisers, as `mercer.backends.sdpa` does, and is about twice as fast there
at training lengths (docs/lab.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mercer.backends.sharing import installed, share, threads_for
from mercer.core.first_order import first_order
from mercer.core.kernels import Exp, Kernel
from mercer.core.normalizers import Normalizer
from mercer.core.structures import Merged
from mercer.core.support import Sizes

WIDEST = 128
"""Largest head dimension: four query rows of scores and their factors still fit the registers and the nearest cache."""
LEAST_PAIRS = 1 << 20
"""Query-key pairs over all heads below which the kernels' start is not worth while (about a millisecond of work)."""


def serves(kernel: Kernel, normalizer: Normalizer, merged: Merged, sizes: Sizes) -> bool:
    """Whether the kernels compute this combination: plain causal self-attention, in float32 sums, on the CPU."""
    return (
        type(kernel) is Exp
        and normalizer.scale_invariant
        and normalizer.takes_divided_rows
        and merged.causal
        and merged.left is None
        and not merged.weighted
        and merged.padding is None
        and merged.documents is None
        and sizes.query_length == sizes.key_length > 0
        and not sizes.past_length
        and sizes.device == "cpu"
        and sizes.itemsize == 4
        and sizes.dim == sizes.value_dim
        and sizes.dim % 16 == 0
        and sizes.dim <= WIDEST
        and installed()
    )


def worth_while(sizes: Sizes) -> bool:
    """Whether there is work enough to pay for the kernels' start."""
    return sizes.batch * sizes.query_heads * sizes.query_length * sizes.key_length >= LEAST_PAIRS


def causal_softmax(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T) v under the causal mask; query [B, Hq, L, D], key and value [B, Hk, L, D], Hk divides Hq."""
    out: Tensor = _Causal.apply(query, key, value, scale)
    return out


class _Causal(torch.autograd.Function):
    """Saves the inputs as they came, the output in float32 and the log-sum of each row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        from mercer.backends.causal_kernels import forward_for

        out = _like(query)
        log_sum = torch.empty(query.shape[:3])
        arrays = [t.float().numpy() for t in (query, key, value)] + [out.numpy(), log_sum.numpy()]
        _share(forward_for(query.shape[-1]), arrays, key, scale)
        ctx.save_for_backward(query, key, value, out, log_sum)
        ctx.scale = scale
        return out.to(query.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        from mercer.backends.causal_kernels import backward_for

        query, key, value, out, log_sum = ctx.saved_tensors
        grads = [_like(t) for t in (query, key, value)]
        arrays = [t.float().numpy() for t in (query, key, value, out)] + [log_sum.numpy()]
        arrays += [t.float().numpy() for t in (upstream, *grads)]
        _share(backward_for(query.shape[-1]), arrays, key, ctx.scale)
        return *(g.to(query.dtype) for g in grads), None


def _like(x: Tensor) -> Tensor:
    """Empty float32 of x's shape, laid out [B, L, H, D] as projections read it."""
    batch, heads, length, dim = x.shape
    return torch.empty(batch, length, heads, dim).transpose(1, 2)


def _share(kernel: Callable[..., None], arrays: list[Any], key: Tensor, scale: float) -> None:
    """Run a kernel over all key heads, an equal run of them a thread, each with scratch of its own."""
    from mercer.backends.causal_kernels import workspace

    items = key.shape[0] * key.shape[1]
    scratch = torch.empty(threads_for(items), workspace(key.shape[2], key.shape[3])).numpy()
    share(items, lambda thread, start, stop: kernel(*arrays, scratch[thread], start, stop, scale))
