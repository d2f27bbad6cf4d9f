"""RecurrentGemma (Griffin Team 2024, arXiv 2404.07839): Griffin's recurrent blocks, and a window of attention in every
third layer.
"""

from __future__ import annotations

from typing import Any

import torch

from mercer.checkpoints.families.decoders import (
    build,
    hidden_of,
    language_model,
    pairs,
    refuse_all_but,
    rope,
    write_rope,
)
from mercer.checkpoints.families.gemma import TANH
from mercer.checkpoints.families.llama import attention_rules, feedforward_rules, norm_rules
from mercer.checkpoints.family import Family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names, Rule, same
from mercer.errors import Unsupported
from mercer.mixers.names import mixer_config
from mercer.mixers.rg_lru_config import RGLRUConfig
from mercer.models.config import ModelConfig

BLOCKS = {"recurrent": "rg-lru", "attention": "softmax"}
NAMES = {ours: theirs for theirs, ours in BLOCKS.items()}
_BIASED = ("output", "feedforward")


def _read(keys: Keys, _architecture: str) -> ModelConfig:
    keys.must_be("hidden_activation", TANH)
    keys.must_be("embeddings_scale_by_sqrt_dim", True)
    keys.aside("w_init_variance_scale", "final_w_init_variance_scale")
    dim, heads = keys.take("hidden_size", kind=int), keys.take("num_attention_heads", kind=int)
    layers = keys.take("num_hidden_layers", kind=int)
    keys.must_be("head_dim", dim // heads, why="it is hidden_size / num_attention_heads again")
    kinds = _kinds(keys, layers)
    attends = "attention" in kinds
    share = keys.take("partial_rotary_factor", 0.5, kind=float)
    share = (keys.take("rope_parameters", None, kind=dict) or {}).get("partial_rotary_factor", share)
    turning: dict[str, Any] = rope(keys, context=8192, share=share)
    if "rope_scaling" in turning:
        raise Unsupported(f"{keys.where}: rope_parameters has another type than default, which recurrent_gemma has not")
    window = keys.take("attention_window_size", 2048, kind=int)
    hidden = keys.take("intermediate_size", kind=int)
    if hidden % 2:
        raise Unsupported(f"{keys.where}: intermediate_size is {hidden}; half of it is the width of the feed-forward")
    options = {
        "width": keys.take("lru_width", None, kind=int),
        "blocks": heads,
        "conv": keys.take("conv1d_width", 4, kind=int),
    }
    return ModelConfig(
        vocab_size=keys.take("vocab_size", kind=int),
        dim=dim,
        layers=layers,
        heads=heads,
        kv_heads=keys.take("num_key_value_heads", None, kind=int),
        attention=tuple(BLOCKS[kind] for kind in kinds),
        mixers={"rg-lru": {name: n for name, n in options.items() if n is not None}} if "recurrent" in kinds else {},
        window=window if attends else None,
        rope_turned=int(dim // heads * share),
        allow_longer=True,
        hidden=hidden // 2,
        feedforward="geglu_tanh",
        bias=("qkv", "output", "feedforward") if keys.take("attention_bias", False, kind=bool) else _BIASED,
        norm_eps=keys.take("rms_norm_eps", 1e-6, kind=float),
        norm_offset=1.0,
        embedding_scale=_scale(dim),
        logit_cap=keys.take("logits_soft_cap", 30.0, kind=float),
        tie_embeddings=keys.take("tie_word_embeddings", True, kind=bool),
        **turning,
    )


def _kinds(keys: Keys, layers: int) -> list[str]:
    """The pattern of blocks, which is repeated over the layers."""
    kinds = keys.take("block_types", ["recurrent", "recurrent", "attention"], kind=list)
    keys.must_be("_block_types", kinds, why="it is block_types again")
    if not kinds or any(kind not in BLOCKS for kind in kinds):
        raise Unsupported(f"{keys.where}: block_types is {kinds!r}; known are 'recurrent' and 'attention'")
    return kinds[:layers]


def _scale(dim: int) -> float:
    """sqrt(dim), rounded to bfloat16 as the model was trained with."""
    return float(torch.tensor(dim**0.5, dtype=torch.bfloat16))


def _write(config: ModelConfig) -> dict[str, Any]:
    refuse_all_but(
        config,
        "recurrent_gemma",
        head_dim=(None, config.dim // config.heads),
        feedforward=("geglu_tanh",),
        norm_offset=(1.0,),
        bias=(_BIASED, ("qkv", *_BIASED)),
        **dict.fromkeys(
            ("attention", "mixers", "kv_heads", "window", "rope_turned", "rope_base", "max_length", "hidden")
        ),
        **dict.fromkeys(("norm_eps", "embedding_scale", "logit_cap", "tie_embeddings")),
    )
    if any(name not in NAMES for name in config.pattern):
        raise Unsupported(f"recurrent_gemma has no way to say attention = {config.attention!r}")
    if config.window is None and "softmax" in config.pattern:
        raise Unsupported("recurrent_gemma has no way to say that attention has no window")
    if config.embedding_scale != _scale(config.dim):
        raise Unsupported(f"recurrent_gemma has no way to say embedding_scale = {config.embedding_scale!r}")
    if config.logit_cap is None:
        raise Unsupported("recurrent_gemma has no way to say that logits have no cap")
    options = _options(config)
    if options.blocks not in (None, config.heads) or not options.bias:
        raise Unsupported(f"recurrent_gemma has no way to say mixers = {config.mixers!r}")
    turned = config.rope_turned or config.head_size
    share = turned / config.head_size
    if int(config.head_size * share) != turned:
        raise Unsupported(f"recurrent_gemma has no way to say rope_turned = {turned} of {config.head_size} channels")
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads or config.heads,
        "head_dim": config.head_size,
        "intermediate_size": 2 * hidden_of(config),
        "hidden_activation": TANH,
        "block_types": [NAMES[name] for name in config.pattern],
        "lru_width": config.dim if options.width is None else options.width,
        "conv1d_width": options.conv,
        "attention_window_size": 2048 if config.window is None else config.window,
        "attention_bias": "qkv" in config.biased,
        "logits_soft_cap": config.logit_cap,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **write_rope(config, partial_rotary_factor=share),
    }


def _options(config: ModelConfig) -> RGLRUConfig:
    options = mixer_config("rg-lru", config.mixers.get("rg-lru"))
    assert isinstance(options, RGLRUConfig)
    return options


def _mixer_rules(config: ModelConfig, layer: int) -> list[Rule]:
    """A recurrent block."""
    here, there = f"blocks.{layer}.mixer", f"model.layers.{layer}.temporal_block"
    options = _options(config)
    width = config.dim if options.width is None else options.width
    both = [
        Rule(f"{here}.input.{part}", (f"{there}.linear_y.{part}", f"{there}.linear_x.{part}"), rows=(width, width))
        for part in ("weight", "bias")
    ]
    gates = [
        same(f"{here}.{ours}.{part}", f"{there}.rg_lru.{theirs}_{part}")
        for ours, theirs in (("input_gate", "input_gate"), ("decay_gate", "recurrent_gate"))
        for part in ("weight", "bias")
    ]
    return [
        *both,
        *gates,
        Rule(
            f"{here}.conv.weight",
            (f"{there}.conv_1d.weight",),
            shape=(width, options.conv),
            stored=(width, 1, options.conv),
        ),
        same(f"{here}.conv.bias", f"{there}.conv_1d.bias"),
        same(f"{here}.decay", f"{there}.rg_lru.recurrent_param"),
        *pairs({f"{here}.output": f"{there}.linear_out"}, ("weight", "bias")),
    ]


def _names(config: ModelConfig) -> Names:
    def layer(i: int) -> list[Rule]:
        attends = config.attentions[i] == "softmax"
        first = "attention_norm" if attends else "mixer_norm"
        return [
            *(attention_rules(config, i, block="temporal_block") if attends else _mixer_rules(config, i)),
            *feedforward_rules(config, i, block="mlp_block"),
            *norm_rules(i, **{first: "temporal_pre_norm", "feedforward_norm": "channel_pre_norm"}),
        ]

    return language_model(config, layer, embedding="model.embed_tokens", norm="model.final_norm")


FAMILIES = (
    Family(
        name="recurrent_gemma",
        architectures=("RecurrentGemmaForCausalLM", "RecurrentGemmaModel"),
        read_config=_read,
        write_config=_write,
        build=build,
        names=_names,
        config=ModelConfig,
        prefix="model.",
    ),
)
