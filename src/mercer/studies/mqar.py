r"""Multi-query associative recall: sequences that list keys with values and then ask for the keys again.

A sequence of T tokens with N pairs begins ``k_1 v_1 k_2 v_2 ... k_N v_N``. Then key i is asked for once, at position
``2N + 2 g_i``; the label there is ``v_i``, at the query's own position (what a language model would predict next). The
gaps ``g`` are N different numbers below ``(T - 2N) / 2``, drawn with probability proportional to ``(g + 1)^(a - 1)``:
with a small a most questions come early and some after a long time. Everything else is token 0 and has no label.

Keys are tokens 1 .. V/2 - 1 and values V/2 .. V - 1, none repeated within a sequence, so an answer has to be read from
the sequence and cannot be known from training.

Source: Arora et al. 2023 (Zoology), arXiv 2312.04927.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mercer.errors import InvalidArgument

NO_LABEL = -100
_DOUBLE = 2.0**-53


@dataclass(frozen=True)
class RecallBatch:
    """``tokens`` and ``targets``, both int64 [B, T]; targets are ``NO_LABEL`` except at queries."""

    tokens: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Recall:
    """The task's sizes.

    Args:
        pairs: N, from 1 to V/2 - 1.
        length: T, at least 4 N: two tokens a pair to list them and two a pair to ask.
        vocabulary: V, even.
        power: the exponent a, above 0.

    Raises:
        InvalidArgument: sizes that do not fit.
    """

    pairs: int
    length: int
    vocabulary: int = 8192
    power: float = 0.01

    def __post_init__(self) -> None:
        if self.vocabulary < 4 or self.vocabulary % 2:
            raise InvalidArgument(f"recall: vocabulary is {self.vocabulary}; it must be even and at least 4.")
        if not 1 <= self.pairs <= min(self.vocabulary // 2 - 1, self.length // 4):
            raise InvalidArgument(
                f"recall: pairs is {self.pairs}; with length {self.length} and vocabulary {self.vocabulary} it lies "
                f"between 1 and {min(self.vocabulary // 2 - 1, self.length // 4)}."
            )
        if not self.power > 0:
            raise InvalidArgument(f"recall: power is {self.power}; it must be above 0.")

    @property
    def gaps(self) -> int:
        """Places where a question can stand."""
        return (self.length - 2 * self.pairs) // 2

    def gap_probabilities(self) -> np.ndarray:
        """[gaps] probabilities of the first gap drawn."""
        weights = np.arange(1, self.gaps + 1, dtype=np.float64) ** (self.power - 1)
        return weights / weights.sum()

    def batch(self, size: int, seed: int, step: int, *, held_out: bool = False) -> RecallBatch:
        """The sequences of one step: a pure function of its arguments, training and held-out streams apart."""
        key = np.array([2 * seed + held_out, step], dtype=np.uint64)
        generator = np.random.Philox(key=key)

        def uniform(*shape: int) -> np.ndarray:
            raw = generator.random_raw(int(np.prod(shape))) >> np.uint64(11)
            return ((raw.astype(np.float64) + 0.5) * _DOUBLE).reshape(shape)  # never 0, so its logarithm is finite

        def distinct(choices: int) -> np.ndarray:
            return uniform(size, choices).argsort(axis=1, kind="stable")[:, : self.pairs]

        half = self.vocabulary // 2
        keys = 1 + distinct(half - 1)
        values = half + distinct(half)
        # Adding Gumbel noise to log-probabilities and taking the largest draws without replacement.
        scores = np.log(self.gap_probabilities()) - np.log(-np.log(uniform(size, self.gaps)))
        gaps = (-scores).argsort(axis=1, kind="stable")[:, : self.pairs]

        tokens = np.zeros((size, self.length), dtype=np.int64)
        tokens[:, 0 : 2 * self.pairs : 2] = keys
        tokens[:, 1 : 2 * self.pairs : 2] = values
        where = 2 * self.pairs + 2 * gaps
        np.put_along_axis(tokens, where, keys, axis=1)
        targets = np.full_like(tokens, NO_LABEL)
        np.put_along_axis(targets, where, values, axis=1)
        return RecallBatch(torch.from_numpy(tokens), torch.from_numpy(targets))
