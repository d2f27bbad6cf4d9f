"""Mamba-2's recurrence for `mixers`: the linear kernel with a decay for every token, which is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from benchmarks._mixer_rows import Case, Run


def ssd(length: int, heads: int = 24, dim: int = 128, width: int = 64) -> Case:
    """The sizes of Mamba-2 with 768 channels: 24 heads, states of 128 by 64."""
    from benchmarks._mixer_rows import PLAIN, Case, fla
    from mercer import Causal, Decay, Identity, Power, attention

    def by(**way: Any) -> Run:
        def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
            structure = Causal() & Decay(log_rate=g)
            parts = {"kernel": Power(1, signed=True), "normalizer": Identity(), "scale": 1.0, "path": "features"}
            return attention(q, k, v, structure=structure, **parts, **way)  # pyright: ignore[reportArgumentType]

        return run

    def peer(*given: Tensor) -> Tensor:
        turned = [x.transpose(1, 2) for x in given]
        return fla("simple_gla").naive_chunk_simple_gla(*turned, scale=1.0)[0].transpose(1, 2)

    ours = {"ours": by(), "ours, chunked (torch)": by(form="chunked", backend="torch")}
    sizes = (1, heads, length)
    q, k = (torch.randn(*sizes, dim) * dim**-0.5 for _ in range(2))
    tensors = (q, k, torch.randn(*sizes, width), -torch.rand(sizes) / 4)
    entries = heads * length * dim * width
    shape, flops = f"B=1 H={heads} n={length:,} K={dim} V={width}", (PLAIN[0] * entries, sum(PLAIN) * entries)
    return Case(shape, tensors, ours, {"fla naive_chunk_simple_gla": peer}, flops)
