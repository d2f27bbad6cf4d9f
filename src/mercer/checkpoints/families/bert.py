"""BERT (Devlin et al. 2018, arXiv 1810.04805) and BigBird (Zaheer et al. 2020, arXiv 2007.14062)."""

from __future__ import annotations

from typing import Any

from mercer.checkpoints.families.decoders import ACTIVATIONS, WRITTEN, pairs
from mercer.checkpoints.families.encoders import (
    BOTH,
    architecture_of,
    bert_embeddings,
    bert_layer,
    build,
    gathered,
    head_of,
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

_HEAD = "cls.predictions"
# Of the first program that BERT was published with; all its models pool the first token.
_POOLER = (
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
)


def _read(keys: Keys, architecture: str) -> EncoderConfig:
    keys.must_be("position_embedding_type", "absolute")
    keys.aside("directionality", *_POOLER)
    activation = keys.one_of("hidden_act", ACTIVATIONS, "gelu")
    return EncoderConfig(
        **read_shape(keys) | head_of(architecture, keys),
        norm_position="post",
        feedforward=activation,
        head_activation=activation,
        max_length=keys.take("max_position_embeddings", 512, kind=int),
        token_types=keys.take("type_vocab_size", 2, kind=int),
    )


def _write(config: EncoderConfig) -> dict[str, Any]:
    refuse(
        config,
        "bert",
        norm_position=("post",),
        feedforward=WRITTEN,
        head_activation=(config.feedforward,),
        pool=(config.head != "tokens",),
        **dict.fromkeys(("max_length", "token_types", "head", "classes")),
    )
    values = {
        **write_shape(config),
        "architectures": [architecture_of(config, "Bert")],
        "hidden_act": WRITTEN[config.feedforward],
        "max_position_embeddings": config.max_length,
        "type_vocab_size": config.token_types,
        "tie_word_embeddings": True,
    }
    return values if config.classes is None else values | labels(config.classes)


def labels(count: int) -> dict[str, Any]:
    """Names of classes, which is how a configuration says how many there are."""
    names = {str(i): f"LABEL_{i}" for i in range(count)}
    return {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}


def _names(config: EncoderConfig) -> Names:
    rules = [
        *bert_embeddings(config, "bert.embeddings"),
        *pairs({"embedding_norm": "bert.embeddings.LayerNorm"}, BOTH),
        *token_head(
            config, "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"
        ),
    ]
    for i in range(config.layers):
        here, there = f"blocks.{i}", f"bert.encoder.layer.{i}"
        norms = {"attention_norm": "attention.output.LayerNorm", "feedforward_norm": "output.LayerNorm"}
        rules += bert_layer(here, there, config)
        rules += pairs({f"{here}.{ours}": f"{there}.{theirs}" for ours, theirs in norms.items()}, BOTH)
    if config.pool:
        rules += pairs({"pooler": "bert.pooler" if config.bigbird_block else "bert.pooler.dense"}, BOTH)
    if config.head == "classes":
        rules += pairs({"classes": "classifier"}, BOTH)
    twins = [
        (f"{_HEAD}.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        (f"{_HEAD}.decoder.bias", f"{_HEAD}.bias"),
    ]
    # The scores of a next sentence, and the pooled token under them, which masked language models do not use.
    unused = [r"bert\.embeddings\.position_ids", r"cls\.seq_relationship\.(weight|bias)"]
    if config.head == "tokens" and not config.pool:
        unused.append(r"bert\.pooler\.dense\.(weight|bias)")
    return gathered(rules, twins if config.head == "tokens" else (), unused)


def _read_big_bird(keys: Keys, architecture: str) -> EncoderConfig:
    keys.must_be("use_bias", True)
    keys.must_be("position_embedding_type", "absolute")
    kind = keys.one_of("attention_type", {"block_sparse": True, "original_full": False}, "block_sparse")
    block, random = keys.take("block_size", 64, kind=int), keys.take("num_random_blocks", 3, kind=int)
    activation = keys.one_of("hidden_act", ACTIVATIONS, "gelu_new")
    shape = read_shape(keys) | head_of(architecture, keys)
    return EncoderConfig(
        **shape | {"pool": True},
        norm_position="post",
        feedforward=activation,
        head_activation=activation,
        max_length=keys.take("max_position_embeddings", 4096, kind=int),
        token_types=keys.take("type_vocab_size", 2, kind=int),
        embedding_scale=shape["dim"] ** 0.5 if keys.take("rescale_embeddings", False, kind=bool) else 1.0,
        bigbird_block=block if kind else None,
        bigbird_random=random,
    )


def _write_big_bird(config: EncoderConfig) -> dict[str, Any]:
    need_tokens(config, "big_bird")
    refuse(
        config,
        "big_bird",
        norm_position=("post",),
        feedforward=WRITTEN,
        head_activation=(config.feedforward,),
        pool=(True,),
        embedding_scale=(1.0, config.dim**0.5),
        **dict.fromkeys(("max_length", "token_types", "head", "bigbird_block", "bigbird_random")),
    )
    if config.bigbird_block is None:
        raise Unsupported("big_bird is written with its blocks")
    return {
        **write_shape(config),
        "hidden_act": WRITTEN[config.feedforward],
        "max_position_embeddings": config.max_length,
        "type_vocab_size": config.token_types,
        "tie_word_embeddings": True,
        "attention_type": "block_sparse",
        "block_size": config.bigbird_block,
        "num_random_blocks": config.bigbird_random,
        "rescale_embeddings": config.embedding_scale != 1,
    }


FAMILIES = (
    Family(
        name="bert",
        architectures=("BertForMaskedLM", "BertModel", "BertForSequenceClassification", "BertForPreTraining"),
        read_config=_read,
        write_config=_write,
        build=build,
        names=_names,
        config=EncoderConfig,
        prefix="bert.",
        renamed=old_norms,
    ),
    Family(
        name="big_bird",
        architectures=("BigBirdForMaskedLM", "BigBirdForPreTraining"),
        read_config=_read_big_bird,
        write_config=_write_big_bird,
        build=build,
        names=_names,
        config=EncoderConfig,
        renamed=old_norms,
    ),
)
