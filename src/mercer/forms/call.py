"""A resolved call, and what a path makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mercer.core.kernels import Kernel
from mercer.core.merged import Merged
from mercer.core.normalizers import Normalizer
from mercer.core.state import State


@dataclass(frozen=True, eq=False)
class Call:
    """A resolved call of :func:`mercer.attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    kernel: Kernel
    normalizer: Normalizer
    merged: Merged
    given_scale: float | None
    state: State | None
    return_state: bool
    form: str
    path: str
    backend: str
    mass: bool
    """Whether weights are summed too."""
    unnormalized: bool = False
    """Whether rows are wanted before anything is divided, since others are added to them."""
    log_sums: bool = False
    """Whether the logarithms of the sums of weights are wanted too."""

    @property
    def scale(self) -> float:
        """The factor on the inner product: the kernel's own unless one was given."""
        return self.kernel.default_scale(self.query.shape[-1]) if self.given_scale is None else self.given_scale

    @property
    def precision(self) -> torch.dtype:
        """The dtype of sums."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32


class Rows(NamedTuple):
    """Rows before they are normalised.

    Attributes:
        numerator: ``[B, Hq, Lq, Dv]``.
        denominator: ``[B, Hq, Lq]``, or None if weights are not summed, or are divided by already.
        log_factor: the logarithm of what was taken out of each row, ``[B, Hq, Lq]``, or None.
        state: what the call leaves behind, or None if nobody asked.
        log_sum: the logarithm of each row's sum of weights, ``[B, Hq, Lq]``, minus infinity where nothing is seen; None
            where the denominator and the log factor give it.
    """

    numerator: Tensor
    denominator: Tensor | None
    log_factor: Tensor | None
    state: State | None
    log_sum: Tensor | None = None


def blank(x: Tensor, valid: Tensor | None) -> Tensor:
    """Zeros where a token is not there, so that whatever stands in the padding cannot leak, not even NaN."""
    if valid is None:
        return x
    hidden = ~valid.unsqueeze(1)
    return x.masked_fill(hidden if x.dim() == 3 else hidden.unsqueeze(-1), 0)
