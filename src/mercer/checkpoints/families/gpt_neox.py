"""GPT-NeoX and Pythia (Black et al. 2022, arXiv 2204.06745): parallel parts, rotary positions on a share of a head."""

from __future__ import annotations

from typing import Any

from mercer.checkpoints.families.decoders import (
    ACTIVATIONS,
    WRITTEN,
    build,
    fused_by_head,
    hidden_of,
    language_model,
    refuse_all_but,
    rope,
    write_rope,
)
from mercer.checkpoints.family import Family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names, Rule
from mercer.errors import Unsupported
from mercer.models.config import ModelConfig

BOTH = ("weight", "bias")
_PARTS = ("qkv", "output", "feedforward", "norm")


def _read(keys: Keys, _architecture: str) -> ModelConfig:
    parameters = keys.take("rope_parameters", None, kind=dict) or {}
    share = keys.first("rotary_pct", "partial_rotary_factor", default=None, kind=float)
    share = parameters.get("partial_rotary_factor", 0.25 if share is None else share)
    dim, heads = keys.take("hidden_size", kind=int), keys.take("num_attention_heads", kind=int)
    return ModelConfig(
        vocab_size=keys.take("vocab_size", kind=int),
        dim=dim,
        layers=keys.take("num_hidden_layers", kind=int),
        heads=heads,
        hidden=keys.take("intermediate_size", kind=int),
        feedforward=keys.one_of("hidden_act", ACTIVATIONS, "gelu"),
        norm="layer",
        norm_eps=keys.take("layer_norm_eps", 1e-5, kind=float),
        parallel="own_norms" if keys.take("use_parallel_residual", True, kind=bool) else "none",
        rope_turned=int(dim // heads * share),
        tie_embeddings=keys.take("tie_word_embeddings", False, kind=bool),
        bias=True if keys.take("attention_bias", True, kind=bool) else ("feedforward", "norm"),
        **rope(keys, context=2048, share=share),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    refuse_all_but(
        config,
        "gpt_neox",
        feedforward=WRITTEN,
        norm=("layer",),
        parallel=("own_norms", "none"),
        bias=(True, _PARTS, ("feedforward", "norm")),
        kv_heads=(None, config.heads),
        head_dim=(None, config.dim // config.heads),
        **dict.fromkeys(
            ("hidden", "norm_eps", "max_length", "rope_turned", "rope_base", "rope_scaling", "tie_embeddings")
        ),
    )
    turned = config.rope_turned or config.head_size
    share = turned / config.head_size
    if int(config.head_size * share) != turned:
        raise Unsupported(f"gpt_neox has no way to say rope_turned = {turned} of {config.head_size} channels")
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": hidden_of(config),
        "hidden_act": WRITTEN[config.feedforward],
        "layer_norm_eps": config.norm_eps,
        "use_parallel_residual": config.parallel == "own_norms",
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": "qkv" in config.biased,
        **write_rope(config, partial_rotary_factor=share),
    }


def _names(config: ModelConfig) -> Names:
    parts = BOTH if "qkv" in config.biased else ("weight",)

    def layer(i: int) -> list[Rule]:
        return fused_by_head(i, f"gpt_neox.layers.{i}", "attention", config.heads, parts)

    return language_model(
        config,
        layer,
        embedding="gpt_neox.embed_in",
        norm="gpt_neox.final_layer_norm",
        head="embed_out",
        norm_parts=BOTH,
        without_meaning=(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    )


FAMILIES = (
    Family(
        name="gpt_neox",
        architectures=("GPTNeoXForCausalLM",),
        read_config=_read,
        write_config=_write,
        build=build,
        names=_names,
        config=ModelConfig,
    ),
)
