"""Where RWKV starts: values that differ by channel and by depth, so that some heads begin with a long memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mercer.errors import InvalidArgument


def check_depth(mixer: str, layer: int, layers: int) -> None:
    """Refuse a layer that is none of 0 .. layers - 1."""
    if not 0 <= layer < layers:
        raise InvalidArgument(f"{mixer} is layer {layer} of {layers}, and layers are counted from 0")


def depth(layer: int, layers: int) -> tuple[float, float]:
    """From 0 in the first layer to 1 in the last, and from 1 in the first to nearly 0 in the last."""
    return layer / max(layers - 1, 1), 1 - layer / layers


def ramp(count: int) -> Tensor:
    """i / count for each channel i."""
    return torch.arange(count, dtype=torch.float32) / count


def slope(count: int) -> Tensor:
    """From 0 to 1 over the channels, both reached."""
    return torch.arange(count, dtype=torch.float32) / max(count - 1, 1)


def zigzag(count: int, size: float) -> Tensor:
    """0, size, -size, 0, ... over the channels: neighbours begin with different bonuses."""
    return ((torch.arange(count) + 1) % 3 - 1) * size


def orthogonal(weight: Tensor, gain: float, generator: torch.Generator | None) -> None:
    """An orthogonal matrix; one with more rows than columns is larger by the root of their ratio."""
    rows, columns = weight.shape
    nn.init.orthogonal_(weight, gain * math.sqrt(max(rows / columns, 1)), generator)
