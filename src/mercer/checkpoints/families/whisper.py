"""Whisper (Radford et al. 2022, arXiv 2212.04356): frames of a spectrogram in, text out."""

from __future__ import annotations

from typing import Any

from mercer.checkpoints.families.decoders import ACTIVATIONS, WRITTEN, pairs
from mercer.checkpoints.families.marian import BOTH, all_blocks, write_shape
from mercer.checkpoints.families.seq2seq import build, refuse
from mercer.checkpoints.family import Family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names, Twin, same
from mercer.models.seq2seq_config import Seq2SeqConfig

BIAS = ("query", "value", "output", "feedforward", "norm")
_OF_TRAINING = (
    "apply_spec_augment",
    "mask_feature_length",
    "mask_feature_min_masks",
    "mask_feature_prob",
    "mask_time_length",
    "mask_time_min_masks",
    "mask_time_prob",
    "init_std",
)


def _read(keys: Keys, _architecture: str) -> Seq2SeqConfig:
    keys.must_be("is_encoder_decoder", True)
    keys.must_be("tie_word_embeddings", True)
    keys.aside(
        *_OF_TRAINING, "classifier_proj_size", "use_weighted_layer_sum", "median_filter_width", "num_hidden_layers"
    )
    heads, hidden = (keys.take(f"encoder_{name}", kind=int) for name in ("attention_heads", "ffn_dim"))
    keys.must_be("decoder_attention_heads", heads, why="both sides have equal blocks")
    keys.must_be("decoder_ffn_dim", hidden, why="both sides have equal blocks")
    keys.must_be("scale_embedding", False)
    return Seq2SeqConfig(
        vocab_size=keys.take("vocab_size", kind=int),
        dim=keys.take("d_model", kind=int),
        encoder_layers=keys.take("encoder_layers", kind=int),
        layers=keys.take("decoder_layers", kind=int),
        heads=heads,
        hidden=hidden,
        feedforward=keys.one_of("activation_function", ACTIVATIONS, "gelu"),
        norm="layer",
        norm_eps=1e-5,
        bias=BIAS,
        source="frames",
        bins=keys.take("num_mel_bins", 80, kind=int),
        position="learned",
        max_source=keys.take("max_source_positions", 1500, kind=int),
        max_length=keys.take("max_target_positions", 448, kind=int),
        start_token=keys.take("decoder_start_token_id", kind=int),
    )


def _write(config: Seq2SeqConfig) -> dict[str, Any]:
    refuse(
        config,
        "whisper",
        feedforward=WRITTEN,
        norm=("layer",),
        norm_eps=(1e-5,),
        bias=(BIAS,),
        kv_heads=(None, config.heads),
        head_dim=(None, config.dim // config.heads),
        source=("frames",),
        position=("learned",),
        **dict.fromkeys(("bins", "max_source")),
    )
    return write_shape(config) | {
        "num_mel_bins": config.bins,
        "max_source_positions": config.max_source,
        "max_target_positions": config.max_length,
        "decoder_start_token_id": config.start_token,
    }


def _names(config: Seq2SeqConfig) -> Names:
    shared = "model.decoder.embed_tokens.weight"
    rules = [
        same("embedding.weight", shared),
        *(same(f"{side}.positions.weight", f"model.{side}.embed_positions.weight") for side in ("encoder", "decoder")),
        *pairs({"encoder.norm": "model.encoder.layer_norm", "decoder.norm": "model.decoder.layer_norm"}, BOTH),
        *pairs({"convolutions.first": "model.encoder.conv1", "convolutions.second": "model.encoder.conv2"}, BOTH),
        *all_blocks(config),
    ]
    return Names(tuple(rules), (Twin("proj_out.weight", shared),))


FAMILIES = (
    Family(
        name="whisper",
        architectures=("WhisperForConditionalGeneration",),
        read_config=_read,
        write_config=_write,
        build=build,
        names=_names,
        config=Seq2SeqConfig,
    ),
)
