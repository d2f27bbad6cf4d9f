"""Jamba (Lieber et al. 2024, arXiv 2403.19887): Mamba with norms inside, an attention without positions every few
layers, and experts every few layers whose weights are their probabilities among all."""

from __future__ import annotations

from typing import Any

from mercer.checkpoints.families import mamba
from mercer.checkpoints.families.decoders import build, hidden_of, language_model, pairs, refuse_all_but
from mercer.checkpoints.families.llama import attention_rules, feedforward_rules, norm_rules
from mercer.checkpoints.family import Family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names, Rule
from mercer.errors import Unsupported
from mercer.mixers.mamba_config import MambaConfig
from mercer.models.config import ModelConfig
from mercer.models.experts_config import ExpertsConfig


def _read(keys: Keys, _architecture: str) -> ModelConfig:
    keys.must_be("hidden_act", "silu")
    keys.must_be("sliding_window", None)
    keys.must_be("mamba_inner_layernorms", True)
    # Which program computes a scan, of which tokens logits are wanted, and the context under another name.
    keys.aside("use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep", "n_ctx")
    keys.aside("calc_logits_for_entire_prompt")
    dim, layers = keys.take("hidden_size", 4096, kind=int), keys.take("num_hidden_layers", 32, kind=int)
    period, offset = keys.take("attn_layer_period", 8, kind=int), keys.take("attn_layer_offset", 4, kind=int)
    names = tuple("softmax" if i % max(period, 1) == offset else "mamba" for i in range(layers))
    every, first = keys.take("expert_layer_period", 2, kind=int), keys.take("expert_layer_offset", 1, kind=int)
    count, chosen = keys.take("num_experts", 16, kind=int), keys.take("num_experts_per_tok", 2, kind=int)
    balance, eps = keys.take("router_aux_loss_coef", 0.001, kind=float), keys.take("rms_norm_eps", 1e-6, kind=float)
    experts = None
    if count > 1 and any(i % max(every, 1) == first for i in range(layers)):
        experts = ExpertsConfig(
            count=count, chosen=chosen, renormalise=False, every=every, offset=first, balance=balance
        )
    rank = keys.take("mamba_dt_rank", "auto", kind=(int, str))
    if isinstance(rank, str) and rank != "auto":
        raise Unsupported(f"{keys.where}: mamba_dt_rank is {rank!r}, and only 'auto' or a number can be computed")
    mixer = MambaConfig(
        state=keys.take("mamba_d_state", 16, kind=int),
        expand=keys.take("mamba_expand", 2, kind=int),
        rank=None if rank in ("auto", -(-dim // 16)) else rank,
        width=keys.take("mamba_d_conv", 4, kind=int),
        bias=keys.take("mamba_proj_bias", False, kind=bool),
        convolution_bias=keys.take("mamba_conv_bias", True, kind=bool),
        inner_norms="learned",
        norm_eps=float(eps),
    )
    key_heads = keys.take("num_key_value_heads", 8, kind=int)
    return ModelConfig(
        vocab_size=keys.take("vocab_size", 65536, kind=int),
        dim=dim,
        layers=layers,
        heads=keys.take("num_attention_heads", 32, kind=int),
        kv_heads=key_heads if "softmax" in names else None,
        attention=names[:period] if period <= layers else names,
        mixers={"mamba": mixer.model_dump(exclude_defaults=True)} if "mamba" in names else {},
        position="none",
        hidden=keys.take("intermediate_size", 14336, kind=int),
        experts=experts,
        norm_eps=eps,
        max_length=keys.take("max_position_embeddings", 262144, kind=int),
        tie_embeddings=keys.take("tie_word_embeddings", False, kind=bool),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    said = ("attention", "mixers", "hidden", "experts", "norm_eps", "max_length", "tie_embeddings", "kv_heads")
    refuse_all_but(config, "jamba", **dict.fromkeys(said), position=("none",))
    if not set(config.attentions) <= {"mamba", "softmax"}:
        raise Unsupported(f"jamba has no way to say attention = {config.attention!r}")
    period, offset = _spaced([i for i, name in enumerate(config.attentions) if name == "softmax"], config.layers)
    experts = config.experts or ExpertsConfig(count=1, chosen=1, renormalise=False, every=2, offset=1)
    plain = ExpertsConfig(
        count=experts.count, chosen=experts.chosen, renormalise=False, every=experts.every, offset=experts.offset,
        balance=experts.balance,
    )  # fmt: skip
    if experts != plain or (config.experts is not None and experts.count == 1):
        raise Unsupported(f"jamba has no way to say experts = {config.experts!r}")
    mixer = _mixer(config)
    if mixer.inner_norms != "learned" or mixer.norm_eps != config.norm_eps or mixer.inner is not None:
        raise Unsupported(
            "jamba has learned norms in its mixers, with the epsilon of its other norms, and no inner size"
        )
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": hidden_of(config),
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads or config.heads,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_length,
        "attn_layer_period": period,
        "attn_layer_offset": offset,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "expert_layer_period": experts.every,
        "expert_layer_offset": experts.offset,
        "router_aux_loss_coef": experts.balance,
        "mamba_d_state": mixer.state,
        "mamba_d_conv": mixer.width,
        "mamba_expand": mixer.expand,
        "mamba_dt_rank": -(-config.dim // 16) if mixer.rank is None else mixer.rank,
        "mamba_proj_bias": mixer.bias,
        "mamba_conv_bias": mixer.convolution_bias,
    }


def _spaced(places: list[int], layers: int) -> tuple[int, int]:
    """The period and the offset that give these of so many layers."""
    offset = places[0] if places else layers
    period = places[1] - offset if len(places) > 1 else max(offset + 1, layers - offset)
    if [i for i in range(layers) if i % period == offset] != places:
        raise Unsupported(f"jamba has an attention every so many layers, not in {', '.join(map(str, places))}")
    return period, offset


def _mixer(config: ModelConfig) -> MambaConfig:
    if "mamba" in config.attentions:
        return MambaConfig(**config.mixers.get("mamba", {}))
    return MambaConfig(inner_norms="learned", norm_eps=config.norm_eps)  # no layer has one, and the keys need some


def _names(config: ModelConfig) -> Names:
    experts, mixer, hidden, dim = config.experts, _mixer(config), hidden_of(config), config.dim

    def layer(i: int) -> list[Rule]:
        here, there = f"blocks.{i}", f"model.layers.{i}"
        if config.attentions[i] == "softmax":
            rules = attention_rules(config, i)
            norm = "attention_norm"
        else:
            inner = {"step_norm": "dt_layernorm", "write_norm": "b_layernorm", "read_norm": "c_layernorm"}
            rules = mamba.mixer_rules(f"{here}.mixer", f"{there}.mamba", mixer, dim)
            rules += pairs({f"{here}.mixer.{a}": f"{there}.mamba.{b}" for a, b in inner.items()}, ["weight"])
            norm = "mixer_norm"
        rules += norm_rules(i, **{norm: "input_layernorm", "feedforward_norm": "pre_ff_layernorm"})
        if experts is None or not experts.at(i):
            return [*rules, *feedforward_rules(config, i, block="feed_forward")]
        here, there = f"{here}.feedforward", f"{there}.feed_forward"
        each = [f"{there}.experts.{e}" for e in range(experts.count)]
        gates = tuple(f"{expert}.{part}_proj.weight" for expert in each for part in ("gate", "up"))
        outward = tuple(f"{expert}.down_proj.weight" for expert in each)
        shape = (experts.count, 2 * hidden, dim)
        return [
            *rules,
            *pairs({f"{here}.router": f"{there}.router"}, ["weight"]),
            Rule(f"{here}.input.weight", gates, rows=(hidden,) * 2 * experts.count, shape=shape),
            Rule(f"{here}.output.weight", outward, rows=(dim,) * experts.count, shape=(experts.count, dim, hidden)),
        ]

    return language_model(config, layer, embedding="model.embed_tokens", norm="model.final_layernorm")


FAMILIES = (
    Family(
        name="jamba",
        architectures=("JambaForCausalLM", "JambaModel"),
        read_config=_read,
        write_config=_write,
        build=build,
        names=_names,
        config=ModelConfig,
        prefix="model.",
    ),
)
