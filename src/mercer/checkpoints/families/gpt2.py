"""GPT-2 (Radford et al. 2019)."""

from __future__ import annotations

from typing import Any

from mercer.checkpoints.families.decoders import (
    ACTIVATIONS,
    WRITTEN,
    build,
    hidden_of,
    language_model,
    pairs,
    refuse_all_but,
)
from mercer.checkpoints.family import Family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import TRANSPOSED, Names, Rule, same
from mercer.models.config import ModelConfig

SUMMARY = ("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj")
"""Keys of a head that no architecture here has."""


def _read(keys: Keys, _architecture: str) -> ModelConfig:
    read_attention(keys)
    keys.aside("n_special", "predict_special_tokens")  # of tokens that the vocabulary counts already
    return ModelConfig(
        vocab_size=keys.take("vocab_size", kind=int),
        dim=keys.take("n_embd", kind=int),
        layers=keys.take("n_layer", kind=int),
        heads=keys.take("n_head", kind=int),
        hidden=keys.take("n_inner", None, kind=int),
        feedforward=keys.one_of("activation_function", ACTIVATIONS, "gelu_new"),
        norm="layer",
        norm_eps=keys.take("layer_norm_epsilon", 1e-5, kind=float),
        position="learned",
        max_length=keys.take("n_positions", kind=int),
        tie_embeddings=keys.take("tie_word_embeddings", True, kind=bool),
        bias=True,
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    refuse_all_but(
        config,
        "gpt2",
        feedforward=WRITTEN,
        norm=("layer",),
        position=("learned",),
        bias=(True,),
        kv_heads=(None, config.heads),
        head_dim=(None, config.dim // config.heads),
        **dict.fromkeys(("hidden", "norm_eps", "max_length", "tie_embeddings")),
    )
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.dim,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": hidden_of(config),
        "activation_function": WRITTEN[config.feedforward],
        "layer_norm_epsilon": config.norm_eps,
        "n_positions": config.max_length,
        "tie_word_embeddings": config.tie_embeddings,
    }


def block_rules(here: str, there: str) -> list[Rule]:
    """A whole block with the names and the [in, out] matrices of GPT-2."""
    linear = {
        "attention.qkv": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "feedforward.input": "mlp.c_fc",
        "feedforward.output": "mlp.c_proj",
    }
    rules = [Rule(f"{here}.{a}.weight", (f"{there}.{b}.weight",), (TRANSPOSED,)) for a, b in linear.items()]
    rules += [same(f"{here}.{a}.bias", f"{there}.{b}.bias") for a, b in linear.items()]
    norms = {f"{here}.attention_norm": f"{there}.ln_1", f"{here}.feedforward_norm": f"{there}.ln_2"}
    return rules + pairs(norms, ("weight", "bias"))


def read_attention(keys: Keys) -> None:
    """Refuse what GPT-2 can ask of its attention and nothing here computes."""
    keys.must_be("add_cross_attention", False)
    keys.must_be("scale_attn_by_inverse_layer_idx", False)
    keys.must_be("scale_attn_weights", True)
    keys.aside("reorder_and_upcast_attn")  # a matter of rounding
    keys.aside("n_ctx", *SUMMARY)  # n_positions again


def _names(config: ModelConfig) -> Names:
    return language_model(
        config,
        lambda i: block_rules(f"blocks.{i}", f"transformer.h.{i}"),
        embedding="transformer.wte",
        norm="transformer.ln_f",
        norm_parts=("weight", "bias"),
        more=[same("positions.weight", "transformer.wpe.weight")],
        without_meaning=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),  # causal masks
    )


FAMILIES = (
    Family(
        name="gpt2",
        architectures=("GPT2LMHeadModel", "GPT2Model"),
        read_config=_read,
        write_config=_write,
        build=build,
        names=_names,
        config=ModelConfig,
        prefix="transformer.",
    ),
)
