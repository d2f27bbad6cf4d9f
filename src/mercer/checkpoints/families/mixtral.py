"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): Mistral with experts, the weights of the chosen ones summing to 1."""

from __future__ import annotations

from typing import Any

from mercer.checkpoints.families.decoders import build, hidden_of, language_model, pairs, refuse_all_but
from mercer.checkpoints.families.llama import SHAPE, attention_rules, norm_rules, read_shape, write_shape
from mercer.checkpoints.family import Family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names, Rule
from mercer.errors import Unsupported
from mercer.models.config import ModelConfig
from mercer.models.experts_config import ExpertsConfig


def _read(keys: Keys, _architecture: str) -> ModelConfig:
    keys.must_be("hidden_act", "silu")
    keys.must_be("router_jitter_noise", 0, why="routers see their input as it is")
    return ModelConfig(
        **read_shape(keys, base=1e6, context=131072) | {"norm_eps": keys.take("rms_norm_eps", 1e-5, kind=float)},
        hidden=keys.take("intermediate_size", kind=int),
        window=keys.take("sliding_window", None, kind=int),
        experts=ExpertsConfig(
            count=keys.take("num_local_experts", 8, kind=int),
            chosen=keys.take("num_experts_per_tok", 2, kind=int),
            balance=keys.take("router_aux_loss_coef", 0.001, kind=float),
        ),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    refuse_all_but(config, "mixtral", **SHAPE, hidden=None, window=None, experts=None)
    experts = config.experts
    if experts is None:
        raise Unsupported("mixtral has experts in every layer")
    said = ExpertsConfig(count=experts.count, chosen=experts.chosen, balance=experts.balance)
    if experts != said:
        raise Unsupported(f"mixtral has no way to say experts = {experts!r}")
    return {
        **write_shape(config),
        "intermediate_size": hidden_of(config),
        "hidden_act": "silu",
        "sliding_window": config.window,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.chosen,
        "router_aux_loss_coef": experts.balance,
    }


def _names(config: ModelConfig) -> Names:
    assert config.experts is not None  # as every configuration that is read
    count, hidden, dim = config.experts.count, hidden_of(config), config.dim

    def layer(i: int) -> list[Rule]:
        here, there = f"blocks.{i}.feedforward", f"model.layers.{i}.block_sparse_moe"
        gates = tuple(f"{there}.experts.{e}.{w}.weight" for e in range(count) for w in ("w1", "w3"))
        outward = tuple(f"{there}.experts.{e}.w2.weight" for e in range(count))
        norms = norm_rules(i, attention_norm="input_layernorm", feedforward_norm="post_attention_layernorm")
        return [
            *attention_rules(config, i),
            *pairs({f"{here}.router": f"{there}.gate"}, ["weight"]),
            Rule(f"{here}.input.weight", gates, rows=(hidden,) * 2 * count, shape=(count, 2 * hidden, dim)),
            Rule(f"{here}.output.weight", outward, rows=(dim,) * count, shape=(count, dim, hidden)),
            *norms,
        ]

    return language_model(config, layer, embedding="model.embed_tokens", norm="model.norm")


FAMILIES = (
    Family(
        name="mixtral",
        architectures=("MixtralForCausalLM", "MixtralModel"),
        read_config=_read,
        write_config=_write,
        build=build,
        names=_names,
        config=ModelConfig,
        prefix="model.",
    ),
)
