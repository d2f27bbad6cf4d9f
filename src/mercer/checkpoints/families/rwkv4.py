"""RWKV-4 (Peng et al. 2023, arXiv 2305.13048), whose model type on the hub is `rwkv`."""

from __future__ import annotations

from typing import Any

from mercer.checkpoints.families.decoders import build, language_model, pairs, refuse_all_but
from mercer.checkpoints.family import Family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names, Rule, same
from mercer.models.config import ModelConfig

BOTH = ("weight", "bias")
EPS = 1e-5
"""Of the last norm, whatever layer_norm_epsilon says of the others."""


def _read(keys: Keys, _architecture: str) -> ModelConfig:
    keys.must_be("layer_norm_epsilon", EPS, why="the last norm has this in any case")
    # In evaluation the weights of later layers, and what flows between them, are halved so that float16 holds them; the
    # norms take it out again.
    keys.aside("rescale_every")
    dim = keys.take("hidden_size", 4096, kind=int)
    width = keys.take("attention_hidden_size", None, kind=int)
    return ModelConfig(
        vocab_size=keys.take("vocab_size", 50277, kind=int),
        dim=dim,
        layers=keys.take("num_hidden_layers", 32, kind=int),
        heads=1,
        attention="rwkv4",
        mixers={} if width in (None, dim) else {"rwkv4": {"width": width}},
        feedforward="rwkv4",
        hidden=keys.take("intermediate_size", None, kind=int),
        norm="layer",
        norm_eps=EPS,
        bias=("norm",),
        position="none",
        max_length=keys.take("context_length", 1024, kind=int),
        embedding_norm=True,
        tie_embeddings=keys.take("tie_word_embeddings", False, kind=bool),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    refuse_all_but(
        config,
        "rwkv",
        attention=("rwkv4", ("rwkv4",)),
        feedforward=("rwkv4",),
        norm=("layer",),
        norm_eps=(EPS,),
        bias=(("norm",), True),
        position=("none",),
        embedding_norm=(True,),
        **dict.fromkeys(("mixers", "hidden", "max_length", "tie_embeddings")),
    )
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "attention_hidden_size": _width(config),
        "intermediate_size": config.hidden or 4 * config.dim,
        "layer_norm_epsilon": EPS,
        "context_length": config.max_length,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _width(config: ModelConfig) -> int:
    return config.mixers.get("rwkv4", {}).get("width") or config.dim


def _names(config: ModelConfig) -> Names:
    def share(ours: str, theirs: str) -> Rule:
        return Rule(ours, (theirs,), shape=(config.dim,), stored=(1, 1, config.dim))

    def layer(i: int) -> list[Rule]:
        here, there = f"blocks.{i}", f"rwkv.blocks.{i}"
        mixer, time, feed, channel = (
            f"{here}.mixer", f"{there}.attention", f"{here}.feedforward", f"{there}.feed_forward"
        )  # fmt: skip
        return [
            *pairs({f"{here}.mixer_norm": f"{there}.ln1", f"{here}.feedforward_norm": f"{there}.ln2"}, BOTH),
            *pairs({f"{mixer}.{n}": f"{time}.{n}" for n in ("key", "value", "receptance", "output")}, ("weight",)),
            *pairs({f"{feed}.{n}": f"{channel}.{n}" for n in ("key", "value", "receptance")}, ("weight",)),
            *(share(f"{mixer}.mix_{n}", f"{time}.time_mix_{n}") for n in ("key", "value", "receptance")),
            *(share(f"{feed}.mix_{n}", f"{channel}.time_mix_{n}") for n in ("key", "receptance")),
            same(f"{mixer}.decay", f"{time}.time_decay"),
            same(f"{mixer}.bonus", f"{time}.time_first"),
        ]

    return language_model(
        config,
        layer,
        embedding="rwkv.embeddings",
        norm="rwkv.ln_out",
        norm_parts=BOTH,
        head="head",
        more=pairs({"embedding_norm": "rwkv.blocks.0.pre_ln"}, BOTH),
    )


FAMILIES = (
    Family(
        name="rwkv",
        architectures=("RwkvForCausalLM", "RwkvModel"),
        read_config=_read,
        write_config=_write,
        build=build,
        names=_names,
        config=ModelConfig,
        prefix="rwkv.",
    ),
)
