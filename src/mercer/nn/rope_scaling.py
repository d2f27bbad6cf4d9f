"""Scalings of rotary positions: other rates of turning, so that a model reads further than it was trained for.

A rotary position turns pair i of a head's channels by p w_i, with w_i = base^(-2i/d) for d turned channels. A scaling
is a value that says which rates to use instead, and by what factor to multiply cos and sin (`temperature`; the
products of queries and keys get its square). This file has those that change all pairs by one rule; `rope_bands` those
that treat fast and slow pairs differently; `rope_config` reads the dictionaries of configurations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from mercer.errors import InvalidArgument


class RopeScaling:
    """Base of the scalings; each is a frozen value."""

    by_length = False
    """Whether the rates depend on the length of the sequence, so that keys in a cache have to be turned anew."""

    @property
    def temperature(self) -> float:
        """Factor of cos and sin."""
        return 1.0

    def rates(self, dim: int, base: float, length: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Radians a position of each of the dim / 2 pairs, ``[dim / 2]``; or ``[..., dim / 2]`` for integer lengths
        ``[...]``, where the rates depend on them.
        """
        raise NotImplementedError

    def reach(self, max_length: int) -> int | None:
        """The longest sequence that a model meant for ``max_length`` can read with this scaling; None: any."""
        raise NotImplementedError

    def check(self, dim: int) -> None:
        """Raise :class:`InvalidArgument` if the scaling cannot serve heads of ``dim`` turned channels."""


class LengthScaling(RopeScaling):
    """A scaling whose rates depend on how long the sequence is.

    Which length? With ``per_token=True`` a query at position p, and the keys that it reads, are turned by the rates of
    length p + 1: nothing depends on later tokens, a text's start keeps its outputs as the text grows, and reading it in
    pieces from a state gives what reading it at once gives, in a model of any depth. With ``per_token=False`` all
    tokens of a call are turned by the rates of the sequence's length after it, as `transformers` does: the outputs of
    early tokens change as the text grows, so in a model of several layers the states that were left behind are not
    those of the longer text; a single layer agrees with its full pass on the newest tokens.
    """

    by_length = True
    trained: int
    per_token: bool
    every: int

    def effective(self, length: Tensor) -> Tensor:
        """The length whose rates serve sequences of these lengths: equal for all that are turned alike."""
        raise NotImplementedError


def plain_rates(dim: int, base: float, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """base^(-2i / dim) for the pairs i = 0..dim/2-1."""
    return base ** -(torch.arange(0, dim, 2, device=device, dtype=dtype) / dim)


def number(where: str, value: object, least: float, name: str = "factor") -> None:
    """Refuse what is not a finite number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value < least:
        raise InvalidArgument(f"{where}: {name} must be a number of {least:g} or more, not {value!r}")


def count(where: str, name: str, value: object) -> None:
    """Refuse what is not a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(f"{where}: {name} must be a whole number of 1 or more, not {value!r}")


def flag(where: str, name: str, value: object) -> None:
    """Refuse what is not True or False."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{where}: {name} must be True or False, not {value!r}")


def _several_pairs(scaling: RopeScaling, dim: int) -> None:
    if dim < 4:
        raise InvalidArgument(f"{scaling} changes the base, which needs at least 4 turned channels, not {dim}")


@dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Position interpolation: w_i / factor, as if positions were that much closer.

    Args:
        factor: how many times the trained length is to be read; 1 or more.

    Source: Chen et al. 2023, arXiv 2306.15595.
    """

    factor: float

    def __post_init__(self) -> None:
        number("LinearScaling", self.factor, 1)

    def rates(self, dim: int, base: float, length: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor:
        return plain_rates(dim, base, device=device, dtype=dtype) / self.factor

    def reach(self, max_length: int) -> int | None:
        return int(max_length * self.factor)


@dataclass(frozen=True)
class NTK(RopeScaling):
    """NTK-aware scaling: base factor^(d / (d - 2)), so that the fastest pair keeps its rate and the slowest is divided
    by the factor.

    Args:
        factor: how many times the trained length is to be read; 1 or more.

    Source: bloc97 2023, described as "NTK-aware" interpolation in Peng et al. 2023 (YaRN), arXiv 2309.00071.
    """

    factor: float

    def __post_init__(self) -> None:
        number("NTK", self.factor, 1)

    def base(self, dim: int, base: float) -> float:
        """The base that is used in place of ``base``."""
        self.check(dim)
        return base * self.factor ** (dim / (dim - 2))

    def rates(self, dim: int, base: float, length: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor:
        return plain_rates(dim, self.base(dim, base), device=device, dtype=dtype)

    def reach(self, max_length: int) -> int | None:
        return int(max_length * self.factor)

    def check(self, dim: int) -> None:
        _several_pairs(self, dim)


@dataclass(frozen=True)
class DynamicNTK(LengthScaling):
    """Dynamic NTK: plain rates up to the trained length T, and for a sequence of n > T tokens those of the base
    base (factor n / T - (factor - 1))^(d / (d - 2)).

    Args:
        factor: 1 or more; with 1 the slowest pair never turns further than in training.
        trained: T, the length the model was trained for.
        per_token: see :class:`LengthScaling`; default True.
        every: lengths above T are rounded up to a multiple of this many tokens, which saves turning keys anew for every
            token; default 1.

    Source: emozilla 2023, "Dynamic NTK" in Peng et al. 2023 (YaRN), arXiv 2309.00071.
    """

    factor: float
    trained: int
    per_token: bool = True
    every: int = 1

    def __post_init__(self) -> None:
        number("DynamicNTK", self.factor, 1)
        count("DynamicNTK", "trained", self.trained)
        count("DynamicNTK", "every", self.every)
        flag("DynamicNTK", "per_token", self.per_token)

    def base(self, dim: int, base: float, length: Tensor) -> Tensor:
        """The base for sequences of these lengths, float64 or, where the device lacks it, float32."""
        self.check(dim)
        wide = torch.float32 if length.device.type == "mps" else torch.float64
        times = self.effective(length).to(wide) / self.trained
        return base * (1 + self.factor * (times - 1)) ** (dim / (dim - 2))

    def effective(self, length: Tensor) -> Tensor:
        rounded = -(-length // self.every) * self.every
        return torch.where(length > self.trained, rounded, torch.full_like(length, self.trained))

    def rates(self, dim: int, base: float, length: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor:
        length = torch.tensor(self.trained, device=device) if length is None else length
        bases = self.base(dim, base, length).to(dtype).unsqueeze(-1)
        return bases ** -(torch.arange(0, dim, 2, device=device, dtype=dtype) / dim)

    def reach(self, max_length: int) -> int | None:
        return None

    def check(self, dim: int) -> None:
        _several_pairs(self, dim)


@dataclass(frozen=True)
class Proportional(RopeScaling):
    """Turns the first ``share`` of a head's pairs, at the rates they have in a whole one; the others stand still.

    With d channels a head the pairs i < floor(share d / 2) turn by base^(-2i/d) / factor. In contrast to turning the
    first channels only, the rates stay those of d channels, and pairs are (i, i + d/2) of the whole head.

    Args:
        share: of the pairs that turn, above 0 and at most 1.
        factor: divides the rates; 1 or more.

    Source: the Gemma 4 models and `transformers`, where it is called "proportional".
    """

    share: float = 1.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        number("Proportional", self.factor, 1)
        number("Proportional", self.share, 0, "share")
        if not 0 < self.share <= 1:
            raise InvalidArgument(f"Proportional: share must be above 0 and at most 1, not {self.share}")

    def rates(self, dim: int, base: float, length: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor:
        rates = plain_rates(dim, base, device=device, dtype=dtype) / self.factor
        turning = int(self.share * dim // 2)
        return torch.where(torch.arange(dim // 2, device=device) < turning, rates, torch.zeros_like(rates))

    def reach(self, max_length: int) -> int | None:
        return int(max_length * self.factor)
