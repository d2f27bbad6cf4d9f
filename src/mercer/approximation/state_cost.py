"""What an order or a number of features costs as a state."""

from __future__ import annotations

from dataclasses import dataclass

from mercer.core.cost import feature_state_bytes
from mercer.core.kernels import Kernel
from mercer.core.merged import Merged
from mercer.core.normalizers import Normalizer
from mercer.core.support import FEATURE_MEMORY_LIMIT, Sizes, unsupported


@dataclass(frozen=True)
class StateCost:
    """The feature state of a kernel at the sizes that were asked about.

    Attributes:
        features: F, its features at this head dimension.
        bytes: of the whole state, F (Dv + 1) sums for every sequence and head, 4 bytes each (8 for float64 inputs); of
            ``Mixed`` without the window, which is a cache.
        limit: the most bytes that a call takes such a state of.
        by_pairs: why no such state can be had, in words, so that only the pairs remain; None if it can.
    """

    features: int
    bytes: int
    limit: int
    by_pairs: str | None

    def __str__(self) -> str:
        size = _size(self.bytes)
        if self.bytes > self.limit:
            return f"no state of this fits ({size}, limit {_size(self.limit)}): by pairs only"
        return f"a state of {size}" if self.by_pairs is None else "by pairs only"


def state_cost(kernel: Kernel, normalizer: Normalizer, merged: Merged, sizes: Sizes) -> StateCost:
    """Of ``kernel`` in a call of these sizes."""
    features = kernel.feature_dim(sizes.dim)
    assert features is not None
    return StateCost(
        features=features,
        bytes=feature_state_bytes(kernel, merged, sizes, mass=True),
        limit=FEATURE_MEMORY_LIMIT,
        by_pairs=unsupported(kernel, normalizer, merged, "chunked", "features", sizes),
    )


def _size(count: int) -> str:
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:,.3g} {unit}" if value < 1024 else f"{value:,.0f} {unit}"
