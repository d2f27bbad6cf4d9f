"""RWKV-7 (Peng et al. 2025, arXiv 2503.14456), as flash-linear-attention has it on the hub."""

from __future__ import annotations

from typing import Any

from mercer.checkpoints.families.decoders import build, language_model, pairs, refuse_all_but
from mercer.checkpoints.family import Family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names, Rule, same
from mercer.errors import InvalidArgument, Unsupported
from mercer.mixers.low_rank import suggested_rank
from mercer.mixers.rwkv7_config import RWKV7Config
from mercer.models.config import ModelConfig

BOTH = ("weight", "bias")
RANKS = {
    "decay_rank": ("decay_low_rank_dim", 2.5),
    "rate_rank": ("a_low_rank_dim", 2.5),
    "value_rank": ("v_low_rank_dim", 1.7),
    "gate_rank": ("gate_low_rank_dim", 5.0),
}
"""Of each rank here the key there, and the factor of what is suggested."""
ABSENT = {"decay_low_rank_dim": 64, "a_low_rank_dim": 64, "v_low_rank_dim": 16, "gate_low_rank_dim": 128}
"""What absent keys mean."""
MIXES = {"receptance": "r", "decay": "w", "key": "k", "value": "v", "rate": "a", "gate": "g"}
LINEAR = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}


def _read(keys: Keys, _architecture: str) -> ModelConfig:
    keys.must_be("hidden_act", "sqrelu")
    keys.must_be("attn", why="layers of attention between those of RWKV-7 are not read")
    # How it is computed, and of the loss.
    keys.aside("attn_mode", "fuse_norm", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp")
    dim, layers = keys.take("hidden_size", 2048, kind=int), keys.take("num_hidden_layers", 24, kind=int)
    count, size = keys.take("num_heads", None, kind=int), keys.take("head_dim", 64, kind=int)
    if size is None and count is not None and count > 0:
        size = dim // count
    if size is None or size < 1 or dim % size:
        raise InvalidArgument(f"{keys.where}: hidden_size {dim} is not a whole number of heads of {size}")
    heads = dim // size
    if count not in (None, heads):
        raise InvalidArgument(f"{keys.where}: num_heads is {count}, and hidden_size / head_dim is {heads}")
    values = keys.take("value_dim", None, kind=(int, list))
    if values is not None and set(values if isinstance(values, list) else [values]) != {dim}:
        raise Unsupported(f"{keys.where}: value_dim is {values!r}, and only the hidden_size of {dim} can be computed")
    ratio = keys.take("hidden_ratio", 4, kind=float)
    hidden = keys.take("intermediate_size", None, kind=int)
    if hidden is None:
        hidden = -(-int(dim * (4 if ratio is None else ratio)) // 32) * 32
    eps = float(keys.take("norm_eps", 1e-5, kind=float))
    ranks = {ours: keys.take(theirs, ABSENT[theirs], kind=int) for ours, (theirs, _) in RANKS.items()}
    if None in ranks.values():
        raise InvalidArgument(f"{keys.where}: a low_rank_dim is null, which is no size")
    return ModelConfig(
        vocab_size=keys.take("vocab_size", 32000, kind=int),
        dim=dim,
        layers=layers,
        heads=heads,
        attention="rwkv7",
        mixers={"rwkv7": ranks | {"norm_eps": eps * size}},
        feedforward="rwkv7",
        hidden=hidden,
        norm="layer",
        norm_eps=eps,
        bias=("norm",) if keys.take("norm_bias", True, kind=bool) else False,
        position="none",
        max_length=keys.take("max_position_embeddings", 2048, kind=int),
        embedding_norm=keys.take("norm_first", True, kind=bool),
        tie_embeddings=keys.take("tie_word_embeddings", False, kind=bool),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    refuse_all_but(
        config,
        "rwkv7",
        attention=("rwkv7", ("rwkv7",)),
        feedforward=("rwkv7",),
        norm=("layer",),
        bias=(("norm",), True, False),
        position=("none",),
        **dict.fromkeys(("mixers", "hidden", "max_length", "tie_embeddings", "embedding_norm", "norm_eps")),
    )
    mixer = RWKV7Config(**config.mixers.get("rwkv7", {}))
    heads = mixer.heads or config.heads
    size = config.dim // heads
    if abs(mixer.norm_eps - size * config.norm_eps) > 1e-9 * mixer.norm_eps:
        raise Unsupported(
            f"rwkv7 has the norm of heads of {size} channels at {size} times its norm_eps of {config.norm_eps}, and "
            f"this model at {mixer.norm_eps}"
        )
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "head_dim": size,
        "num_heads": heads,
        "value_dim": [config.dim] * config.layers,
        "intermediate_size": config.hidden or 4 * config.dim,
        "hidden_act": "sqrelu",
        "norm_eps": config.norm_eps,
        "norm_bias": "norm" in config.biased,
        "norm_first": config.embedding_norm,
        "max_position_embeddings": config.max_length,
        "tie_word_embeddings": config.tie_embeddings,
    } | {theirs: getattr(mixer, ours) or suggested_rank(config.dim, factor) for ours, (theirs, factor) in RANKS.items()}


def _names(config: ModelConfig) -> Names:
    parts = BOTH if "norm" in config.biased else ("weight",)

    def low_rank(ours: str, theirs: str, *, bias: bool = True) -> list[Rule]:
        return [
            same(f"{ours}.down.weight", f"{theirs}.lora.0.weight"),
            *pairs({f"{ours}.up": f"{theirs}.lora.2"}, BOTH if bias else ("weight",)),
        ]

    def layer(i: int) -> list[Rule]:
        here, there = f"blocks.{i}", f"model.layers.{i}"
        mixer, theirs = f"{here}.mixer", f"{there}.attn"
        return [
            *pairs(
                {f"{here}.mixer_norm": f"{there}.attn_norm", f"{here}.feedforward_norm": f"{there}.ffn_norm"}, parts
            ),
            *(
                Rule(f"{mixer}.mix_{a}", (f"{theirs}.x_{b}",), shape=(config.dim,), stored=(1, 1, config.dim))
                for a, b in MIXES.items()
            ),
            same(f"{mixer}.key_scale", f"{theirs}.k_k"),
            same(f"{mixer}.key_rate", f"{theirs}.k_a"),
            same(f"{mixer}.bonus", f"{theirs}.r_k"),
            *pairs({f"{mixer}.{a}": f"{theirs}.{b}" for a, b in LINEAR.items()}, ("weight",)),
            *low_rank(f"{mixer}.decay", f"{theirs}.w_lora"),
            *low_rank(f"{mixer}.rate", f"{theirs}.a_lora"),
            *(low_rank(f"{mixer}.first_share", f"{theirs}.v_lora") if i else ()),
            *low_rank(f"{mixer}.gate", f"{theirs}.g_lora", bias=False),
            *pairs({f"{mixer}.norm": f"{theirs}.g_norm"}, BOTH),
            same(f"{here}.feedforward.mix_key", f"{there}.ffn.x_k"),
            *pairs({f"{here}.feedforward.{n}": f"{there}.ffn.{n}" for n in ("key", "value")}, ("weight",)),
        ]

    return language_model(
        config,
        layer,
        embedding="model.embeddings",
        norm="model.norm",
        norm_parts=parts,
        more=pairs({"embedding_norm": "model.layers.0.pre_norm"}, parts) if config.embedding_norm else (),
    )


FAMILIES = (
    Family(
        name="rwkv7",
        architectures=("RWKV7ForCausalLM", "RWKV7Model"),
        read_config=_read,
        write_config=_write,
        build=build,
        names=_names,
        config=ModelConfig,
        prefix="model.",
    ),
)
