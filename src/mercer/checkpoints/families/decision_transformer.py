"""The Decision Transformer (Chen et al. 2021, arXiv 2106.01345), whose body is a GPT-2."""

from __future__ import annotations

from typing import Any

from mercer.checkpoints.families.decoders import ACTIVATIONS, WRITTEN, hidden_of, pairs, refuse_all_but
from mercer.checkpoints.families.gpt2 import block_rules, read_attention
from mercer.checkpoints.family import Family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names, same
from mercer.models.decision import DecisionTransformer
from mercer.models.decision_config import DecisionConfig


def _read(keys: Keys, _architecture: str) -> DecisionConfig:
    read_attention(keys)
    keys.aside("vocab_size")  # of a table of tokens that no call reads
    return DecisionConfig(
        observed=keys.take("state_dim", 17, kind=int),
        actions=keys.take("act_dim", 4, kind=int),
        bounded=keys.take("action_tanh", True, kind=bool),
        dim=keys.take("hidden_size", 128, kind=int),
        layers=keys.take("n_layer", 3, kind=int),
        heads=keys.take("n_head", 1, kind=int),
        hidden=keys.take("n_inner", None, kind=int),
        feedforward=keys.one_of("activation_function", ACTIVATIONS, "relu"),
        norm="layer",
        norm_eps=keys.take("layer_norm_epsilon", 1e-5, kind=float),
        bias=True,
        max_length=keys.take("max_ep_len", 4096, kind=int),
        position_rows=keys.take("n_positions", 1024, kind=int),
    )


def _write(config: DecisionConfig) -> dict[str, Any]:
    refuse_all_but(
        config,
        "decision_transformer",
        feedforward=WRITTEN,
        norm=("layer",),
        bias=(True,),
        kv_heads=(None, config.heads),
        head_dim=(None, config.dim // config.heads),
        **dict.fromkeys(("observed", "actions", "bounded", "hidden", "norm_eps", "max_length", "position_rows")),
    )
    return {
        "state_dim": config.observed,
        "act_dim": config.actions,
        "action_tanh": config.bounded,
        "hidden_size": config.dim,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": hidden_of(config),
        "activation_function": WRITTEN[config.feedforward],
        "layer_norm_epsilon": config.norm_eps,
        "max_ep_len": config.max_length,
        "n_positions": config.position_rows,
    }


def _names(config: DecisionConfig) -> Names:
    modules = {
        "embed_return": "embed_return",
        "embed_observation": "embed_state",
        "embed_action": "embed_action",
        "embedding_norm": "embed_ln",
        "norm": "encoder.ln_f",
        "predict_action": "predict_action.0",
        "predict_observation": "predict_state",
        "predict_return": "predict_return",
    }
    rules = [
        *pairs(modules, ("weight", "bias")),
        same("steps.weight", "embed_timestep.weight"),
        same("positions.weight", "encoder.wpe.weight"),
    ]
    for i in range(config.layers):
        rules += block_rules(f"blocks.{i}", f"encoder.h.{i}")
    unread = r"encoder\.wte\.weight"
    return Names(tuple(rules), without_meaning=(unread, r"encoder\.h\.\d+\.attn\.(bias|masked_bias)"))


FAMILIES = (
    Family(
        name="decision_transformer",
        architectures=("DecisionTransformerModel",),
        read_config=_read,
        write_config=_write,
        build=DecisionTransformer,
        names=_names,
        config=DecisionConfig,
    ),
)
