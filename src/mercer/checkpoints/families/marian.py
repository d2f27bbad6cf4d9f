"""The original transformer (Vaswani et al. 2017, arXiv 1706.03762) as Marian has it (Junczys-Dowmunt et al. 2018)."""

from __future__ import annotations

from typing import Any

from mercer.checkpoints.families.decoders import ACTIVATIONS, WRITTEN, pairs
from mercer.checkpoints.families.seq2seq import attention, build, refuse
from mercer.checkpoints.family import Family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names, Rule, Twin, same
from mercer.models.seq2seq_config import Seq2SeqConfig
from mercer.nn.activations import default_hidden

BOTH = ("weight", "bias")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


def _read(keys: Keys, _architecture: str) -> Seq2SeqConfig:
    for name in (
        "is_decoder",
        "add_cross_attention",
        "add_final_layer_norm",
        "normalize_before",
        "normalize_embedding",
    ):
        keys.must_be(name, False)
    for name in ("share_encoder_decoder_embeddings", "tie_word_embeddings", "static_position_embeddings"):
        keys.must_be(name, True)
    keys.must_be("is_encoder_decoder", True)
    keys.aside("num_hidden_layers", "init_std", "add_bias_logits", "extra_pos_embeddings")
    size = keys.take("vocab_size", kind=int)
    keys.must_be("decoder_vocab_size", size)
    heads, hidden = (keys.take(f"encoder_{name}", kind=int) for name in ("attention_heads", "ffn_dim"))
    keys.must_be("decoder_attention_heads", heads, why="both sides have equal blocks")
    keys.must_be("decoder_ffn_dim", hidden, why="both sides have equal blocks")
    dim, context = keys.take("d_model", kind=int), keys.take("max_position_embeddings", 1024, kind=int)
    return Seq2SeqConfig(
        vocab_size=size,
        dim=dim,
        encoder_layers=keys.take("encoder_layers", kind=int),
        layers=keys.take("decoder_layers", kind=int),
        heads=heads,
        hidden=hidden,
        feedforward=keys.one_of("activation_function", ACTIVATIONS, "gelu"),
        norm="layer",
        norm_eps=1e-5,
        norm_position="post",
        bias=True,
        position="sinusoidal",
        max_source=context,
        max_length=context,
        embedding_scale=dim**0.5 if keys.take("scale_embedding", False, kind=bool) else 1.0,
        score_bias=True,
        start_token=keys.take("decoder_start_token_id", kind=int),
    )


def _write(config: Seq2SeqConfig) -> dict[str, Any]:
    refuse(
        config,
        "marian",
        feedforward=WRITTEN,
        norm=("layer",),
        norm_eps=(1e-5,),
        norm_position=("post",),
        bias=(True,),
        kv_heads=(None, config.heads),
        head_dim=(None, config.dim // config.heads),
        embedding_scale=(1.0, config.dim**0.5),
        score_bias=(True,),
        max_source=(config.max_length,),
    )
    return write_shape(config) | {
        "decoder_vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_length,
        "share_encoder_decoder_embeddings": True,
        "decoder_start_token_id": config.start_token,
    }


def write_shape(config: Seq2SeqConfig) -> dict[str, Any]:
    """What Marian and Whisper call alike."""
    hidden = default_hidden(config.dim, config.feedforward) if config.hidden is None else config.hidden
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.dim,
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.layers,
        "encoder_attention_heads": config.heads,
        "decoder_attention_heads": config.heads,
        "encoder_ffn_dim": hidden,
        "decoder_ffn_dim": hidden,
        "activation_function": WRITTEN[config.feedforward],
        "scale_embedding": config.embedding_scale != 1,
        "tie_word_embeddings": True,
        "is_encoder_decoder": True,
    }


def block_rules(config: Seq2SeqConfig, side: str, layer: int) -> list[Rule]:
    """A layer of a side, "encoder" or "decoder"."""
    here, there = f"{side}.blocks.{layer}", f"model.{side}.layers.{layer}"
    rules = attention(f"{here}.attention", f"{there}.self_attn", config, PROJECTIONS)
    modules = {
        "attention_norm": "self_attn_layer_norm",
        "feedforward.input": "fc1",
        "feedforward.output": "fc2",
        "feedforward_norm": "final_layer_norm",
    }
    if side == "decoder":
        rules += attention(f"{here}.cross", f"{there}.encoder_attn", config, PROJECTIONS, cross=True)
        modules["cross_norm"] = "encoder_attn_layer_norm"
    return rules + pairs({f"{here}.{ours}": f"{there}.{theirs}" for ours, theirs in modules.items()}, BOTH)


def all_blocks(config: Seq2SeqConfig) -> list[Rule]:
    """The layers of both sides."""
    sides = {"encoder": config.encoder_layers, "decoder": config.layers}
    return [rule for side, count in sides.items() for i in range(count) for rule in block_rules(config, side, i)]


def _names(config: Seq2SeqConfig) -> Names:
    shared = "model.shared.weight"
    rules = [
        same("embedding.weight", shared),
        Rule("score_bias", ("final_logits_bias",), shape=(config.vocab_size,), stored=(1, config.vocab_size)),
        *all_blocks(config),
    ]
    copies = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    sinusoids = (r"model\.(encoder|decoder)\.embed_positions\.weight",)
    return Names(tuple(rules), tuple(Twin(name, shared) for name in copies), sinusoids)


FAMILIES = (
    Family(
        name="marian",
        architectures=("MarianMTModel",),
        read_config=_read,
        write_config=_write,
        build=build,
        names=_names,
        config=Seq2SeqConfig,
    ),
)
