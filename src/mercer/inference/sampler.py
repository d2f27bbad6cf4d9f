"""From logits to the next token: repetition penalty, temperature, top-k, top-p, min-p and a seed."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from mercer.errors import InvalidArgument, NonFinite
from mercer.inference.reading import whole

FEW = (256, 4096)


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: p = softmax(penalised logits / temperature), cut to the likeliest tokens, renormalised,
    drawn.

    In this order: the repetition penalty, the temperature, top_k, top_p of what top_k kept, min_p of what both kept
    (the order of transformers' processors, whose definitions these are). The cuts keep the likeliest token always; of
    tokens equally likely at the edge the lower ones are kept.

    Attributes:
        temperature: 0 takes the likeliest token (after the penalty) and ignores the cuts; 1 is the model's own
            distribution.
        top_k: keep at most so many tokens. None keeps all.
        top_p: keep the fewest likeliest tokens whose probabilities sum to this (Holtzman et al. 2020, arXiv
            1904.09751). None keeps all.
        min_p: keep tokens that are at least this share as likely as the likeliest (Nguyen et al. 2024, arXiv
            2407.01082). None keeps all.
        repetition_penalty: logits of tokens that stand in the prompt or were chosen before are divided by this where
            they are positive and multiplied where they are negative (Keskar et al. 2019, arXiv 1909.05858). 1 changes
            nothing.

    Raises:
        InvalidArgument: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real | None):
                raise InvalidArgument(f"{name} is {value!r}; it is a number")
        if not 0 <= self.temperature < float("inf"):
            raise InvalidArgument(f"temperature is {self.temperature}; it is a finite number of at least 0")
        if self.top_k is not None and (not whole(self.top_k) or self.top_k < 1):
            raise InvalidArgument(f"top_k is {self.top_k}; it is a whole number from 1, or None to keep every token")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InvalidArgument(f"top_p is {self.top_p}; it is above 0 and at most 1, or None to keep every token")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise InvalidArgument(f"min_p is {self.min_p}; it is from 0 to 1, or None to keep every token")
        if not 0 < self.repetition_penalty < float("inf"):
            raise InvalidArgument(
                f"repetition_penalty is {self.repetition_penalty}; it is a finite number above 0, and 1 changes nothing"
            )

    def distribution(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """[V] logits -> [V] float64 probabilities on the CPU, zeros where a token was cut; ties go to the lower token.

        seen: [V] bool, the tokens that the penalty is for. None: none.

        Raises:
            NonFinite: a logit is NaN or infinite.
        """
        logits = self._penalised(logits, seen)
        if self.temperature == 0:
            chosen = torch.zeros_like(logits)
            chosen[logits.argmax()] = 1.0
            return chosen
        # From the largest down, so that no temperature, however small, turns it into infinity: the others become -inf.
        scaled = (logits - logits.max()) / self.temperature
        if self.top_k is None and self.top_p is None:
            return self._above_least(scaled.softmax(0))
        ordered, tokens = self._likeliest(scaled)
        probabilities = ordered.softmax(0) if self.top_k is not None else ordered.exp() / scaled.exp().sum()
        if self.top_p is not None:
            before = probabilities.cumsum(0) - probabilities
            probabilities = probabilities[before < self.top_p]
            probabilities = probabilities / probabilities.sum()
        chosen = torch.zeros_like(logits)
        chosen[tokens[: len(probabilities)]] = probabilities
        return self._above_least(chosen)

    def _likeliest(self, scaled: Tensor) -> tuple[Tensor, Tensor]:
        """Values and numbers of the tokens that top_k keeps, or of as many as top_p may, the likeliest first."""
        if self.top_k is not None:
            return _first(scaled, self.top_k)
        share = 1.0 if self.top_p is None else self.top_p
        # Most texts need few tokens, and sorting a vocabulary takes as long as a step of a small model.
        for many in FEW:
            ordered, tokens = _first(scaled, many)
            if ordered.exp().sum() >= share * scaled.exp().sum():
                return ordered, tokens
        return _first(scaled, len(scaled))

    def _penalised(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        logits = logits.detach().to("cpu", torch.float64)
        if not bool(logits.isfinite().all()):
            raise NonFinite("the model's logits are not finite; its parameters or its dtype are at fault")
        if seen is None or self.repetition_penalty == 1:
            return logits
        penalty = self.repetition_penalty
        return torch.where(seen.to("cpu"), torch.where(logits < 0, logits * penalty, logits / penalty), logits)

    def _above_least(self, probabilities: Tensor) -> Tensor:
        if not self.min_p:
            return probabilities
        kept = torch.where(probabilities < self.min_p * probabilities.max(), 0.0, probabilities)
        return kept / kept.sum()

    def choose(self, logits: Tensor, generator: torch.Generator, seen: Tensor | None = None) -> int:
        """One token for [V] logits, drawn with ``generator`` (on the CPU): the first at which the probabilities, summed
        from token 0 on, exceed one uniform number, so that rounding in the logits seldom changes the token."""
        if self.temperature == 0:
            return int(self._penalised(logits, seen).argmax())
        sums = self.distribution(logits, seen).cumsum(0)
        drawn = torch.rand((), generator=generator, dtype=torch.float64) * sums[-1]
        # Rounding may leave the draw at the whole sum, and tokens after the first that reaches it were cut.
        last = int(torch.searchsorted(sums, sums[-1]))
        return min(int(torch.searchsorted(sums, drawn, right=True)), last)


def _first(values: Tensor, many: int) -> tuple[Tensor, Tensor]:
    """The largest values and where they stand, in order; equal ones from the first on."""
    if many >= len(values):
        return values.sort(descending=True, stable=True)
    # At least so many values reach the least of the largest maxima of runs, and few others do.
    width = max(len(values) // (8 * many), 1)
    largest = values[: len(values) // width * width].view(-1, width).amax(1)
    places = (values >= largest.topk(many).values[-1]).nonzero().squeeze(1)
    ordered, order = values[places].sort(descending=True, stable=True)
    return ordered[:many], places[order[:many]]
