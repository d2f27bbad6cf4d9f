"""Normalisers that stand something else in the denominator's place: a count, a bound, a constant, a gate.

They answer what a denominator is for by leaving one thing of it out at a time. Source of the comparison: the ablation
of Mongaras and Larson 2025, arXiv 2507.23632.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import isfinite
from numbers import Real
from typing import ClassVar, Self

import torch
from torch import Tensor

from mercer.core.normalizers import Identity, Normalizer, Sum
from mercer.errors import InvalidArgument


@dataclass(frozen=True)
class Length(Normalizer):
    """o_i = u_i / t_i, t_i the number of keys that row i sees. Not scale invariant; works with every kernel.

    Under a causal structure t_i is the token's position, from 1 on and from the state's length on; windows, padding and
    documents are counted exactly, while weights (``Alibi``, ``Decay``) do not count. A row that sees nothing gives
    zeros.
    """

    needs_count: ClassVar[bool] = True

    def apply(self, numerator: Tensor, denominator: Tensor | None) -> Tensor:
        assert denominator is not None
        return numerator / denominator.clamp(min=1).unsqueeze(-1)  # a row that sees nothing has u = 0


@dataclass(frozen=True)
class Clamped(Normalizer):
    """o = u / max(|d|, minimum), d the sum of the weights. Not scale invariant; works with every kernel, signed ones
    included, since it never divides by less than ``minimum``.

    Args:
        minimum: positive and finite; default 1.

    Source: Beck et al. 2024 (mLSTM), arXiv 2405.04517, with minimum 1.
    """

    minimum: float = 1.0

    needs_denominator: ClassVar[bool] = True
    takes_any_sign: ClassVar[bool] = True

    def __post_init__(self) -> None:
        value = self.minimum
        if isinstance(value, bool) or not isinstance(value, Real) or not isfinite(value) or value <= 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"Clamped: minimum must be a positive finite number, not {value!r}.")

    def apply(self, numerator: Tensor, denominator: Tensor | None) -> Tensor:
        assert denominator is not None
        return numerator / denominator.abs().clamp(min=self.minimum).unsqueeze(-1)

    def apply_factored(self, numerator: Tensor, denominator: Tensor | None, log_factor: Tensor) -> Tensor:
        """u e^f / max(|d| e^f, minimum) = u / max(|d|, minimum e^-f): no score is too large for it."""
        assert denominator is not None
        size, least = denominator.abs(), (self.minimum * (-log_factor).exp()).to(denominator.dtype)
        divisor = torch.where(size >= least, size, least)  # e^-f may be infinite, which makes the row 0, or 0
        return numerator / divisor.masked_fill(divisor == 0, 1).unsqueeze(-1)


@dataclass(frozen=True)
class Detached(Normalizer):
    """o = u / d with no gradient through d: the value of :class:`~mercer.Sum`, the gradient of a constant denominator.

    Scale invariant in value. Fused operators divide inside and would give the gradient of ``Sum``; they do not run
    under it. A row with d = 0 gives zeros.
    """

    needs_denominator: ClassVar[bool] = True
    scale_invariant: ClassVar[bool] = True
    takes_divided_rows: ClassVar[bool] = False

    def apply(self, numerator: Tensor, denominator: Tensor | None) -> Tensor:
        assert denominator is not None
        return Sum().apply(numerator, denominator.detach())


@dataclass(frozen=True, eq=False)
class SigmoidGate(Normalizer):
    """o = sigmoid(gate) * N(u), N an inner normaliser, by default none. What N needs and promises, it does too.

    Args:
        gate: ``[B, Hq, L]`` or ``[B, Hq, L, Dv]``, one entry per query of the call, before the sigmoid.
            :class:`mercer.nn.Attention` makes it from its input and takes a gate of None; a call of
            :func:`mercer.attention` does not.
        inner: the normaliser before the gate.

    Source: Mongaras and Larson 2025, arXiv 2507.23632 (without an inner one); Qiu et al. 2025 (gated attention), arXiv
    2505.06708 (after softmax).
    """

    gate: Tensor | None = None
    inner: Normalizer = field(default_factory=Identity)

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Normalizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"SigmoidGate: inner must be a normaliser such as Sum(), not {self.inner!r}.")
        if self.gate is not None and not isinstance(self.gate, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"SigmoidGate: gate must be a tensor [B, Hq, L] or with Dv, not {self.gate!r}.")

    def __str__(self) -> str:
        return "SigmoidGate(gate)" if isinstance(self.inner, Identity) else f"SigmoidGate(gate, {self.inner})"

    @property
    def needs_denominator(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.needs_denominator

    @property
    def needs_count(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.needs_count

    @property
    def scale_invariant(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.scale_invariant

    @property
    def takes_any_sign(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.takes_any_sign

    @property
    def takes_divided_rows(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner.takes_divided_rows

    def apply(self, numerator: Tensor, denominator: Tensor | None) -> Tensor:
        return self._gated(self.inner.apply(numerator, denominator))

    def apply_factored(self, numerator: Tensor, denominator: Tensor | None, log_factor: Tensor) -> Tensor:
        return self._gated(self.inner.apply_factored(numerator, denominator, log_factor))

    def map_tokens(self, select: Callable[[Tensor], Tensor]) -> Self:
        gate = None if self.gate is None else select(self.gate)
        return replace(self, gate=gate, inner=self.inner.map_tokens(select))

    def check(self, batch: int, heads: int, length: int, value_dim: int) -> None:
        rows = (batch, heads, length)
        found = None if self.gate is None else tuple(self.gate.shape)
        if found not in (rows, (*rows, value_dim)):
            given = "None" if found is None else f"one of shape {list(found)}"
            raise InvalidArgument(
                f"SigmoidGate: gate must be a tensor {list(rows)} or {[*rows, value_dim]} ([B, Hq, L] or with Dv), "
                f"not {given}."
            )
        self.inner.check(batch, heads, length, value_dim)

    def _gated(self, out: Tensor) -> Tensor:
        assert self.gate is not None  # see check
        gate = self.gate if self.gate.dim() == out.dim() else self.gate.unsqueeze(-1)
        return out * gate.to(out.dtype).sigmoid()
