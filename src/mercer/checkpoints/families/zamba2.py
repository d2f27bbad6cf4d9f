"""Zamba2 (Glorioso et al. 2024, arXiv 2411.15242): Mamba-2 layers, some of which read shared transformer blocks, with
adapters of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mercer.checkpoints.families.decoders import hidden_of, language_model, pairs, qkv, refuse_all_but, rope, write_rope
from mercer.checkpoints.families.mamba2 import mixer_rules
from mercer.checkpoints.family import Family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names, Rule, Twin, same
from mercer.errors import InvalidArgument, Unsupported
from mercer.mixers.mamba2_config import Mamba2Config
from mercer.models.shared_hybrid import SharedHybridLM
from mercer.models.shared_hybrid_config import SharedHybridConfig

GATED = {"gelu": "geglu", "silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh"}
"""The hub's names of what is done to a gate."""
WRITTEN = {"geglu": "gelu", "swiglu": "silu", "geglu_tanh": "gelu_pytorch_tanh"}
_MIXER_EPS = 1e-5
"""Of the mixers' norms, whatever the others have."""


def build(config: SharedHybridConfig) -> SharedHybridLM:
    return SharedHybridLM(config)


def hybrid_layers(keys: Keys, kinds: list[Any] | None, layers: int) -> tuple[int, ...]:
    """The layers that read a shared block, of the list of what each layer is."""
    names = {"mamba": False, "linear_attention": False, "hybrid": True}
    if kinds is None or len(kinds) != layers or any(kind not in names for kind in kinds):
        raise InvalidArgument(
            f"{keys.where}: layers_block_type must say 'mamba' or 'hybrid' of each of {layers} layers"
        )
    return tuple(i for i, kind in enumerate(kinds) if names[kind])


def shared_fields(keys: Keys, *, dim: int, heads: int, head_dim: int, kv_heads: int | None) -> dict[str, Any]:
    """What Zamba and Zamba2 call alike. kv_heads: what an absent key means."""
    keys.aside("num_logits_to_keep", "use_mamba_kernels", "use_associative_scan")
    return {
        "vocab_size": keys.take("vocab_size", 32000, kind=int),
        "dim": dim,
        "heads": heads,
        "kv_heads": keys.take("num_key_value_heads", kv_heads, kind=int),
        "head_dim": head_dim,
        "attention_scale": (head_dim / 2) ** -0.5,
        "norm_eps": keys.take("rms_norm_eps", 1e-5, kind=float),
        "tie_embeddings": keys.take("tie_word_embeddings", True, kind=bool),
        "feedforward": keys.one_of("hidden_act", GATED, "gelu"),
    }


def _read(keys: Keys, _architecture: str) -> SharedHybridConfig:
    keys.must_be("use_long_context", False)
    keys.must_be("time_step_limit", None)
    keys.must_be("use_shared_mlp_adapter", True)
    # Only how a new model starts, how a scan is cut, and what the mixer's convolution does not ask for.
    keys.aside("time_step_max", "time_step_floor", "chunk_size", "use_mem_eff_path", "use_conv_bias")
    keys.aside("kv_channels", "num_query_groups", "rescale_prenorm_residual")
    dim, heads = keys.take("hidden_size", 2560, kind=int), keys.take("num_attention_heads", 32, kind=int)
    layers, expand = keys.take("num_hidden_layers", 54, kind=int), keys.take("mamba_expand", 2, kind=int)
    mamba_heads = keys.take("n_mamba_heads", 8, kind=int)
    if 2 * dim % heads or expand * dim % mamba_heads:
        raise InvalidArgument(
            f"{keys.where}: {heads} heads do not divide twice {dim} channels, or {mamba_heads} heads of Mamba {expand} "
            "times as many"
        )
    keys.must_be("attention_hidden_size", 2 * dim)
    keys.must_be("attention_head_dim", 2 * dim // heads)
    keys.must_be("mamba_headdim", expand * dim // mamba_heads)
    kinds = keys.first("layers_block_type", "layer_types", default=_DEFAULT_LAYERS, kind=list)
    places = hybrid_layers(keys, kinds, layers)
    keys.must_be("hybrid_layer_ids", list(places))
    positions: dict[str, Any]
    if keys.take("use_mem_rope", False, kind=bool):
        positions = {"position": "rotary", **rope(keys, context=4096)}
    else:
        keys.aside("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
        positions = {"position": "none", "max_length": keys.take("max_position_embeddings", 4096, kind=int)}
    rank = keys.take("adapter_rank", 128, kind=int)
    bias = keys.take("add_bias_linear", False, kind=bool)
    hidden = keys.take("intermediate_size", None, kind=int)
    mixer = Mamba2Config(
        state=keys.take("mamba_d_state", 64, kind=int),
        head_dim=expand * dim // mamba_heads,
        expand=expand,
        groups=keys.take("mamba_ngroups", 1, kind=int),
        width=keys.take("mamba_d_conv", 4, kind=int),
        step_least=float(keys.take("time_step_min", 0.001, kind=float)),
        norm_eps=_MIXER_EPS,
        bias=bias,
    )
    return SharedHybridConfig(
        **shared_fields(keys, dim=dim, heads=heads, head_dim=2 * dim // heads, kv_heads=None),
        **positions,
        layers=layers,
        hidden=hidden or 4 * dim,
        bias=("feedforward",) if bias else False,
        mixer="mamba2",
        mixers={"mamba2": mixer.model_dump(exclude_defaults=True)},
        shared_at=places,
        shared=min(keys.take("num_mem_blocks", 1, kind=int), max(len(places), 1)),
        attention_rank=rank if keys.take("use_shared_attention_adapter", False, kind=bool) else None,
        feedforward_rank=rank,
    )


_DEFAULT_LAYERS = [
    *["mamba"] * 6, "hybrid", *["mamba"] * 5, "hybrid", *["mamba"] * 5, "hybrid", *["mamba"] * 5, "hybrid",
    *["mamba"] * 5, "hybrid", *["mamba"] * 5, "hybrid", *["mamba"] * 5, "hybrid", *["mamba"] * 4, "hybrid",
    *["mamba"] * 3, "hybrid", *["mamba"] * 2,
]  # fmt: skip


def _write(config: SharedHybridConfig) -> dict[str, Any]:
    said = ("kv_heads", "norm_eps", "tie_embeddings", "hidden", "rope_base", "rope_scaling", "max_length", "bias")
    said = (
        *said,
        "head_dim",
        "attention_scale",
        "mixers",
        "shared_at",
        "shared",
        "attention_rank",
        "feedforward_rank",
        "feedforward",
    )
    places = {"position": ("rotary", "none"), "mixer": ("mamba2",)}
    refuse_all_but(config, "zamba2", **dict.fromkeys(said), **places)
    mixer = Mamba2Config(**config.mixers.get("mamba2", {}))
    inner, biased = mixer.expand * config.dim, config.biased == ("feedforward",)
    made = Mamba2Config(
        state=mixer.state, head_dim=mixer.head_dim, expand=mixer.expand, groups=mixer.groups, width=mixer.width,
        step_least=mixer.step_least, norm_eps=_MIXER_EPS, bias=biased,
    )  # fmt: skip
    ranks = {config.feedforward_rank, config.attention_rank} - {None}
    if mixer != made or config.biased not in ((), ("feedforward",)):
        raise Unsupported("zamba2 has biases in its mixers and its feed-forwards or in neither, and mixers of one kind")
    check_heads(config, "zamba2")
    if config.feedforward_rank is None or len(ranks) != 1:
        raise Unsupported("zamba2 has adapters of one rank in its feed-forwards, and in all attentions or none")
    return {
        **write_shared(config, "zamba2"),
        "add_bias_linear": biased,
        "adapter_rank": config.feedforward_rank,
        "use_shared_attention_adapter": config.attention_rank is not None,
        "num_mem_blocks": config.shared,
        "use_mem_rope": config.position == "rotary",
        **(write_rope(config) if config.position == "rotary" else {"max_position_embeddings": config.max_length}),
        "mamba_d_state": mixer.state,
        "mamba_d_conv": mixer.width,
        "mamba_expand": mixer.expand,
        "mamba_ngroups": mixer.groups,
        "n_mamba_heads": inner // mixer.head_dim,
        "time_step_min": mixer.step_least,
    }


def check_heads(config: SharedHybridConfig, family: str) -> None:
    """Refuse other sizes and scales of the shared attention than both families have."""
    head_dim = 2 * config.dim // config.heads
    if config.head_dim != head_dim or config.attention_scale != (head_dim / 2) ** -0.5:
        raise Unsupported(
            f"{family} has heads of 2 dim / heads = {head_dim} channels and scores over their half's root"
        )


def write_shared(config: SharedHybridConfig, family: str) -> dict[str, Any]:
    """What `shared_fields` reads, and the layers."""
    if config.feedforward not in WRITTEN:
        raise Unsupported(f"{family} has no way to say feedforward = {config.feedforward!r}")
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads or config.heads,
        "intermediate_size": hidden_of(config),
        "hidden_act": WRITTEN[config.feedforward],
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "layers_block_type": ["hybrid" if i in config.shared_at else "mamba" for i in range(config.layers)],
    }


def shared_rules(config: SharedHybridConfig, name: str, feedforward: dict[str, str]) -> list[Rule]:
    """The shared blocks, which lie in the first layer that uses each. feedforward: the names of its parts here and
    there, with `hidden` rows each where there are two."""
    rules: list[Rule] = []
    for number, first in enumerate(config.shared_at[: config.shared]):
        here, there = f"shared.{number}", f"model.layers.{first}.{name}"
        modules = {"attention.output": "self_attn.o_proj", "attention_norm": "input_layernorm"}
        modules |= {"feedforward_norm": "pre_ff_layernorm"}
        rules += qkv(f"{here}.attention.qkv", [f"{there}.self_attn.{n}_proj" for n in "qkv"], config)
        rules += pairs({f"{here}.{ours}": f"{there}.{theirs}" for ours, theirs in modules.items()}, ["weight"])
        parts = ("weight", "bias") if "feedforward" in config.biased else ("weight",)
        rules += pairs({f"{here}.{ours}": f"{there}.{theirs}" for ours, theirs in feedforward.items()}, parts)
    return rules


def repeated(config: SharedHybridConfig, name: str, rules: list[Rule]) -> tuple[Twin, ...]:
    """The tensors of the shared blocks in the layers that use them again, where some programs write them once more."""
    twins: list[Twin] = []
    for use, layer in enumerate(config.shared_at):
        first = f"model.layers.{config.shared_at[use % config.shared]}.{name}."
        if use >= config.shared:
            twins += [
                Twin(f"model.layers.{layer}.{name}.{theirs.removeprefix(first)}", theirs, "layers_block_type")
                for rule in rules
                for theirs in rule.theirs
                if theirs.startswith(first)
            ]
    return tuple(twins)


def _adapters(config: SharedHybridConfig) -> list[Rule]:
    """What each use adds; it lies in the layer that has the shared block."""
    rules: list[Rule] = []
    for use, layer in enumerate(config.shared_at):
        here = f"blocks.{layer}.adapters"
        there = f"model.layers.{config.shared_at[use % config.shared]}.shared_transformer"
        places = {"feedforward": f"feed_forward.gate_up_proj_adapter_list.{use}"}
        if config.attention_rank is not None:
            places |= {f"attention.{i}": f"self_attn.linear_{n}_adapter_list.{use}" for i, n in enumerate("qkv")}
        for ours, theirs in places.items():
            names = {f"{here}.{ours}.down": f"{there}.{theirs}.0", f"{here}.{ours}.up": f"{there}.{theirs}.1"}
            rules += pairs(names, ["weight"])
    return rules


def _names(config: SharedHybridConfig) -> Names:
    mixer = Mamba2Config(**config.mixers.get("mamba2", {}))

    def layer(i: int) -> list[Rule]:
        here, there = f"blocks.{i}", f"model.layers.{i}"
        bridge: list[Rule] = []
        if i in config.shared_at:
            bridge, there = [same(f"{here}.bridge.weight", f"{there}.linear.weight")], f"{there}.mamba_decoder"
        norm = same(f"{here}.mixer_norm.weight", f"{there}.input_layernorm.weight")
        return [*mixer_rules(f"{here}.mixer", f"{there}.mamba", mixer, config.dim), norm, *bridge]

    feedforward = {
        "feedforward.input": "feed_forward.gate_up_proj",
        "feedforward.output": "feed_forward.down_proj",
    }
    more = [*shared_rules(config, "shared_transformer", feedforward), *_adapters(config)]
    names = language_model(config, layer, embedding="model.embed_tokens", norm="model.final_layernorm", more=more)
    return replace(names, twins=(*names.twins, *repeated(config, "shared_transformer", more)))


FAMILIES = (
    Family(
        name="zamba2",
        architectures=("Zamba2ForCausalLM", "Zamba2Model"),
        read_config=_read,
        write_config=_write,
        build=build,
        names=_names,
        config=SharedHybridConfig,
        prefix="model.",
    ),
)
