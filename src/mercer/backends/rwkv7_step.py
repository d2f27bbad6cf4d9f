"""One token of RWKV-7's time mixing on the CPU: all between the products, fused (extra `cpu`).

A token is some thirty operators on a few hundred numbers each, which take longer to call than to compute. Here a head
is read, put into its state, read back, normed and gated in one call for all of them. There are no gradients.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from mercer.backends.sharing import installed, share

LEAST = 1 << 13
"""Entries of the states below which torch's operators are used: nobody waits for a compiler because of few numbers."""
ALONE = 1 << 19
"""Entries up to which one thread is quicker than waking others."""


def serves(x: Tensor, *numbers: Tensor | None) -> bool:
    """Whether a token `[B, 1, dim]`, the mixer's numbers, the third of them `[heads, K]`, and the state are float32 or
    bfloat16 on the CPU, of at least `LEAST` entries, without derivatives and not for a compiler.
    """
    bonus = numbers[2]
    assert bonus is not None
    return (
        not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and len(x) * bonus.numel() * bonus.shape[1] >= LEAST
        and installed()
        and forward_ad._current_level < 0  # pyright: ignore[reportPrivateUsage]
        and x.is_cpu
        and x.dtype in _DTYPES
        and all(y is None or y.dtype in _DTYPES for y in numbers)
    )


_DTYPES = (torch.float32, torch.bfloat16)


def step(
    products: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    share_of_first: tuple[Tensor, Tensor] | None,
    numbers: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    state: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """What the output's product reads, `[B, 1, dim]` in a dtype, and the sums after the token, `[B, heads, K, K]`, as
    `mercer.mixers.rwkv7.RWKV7` has them, for tensors that `serves` takes.

    products: r, k, v, d, a and g before their sigmoids, `[B, 1, dim]`. share_of_first: n before its sigmoid and v^0;
    None: v is not mixed. numbers: key_scale, key_rate, bonus `[heads, K]`, and weight and bias of the norm. state:
    float32; None: 0. eps: of the norm.
    """
    from mercer.backends import rwkv7_step_kernels as kernels

    heads, size = numbers[2].shape
    batch, _, dim = products[0].shape
    out, sums = torch.empty(batch, 1, dim, dtype=dtype), torch.empty(batch, heads, size, size)
    given = (*products, *(share_of_first or (None, None)), *numbers, state)
    tensors = [None if x is None else _plain(x) for x in given] + [sums, out]
    rows = [0 if x is None else x.data_ptr() for x in tensors]
    halves = [x is not None and x.dtype == torch.bfloat16 for x in tensors]
    table = np.array([heads, size, *rows, *halves], np.int64)
    items = batch * heads

    def part(_thread: int, start: int, stop: int) -> None:
        work = torch.empty(kernels.room(size))
        kernels.compiled()(table, eps, work.data_ptr(), start, stop)

    if sums.numel() <= ALONE:
        part(0, 0, items)
    else:
        share(items, part)
    return out, sums


def _plain(x: Tensor) -> Tensor:
    """In float32 or bfloat16, without gaps."""
    x = x.contiguous()
    return x if x.dtype in _DTYPES else x.float()
