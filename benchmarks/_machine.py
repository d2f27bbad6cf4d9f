"""What this machine can do at most: large matrix products and memory traffic, with the threads that the rest gets."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from benchmarks._clock import seconds

PRODUCTS = {
    "cpu": ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 1024, 4096)),
    "other": ((4096, 4096, 4096), (8192, 8192, 8192)),
}
"""m, k, n of the products: one that stays in the caches, a cube, and one with more columns than it sums over."""
COPIED = {"cpu": 1 << 28, "other": 1 << 30}
"""Bytes of the buffer that is copied and read; far more than the caches hold."""


@dataclass
class Limits:
    """Best rates seen.

    Attributes:
        products: FLOP a second by dtype, and within it by shape ``"m x k x n"``.
        copy: bytes a second of a copy, each byte counted when read and when written.
        read: bytes a second of a sum.
    """

    products: dict[str, dict[str, float]] = field(default_factory=dict)
    copy: float = 0.0
    read: float = 0.0

    def flops(self, dtype: str) -> float:
        """FLOP a second: the best product."""
        return max(self.products[dtype].values())

    @property
    def bandwidth(self) -> float:
        """Bytes a second: the better of copying and reading, so that the limit is not set too low."""
        return max(self.copy, self.read)

    def least_seconds(self, flops: float, moved: float, dtype: str) -> float:
        """No call can take less: products at the best rate or memory at the best rate, whichever takes longer."""
        return max(flops / self.flops(dtype), moved / self.bandwidth)

    def merge(self, other: Limits) -> Limits:
        """The better of both in every rate: what the machine did once, it can do."""
        products = {
            dtype: {
                shape: max(
                    rates.get(shape, 0.0) for rates in (self.products.get(dtype, {}), other.products.get(dtype, {}))
                )
                for shape in self.products.get(dtype, {}) | other.products.get(dtype, {})
            }
            for dtype in self.products | other.products
        }
        return Limits(products, max(self.copy, other.copy), max(self.read, other.read))


def measure(dtypes: tuple[str, ...], device: torch.device, repeats: int = 5, quick: bool = False) -> Limits:
    """The best of ``repeats`` tries each; ``quick`` takes the smallest product and a small buffer."""
    kind = "cpu" if device.type == "cpu" else "other"
    found = Limits()
    for name in dtypes:
        dtype = getattr(torch, name)
        found.products[name] = {}
        for m, k, n in PRODUCTS[kind][: 1 if quick else None]:
            left, right = (torch.randn(size, device=device).to(dtype) for size in ((m, k), (k, n)))
            out = torch.empty(m, n, dtype=dtype, device=device)
            rate = 2 * m * k * n / _best(lambda a=left, b=right, o=out: torch.mm(a, b, out=o), repeats, device)
            found.products[name][f"{m} x {k} x {n}"] = rate
    size = COPIED[kind] // (8 if quick else 1)
    source = torch.ones(size // 4, device=device)
    target = torch.zeros_like(source)
    found.copy = 2 * size / _best(lambda: target.copy_(source), repeats, device)
    found.read = size / _best(source.sum, repeats, device)
    return found


def _best(call: object, repeats: int, device: torch.device) -> float:
    assert callable(call)
    call()
    return min(seconds(call, device) for _ in range(repeats))
