"""What the encoder-decoders of the hub have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mercer.checkpoints.families.decoders import refuse_all_but
from mercer.checkpoints.mapping import Rule
from mercer.models.seq2seq import Seq2Seq
from mercer.models.seq2seq_config import Seq2SeqConfig


def build(config: Seq2SeqConfig) -> Seq2Seq:
    return Seq2Seq(config)


def refuse(config: Seq2SeqConfig, family: str, **allowed: Any) -> None:
    """`refuse_all_but` for what every family here says."""
    refuse_all_but(
        config, family, **allowed, **dict.fromkeys(("encoder_layers", "max_length", "start_token", "hidden"))
    )


def attention(
    ours: str, theirs: str, config: Seq2SeqConfig, names: Sequence[str], *, cross: bool = False
) -> list[Rule]:
    """The projections of an attention. names: theirs of queries, keys, values and the output."""
    biased = set(config.biased)
    biased |= {"query", "key", "value"} if "qkv" in biased else set()
    size = config.head_size
    kv = (config.kv_heads or config.heads) * size
    heads = {"query": config.heads * size, "key": kv, "value": kv}
    groups = {"query": ("query",), "key_value": ("key", "value")} if cross else {"qkv": ("query", "key", "value")}
    there = dict(zip(("query", "key", "value", "output"), (f"{theirs}.{name}" for name in names), strict=True))
    rules: list[Rule] = []
    for module, parts in {**groups, "output": ("output",)}.items():
        for kind in ("weight", "bias"):
            held = [part for part in parts if kind == "weight" or part in biased]
            if held:
                rows = tuple(heads[part] for part in held) if len(held) > 1 else ()
                rules.append(
                    Rule(f"{ours}.{module}.{kind}", tuple(f"{there[part]}.{kind}" for part in held), rows=rows)
                )
    return rules
