"""BLOOM (BigScience 2022, arXiv 2211.05100): ALiBi, a norm on the embedding, queries, keys and values fused by head."""

from __future__ import annotations

from typing import Any

from mercer.checkpoints.families.decoders import build, fused_by_head, language_model, pairs, refuse_all_but
from mercer.checkpoints.family import Family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names, Rule
from mercer.models.config import ModelConfig

BOTH = ("weight", "bias")


def _read(keys: Keys, _architecture: str) -> ModelConfig:
    keys.must_be("apply_residual_connection_post_layernorm", False)
    keys.must_be("n_inner", None)
    keys.aside(
        "attention_softmax_in_fp32",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "skip_bias_add",
        "skip_bias_add_qkv",
        "offset_alibi",  # of slopes that the models no longer read
        "seq_length",  # of training; positions have no end
    )
    return ModelConfig(
        vocab_size=keys.take("vocab_size", kind=int),
        dim=keys.first("hidden_size", "n_embed", kind=int),
        layers=keys.first("n_layer", "num_hidden_layers", kind=int),
        heads=keys.first("n_head", "num_attention_heads", kind=int),
        feedforward="gelu_tanh",
        norm="layer",
        norm_eps=keys.take("layer_norm_epsilon", 1e-5, kind=float),
        position="alibi",
        embedding_norm=True,
        tie_embeddings=keys.take("tie_word_embeddings", True, kind=bool),
        bias=True,
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    refuse_all_but(
        config,
        "bloom",
        feedforward=("gelu_tanh",),
        hidden=(None, 4 * config.dim),
        norm=("layer",),
        position=("alibi",),
        embedding_norm=(True,),
        bias=(True,),
        kv_heads=(None, config.heads),
        head_dim=(None, config.dim // config.heads),
        **dict.fromkeys(("norm_eps", "max_length", "tie_embeddings")),
    )
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "n_layer": config.layers,
        "n_head": config.heads,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _names(config: ModelConfig) -> Names:
    def layer(i: int) -> list[Rule]:
        return fused_by_head(i, f"transformer.h.{i}", "self_attention", config.heads, BOTH)

    return language_model(
        config,
        layer,
        embedding="transformer.word_embeddings",
        norm="transformer.ln_f",
        norm_parts=BOTH,
        more=pairs({"embedding_norm": "transformer.word_embeddings_layernorm"}, BOTH),
    )


FAMILIES = (
    Family(
        name="bloom",
        architectures=("BloomForCausalLM", "BloomModel"),
        read_config=_read,
        write_config=_write,
        build=build,
        names=_names,
        config=ModelConfig,
        prefix="transformer.",
    ),
)
