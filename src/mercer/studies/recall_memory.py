"""What the memory view predicts for recall: how much a state of the last layer's size holds of random keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch

from mercer.core.names import parse_attention
from mercer.core.structures import Causal
from mercer.memory.theory import Overlaps, overlaps, predicted_accuracy
from mercer.mixers.names import is_mixer, mixer_config
from mercer.ops import plan

SHARPNESS = (1.0, 2.0, 4.0)
"""Factors on the kernel's own scale. Training can lengthen queries and keys, so the best of them is the prediction."""


@cache
def best_overlaps(attention: str, head_dim: int) -> Overlaps:
    """The overlaps of the kernel at the sharpness with the most effective features."""
    kernel, _ = parse_attention(attention)
    scale = kernel.default_scale(head_dim)
    return max((overlaps(kernel, head_dim, factor * scale) for factor in SHARPNESS), key=lambda o: o.effective_features)


def predicted_recall(attention: str, heads: int, head_dim: int, pairs: int) -> float | None:
    """The share of values recalled rightly out of ``pairs`` random ones, by the theory of ``mercer.memory``; None for a
    mixer, which it says nothing of.

    Every head has random keys of its own and holds its part of the value, so the crosstalk of the heads is independent
    and the values count with ``heads * head_dim`` dimensions.
    """
    if is_mixer(attention):
        return None
    return predicted_accuracy(best_overlaps(attention, head_dim), heads * head_dim, pairs)


def state_bytes(attentions: Sequence[str], heads: int, head_dim: int, length: int) -> int:
    """Bytes of state of all layers after ``length`` tokens of one sequence in float32, as the plan gives them."""
    total = 0
    for attention in attentions:
        if is_mixer(attention):
            total += mixer_bytes(attention, heads, head_dim)
            continue
        kernel, normalizer = parse_attention(attention)
        x = torch.empty(1, heads, length, head_dim, device="meta")
        total += plan(x, x, x, kernel=kernel, normalizer=normalizer, structure=Causal(), return_state=True).state_bytes
    return total


@cache
def mixer_bytes(name: str, heads: int, head_dim: int) -> int:
    """Bytes of the state that one sequence leaves in a mixer of ``heads * head_dim`` channels, of any length."""
    dim = heads * head_dim
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        mixer = mixer_config(name).build(dim, heads, layer=0, layers=1)
        _, state = mixer(torch.zeros(1, 1, dim), return_state=True)
    return state.nbytes


def half_point(pairs: Sequence[int], accuracy: Sequence[float], level: float = 0.5) -> float | None:
    """The number of pairs at which accuracy first falls through ``level``, interpolated in log n; None if nowhere."""
    if accuracy and accuracy[0] < level:
        return None
    for (n, high), (m, low) in zip(
        zip(pairs, accuracy, strict=True), zip(pairs[1:], accuracy[1:], strict=True), strict=False
    ):
        if low < level <= high:
            return math.exp(math.log(n) + (high - level) / (high - low) * math.log(m / n))
    return None
