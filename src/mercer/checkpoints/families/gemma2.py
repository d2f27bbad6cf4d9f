"""Gemma 2 (Gemma Team 2024, arXiv 2408.00118): norms on both sides, capped scores and logits, windows in every other
layer.
"""

from __future__ import annotations

from typing import Any

from mercer.checkpoints.families.decoders import build, language_model
from mercer.checkpoints.families.gemma import TANH, read_common, write_common
from mercer.checkpoints.families.llama import attention_rules, feedforward_rules, norm_rules
from mercer.checkpoints.family import Family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names, Rule
from mercer.core.names import parse_attention
from mercer.core.normalizers import Sum
from mercer.core.soft_cap import SoftCap
from mercer.core.structure_names import parse_structure
from mercer.core.structures import Causal, Window
from mercer.errors import Unsupported
from mercer.models.config import ModelConfig

SLIDING, FULL = "sliding_attention", "full_attention"


def _read(keys: Keys, _architecture: str) -> ModelConfig:
    keys.must_be("hidden_activation", TANH)
    keys.must_be("hidden_act", TANH)
    common = read_common(keys)
    alternating = [SLIDING if layer % 2 == 0 else FULL for layer in range(common["layers"])]
    window = keys.take("sliding_window", 4096, kind=int)
    keys.must_be("sliding_window_size", window, why="it is sliding_window again")
    kinds = keys.take("layer_types", alternating, kind=list)
    if unknown := sorted({str(kind) for kind in kinds} - {SLIDING, FULL}):
        raise Unsupported(f"{keys.where}: layer_types has {unknown[0]!r}; known are {SLIDING!r} and {FULL!r}")
    if len(kinds) != common["layers"]:
        raise Unsupported(f"{keys.where}: layer_types has {len(kinds)} entries for {common['layers']} layers")
    cap = keys.take("attn_logit_softcapping", 50.0, kind=float)
    if cap is not None and cap != int(cap):
        raise Unsupported(f"{keys.where}: attn_logit_softcapping is {cap}; a whole number can be named")
    return ModelConfig(
        **common,
        attention="softmax" if cap is None else f"softcap{int(cap)}-sum",
        attention_scale=float(keys.take("query_pre_attn_scalar", 256, kind=float)) ** -0.5,
        norm_position="both",
        structure=[f"window({window})" if kind == SLIDING else "causal" for kind in kinds],
        logit_cap=keys.take("final_logit_softcapping", 30.0, kind=float),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    common = write_common(
        config,
        "gemma2",
        norm_position=("both",),
        **dict.fromkeys(("attention", "attention_scale", "structure", "logit_cap")),
    )
    windows = [_window(name) for name in config.structures]
    widths = {width for width in windows if width is not None}
    if len(widths) > 1:
        raise Unsupported("gemma2 has no way to say windows of several widths")
    scale = config.head_size**-0.5 if config.attention_scale is None else config.attention_scale
    channels = round(scale**-2)
    if abs(channels**-0.5 - scale) > 1e-9 * scale:
        raise Unsupported(f"gemma2 has no way to say attention_scale = {scale!r}")
    return {
        **common,
        "hidden_activation": TANH,
        "attn_logit_softcapping": _cap(config),
        "final_logit_softcapping": config.logit_cap,
        "query_pre_attn_scalar": channels,
        "sliding_window": next(iter(widths), 4096),
        "layer_types": [FULL if width is None else SLIDING for width in windows],
    }


def _window(name: str) -> int | None:
    structure = parse_structure(name)
    if structure == Causal():
        return None
    if isinstance(structure, Window) and structure.left is not None and structure == Window.last(structure.left + 1):
        return structure.left + 1
    raise Unsupported(f"gemma2 has no way to say structure = {name!r}")


def _cap(config: ModelConfig) -> float | None:
    parts = {parse_attention(name) for name in config.pattern}
    if len(parts) == 1:
        kernel, normalizer = parts.pop()
        if normalizer == Sum() and isinstance(kernel, SoftCap):
            return float(kernel.cap)
    if config.pattern == ("softmax",):
        return None
    raise Unsupported(f"gemma2 has no way to say attention = {config.attention!r}")


def _names(config: ModelConfig) -> Names:
    def layer(i: int) -> list[Rule]:
        norms = norm_rules(
            i,
            attention_norm="input_layernorm",
            attention_norm_after="post_attention_layernorm",
            feedforward_norm="pre_feedforward_layernorm",
            feedforward_norm_after="post_feedforward_layernorm",
        )
        return [*attention_rules(config, i), *feedforward_rules(config, i), *norms]

    return language_model(config, layer, embedding="model.embed_tokens", norm="model.norm")


FAMILIES = (
    Family(
        name="gemma2",
        architectures=("Gemma2ForCausalLM", "Gemma2Model"),
        read_config=_read,
        write_config=_write,
        build=build,
        names=_names,
        config=ModelConfig,
        prefix="model.",
    ),
)
