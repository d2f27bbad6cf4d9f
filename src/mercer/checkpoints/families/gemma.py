"""Gemma (Gemma Team 2024, arXiv 2403.08295): norms of weight 1 + w, embeddings times sqrt(dim), gates by gelu."""

from __future__ import annotations

from typing import Any

from mercer.checkpoints.families.decoders import build, hidden_of, language_model, refuse_all_but
from mercer.checkpoints.families.llama import (
    SHAPE,
    attention_rules,
    feedforward_rules,
    norm_rules,
    read_shape,
    write_shape,
)
from mercer.checkpoints.family import Family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names, Rule
from mercer.errors import Unsupported
from mercer.models.config import ModelConfig

TANH = "gelu_pytorch_tanh"


def read_common(keys: Keys) -> dict[str, Any]:
    """What the generations share."""
    keys.must_be("use_bidirectional_attention", False)
    shape = read_shape(keys, context=8192)
    if "tie_word_embeddings" not in keys:
        shape["tie_embeddings"] = True
    return {
        **shape,
        "hidden": keys.take("intermediate_size", kind=int),
        "feedforward": "geglu_tanh",
        "norm_offset": 1.0,
        "embedding_scale": shape["dim"] ** 0.5,
        "bias": ("qkv", "output") if keys.take("attention_bias", False, kind=bool) else False,
    }


def write_common(config: ModelConfig, family: str, **allowed: Any) -> dict[str, Any]:
    refuse_all_but(
        config,
        family,
        **SHAPE,
        hidden=None,
        feedforward=("geglu_tanh",),
        norm_offset=(1.0,),
        embedding_scale=None,
        bias=(False, (), ("qkv", "output")),
        **allowed,
    )
    if config.embedding_scale is None or abs(config.embedding_scale - config.dim**0.5) > 1e-9:
        raise Unsupported(f"{family} has no way to say embedding_scale = {config.embedding_scale!r}")
    return {
        **write_shape(config),
        "intermediate_size": hidden_of(config),
        "attention_bias": "qkv" in config.biased,
    }


def _read(keys: Keys, _architecture: str) -> ModelConfig:
    # The first files say "gelu" and mean its approximation, as do those that say nothing.
    keys.must_be("hidden_act", TANH, "gelu")
    keys.must_be("hidden_activation", TANH)
    return ModelConfig(**read_common(keys))


def _write(config: ModelConfig) -> dict[str, Any]:
    return {**write_common(config, "gemma"), "hidden_act": TANH}


def _names(config: ModelConfig) -> Names:
    def layer(i: int) -> list[Rule]:
        norms = norm_rules(i, attention_norm="input_layernorm", feedforward_norm="post_attention_layernorm")
        return [*attention_rules(config, i), *feedforward_rules(config, i), *norms]

    return language_model(config, layer, embedding="model.embed_tokens", norm="model.norm")


FAMILIES = (
    Family(
        name="gemma",
        architectures=("GemmaForCausalLM", "GemmaModel"),
        read_config=_read,
        write_config=_write,
        build=build,
        names=_names,
        config=ModelConfig,
        prefix="model.",
    ),
)
