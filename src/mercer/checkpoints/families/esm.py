"""ESM-2, a language model of proteins (Lin et al. 2023): rotary positions; others make up for masked tokens."""

from __future__ import annotations

from typing import Any

from mercer.checkpoints.families.decoders import pairs, rope
from mercer.checkpoints.families.encoders import (
    BOTH,
    bert_embeddings,
    bert_layer,
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


def _read(keys: Keys, _architecture: str) -> EncoderConfig:
    keys.must_be("is_folding_model", False)
    keys.must_be("tie_word_embeddings", True)
    keys.must_be("hidden_act", "gelu")
    keys.aside("esmfold_config", "vocab_list", "type_vocab_size")
    position = keys.one_of("position_embedding_type", {"absolute": "learned", "rotary": "rotary"}, "absolute")
    start = keys.take("pad_token_id", 1, kind=int) + 1 if position == "learned" else 0
    turning = rope(keys, context=1026)
    if "rope_scaling" in turning:
        raise Unsupported(f"{keys.where}: rope_scaling is {turning['rope_scaling']!r}, and esm has none")
    mask = keys.take("mask_token_id", None, kind=int)
    return EncoderConfig(
        **read_shape(keys),
        feedforward="gelu",
        head="tokens",
        position=position,
        position_start=start,
        rope_base=turning["rope_base"],
        max_length=turning["max_length"] - start,
        embedding_norm=bool(keys.take("emb_layer_norm_before", False, kind=bool)),
        mask_token=mask if keys.take("token_dropout", False, kind=bool) else None,
    )


def _write(config: EncoderConfig) -> dict[str, Any]:
    need_tokens(config, "esm")
    refuse(
        config,
        "esm",
        feedforward=("gelu",),
        head=("tokens",),
        position=("learned", "rotary"),
        **dict.fromkeys(("position_start", "rope_base", "max_length", "embedding_norm", "mask_token")),
    )
    learned = config.position == "learned"
    if learned and config.position_start == 0:
        raise Unsupported("esm has no way to say position_start = 0")
    values = {
        **write_shape(config),
        "hidden_act": "gelu",
        "position_embedding_type": "absolute" if learned else "rotary",
        "max_position_embeddings": config.max_length + config.position_start,
        "rope_theta": config.rope_base,
        "emb_layer_norm_before": config.embedding_norm,
        "token_dropout": config.mask_token is not None,
        "tie_word_embeddings": True,
    }
    if learned:
        values["pad_token_id"] = config.position_start - 1
    return values if config.mask_token is None else values | {"mask_token_id": config.mask_token}


def _names(config: EncoderConfig) -> Names:
    rules = [
        *bert_embeddings(config, "esm.embeddings"),
        *pairs({"norm": "esm.encoder.emb_layer_norm_after"}, BOTH),
        *token_head(config, "lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    ]
    if config.embedding_norm:
        rules += pairs({"embedding_norm": "esm.embeddings.layer_norm"}, BOTH)
    for i in range(config.layers):
        here, there = f"blocks.{i}", f"esm.encoder.layer.{i}"
        norms = {"attention_norm": "attention.LayerNorm", "feedforward_norm": "LayerNorm"}
        rules += bert_layer(here, there, config)
        rules += pairs({f"{here}.{ours}": f"{there}.{theirs}" for ours, theirs in norms.items()}, BOTH)
    unused = [
        r"esm\.embeddings\.position_ids",
        r"esm\.encoder\.layer\.[\d*]+\.attention\.self\.rotary_embeddings\.inv_freq",
        r"esm\.contact_head\.regression\.(weight|bias)",  # of contacts between residues, from all attention weights
    ]
    if config.position == "rotary":
        unused.append(r"esm\.embeddings\.position_embeddings\.weight")  # a table that old files have all the same
    return gathered(rules, [("lm_head.decoder.weight", "esm.embeddings.word_embeddings.weight")], unused)


FAMILIES = (
    Family(
        name="esm",
        architectures=("EsmForMaskedLM",),
        read_config=_read,
        write_config=_write,
        build=build,
        names=_names,
        config=EncoderConfig,
        renamed=old_norms,
    ),
)
