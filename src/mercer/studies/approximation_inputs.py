"""Queries, keys and values to measure on: random ones of a given spread, and those of a model's layers on text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from mercer.approximation import gaussian_inputs
from mercer.core.log_weights import Alibi
from mercer.core.merged import merge
from mercer.core.structures import Causal, Structure
from mercer.core.support import unsupported
from mercer.errors import InvalidArgument, Unsupported
from mercer.models.decoder import DecoderLM
from mercer.models.vocabulary import Vocabulary
from mercer.nn.attention import Attention
from mercer.studies.approximation_arms import Arm
from mercer.training.data import windows


@dataclass(frozen=True)
class Inputs:
    """What a cell of the study is measured on; ``make`` gives query, key and value when they are wanted."""

    name: str
    kind: Literal["random", "model"]
    make: Callable[[], tuple[Tensor, Tensor, Tensor]]
    structure: Structure
    scale: float | None = None
    spread: float | None = None
    layer: int | None = None


def random_inputs(dim: int, spread: float, length: int, heads: int, seed: int) -> Inputs:
    """Every head an independent draw whose scores have the standard deviation ``spread``; causal."""

    def make() -> tuple[Tensor, Tensor, Tensor]:
        return gaussian_inputs(length, dim, spread, heads=heads, seed=seed)

    return Inputs(f"random-D{dim}-sd{spread:g}", "random", make, Causal(), spread=spread)


def attention_layers(model: DecoderLM) -> list[Attention]:
    """The attention layers of a model, first to last.

    Raises:
        Unsupported: a layer weighs its past by gates made from the text, which are no part of queries and keys, or all
            layers by T5's biases, which kernels of features cannot have.
    """
    if model.relative is not None:
        raise Unsupported(
            "The model has T5's biases by distance, which this study cannot lay over kernels of features: take a model "
            "without."
        )
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    for number, layer in enumerate(layers):
        if getattr(layer, "recency", None) is not None:
            raise Unsupported(
                f"Layer {number} of the model has recency gates, which this study cannot lay over other kernels: take "
                "a model without."
            )
    return layers


def check_layers(model: DecoderLM, arms: Sequence[Arm]) -> None:
    """Refuse a model whose layers the study cannot measure under their own structure.

    Raises:
        Unsupported: :func:`attention_layers` does, or an arm cannot be computed under the structure of a layer.
    """
    for number, layer in enumerate(attention_layers(model)):
        for arm in arms:
            reason = unsupported(arm.kernel, arm.normalizer, merge(layer.structure), "dense", "pairs")
            if reason is not None:
                raise Unsupported(
                    f"Layer {number} of the model sees {layer.structure}, under which {arm.record.name} cannot be "
                    f"computed; name attentions that can. {reason}"
                )


def model_inputs(model: DecoderLM, tokens: Tensor) -> list[Inputs]:
    """What each layer's operator is given for ``tokens`` ``[B, L]``, with the layer's own structure and scale."""
    layers = attention_layers(model)
    seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def watch(number: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            assert isinstance(layer, Attention)
            seen[number] = layer.operands(arguments[0])

        return hook

    handles = [layer.register_forward_pre_hook(watch(number)) for number, layer in enumerate(layers)]
    try:
        with torch.no_grad():
            model.hidden(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return [
        Inputs(
            f"layer{number}", "model", lambda n=number: seen[n], _structure(layer, tokens), layer.scale, layer=number
        )
        for number, layer in enumerate(layers)
    ]


def _structure(layer: Attention, tokens: Tensor) -> Structure:
    return layer.structure if layer.slopes is None else layer.structure & Alibi(layer.slopes.to(tokens.device))


def text_windows(text: np.ndarray, vocabulary: Vocabulary, length: int, count: int) -> Tensor:
    """``[count, length]`` tokens of evenly spaced windows of held-out bytes.

    Raises:
        InvalidArgument: the text has no window of this length in this vocabulary.
    """
    piece = bytes(text[: 64 * count * (length + 1)].astype(np.uint8))
    tokens = vocabulary.encode(piece.decode("utf-8", "ignore").encode())
    if len(tokens) <= length:
        raise InvalidArgument(
            f"the held-out text is too short: a window of length={length} needs {length + 1} tokens of the model's "
            f"vocabulary, and it has {len(tokens)}; give more text."
        )
    return windows(tokens, length, count)[:, :-1]
