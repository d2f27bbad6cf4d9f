"""Mamba-2 (Dao & Gu 2024, arXiv 2405.21060): blocks of one mixer and no feed-forward."""

from __future__ import annotations

from math import inf
from typing import Any

from mercer.checkpoints.families.decoders import build, language_model, pairs, refuse_all_but
from mercer.checkpoints.family import Family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names, Rule, same
from mercer.errors import InvalidArgument, Unsupported
from mercer.mixers.mamba2_config import Mamba2Config
from mercer.models.config import ModelConfig

_INFINITY = {"__float__": "Infinity"}
"""As transformers writes what JSON has no number for. (Older versions wrote the word Infinity, which is read too.)"""


def _read(keys: Keys, _architecture: str) -> ModelConfig:
    keys.must_be("hidden_act", "silu")
    keys.must_be("rms_norm", True)
    # Only how a new model starts, how a scan is cut, and which dtype the sum of the layers is kept in.
    keys.aside("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "time_step_scale")
    keys.aside("time_step_init_scheme", "rescale_prenorm_residual", "chunk_size", "residual_in_fp32")
    keys.aside("norm_before_gate")  # written as true by a converter; transformers has the gate first all the same
    dim, eps = keys.take("hidden_size", 4096, kind=int), keys.take("layer_norm_epsilon", 1e-5, kind=float)
    heads, size = keys.take("num_heads", 128, kind=int), keys.take("head_dim", 64, kind=int)
    expand = keys.take("expand", 2, kind=int)
    inner = keys.take("intermediate_size", expand * dim, kind=int)
    if not heads * size == expand * dim == inner:
        raise InvalidArgument(
            f"{keys.where}: {heads} heads of {size} channels, expand {expand} of {dim} and an intermediate_size of "
            f"{inner} are not the same number"
        )
    least, most = read_limits(keys)
    mixer = Mamba2Config(
        state=keys.take("state_size", 128, kind=int),
        head_dim=size,
        expand=expand,
        groups=keys.take("n_groups", 8, kind=int),
        width=keys.take("conv_kernel", 4, kind=int),
        step_least=least,
        step_most=most,
        norm_eps=float(eps),
        bias=keys.take("use_bias", False, kind=bool),
        convolution_bias=keys.take("use_conv_bias", True, kind=bool),
    )
    return ModelConfig(
        vocab_size=keys.take("vocab_size", 32768, kind=int),
        dim=dim,
        layers=keys.take("num_hidden_layers", 64, kind=int),
        heads=1,
        attention="mamba2",
        mixers={"mamba2": mixer.model_dump(exclude_defaults=True)},
        feedforward="none",
        position="none",
        norm_eps=eps,
        tie_embeddings=keys.take("tie_word_embeddings", False, kind=bool),
    )


def read_limits(keys: Keys) -> tuple[float, float | None]:
    """The least and the largest time step; None: any."""
    limits = keys.take("time_step_limit", [0.0, inf], kind=(list, tuple))
    ends = [inf if end == _INFINITY else end for end in limits]
    if len(ends) != 2 or any(isinstance(end, bool) or not isinstance(end, int | float) for end in ends):
        raise InvalidArgument(f"{keys.where}: time_step_limit is {limits!r}, not two numbers")
    return float(ends[0]), None if ends[1] == inf else float(ends[1])


def _write(config: ModelConfig) -> dict[str, Any]:
    allowed = {"attention": ["mamba2"], "feedforward": ["none"], "position": ["none"]}
    refuse_all_but(config, "mamba2", mixers=None, norm_eps=None, tie_embeddings=None, max_length=None, **allowed)
    mixer = Mamba2Config(**config.mixers.get("mamba2", {}))
    if mixer.norm_before_gate or mixer.norm_groups not in (None, mixer.groups) or mixer.norm_eps != config.norm_eps:
        raise Unsupported("mamba2 norms what the gate gave, by its groups, with the epsilon of its other norms")
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "num_heads": mixer.expand * config.dim // mixer.head_dim,
        "head_dim": mixer.head_dim,
        "expand": mixer.expand,
        "state_size": mixer.state,
        "n_groups": mixer.groups,
        "conv_kernel": mixer.width,
        "time_step_limit": [mixer.step_least, _INFINITY if mixer.step_most is None else mixer.step_most],
        "use_bias": mixer.bias,
        "use_conv_bias": mixer.convolution_bias,
        "hidden_act": "silu",
    }


def mixer_rules(ours: str, theirs: str, mixer: Mamba2Config, dim: int) -> list[Rule]:
    """The rules of one mixer."""
    channels = mixer.expand * dim + 2 * mixer.groups * mixer.state
    linear = ("weight", "bias") if mixer.bias else ("weight",)
    convolution = f"{theirs}.conv1d"
    return [
        *pairs({f"{ours}.input": f"{theirs}.in_proj", f"{ours}.output": f"{theirs}.out_proj"}, linear),
        Rule(
            f"{ours}.convolution.weight",
            (f"{convolution}.weight",),
            shape=(channels, mixer.width),
            stored=(channels, 1, mixer.width),
        ),
        *([same(f"{ours}.convolution.bias", f"{convolution}.bias")] if mixer.convolution_bias else []),
        same(f"{ours}.log_rate", f"{theirs}.A_log"),
        same(f"{ours}.step_bias", f"{theirs}.dt_bias"),
        same(f"{ours}.skip", f"{theirs}.D"),
        same(f"{ours}.norm.weight", f"{theirs}.norm.weight"),
    ]


def _names(config: ModelConfig) -> Names:
    mixer = Mamba2Config(**config.mixers.get("mamba2", {}))

    def layer(i: int) -> list[Rule]:
        here, there = f"blocks.{i}", f"backbone.layers.{i}"
        norm = same(f"{here}.mixer_norm.weight", f"{there}.norm.weight")
        return [*mixer_rules(f"{here}.mixer", f"{there}.mixer", mixer, config.dim), norm]

    return language_model(config, layer, embedding="backbone.embeddings", norm="backbone.norm_f")


FAMILIES = (
    Family(
        name="mamba2",
        architectures=("Mamba2ForCausalLM", "Mamba2Model"),
        read_config=_read,
        write_config=_write,
        build=build,
        names=_names,
        config=ModelConfig,
        prefix="backbone.",
    ),
)
