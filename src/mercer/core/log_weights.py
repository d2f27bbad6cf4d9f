"""Structures that weigh what is seen: log-weights by distance and by step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mercer.core.structures import Structure, at_least, tensors_only
from mercer.errors import InvalidArgument


def _all(holds: Tensor) -> bool:
    """Whether something holds of every number; a compiler, which has no numbers, goes on as if it did."""
    return torch.compiler.is_compiling() or bool(holds.all())


GONE = 1e4
"""What no logarithm of a decay falls below minus of: exp(-GONE) is 0 in every dtype."""


@dataclass(frozen=True, eq=False)
class Alibi(Structure):
    """Log-weight -slope_h |i - j|, distances exact in any dtype; differentiable in the slopes.

    Under :class:`~mercer.Exp` it is ALiBi; under a finite kernel and a causal structure, exponential decay.

    Args:
        slopes: ``[Hq]``, 0 or more. :func:`mercer.nn.alibi_slopes` gives the standard ones.

    Source: Press et al. 2021, arXiv 2108.12409.
    """

    slopes: Tensor

    def __post_init__(self) -> None:
        tensors_only("Alibi", slopes=self.slopes)
        if self.slopes.dim() != 1:
            raise InvalidArgument(f"Alibi: slopes must be [heads], not {list(self.slopes.shape)}.")
        if not _all((self.slopes >= 0) & (self.slopes < torch.inf)):
            raise InvalidArgument("Alibi: every slope must be finite and 0 or more.")

    def __str__(self) -> str:
        return "Alibi(slopes)"


@dataclass(frozen=True, eq=False)
class RelativeBias(Structure):
    """Log-weight table[h, n] of a key that stands n - left positions after the query; keys further away have that of
    the nearest entry. Differentiable in the table; by pairs.

    Args:
        table: ``[Hq, distances]``, finite. :class:`mercer.nn.T5Bias` learns one.
        left: the first entry is for keys at this distance before the query, 0 or more and below the number of entries.
            Default that number less 1: the last entry is the query's own place, and its weight that of keys ahead.

    Source: Shaw et al. 2018, arXiv 1803.02155 (clipped distances); Raffel et al. 2020, arXiv 1910.10683 (scalars).
    """

    table: Tensor
    left: int | None = None

    def __post_init__(self) -> None:
        tensors_only("RelativeBias", table=self.table)
        if self.table.dim() != 2 or not self.table.shape[1]:
            raise InvalidArgument(f"RelativeBias: table must be [heads, distances], not {list(self.table.shape)}.")
        if not _all(torch.isfinite(self.table)):
            raise InvalidArgument("RelativeBias: every entry of the table must be finite.")
        if self.left is not None:
            at_least("RelativeBias", 0, left=self.left)
            if self.left >= self.table.shape[1]:
                raise InvalidArgument(
                    f"RelativeBias: left must be below the table's {self.table.shape[1]} distances, not {self.left}."
                )

    @property
    def before(self) -> int:
        """The distance of the first entry."""
        return self.table.shape[1] - 1 if self.left is None else self.left

    def __str__(self) -> str:
        return f"RelativeBias({self.table.shape[1]} distances, left={self.before})"


@dataclass(frozen=True, eq=False)
class Decay(Structure):
    """Log-weight sum_{t=j+1..i} log(rate_t): every step multiplies what was seen before by its rate. Needs a causal
    structure.

    Under a finite kernel this is the decay of RetNet (per head) and of gated linear recurrences with scalar gates
    (per token); under :class:`~mercer.Exp` it is the forgetting attention of Lin et al. 2025. Differentiable in the
    rates.

    Args:
        rate: ``[H]`` per head or ``[B, H, L]`` per token, in (0, 1]; H is 1, the number of key heads, or of query
            heads; L that of keys.
        log_rate: the same as logarithms, 0 or less. Give exactly one of the two; gates near 1 keep their precision as
            logarithms. Below -10,000 they count as that and have a gradient of 0: the past is forgotten either way, and
            sums of logarithms would lose the digits of other tokens' rates.
        complement: also weigh what token j adds by 1 - rate_j, so that the weights of a long past sum to 1: the
            recency gate of random-feature attention, S_j = rate_j S_{j-1} + (1 - rate_j) phi(k_j) v_j^T. (By pairs
            the gradient of a rate of exactly 1 leaves this factor out.)

    Source: Sun et al. 2023 (RetNet), arXiv 2307.08621; Lin et al. 2025 (Forgetting Transformer), arXiv 2503.02130;
    Peng et al. 2021 (RFA), arXiv 2103.02143.
    """

    rate: Tensor | None = None
    log_rate: Tensor | None = None
    complement: bool = False

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.log_rate is None):
            raise InvalidArgument("Decay: give exactly one of rate and log_rate.")
        tensors_only("Decay", rate=self.rate, log_rate=self.log_rate)
        value = self.rate if self.rate is not None else self.log_rate
        assert value is not None
        if value.dim() not in (1, 3):
            raise InvalidArgument(f"Decay: rates must be [heads] or [batch, heads, length], not {list(value.shape)}.")
        inside = ((value > 0) & (value <= 1)) if self.rate is not None else ((value > -torch.inf) & (value <= 0))
        if not _all(inside):
            allowed = "in (0, 1]" if self.rate is not None else "finite and 0 or less"
            raise InvalidArgument(f"Decay: every {'rate' if self.rate is not None else 'log_rate'} must be {allowed}.")

    @property
    def per_token(self) -> bool:
        return (self.rate if self.rate is not None else self.log_rate).dim() == 3  # pyright: ignore[reportOptionalMemberAccess]

    @property
    def heads(self) -> int:
        """Rows of `logs`."""
        return (self.rate if self.rate is not None else self.log_rate).shape[1 if self.per_token else 0]  # pyright: ignore[reportOptionalMemberAccess]

    def logs(self) -> Tensor:
        """Logarithms of the rates in float64, ``[1, H, 1]`` or ``[B, H, L]``, none below -GONE."""
        logs = self.log_rate.double().clamp_min(-GONE) if self.log_rate is not None else self.rate.double().log()  # pyright: ignore[reportOptionalMemberAccess]
        return logs.view(1, -1, 1) if logs.dim() == 1 else logs

    def __str__(self) -> str:
        rates = "per token" if self.per_token else "per head"
        return f"Decay({rates}, complement)" if self.complement else f"Decay({rates})"
