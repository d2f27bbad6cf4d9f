"""LLaMA 1, 2 and 3 (Touvron et al. 2023, arXiv 2302.13971), and Mistral (arXiv 2310.06825), which adds a window."""

from __future__ import annotations

from typing import Any

from mercer.checkpoints.families.decoders import (
    build,
    gated,
    hidden_of,
    language_model,
    pairs,
    qkv,
    refuse_all_but,
    rope,
    write_rope,
)
from mercer.checkpoints.family import Family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names, Rule
from mercer.errors import Unsupported
from mercer.models.config import ModelConfig

_BUFFERS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")


def read_shape(keys: Keys, **rotary: Any) -> dict[str, Any]:
    """What LLaMA and its descendants call alike. rotary: what absent keys of `rope` mean."""
    return {
        "vocab_size": keys.take("vocab_size", kind=int),
        "dim": keys.take("hidden_size", kind=int),
        "layers": keys.take("num_hidden_layers", kind=int),
        "heads": keys.take("num_attention_heads", kind=int),
        "kv_heads": keys.take("num_key_value_heads", None, kind=int),
        "head_dim": keys.take("head_dim", None, kind=int),
        "norm_eps": keys.take("rms_norm_eps", 1e-6, kind=float),
        "tie_embeddings": keys.take("tie_word_embeddings", False, kind=bool),
        **rope(keys, **rotary),
    }


def write_shape(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads or config.heads,
        "head_dim": config.head_size,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        **write_rope(config),
    }


SHAPE: dict[str, Any] = dict.fromkeys(
    ("kv_heads", "head_dim", "norm_eps", "tie_embeddings", "rope_base", "rope_scaling", "max_length")
)
"""The fields that `write_shape` says, for `refuse_all_but`."""


def _read_llama(keys: Keys, _architecture: str) -> ModelConfig:
    keys.must_be("hidden_act", "silu")
    keys.must_be("rope_interleaved", False)
    keys.aside("is_llama_config", "max_sequence_length")  # the context is max_position_embeddings
    both = (keys.take("attention_bias", False, kind=bool), keys.take("mlp_bias", False, kind=bool))
    bias = (("qkv", "output") if both[0] else ()) + (("feedforward",) if both[1] else ())
    return ModelConfig(
        **read_shape(keys, context=2048), hidden=keys.take("intermediate_size", kind=int), bias=bias or False
    )


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    refuse_all_but(config, "llama", **SHAPE, hidden=None, bias=None)
    parts = set(config.biased)
    if not parts <= {"qkv", "output", "feedforward"} or ("qkv" in parts) != ("output" in parts):
        raise Unsupported(f"llama has no way to say bias = {config.bias!r}")
    return {
        **write_shape(config),
        "intermediate_size": hidden_of(config),
        "hidden_act": "silu",
        "attention_bias": "qkv" in parts,
        "mlp_bias": "feedforward" in parts,
    }


def _read_mistral(keys: Keys, _architecture: str) -> ModelConfig:
    keys.must_be("hidden_act", "silu")
    return ModelConfig(
        **read_shape(keys),
        hidden=keys.take("intermediate_size", kind=int),
        window=keys.take("sliding_window", 4096, kind=int),
    )


def _write_mistral(config: ModelConfig) -> dict[str, Any]:
    refuse_all_but(config, "mistral", **SHAPE, hidden=None, window=None)
    return {
        **write_shape(config),
        "intermediate_size": hidden_of(config),
        "hidden_act": "silu",
        "sliding_window": config.window,
    }


def attention_rules(config: ModelConfig, layer: int, *, block: str = "self_attn") -> list[Rule]:
    """The attention of a layer. block: its name there."""
    here, there = f"blocks.{layer}", f"model.layers.{layer}.{block}"
    parts = ("weight", "bias") if "qkv" in config.biased else ("weight",)
    return [
        *qkv(f"{here}.attention.qkv", [f"{there}.{n}_proj" for n in "qkv"], config, parts=parts),
        *pairs(
            {f"{here}.attention.output": f"{there}.o_proj"},
            ("weight", "bias") if "output" in config.biased else ("weight",),
        ),
    ]


def feedforward_rules(config: ModelConfig, layer: int, *, block: str = "mlp") -> list[Rule]:
    """A gated feed-forward. block: its name there."""
    here, there = f"blocks.{layer}.feedforward", f"model.layers.{layer}.{block}"
    parts = ("weight", "bias") if "feedforward" in config.biased else ("weight",)
    return [
        *gated(f"{here}.input", f"{there}.gate_proj", f"{there}.up_proj", hidden_of(config), parts=parts),
        *pairs({f"{here}.output": f"{there}.down_proj"}, parts),
    ]


def norm_rules(layer: int, **names: str) -> list[Rule]:
    """Norms of a layer: our names and theirs."""
    return pairs(
        {f"blocks.{layer}.{ours}": f"model.layers.{layer}.{theirs}" for ours, theirs in names.items()}, ["weight"]
    )


def _names(config: ModelConfig) -> Names:
    def layer(i: int) -> list[Rule]:
        norms = norm_rules(i, attention_norm="input_layernorm", feedforward_norm="post_attention_layernorm")
        return [*attention_rules(config, i), *feedforward_rules(config, i), *norms]

    return language_model(config, layer, embedding="model.embed_tokens", norm="model.norm", without_meaning=_BUFFERS)


FAMILIES = (
    Family(
        name="llama",
        architectures=("LlamaForCausalLM", "LlamaModel"),
        read_config=_read_llama,
        write_config=_write_llama,
        build=build,
        names=_names,
        config=ModelConfig,
        prefix="model.",
    ),
    Family(
        name="mistral",
        architectures=("MistralForCausalLM", "MistralModel"),
        read_config=_read_mistral,
        write_config=_write_mistral,
        build=build,
        names=_names,
        config=ModelConfig,
        prefix="model.",
    ),
)
