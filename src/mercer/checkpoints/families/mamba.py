"""Mamba (Gu & Dao 2023, arXiv 2312.00752) and Falcon-Mamba (Zuo et al. 2024, arXiv 2410.05355): blocks of one mixer
and no feed-forward. Falcon-Mamba has norms without weights inside.
"""

from __future__ import annotations

from typing import Any

from mercer.checkpoints.families.decoders import build, language_model, pairs, refuse_all_but
from mercer.checkpoints.family import Family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names, Rule, same
from mercer.errors import Unsupported
from mercer.mixers.mamba_config import MambaConfig
from mercer.models.config import ModelConfig


def _read(keys: Keys, _architecture: str, *, falcon: bool = False) -> ModelConfig:
    keys.must_be("hidden_act", "silu")
    # Only how a new model starts, which program computes a scan, and which dtype the sum of the layers is kept in.
    keys.aside("time_step_min", "time_step_max", "time_step_floor", "time_step_scale", "time_step_init_scheme")
    keys.aside("rescale_prenorm_residual", "residual_in_fp32", "use_mambapy", "use_associative_scan")
    if falcon:
        keys.aside("use_falcon_mambapy")
    else:
        _read_original(keys)
    dim, eps = keys.take("hidden_size", 768, kind=int), keys.take("layer_norm_epsilon", 1e-5, kind=float)
    # Where both are there and differ, as in Falcon-Mamba's own file, the size is what its tensors have.
    inner = keys.take("intermediate_size", keys.take("expand", 2, kind=int) * dim, kind=int)
    rank = keys.take("time_step_rank", "auto", kind=(int, str))
    if isinstance(rank, str) and rank != "auto":
        raise Unsupported(f"{keys.where}: time_step_rank is {rank!r}, and only 'auto' or a number can be computed")
    mixer = MambaConfig(
        state=keys.take("state_size", 16, kind=int),
        inner=None if inner == 2 * dim else inner,
        rank=None if rank in ("auto", -(-dim // 16)) else rank,
        width=keys.take("conv_kernel", 4, kind=int),
        bias=keys.take("use_bias", False, kind=bool),
        convolution_bias=keys.take("use_conv_bias", True, kind=bool),
        inner_norms="plain" if falcon else None,
        norm_eps=float(keys.take("mixer_rms_eps", 1e-6, kind=float)) if falcon else 1e-6,
    )
    return ModelConfig(
        vocab_size=keys.take("vocab_size", 50280, kind=int),
        dim=dim,
        layers=keys.take("num_hidden_layers", 32, kind=int),
        heads=1,
        attention="mamba",
        mixers={"mamba": mixer.model_dump(exclude_defaults=True)},
        feedforward="none",
        position="none",
        norm_eps=eps,
        tie_embeddings=keys.take("tie_word_embeddings", True, kind=bool),
    )


def _read_original(keys: Keys) -> None:
    """Keys of the first program's files, which the first conversions kept beside the others."""
    keys.must_be("rms_norm", True)
    keys.must_be("ssm_cfg", {})
    keys.aside("d_model", "d_inner", "n_layer", "fused_add_norm", "pad_vocab_size_multiple")


def _write(config: ModelConfig, *, falcon: bool = False) -> dict[str, Any]:
    name = "falcon_mamba" if falcon else "mamba"
    allowed = {"attention": ["mamba"], "feedforward": ["none"], "position": ["none"]}
    refuse_all_but(config, name, mixers=None, norm_eps=None, tie_embeddings=None, max_length=None, **allowed)
    mixer = _mixer(config)
    if mixer.inner_norms != ("plain" if falcon else None):
        raise Unsupported(f"{name} has no way to say inner_norms = {mixer.inner_norms!r}")
    inner = mixer.expand * config.dim if mixer.inner is None else mixer.inner
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "expand": max(1, inner // config.dim),
        "intermediate_size": inner,
        "state_size": mixer.state,
        "time_step_rank": -(-config.dim // 16) if mixer.rank is None else mixer.rank,
        "conv_kernel": mixer.width,
        "use_bias": mixer.bias,
        "use_conv_bias": mixer.convolution_bias,
        "hidden_act": "silu",
    } | ({"mixer_rms_eps": mixer.norm_eps} if falcon else {})


def mixer_rules(ours: str, theirs: str, mixer: MambaConfig, dim: int) -> list[Rule]:
    """The rules of one mixer."""
    inner = mixer.expand * dim if mixer.inner is None else mixer.inner
    linear, convolution = ("weight", "bias") if mixer.bias else ("weight",), f"{theirs}.conv1d"
    return [
        *pairs({f"{ours}.input": f"{theirs}.in_proj", f"{ours}.output": f"{theirs}.out_proj"}, linear),
        Rule(
            f"{ours}.convolution.weight",
            (f"{convolution}.weight",),
            shape=(inner, mixer.width),
            stored=(inner, 1, mixer.width),
        ),
        *([same(f"{ours}.convolution.bias", f"{convolution}.bias")] if mixer.convolution_bias else []),
        same(f"{ours}.select.weight", f"{theirs}.x_proj.weight"),
        *pairs({f"{ours}.step": f"{theirs}.dt_proj"}, ("weight", "bias")),
        same(f"{ours}.log_rate", f"{theirs}.A_log"),
        same(f"{ours}.skip", f"{theirs}.D"),
    ]


def _mixer(config: ModelConfig) -> MambaConfig:
    return MambaConfig(**config.mixers.get("mamba", {}))


def _names(config: ModelConfig) -> Names:
    def layer(i: int) -> list[Rule]:
        here, there = f"blocks.{i}", f"backbone.layers.{i}"
        norm = same(f"{here}.mixer_norm.weight", f"{there}.norm.weight")
        return [*mixer_rules(f"{here}.mixer", f"{there}.mixer", _mixer(config), config.dim), norm]

    return language_model(config, layer, embedding="backbone.embeddings", norm="backbone.norm_f")


def _renamed(name: str) -> str:
    """The first program's name of the embedding."""
    return name.replace("embedding.weight", "embeddings.weight") if name.endswith("embedding.weight") else name


FAMILIES = (
    Family(
        name="mamba",
        architectures=("MambaForCausalLM", "MambaModel"),
        read_config=_read,
        write_config=_write,
        build=build,
        names=_names,
        config=ModelConfig,
        prefix="backbone.",
        renamed=_renamed,
    ),
    Family(
        name="falcon_mamba",
        architectures=("FalconMambaForCausalLM", "FalconMambaModel"),
        read_config=lambda keys, architecture: _read(keys, architecture, falcon=True),
        write_config=lambda config: _write(config, falcon=True),
        build=build,
        names=_names,
        config=ModelConfig,
        prefix="backbone.",
        renamed=_renamed,
    ),
)
