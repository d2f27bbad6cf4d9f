"""One token of RWKV-7's time mixing on the CPU: all between the products, fused (extra `cpu`).

A token is some thirty operators on a few hundred numbers each, which take longer to call than to compute. Here a head
is read, put into its state, read back, normed and gated in one call for all of them. There are no gradients.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from mercer.backends.sharing import installed, share, transformed

LEAST = 1 << 13
"""Entries of the states below which torch's operators are used: nobody waits for a compiler because of few numbers."""
ALONE = 1 << 19
"""Entries up to which one thread is quicker than waking others."""


def serves(x: Tensor, *numbers: Tensor | None) -> bool:
    """Whether a token `[B, 1, dim]`, the mixer's numbers, the third of them `[heads, K]`, and the state are float32 or
    bfloat16 on the CPU, of at least `LEAST` entries, without derivatives and not for a compiler or `torch.func`.
    """
    bonus = numbers[2]
    assert bonus is not None
    return (
        not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not transformed()
        and len(x) * bonus.numel() * bonus.shape[1] >= LEAST
        and installed()
        and forward_ad._current_level < 0  # pyright: ignore[reportPrivateUsage]
        and x.is_cpu
        and not x.is_neg()
        and x.dtype in _DTYPES
        and all(y is None or y.dtype in _DTYPES for y in numbers)
    )


_DTYPES = (torch.float32, torch.bfloat16)


def mixtures(x: Tensor, before: Tensor, shares: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """x + (before - x) * share, for each share `[dim]`; x and before are `[B, 1, dim]` or `[dim]`, of one dtype."""
    from mercer.backends import rwkv7_step_kernels as kernels

    x, before, dim = x.contiguous(), before.contiguous(), x.shape[-1]
    shares = tuple(y.contiguous() for y in shares)
    out = torch.empty(len(shares), *x.shape, dtype=x.dtype)
    rows = (x, before, out, *shares)
    table = [dim, x.numel() // dim, len(shares), *(y.data_ptr() for y in rows)]
    kernels.mixer()(np.array(table + [y.dtype == torch.bfloat16 for y in rows], np.int64))
    return out.unbind()


def step(
    products: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    share_of_first: tuple[Tensor, Tensor] | None,
    numbers: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    state: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """What the output's product reads, in a dtype, and the sums after the token, `[B, heads, K, K]`, as
    `mercer.mixers.rwkv7.RWKV7` has them, for tensors that `serves` takes.

    products: r, k, v, d, a and g before their sigmoids, `[B, 1, dim]`, or `[dim]` of a batch of 1, and so is what comes
    out. share_of_first: n before its sigmoid and v^0; None: v is not mixed. numbers: key_scale, key_rate, bonus
    `[heads, K]`, and weight and bias of the norm. state: float32; None: 0. eps: of the norm.
    """
    from mercer.backends import rwkv7_step_kernels as kernels

    (heads, size), shape = numbers[2].shape, products[0].shape
    batch = products[0].numel() // (heads * size)
    out, sums = torch.empty(shape, dtype=dtype), torch.empty(batch, heads, size, size)
    rows, halves, kept = [heads, size], [], []
    for x in (*products, *(share_of_first or (None, None)), *numbers, state, sums, out):
        if x is None:
            rows.append(0)
            halves.append(False)
            continue
        half = x.dtype == torch.bfloat16
        if not x.is_contiguous() or not (half or x.dtype == torch.float32):
            x = x.contiguous() if half else x.float().contiguous()
            kept.append(x)
        rows.append(x.data_ptr())
        halves.append(half)
    table = np.array(rows + halves, np.int64)
    items = batch * heads

    def part(_thread: int, start: int, stop: int) -> None:
        work = torch.empty(kernels.room(size))
        kernels.compiled()(table, eps, work.data_ptr(), start, stop)

    if sums.numel() <= ALONE:
        part(0, 0, items)
    else:
        share(items, part)
    return out, sums
