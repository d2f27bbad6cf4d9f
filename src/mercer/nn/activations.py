"""The non-linearities of feed-forwards by name, each with its derivative for passes that are written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from mercer.errors import InvalidArgument

_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """f, elementwise, and backward(g, x) = g f'(x)."""

    apply: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


def _gelu(approximate: Literal["none", "tanh"]) -> Activation:
    return Activation(
        lambda x: gelu(x, approximate=approximate), lambda g, x: _aten.gelu_backward(g, x, approximate=approximate)
    )


ACTIVATIONS = {
    "relu": Activation(torch.relu, lambda g, x: _aten.threshold_backward(g, x, 0)),
    "gelu": _gelu("none"),
    "gelu_tanh": _gelu("tanh"),
    "silu": Activation(silu, lambda g, x: _aten.silu_backward(g, x)),
    "sigmoid": Activation(torch.sigmoid, lambda g, x: _aten.sigmoid_backward(g, x.sigmoid())),
}
"""relu: max(0, x). gelu: x Phi(x), exact (Hendrycks & Gimpel 2016). gelu_tanh: its approximation x (1 + tanh(sqrt(2/pi)
(x + 0.044715 x^3))) / 2, which GPT-2 uses. silu: x sigmoid(x), also called swish (Elfwing et al. 2017). sigmoid: 1 / (1
+ exp(-x)), for gates alone."""

GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
"""Kinds of feed-forwards with a gate, and what is done to the gate (Shazeer 2020, arXiv 2002.05202)."""

KINDS = (*GATED, "relu", "gelu", "gelu_tanh", "silu")


def check_kind(kind: str) -> None:
    """Refuse a kind of feed-forward that is not one of KINDS."""
    if kind not in KINDS:
        raise InvalidArgument(f"the feed-forward kind must be one of {', '.join(KINDS)}, got {kind!r}")


def default_hidden(dim: int, kind: str) -> int:
    """4 dim, or for gated kinds 8/3 dim rounded up to a multiple of 32, which is about the same number of weights."""
    return -(-8 * dim // 96) * 32 if kind in GATED else 4 * dim
