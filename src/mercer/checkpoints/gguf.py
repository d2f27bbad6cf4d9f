"""Language models of GGUF files: what their metadata and their tensors are called, and what they are here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mercer.checkpoints.families.decoders import gated, hidden_of, language_model, pairs
from mercer.checkpoints.gguf_file import GGUF
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import AS_IS, Names, Neighbours, Rule, same
from mercer.errors import InvalidArgument, Unsupported
from mercer.models.config import ModelConfig

SUFFIX = ".gguf"
_LAYERS = {"attention_norm": "attn_norm", "feedforward_norm": "ffn_norm"}
BOTH = ("weight", "bias")


@dataclass(frozen=True)
class Kind:
    """One `general.architecture`: its configuration, and its rules."""

    read_config: Callable[[Keys, GGUF], ModelConfig]
    names: Callable[[ModelConfig], Names]


def read_gguf(path: Path) -> tuple[GGUF, ModelConfig, Names, dict[str, Any]]:
    """The file, the configuration, the rules and what was left aside.

    Raises:
        InvalidArgument: an unknown architecture, or a key of it that nothing here reads.
    """
    file = GGUF(path)
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _KINDS:
        raise InvalidArgument(f"{path}: there is no GGUF architecture {name!r} here; there are {', '.join(_KINDS)}")
    prefix = f"{name}."
    own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    keys = Keys(own, str(path))
    config = _KINDS[name].read_config(keys, file)
    keys.aside("vocab_size", "rope.dimension_count", "attention.key_length", "attention.value_length")
    keys.finish()
    others = {key: value for key, value in file.metadata.items() if not key.startswith((prefix, "tokenizer."))}
    return file, config, _KINDS[name].names(config), others | keys.ignored


def _shape(keys: Keys, file: GGUF) -> dict[str, Any]:
    """What the architectures call alike. The vocabulary is as long as the embedding."""
    rows = file.shape("token_embd.weight") if "token_embd.weight" in file.names else ()
    return {
        "vocab_size": rows[0] if rows else 1,
        "dim": keys.take("embedding_length", kind=int),
        "layers": keys.take("block_count", kind=int),
        "heads": keys.take("attention.head_count", kind=int),
        "hidden": keys.take("feed_forward_length", kind=int),
        "max_length": keys.take("context_length", kind=int),
        "tie_embeddings": "output.weight" not in file.names,
    }


def _read_llama(keys: Keys, file: GGUF) -> ModelConfig:
    shape = _shape(keys, file)
    if keys.take("expert_count", 0, kind=int):
        raise Unsupported(f"{file.where} has experts, which are read from the hub's format alone")
    keys.aside("expert_used_count")
    head = keys.take("attention.key_length", None, kind=int)
    size = shape["dim"] // max(shape["heads"], 1) if head is None else head  # no heads are refused with their number
    if keys.take("attention.value_length", size, kind=int) != size:
        raise Unsupported(f"{file.where}: values have another number of channels than keys")
    turned = keys.take("rope.dimension_count", size, kind=int)
    scaling = keys.take("rope.scaling.type", "none", kind=str)
    factor = keys.take("rope.scaling.factor", None, kind=float)
    trained = keys.take("rope.scaling.original_context_length", None, kind=int)
    if "rope_freqs.weight" in file.names or scaling not in ("none", "linear", "yarn"):
        raise Unsupported(f"{file.where}: its rotary rates are a table; read the model from the hub's format")
    rope: dict[str, Any] | None = None
    if scaling != "none":
        rope = {"rope_type": scaling, "factor": factor}
        if scaling == "yarn":
            rope["original_max_position_embeddings"] = trained
    return ModelConfig(
        **shape,
        kv_heads=keys.take("attention.head_count_kv", None, kind=int),
        head_dim=head,
        norm_eps=keys.take("attention.layer_norm_rms_epsilon", kind=float),
        rope_base=keys.take("rope.freq_base", 10000.0, kind=float),
        rope_turned=None if turned == size else turned,
        rope_scaling=rope,
    )


def _names_llama(config: ModelConfig) -> Names:
    heads, kv, size = config.heads, config.kv_heads or config.heads, config.head_size
    layouts = (Neighbours(heads, config.rope_turned), Neighbours(kv, config.rope_turned), AS_IS)
    rows = (heads * size, kv * size, kv * size)

    def layer(i: int) -> list[Rule]:
        here, there = f"blocks.{i}", f"blk.{i}"
        qkv = tuple(f"{there}.attn_{name}.weight" for name in "qkv")
        return [
            Rule(f"{here}.attention.qkv.weight", qkv, layouts, rows),
            *pairs({f"{here}.attention.output": f"{there}.attn_output"}, ["weight"]),
            *gated(f"{here}.feedforward.input", f"{there}.ffn_gate", f"{there}.ffn_up", hidden_of(config)),
            *pairs({f"{here}.feedforward.output": f"{there}.ffn_down"}, ["weight"]),
            *pairs({f"{here}.{ours}": f"{there}.{theirs}" for ours, theirs in _LAYERS.items()}, ["weight"]),
        ]

    return language_model(config, layer, embedding="token_embd", norm="output_norm", head="output")


def _read_gpt2(keys: Keys, file: GGUF) -> ModelConfig:
    return ModelConfig(
        **_shape(keys, file),
        feedforward="gelu_tanh",
        norm="layer",
        norm_eps=keys.take("attention.layer_norm_epsilon", kind=float),
        position="learned",
        bias=True,
    )


def _names_gpt2(config: ModelConfig) -> Names:
    def layer(i: int) -> list[Rule]:
        here, there = f"blocks.{i}", f"blk.{i}"
        names = {
            "attention.qkv": "attn_qkv",
            "attention.output": "attn_output",
            "feedforward.input": "ffn_up",
            "feedforward.output": "ffn_down",
            **_LAYERS,
        }
        return pairs({f"{here}.{ours}": f"{there}.{theirs}" for ours, theirs in names.items()}, BOTH)

    return language_model(
        config,
        layer,
        embedding="token_embd",
        norm="output_norm",
        head="output",
        norm_parts=BOTH,
        more=[same("positions.weight", "position_embd.weight")],
    )


_KINDS = {"llama": Kind(_read_llama, _names_llama), "gpt2": Kind(_read_gpt2, _names_gpt2)}
