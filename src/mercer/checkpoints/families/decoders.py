"""What the decoder language models of the hub have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mercer.checkpoints.family import Unsayable
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names, PerHead, Rule, Twin, same
from mercer.errors import InvalidArgument, Unsupported
from mercer.models.block_config import BlockConfig
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.nn.activations import default_hidden

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""The hub's names of plain non-linearities; three of them are one function."""
WRITTEN = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}


def build(config: ModelConfig) -> DecoderLM:
    return DecoderLM(config)


def rope(keys: Keys, *, base: float = 10000.0, context: int | None = None, share: float = 1.0) -> dict[str, Any]:
    """`rope_base`, `rope_scaling` and `max_length` of a model with rotary positions. Newer files have
    `rope_parameters`; older ones `rope_theta` and `rope_scaling`.

    base and context: what absent keys mean. share: of a head's channels those that turn, which nothing may contradict.

    Raises:
        InvalidArgument: two keys that mean the same differ.
        Unsupported: another share, or a key of no known type.
    """
    new, old = (_scaling(keys, name) for name in ("rope_parameters", "rope_scaling"))
    if new is not None and old is not None and any(new.get(name, value) != value for name, value in old.items()):
        raise InvalidArgument(f"{keys.where}: rope_parameters and rope_scaling differ, and mean the same")
    values = new if new is not None else old or {}
    outside = keys.first("rope_theta", "rotary_emb_base", default=None, kind=float)
    inside = values.pop("rope_theta", outside)
    if isinstance(inside, bool) or not isinstance(inside, int | float | None):
        raise InvalidArgument(f"{keys.where}: rope_theta is {inside!r}, not of type float")
    if outside is not None and inside is not None and inside != outside:
        raise InvalidArgument(f"{keys.where}: rope_theta is {outside!r}, and in rope_parameters {inside!r}")
    theta = outside if inside is None else inside
    found: dict[str, Any] = {"rope_base": float(base if theta is None else theta)}
    kind = values.get("rope_type", "default")
    if kind != "proportional" and values.pop("partial_rotary_factor", share) != share:
        raise Unsupported(f"{keys.where}: partial_rotary_factor of its rope_parameters is not {share}")
    if kind != "default":
        found["rope_scaling"] = values
    elif extra := sorted(values.keys() - {"rope_type"}):
        raise Unsupported(f"{keys.where}: rope_parameters of type default has {', '.join(extra)}")
    found["max_length"] = keys.take("max_position_embeddings", *(() if context is None else (context,)), kind=int)
    return found


def _scaling(keys: Keys, name: str) -> dict[str, Any] | None:
    """A dictionary of rotary positions without what is null, and with its type under the newer name."""
    found = keys.take(name, None, kind=dict)
    if found is None:
        return None
    values = {key: value for key, value in found.items() if value is not None}
    if "type" in values and values.setdefault("rope_type", values["type"]) == values["type"]:
        del values["type"]
    return values


def write_rope(config: ModelConfig, **more: Any) -> dict[str, Any]:
    """`rope_parameters` and the context."""
    parameters = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_base, **more}
    return {"rope_parameters": parameters, "max_position_embeddings": config.max_length}


def refuse_all_but(config: BlockConfig, family: str, **allowed: Any) -> None:
    """Refuse a configuration that the family has no key for.

    allowed: of each field the values that can be said: a collection, or None for any. Fields that are not mentioned
    must have their defaults. What only training reads may have any value.

    Raises:
        Unsayable: fields have other values; the message has all of them.
    """
    unsaid: list[str] = []
    training = {"seed", "init_std", "allow_longer"}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if name in training or name in ("vocab_size", "dim", "layers", "heads"):
            continue
        if name in allowed:
            if allowed[name] is None or value in allowed[name]:
                continue
        elif value == field.get_default(call_default_factory=True):
            continue
        unsaid.append(f"{name} = {value!r}")
    if unsaid:
        raise Unsayable(family, unsaid)


def qkv(ours: str, theirs: Sequence[str], config: ModelConfig, *, parts: Sequence[str] = ("weight",)) -> list[Rule]:
    """Queries, keys and values in tensors of their own, for our fused one."""
    size, heads = config.head_size, config.heads
    kv = config.kv_heads or heads
    rows = (heads * size, kv * size, kv * size)
    return [Rule(f"{ours}.{part}", tuple(f"{name}.{part}" for name in theirs), rows=rows) for part in parts]


def gated(ours: str, gate: str, value: str, hidden: int, *, parts: Sequence[str] = ("weight",)) -> list[Rule]:
    """A gate and a value in matrices of their own, for our fused one."""
    return [Rule(f"{ours}.{part}", (f"{gate}.{part}", f"{value}.{part}"), rows=(hidden, hidden)) for part in parts]


def hidden_of(config: ModelConfig) -> int:
    """Channels inside the feed-forward."""
    return default_hidden(config.dim, config.feedforward) if config.hidden is None else config.hidden


def fused_by_head(layer: int, there: str, attention: str, heads: int, parts: Sequence[str]) -> list[Rule]:
    """A layer of Megatron's making: queries, keys and values fused by head, and the names that go with them.

    there: the layer's name; attention: that of the attention inside of it; parts: what the attention's layers have,
    weights or biases too.
    """
    here, inner = f"blocks.{layer}", f"{there}.{attention}"
    qkv = f"{inner}.query_key_value"
    modules = {
        "feedforward.input": "mlp.dense_h_to_4h",
        "feedforward.output": "mlp.dense_4h_to_h",
        "attention_norm": "input_layernorm",
        "feedforward_norm": "post_attention_layernorm",
    }
    return [
        *(Rule(f"{here}.attention.qkv.{part}", (f"{qkv}.{part}",), (PerHead(heads),)) for part in parts),
        *pairs({f"{here}.attention.output": f"{inner}.dense"}, parts),
        *pairs({f"{here}.{ours}": f"{there}.{theirs}" for ours, theirs in modules.items()}, ("weight", "bias")),
    ]


def pairs(names: dict[str, str], parts: Sequence[str]) -> list[Rule]:
    """Modules that are stored as they are: of each the parts (weight, bias)."""
    return [same(f"{ours}.{part}", f"{theirs}.{part}") for ours, theirs in names.items() for part in parts]


def language_model(
    config: ModelConfig,
    layer: Callable[[int], list[Rule]],
    *,
    embedding: str,
    norm: str,
    head: str = "lm_head",
    norm_parts: Sequence[str] = ("weight",),
    more: Iterable[Rule] = (),
    without_meaning: Iterable[str] = (),
) -> Names:
    """The rules of a whole decoder from those of a layer."""
    rules = [same("embedding.weight", f"{embedding}.weight"), *pairs({"norm": norm}, norm_parts), *more]
    for i in range(config.layers):
        rules.extend(layer(i))
    twins: tuple[Twin, ...] = ()
    if config.tie_embeddings:
        twins = (Twin(f"{head}.weight", f"{embedding}.weight"),)
    else:
        rules.extend(pairs({"head": head}, ("weight", "bias") if config.head_bias else ("weight",)))
    return Names(tuple(rules), twins, tuple(without_meaning))
