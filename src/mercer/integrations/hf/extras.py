"""What the attention of some models has beside softmax: a cap on scores, and sinks. As a kernel and a normaliser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mercer.core.kernels import Exp, Kernel
from mercer.core.normalizers import Normalizer, Sum
from mercer.core.soft_cap import SoftCap
from mercer.errors import InvalidArgument, Unsupported


@dataclass(frozen=True, eq=False)
class Sink(Normalizer):
    """o = u / (d + exp(sink)): a key without a value that every query sees, with a score of its own for each head.

    Args:
        sink: ``[Hq]``.

    Source: Xiao et al. 2023, arXiv 2309.17453; OpenAI 2025 (gpt-oss), arXiv 2508.10925.
    """

    sink: Tensor

    needs_denominator: ClassVar[bool] = True

    def check(self, batch: int, heads: int, length: int, value_dim: int) -> None:
        if self.sink.shape != (heads,):
            raise InvalidArgument(f"Sink: sink must be [{heads}], one per query head, not {list(self.sink.shape)}.")

    def apply(self, numerator: Tensor, denominator: Tensor | None) -> Tensor:
        assert denominator is not None
        return self.apply_factored(numerator, denominator, torch.zeros_like(denominator))

    def apply_factored(self, numerator: Tensor, denominator: Tensor | None, log_factor: Tensor) -> Tensor:
        """u e^f / (d e^f + e^sink), both divided by the larger of e^f and e^sink."""
        assert denominator is not None
        sink = self.sink.to(denominator.dtype).view(1, -1, 1)
        least = torch.finfo(denominator.dtype).min
        factor = log_factor.to(denominator.dtype).clamp(min=least)  # minus infinity for a row that sees nothing
        top = torch.maximum(factor, sink).detach()
        kept = (factor - top).exp()
        return numerator * (kept / (denominator * kept + (sink - top).exp())).unsqueeze(-1)


def with_extras(
    kernel: Kernel, normalizer: Normalizer, softcap: float | None, sinks: Tensor | None
) -> tuple[Kernel, Normalizer]:
    """The parts for a model that caps its scores or has sinks, where they can be had."""
    if softcap is not None:
        if not isinstance(kernel, Exp):
            raise Unsupported(
                f"This model caps its scores (softcap={softcap:g}), which has a meaning for Exp() alone, not for "
                f"{kernel}: load it with a configuration that has no cap."
            )
        kernel = SoftCap(float(softcap))
    if sinks is not None:
        if not isinstance(normalizer, Sum):
            raise Unsupported(
                f"This model has attention sinks, which are a part of the denominator, and {normalizer} has none: use "
                "Sum()."
            )
        normalizer = Sink(sinks)
    return kernel, normalizer
