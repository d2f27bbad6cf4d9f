"""GPT-J (Wang & Komatsuzaki 2021): parallel parts behind one norm, rotary pairs (2i, 2i + 1)."""

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
from mercer.checkpoints.families.gpt2 import SUMMARY
from mercer.checkpoints.family import Family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import AS_IS, Names, Neighbours, Rule
from mercer.models.config import ModelConfig

BOTH = ("weight", "bias")


def _read(keys: Keys, _architecture: str) -> ModelConfig:
    keys.must_be("scale_attn_weights", True)
    keys.must_be("rotary", True)
    keys.aside("n_ctx", *SUMMARY)  # n_positions again
    return ModelConfig(
        vocab_size=keys.take("vocab_size", kind=int),
        dim=keys.take("n_embd", kind=int),
        layers=keys.take("n_layer", kind=int),
        heads=keys.take("n_head", kind=int),
        hidden=keys.take("n_inner", None, kind=int),
        feedforward=keys.one_of("activation_function", ACTIVATIONS, "gelu_new"),
        norm="layer",
        norm_eps=keys.take("layer_norm_epsilon", 1e-5, kind=float),
        parallel="one_norm",
        rope_turned=keys.take("rotary_dim", 64, kind=int),
        max_length=keys.take("n_positions", 2048, kind=int),
        tie_embeddings=keys.take("tie_word_embeddings", False, kind=bool),
        head_bias=True,
        bias=("feedforward", "norm"),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    refuse_all_but(
        config,
        "gptj",
        feedforward=WRITTEN,
        norm=("layer",),
        parallel=("one_norm",),
        tie_embeddings=(False,),
        head_bias=(True,),
        bias=(("feedforward", "norm"),),
        kv_heads=(None, config.heads),
        head_dim=(None, config.dim // config.heads),
        **dict.fromkeys(("hidden", "norm_eps", "max_length", "rope_turned")),
    )
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.dim,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": hidden_of(config),
        "activation_function": WRITTEN[config.feedforward],
        "layer_norm_epsilon": config.norm_eps,
        "rotary_dim": config.rope_turned,
        "n_positions": config.max_length,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _names(config: ModelConfig) -> Names:
    turned = Neighbours(config.heads, config.rope_turned)
    rows = (config.dim,) * 3

    def layer(i: int) -> list[Rule]:
        here, there = f"blocks.{i}", f"transformer.h.{i}"
        qkv = tuple(f"{there}.attn.{name}_proj.weight" for name in "qkv")
        linear = {
            f"{here}.feedforward.input": f"{there}.mlp.fc_in",
            f"{here}.feedforward.output": f"{there}.mlp.fc_out",
            f"{here}.attention_norm": f"{there}.ln_1",
        }
        return [
            Rule(f"{here}.attention.qkv.weight", qkv, (turned, turned, AS_IS), rows),
            *pairs({f"{here}.attention.output": f"{there}.attn.out_proj"}, ["weight"]),
            *pairs(linear, BOTH),
        ]

    return language_model(
        config,
        layer,
        embedding="transformer.wte",
        norm="transformer.ln_f",
        norm_parts=BOTH,
        without_meaning=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias|embed_positions)",),  # masks and sinusoids
    )


FAMILIES = (
    Family(
        name="gptj",
        architectures=("GPTJForCausalLM",),
        read_config=_read,
        write_config=_write,
        build=build,
        names=_names,
        config=ModelConfig,
    ),
)
