"""From logits to the next token: temperature, top-k, top-p and a seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mercer.errors import InvalidArgument, NonFinite


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: p = softmax(logits / temperature), cut to the likeliest tokens, renormalised, drawn.

    Attributes:
        temperature: 0 takes the likeliest token and ignores the other fields; 1 is the model's own distribution.
        top_k: keep at most so many tokens. None keeps all.
        top_p: keep the fewest likeliest tokens whose probabilities (after top_k) sum to this. None keeps all.

    Raises:
        InvalidArgument: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InvalidArgument(f"temperature is {self.temperature}; it is a finite number of at least 0")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise InvalidArgument(f"top_k is {self.top_k}; it is a whole number from 1, or None to keep every token")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InvalidArgument(f"top_p is {self.top_p}; it is above 0 and at most 1, or None to keep every token")

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """[V] logits -> [V] float64 probabilities on the CPU, zeros where a token was cut; ties go to the lower token.

        Raises:
            NonFinite: a logit is NaN or infinite.
        """
        logits = logits.detach().to("cpu", torch.float64)
        if not bool(logits.isfinite().all()):
            raise NonFinite("the model's logits are not finite; its parameters or its dtype are at fault")
        if self.temperature == 0:
            chosen = torch.zeros_like(logits)
            chosen[logits.argmax()] = 1.0
            return chosen
        ordered, tokens = logits.sort(descending=True, stable=True)
        # From the largest down, so that no temperature, however small, turns it into infinity: the others become -inf.
        probabilities = ((ordered - ordered[0]) / self.temperature)[: self.top_k].softmax(0)
        if self.top_p is not None:
            before = probabilities.cumsum(0) - probabilities
            probabilities = probabilities[before < self.top_p]
            probabilities = probabilities / probabilities.sum()
        chosen = torch.zeros_like(logits)
        chosen[tokens[: len(probabilities)]] = probabilities
        return chosen

    def choose(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        """One token for [V] logits, drawn with ``generator`` (on the CPU)."""
        probabilities = self.distribution(logits)
        if self.temperature == 0:
            return int(probabilities.argmax())
        return int(torch.multinomial(probabilities, 1, generator=generator))
