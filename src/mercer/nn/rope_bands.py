"""Scalings of rotary positions that treat fast and slow pairs differently: YaRN, Llama 3's and LongRoPE."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mercer.errors import InvalidArgument
from mercer.nn.rope_scaling import LengthScaling, RopeScaling, count, flag, number, plain_rates


@dataclass(frozen=True)
class YaRN(RopeScaling):
    """Pairs that turn often within the trained length T keep their rate, those that never turn once are divided by
    the factor, and a ramp over the pairs joins them; cos and sin are multiplied by 0.1 ln(factor) + 1.

    A pair makes b turns in T positions at the (real) index c(b) = d ln(T / (2 pi b)) / (2 ln base). With
    low = max(floor c(beta_fast), 0) and high = min(ceil c(beta_slow), d - 1),

        w_i' = (1 - r_i) w_i + r_i w_i / factor,     r_i = clamp((i - low) / (high - low), 0, 1)

    Args:
        factor: how many times the trained length is to be read; 1 or more.
        trained: T, the length the model was trained for before it was extended.
        beta_fast: turns from which a pair keeps its rate; default 32.
        beta_slow: turns below which a pair is fully scaled; default 1.
        attention_factor: what cos and sin are multiplied by; replaces the formula.
        mscale: with mscale_all_dim the factor is m(mscale) / m(mscale_all_dim), m(a) = 0.1 a ln(factor) + 1.
        mscale_all_dim: see mscale. (`transformers` ignores either of them alone, and so does this.)
        truncate: round low down and high up; default True.

    Source: Peng et al. 2023, arXiv 2309.00071; mscale: DeepSeek-V2, arXiv 2405.04434.
    """

    factor: float
    trained: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        number("YaRN", self.factor, 1)
        count("YaRN", "trained", self.trained)
        for name in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is not None or name.startswith("beta"):
                number("YaRN", value, 0, name)
        flag("YaRN", "truncate", self.truncate)
        if not 0 < self.beta_slow < self.beta_fast:
            raise InvalidArgument(
                f"YaRN: beta_slow must be above 0 and below beta_fast, not {self.beta_slow} with {self.beta_fast}"
            )

    @property
    def temperature(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._grown(self.mscale) / self._grown(self.mscale_all_dim)
        return self._grown(1.0)

    def _grown(self, scale: float) -> float:
        return 1.0 + 0.1 * scale * math.log(self.factor)

    def ramp(self, dim: int, base: float) -> tuple[float, float]:
        """The pairs (low, high) between which rates go over from kept to divided."""
        if base <= 1:
            raise InvalidArgument(f"YaRN needs a base of rotary positions above 1, not {base}")
        low, high = (
            dim * math.log(self.trained / (2 * math.pi * turns)) / (2 * math.log(base))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, dim - 1)

    def rates(self, dim: int, base: float, length: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor:
        low, high = self.ramp(dim, base)
        if low == high:
            high += 0.001  # the ramp is a step
        pairs = torch.arange(dim // 2, device=device, dtype=dtype)
        scaled = ((pairs - low) / (high - low)).clamp(0, 1)
        plain = plain_rates(dim, base, device=device, dtype=dtype)
        return plain * (1 - scaled) + plain / self.factor * scaled

    def reach(self, max_length: int) -> int | None:
        return max(int(self.factor * self.trained), max_length)


@dataclass(frozen=True)
class Llama3(RopeScaling):
    """Wavelengths 2 pi / w_i below trained / high keep their rate, those above trained / low are divided by the
    factor, and between them the share that is kept grows linearly in trained / wavelength.

    Args:
        factor: 1 or more.
        trained: the length the model was trained for before it was extended.
        low: `low_freq_factor`; default 1.
        high: `high_freq_factor`, above low; default 4.

    Source: the Llama 3.1 models; Grattafiori et al. 2024, arXiv 2407.21783.
    """

    factor: float
    trained: int
    low: float = 1.0
    high: float = 4.0

    def __post_init__(self) -> None:
        number("Llama3", self.factor, 1)
        count("Llama3", "trained", self.trained)
        number("Llama3", self.low, 0, "low")
        number("Llama3", self.high, 0, "high")
        if not 0 < self.low < self.high:
            raise InvalidArgument(f"Llama3: low must be above 0 and below high, not {self.low} with {self.high}")

    def rates(self, dim: int, base: float, length: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor:
        plain = plain_rates(dim, base, device=device, dtype=dtype)
        turns = self.trained * plain / (2 * math.pi)  # of each pair within the trained length
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return plain * kept + plain / self.factor * (1 - kept)

    def reach(self, max_length: int) -> int | None:
        return max(int(self.factor * self.trained), max_length)


@dataclass(frozen=True)
class LongRoPE(LengthScaling):
    """Each pair's rate is divided by a number of its own, found by search: w_i / short_i up to the trained length,
    w_i / long_i beyond; cos and sin are multiplied by sqrt(1 + ln(factor) / ln(trained)).

    Args:
        short: one number a pair, for sequences up to the trained length.
        long: the same for longer ones.
        trained: the length the model was trained for before it was extended.
        factor: how many times the trained length is to be read; 1 or more.
        attention_factor: what cos and sin are multiplied by; replaces the formula.
        per_token: see :class:`LengthScaling`; default True.

    Source: Ding et al. 2024, arXiv 2402.13753.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    trained: int
    factor: float
    attention_factor: float | None = None
    per_token: bool = True

    every = 1

    def __post_init__(self) -> None:
        count("LongRoPE", "trained", self.trained)
        number("LongRoPE", self.factor, 1)
        flag("LongRoPE", "per_token", self.per_token)
        if self.attention_factor is not None:
            number("LongRoPE", self.attention_factor, 0, "attention_factor")
        for name in ("short", "long"):
            values = getattr(self, name)
            if not isinstance(values, tuple | list) or not values:
                raise InvalidArgument(f"LongRoPE: {name} must be numbers, one a pair of channels, not {values!r}")
            object.__setattr__(self, name, tuple(values))
            for value in values:
                number("LongRoPE", value, 0, f"every number of {name}")
            if min(values) <= 0:
                raise InvalidArgument(f"LongRoPE: every number of {name} must be above 0, not {min(values)}")

    @property
    def temperature(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor == 1:
            return 1.0
        if self.trained == 1:
            raise InvalidArgument("LongRoPE: with trained=1 cos and sin get an infinite factor; give attention_factor")
        return math.sqrt(1 + math.log(self.factor) / math.log(self.trained))

    def effective(self, length: Tensor) -> Tensor:
        return torch.where(length > self.trained, self.trained + 1, self.trained)

    def rates(self, dim: int, base: float, length: Tensor | None, device: torch.device, dtype: torch.dtype) -> Tensor:
        self.check(dim)
        short, long = (torch.tensor(f, device=device, dtype=dtype) for f in (self.short, self.long))
        plain = plain_rates(dim, base, device=device, dtype=dtype)
        if length is None:
            return plain / short
        return plain / torch.where((length > self.trained).unsqueeze(-1), long, short)

    def reach(self, max_length: int) -> int | None:
        return max(int(self.factor * self.trained), max_length)

    def check(self, dim: int) -> None:
        for name in ("short", "long"):
            if len(getattr(self, name)) != dim // 2:
                raise InvalidArgument(
                    f"LongRoPE: {name} has {len(getattr(self, name))} numbers, but {dim} turned channels are "
                    f"{dim // 2} pairs"
                )
