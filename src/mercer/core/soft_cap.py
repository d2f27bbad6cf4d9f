"""The exponential of scores that are bent so that none leaves a range: Gemma 2's attention."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from numbers import Real

from torch import Tensor

from mercer.core.kernels import Kernel
from mercer.errors import InvalidArgument

LARGEST = 80
"""exp(80) n is a float32 for every n that fits a machine."""


@dataclass(frozen=True)
class SoftCap(Kernel):
    """The soft-capped exponential K = exp(cap tanh(scale q.k / cap)): scores stay within -cap .. cap. Scale D^(-1/2);
    positive; infinitely many features.

    Near 0 it is :class:`~mercer.Exp`, and in the limit of large caps everywhere. Its weights are bounded, so no row
    maximum has to be taken out of them.

    Args:
        cap: above 0 and at most 80. Gemma 2 has 50.

    Source: Gemma Team 2024 (Gemma 2), arXiv 2408.00118.
    """

    cap: float

    def __post_init__(self) -> None:
        number = isinstance(self.cap, Real) and not isinstance(self.cap, bool) and isfinite(self.cap)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not number or not 0 < self.cap <= LARGEST:
            raise InvalidArgument(f"SoftCap: cap must be a number above 0 and at most {LARGEST}, not {self.cap!r}.")

    @property
    def positive(self) -> bool:
        return True

    def default_scale(self, dim: int) -> float:
        return dim**-0.5

    def profile(self, score: Tensor) -> Tensor:
        return (self.cap * (score / self.cap).tanh()).exp()

    def derivative(self, score: Tensor) -> Tensor:
        return self.profile_and_derivative(score)[1]

    def profile_and_derivative(self, score: Tensor) -> tuple[Tensor, Tensor]:
        ratio = score / self.cap
        value = (self.cap * ratio.tanh()).exp()
        return value, value / ratio.cosh().square()  # 1 - tanh^2 has no digits left near the cap
