"""What the encoders of the hub have in common: the layers of BERT."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mercer.checkpoints.families.decoders import pairs, refuse_all_but
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names, Rule, Twin, same
from mercer.errors import Unsupported
from mercer.models.block_config import BlockConfig
from mercer.models.encoder import Encoder
from mercer.models.encoder_config import EncoderConfig
from mercer.nn.activations import default_hidden

BOTH = ("weight", "bias")


def build(config: EncoderConfig) -> Encoder:
    return Encoder(config)


def read_shape(keys: Keys) -> dict[str, Any]:
    """What BERT and its descendants call alike."""
    keys.must_be("is_decoder", False)
    keys.must_be("add_cross_attention", False)
    return {
        "vocab_size": keys.take("vocab_size", kind=int),
        "dim": keys.take("hidden_size", kind=int),
        "layers": keys.take("num_hidden_layers", kind=int),
        "heads": keys.take("num_attention_heads", kind=int),
        "hidden": keys.take("intermediate_size", kind=int),
        "norm": "layer",
        "norm_eps": keys.take("layer_norm_eps", 1e-12, kind=float),
        "bias": True,
    }


def write_shape(config: EncoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": default_hidden(config.dim, config.feedforward) if config.hidden is None else config.hidden,
        "layer_norm_eps": config.norm_eps,
    }


def refuse(config: EncoderConfig, family: str, **allowed: Any) -> None:
    """`refuse_all_but` for what `write_shape` says."""
    refuse_all_but(
        config,
        family,
        norm=("layer",),
        bias=(True,),
        kv_heads=(None, config.heads),
        head_dim=(None, config.dim // config.heads),
        hidden=None,
        norm_eps=None,
        **allowed,
    )


def head_of(architecture: str, keys: Keys) -> dict[str, Any]:
    """What stands on the encoder, by the class that was saved."""
    if architecture.endswith(("ForMaskedLM", "ForPreTraining")):
        keys.must_be("tie_word_embeddings", True)
        return {"head": "tokens"}
    keys.aside("tie_word_embeddings")  # there are no scores of tokens
    if architecture.endswith("ForSequenceClassification"):
        return {"head": "classes", "classes": class_count(keys), "pool": True}
    return {"head": "none", "pool": True}


def class_count(keys: Keys) -> int:
    """How many classes a head has: those that are named, 2 by default."""
    return keys.take("num_labels", None, kind=int) or len(keys.take("id2label", {0: "", 1: ""}, kind=dict))


def architecture_of(config: EncoderConfig, name: str) -> str:
    return name + {"tokens": "ForMaskedLM", "classes": "ForSequenceClassification", "none": "Model"}[config.head]


def bert_layer(here: str, there: str, config: BlockConfig, *, attention: str = "attention.self") -> list[Rule]:
    """Attention and feed-forward of a layer with the names of BERT, without the norms."""
    qkv = tuple(f"{there}.{attention}.{name}" for name in ("query", "key", "value"))
    rows, parts = (config.dim,) * 3, BOTH if "qkv" in config.biased else ("weight",)
    rules = [Rule(f"{here}.attention.qkv.{part}", tuple(f"{name}.{part}" for name in qkv), rows=rows) for part in parts]
    plain = {
        "attention.output": "attention.output.dense",
        "feedforward.input": "intermediate.dense",
        "feedforward.output": "output.dense",
    }
    return rules + pairs({f"{here}.{ours}": f"{there}.{theirs}" for ours, theirs in plain.items()}, BOTH)


def bert_embeddings(config: EncoderConfig, there: str) -> list[Rule]:
    """Tokens, positions, types and their norm."""
    rules = [same("embedding.weight", f"{there}.word_embeddings.weight")]
    if config.position == "learned":
        rules.append(same("positions.weight", f"{there}.position_embeddings.weight"))
    if config.token_types:
        rules.append(same("types.weight", f"{there}.token_type_embeddings.weight"))
    return rules


def token_head(config: EncoderConfig, dense: str, norm: str, bias: str) -> list[Rule]:
    """Scores of tokens."""
    if config.head != "tokens":
        return []
    return [*pairs({"tokens.dense": dense, "tokens.norm": norm}, BOTH), same("tokens.bias", bias)]


def gathered(
    rules: Iterable[Rule], twins: Iterable[tuple[str, str]] = (), without_meaning: Iterable[str] = ()
) -> Names:
    return Names(tuple(rules), tuple(Twin(name, of) for name, of in twins), tuple(without_meaning))


def old_norms(name: str) -> str:
    """The names that norms had in TensorFlow, and still have in some files."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def need_tokens(config: EncoderConfig, family: str) -> None:
    """For architectures of which only the masked language model is read."""
    if config.head != "tokens":
        raise Unsupported(f"{family} is written with the scores of tokens alone, not with head {config.head!r}")
