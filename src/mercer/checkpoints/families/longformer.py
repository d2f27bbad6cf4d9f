"""Longformer (Beltagy et al. 2020, arXiv 2004.05150): windows, and global tokens with projections of their own."""

from __future__ import annotations

from typing import Any

from mercer.checkpoints.families.decoders import ACTIVATIONS, WRITTEN, pairs
from mercer.checkpoints.families.encoders import (
    BOTH,
    bert_embeddings,
    build,
    gathered,
    need_tokens,
    old_norms,
    read_shape,
    refuse,
    token_head,
    write_shape,
)
from mercer.checkpoints.family import Family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names
from mercer.errors import Unsupported
from mercer.models.encoder_config import EncoderConfig

_PROJECTIONS = ("query", "key", "value", "query_global", "key_global", "value_global")


def _read(keys: Keys, _architecture: str) -> EncoderConfig:
    keys.must_be("tie_word_embeddings", True)
    keys.must_be("position_embedding_type", "absolute")
    keys.aside("onnx_export", "attention_mode", "attention_dilation", "autoregressive", "ignore_attention_mask")
    shape = read_shape(keys)
    windows = keys.take("attention_window", 512, kind=(int, list))
    start = keys.take("pad_token_id", 1, kind=int) + 1
    return EncoderConfig(
        **shape,
        norm_position="post",
        feedforward=keys.one_of("hidden_act", ACTIVATIONS, "gelu"),
        head="tokens",
        position_start=start,
        max_length=keys.take("max_position_embeddings", 512, kind=int) - start,
        token_types=keys.take("type_vocab_size", 2, kind=int),
        longformer_windows=windows if isinstance(windows, list) else [windows] * shape["layers"],
    )


def _write(config: EncoderConfig) -> dict[str, Any]:
    need_tokens(config, "longformer")
    refuse(
        config,
        "longformer",
        norm_position=("post",),
        feedforward=WRITTEN,
        head=("tokens",),
        **dict.fromkeys(("position_start", "max_length", "token_types", "longformer_windows")),
    )
    if config.longformer_windows is None or config.position_start == 0:
        raise Unsupported("longformer is written with longformer_windows and a position_start of at least 1")
    return {
        **write_shape(config),
        "hidden_act": WRITTEN[config.feedforward],
        "pad_token_id": config.position_start - 1,
        "max_position_embeddings": config.max_length + config.position_start,
        "type_vocab_size": config.token_types,
        "attention_window": list(config.longformer_windows),
        "tie_word_embeddings": True,
    }


def _names(config: EncoderConfig) -> Names:
    rules = [
        *bert_embeddings(config, "longformer.embeddings"),
        *pairs({"embedding_norm": "longformer.embeddings.LayerNorm"}, BOTH),
        *token_head(config, "lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    ]
    for i in range(config.layers):
        here, there = f"blocks.{i}", f"longformer.encoder.layer.{i}"
        modules = {f"attention.{name}": f"attention.self.{name}" for name in _PROJECTIONS} | {
            "attention.output": "attention.output.dense",
            "attention_norm": "attention.output.LayerNorm",
            "feedforward.input": "intermediate.dense",
            "feedforward.output": "output.dense",
            "feedforward_norm": "output.LayerNorm",
        }
        rules += pairs({f"{here}.{ours}": f"{there}.{theirs}" for ours, theirs in modules.items()}, BOTH)
    twins = [
        ("lm_head.decoder.weight", "longformer.embeddings.word_embeddings.weight"),
        ("lm_head.decoder.bias", "lm_head.bias"),
    ]
    unused = [r"longformer\.embeddings\.position_ids", r"longformer\.pooler\.dense\.(weight|bias)"]
    return gathered(rules, twins, unused)


FAMILIES = (
    Family(
        name="longformer",
        architectures=("LongformerForMaskedLM",),
        read_config=_read,
        write_config=_write,
        build=build,
        names=_names,
        config=EncoderConfig,
        renamed=old_norms,
    ),
)
