"""Zamba (Glorioso et al. 2024, arXiv 2405.16712): Mamba with heads, and one transformer block that several layers
share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mercer.checkpoints.families.decoders import gated, hidden_of, language_model, pairs, refuse_all_but
from mercer.checkpoints.families.zamba2 import (
    build,
    check_heads,
    hybrid_layers,
    repeated,
    shared_fields,
    shared_rules,
    write_shared,
)
from mercer.checkpoints.family import Family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names, PerHead, Rule, same
from mercer.errors import InvalidArgument, Unsupported
from mercer.mixers.mamba_config import MambaConfig
from mercer.models.shared_hybrid_config import SharedHybridConfig


def _read(keys: Keys, _architecture: str) -> SharedHybridConfig:
    keys.must_be("hidden_mamba_act", "silu")
    # Only how a new model starts, and which program computes a scan.
    keys.aside("time_step_min", "time_step_max", "time_step_floor", "use_mambapy")
    dim, heads = keys.take("hidden_size", 3712, kind=int), keys.take("num_attention_heads", 16, kind=int)
    layers, rank = keys.take("num_hidden_layers", 76, kind=int), keys.take("mamba_dt_rank", "auto", kind=(int, str))
    if 2 * dim % heads:
        raise InvalidArgument(f"{keys.where}: {heads} heads do not divide twice {dim} channels")
    if isinstance(rank, str) and rank != "auto":
        raise Unsupported(f"{keys.where}: mamba_dt_rank is {rank!r}, and only 'auto' or a number can be computed")
    keys.must_be("attention_hidden_size", 2 * dim)
    keys.must_be("attention_head_dim", 2 * dim // heads)
    period, offset = keys.take("attn_layer_period", 6, kind=int), keys.take("attn_layer_offset", 4, kind=int)
    spaced = ["hybrid" if i % max(period, 1) == offset else "mamba" for i in range(layers - 3)]
    kinds = keys.first("layers_block_type", "layer_types", default=["mamba", "mamba", "hybrid", *spaced], kind=list)
    mixer = MambaConfig(
        state=keys.take("mamba_d_state", 16, kind=int),
        expand=keys.take("mamba_expand", 2, kind=int),
        rank=None if rank in ("auto", -(-dim // 16)) else rank,
        heads=keys.take("n_mamba_heads", 2, kind=int),
        width=keys.take("mamba_d_conv", 4, kind=int),
        bias=keys.take("mamba_proj_bias", False, kind=bool),
        convolution_bias=keys.take("mamba_conv_bias", True, kind=bool),
    )
    return SharedHybridConfig(
        **shared_fields(keys, dim=dim, heads=heads, head_dim=2 * dim // heads, kv_heads=16),
        layers=layers,
        position="none",
        max_length=keys.take("max_position_embeddings", 4096, kind=int),
        hidden=keys.take("intermediate_size", 14848, kind=int),
        mixer="mamba",
        mixers={"mamba": mixer.model_dump(exclude_defaults=True)},
        shared_at=hybrid_layers(keys, kinds, layers),
    )


def _write(config: SharedHybridConfig) -> dict[str, Any]:
    said = ("kv_heads", "norm_eps", "tie_embeddings", "hidden", "max_length", "head_dim", "attention_scale", "mixers")
    places = {"position": ("none",), "mixer": ("mamba",), "shared": (1,)}
    refuse_all_but(config, "zamba", **dict.fromkeys((*said, "shared_at", "feedforward")), **places)
    mixer = _mixer(config)
    if mixer.heads == 1 or mixer.inner is not None or mixer.inner_norms is not None:
        raise Unsupported("zamba has mixers with two heads or more, without norms inside and without an inner size")
    check_heads(config, "zamba")
    return {
        **write_shared(config, "zamba"),
        "max_position_embeddings": config.max_length,
        "attention_hidden_size": 2 * config.dim,
        "attention_head_dim": config.head_dim,
        "hidden_mamba_act": "silu",
        "mamba_d_state": mixer.state,
        "mamba_d_conv": mixer.width,
        "mamba_expand": mixer.expand,
        "mamba_dt_rank": -(-config.dim // 16) if mixer.rank is None else mixer.rank,
        "n_mamba_heads": mixer.heads,
        "mamba_proj_bias": mixer.bias,
        "mamba_conv_bias": mixer.convolution_bias,
    }


def _mixer(config: SharedHybridConfig) -> MambaConfig:
    return MambaConfig(**config.mixers.get("mamba", {}))


def _mixer_rules(ours: str, theirs: str, config: SharedHybridConfig) -> list[Rule]:
    """A mixer whose heads have dimensions of their own on disk, and whose rows of x and z lie in turn."""
    mixer = _mixer(config)
    heads, inner, width = mixer.heads, mixer.expand * config.dim, mixer.width
    rank = -(-config.dim // 16) if mixer.rank is None else mixer.rank
    linear = ("weight", "bias") if mixer.bias else ("weight",)

    def by_head(name: str, there: str, *sizes: int) -> Rule:
        return Rule(
            f"{ours}.{name}", (f"{theirs}.{there}",), shape=(inner, *sizes), stored=(heads, inner // heads, *sizes)
        )

    return [
        *(Rule(f"{ours}.input.{part}", (f"{theirs}.in_proj.{part}",), (PerHead(inner, parts=2),)) for part in linear),
        *pairs({f"{ours}.output": f"{theirs}.out_proj"}, linear),
        Rule(
            f"{ours}.convolution.weight",
            (f"{theirs}.conv1d.weight",),
            shape=(inner, width),
            stored=(inner, 1, width),
        ),
        *([same(f"{ours}.convolution.bias", f"{theirs}.conv1d.bias")] if mixer.convolution_bias else []),
        same(f"{ours}.select.weight", f"{theirs}.x_proj_weight"),
        by_head("step.weight", "dt_proj_weight", rank),
        by_head("step.bias", "dt_proj_bias"),
        by_head("log_rate", "A_log", mixer.state),
        by_head("skip", "D"),
    ]


def _names(config: SharedHybridConfig) -> Names:
    def layer(i: int) -> list[Rule]:
        here, there = f"blocks.{i}", f"model.layers.{i}"
        bridge: list[Rule] = []
        if i in config.shared_at:
            bridge, there = [same(f"{here}.bridge.weight", f"{there}.linear.weight")], f"{there}.mamba_decoder"
        norm = same(f"{here}.mixer_norm.weight", f"{there}.input_layernorm.weight")
        return [*_mixer_rules(f"{here}.mixer", f"{there}.mamba", config), norm, *bridge]

    inside = f"model.layers.{config.shared_at[0]}.shared_transf.feed_forward"
    more = [
        *shared_rules(config, "shared_transf", {"feedforward.output": "feed_forward.down_proj"}),
        *gated("shared.0.feedforward.input", f"{inside}.gate_proj", f"{inside}.up_proj", hidden_of(config)),
    ]
    names = language_model(config, layer, embedding="model.embed_tokens", norm="model.final_layernorm", more=more)
    return replace(names, twins=(*names.twins, *repeated(config, "shared_transf", more)))


FAMILIES = (
    Family(
        name="zamba",
        architectures=("ZambaForCausalLM", "ZambaModel"),
        read_config=_read,
        write_config=_write,
        build=build,
        names=_names,
        config=SharedHybridConfig,
        prefix="model.",
    ),
)
