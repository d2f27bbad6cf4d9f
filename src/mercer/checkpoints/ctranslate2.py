"""Whisper in CTranslate2's format, which faster-whisper's models have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mercer.checkpoints.ctranslate2_file import CTranslate2
from mercer.checkpoints.families.whisper import BIAS
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Layout, Names, Rule, Twin, same
from mercer.errors import InvalidArgument, StorageError, Unsupported
from mercer.models.seq2seq_config import Seq2SeqConfig
from mercer.models.tokenizer import HubVocabulary, load_hub_vocabulary
from mercer.runtime.files import read_json

KIND, REVISION = "WhisperSpec", 3
START, END = "<|startoftranscript|>", "<|endoftext|>"
_GELU = 3
_EMBEDDING = "decoder/embeddings/weight"
_OFF = ("alibi", "alibi_use_positive_positions", "scale_alibi", "scale_embeddings", "start_from_zero_embedding")


@dataclass(frozen=True)
class ZerosAt(Layout):
    """Rows start to stop are zeros on the disk and absent here: biases that a model has not, in a fused one."""

    start: int
    stop: int

    def read(self, stored: Tensor) -> Tensor:
        if stored[self.start : self.stop].any():
            raise InvalidArgument("the keys of an attention have biases, which Whisper's have not")
        return torch.cat((stored[: self.start], stored[self.stop :]))

    def write(self, tensor: Tensor) -> Tensor:
        zeros = tensor.new_zeros(self.stop - self.start, *tensor.shape[1:])
        return torch.cat((tensor[: self.start], zeros, tensor[self.start :]))


def read_ctranslate2(folder: Path) -> tuple[CTranslate2, Seq2SeqConfig, Names, dict[str, Any]]:
    """The file, the configuration, the rules and what was left aside.

    Raises:
        StorageError, InvalidArgument: a file is missing or damaged, or has what nothing here reads.
        Unsupported: it is no Whisper, or quantised.
    """
    file = CTranslate2(folder)
    if (file.kind, file.revision) != (KIND, REVISION):
        raise Unsupported(
            f"{file.where} is a {file.kind} of revision {file.revision}; of CTranslate2's models {KIND} of revision "
            f"{REVISION} is read alone"
        )
    keys = Keys(file.settings, file.where)
    heads = keys.take("decoder/num_heads", kind=int)
    keys.must_be("encoder/num_heads", heads, why="both sides have equal blocks")
    keys.must_be("decoder/activation", _GELU)
    keys.must_be("decoder/pre_norm", 1)
    for name in _OFF:
        keys.must_be(f"decoder/{name}", 0)
    keys.aside("decoder/alignment_heads", "decoder/alignment_layer")  # which say when a word was spoken
    keys.finish()
    vocabulary, dim = _shape(file, _EMBEDDING, 2)
    config = Seq2SeqConfig(
        vocab_size=vocabulary,
        dim=dim,
        encoder_layers=_layers(file, "encoder"),
        layers=_layers(file, "decoder"),
        heads=heads,
        hidden=_shape(file, "encoder/layer_0/ffn/linear_0/weight", 2)[0],
        feedforward="gelu",
        norm="layer",
        norm_eps=1e-5,
        bias=BIAS,
        source="frames",
        bins=_shape(file, "encoder/conv1/weight", 3)[1],
        position="learned",
        max_source=_shape(file, "encoder/position_encodings/encodings", 2)[0],
        max_length=_shape(file, "decoder/position_encodings/encodings", 2)[0],
        start_token=_number_of(START, folder, vocabulary),
    )
    ignored = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    return file, config, _names(config), keys.ignored | (ignored if isinstance(ignored, dict) else {})


def ctranslate2_vocabulary(folder: Path, size: int) -> HubVocabulary:
    """The tokenizer.json of a folder, where nothing says what ends a text: it is Whisper's <|endoftext|>."""
    found = load_hub_vocabulary(folder, size)
    return HubVocabulary(found.tokenizer, names={"eos_token": END} | found.names, where=str(folder))


def _shape(file: CTranslate2, name: str, dimensions: int) -> tuple[int, ...]:
    if name not in file.names or len(file.shape(name)) != dimensions:
        raise InvalidArgument(f"{file.where} lacks {name} of {dimensions} dimensions")
    return file.shape(name)


def _layers(file: CTranslate2, side: str) -> int:
    return len({name.split("/")[1] for name in file.names if name.startswith(f"{side}/layer_") and "ffn" in name})


def _number_of(token: str, folder: Path, size: int) -> int:
    """The number of a token, by the list that CTranslate2 keeps beside the weights."""
    for name in ("vocabulary.json", "vocabulary.txt"):
        path = folder / name
        if not path.exists():
            continue
        try:
            tokens = read_json(path) if name.endswith("json") else path.read_text("utf-8").split("\n")[:size]
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(f"cannot read {path}: {error}") from error
        if not isinstance(tokens, list) or len(tokens) != size:
            raise InvalidArgument(f"{path} must hold {size} tokens, as many as the model has")
        if token not in tokens:
            raise InvalidArgument(f"{path} lacks the token {token}, with which Whisper's targets begin")
        return tokens.index(token)
    raise StorageError(f"{folder} has neither vocabulary.json nor vocabulary.txt")


def _names(config: Seq2SeqConfig) -> Names:
    rules = [same("embedding.weight", _EMBEDDING)]
    for side, count in (("encoder", config.encoder_layers), ("decoder", config.layers)):
        rules.append(same(f"{side}.positions.weight", f"{side}/position_encodings/encodings"))
        rules += _norm(f"{side}.norm", side)
        for i in range(count):
            rules += _block(config, side, i)
    for ours, theirs in (("first", "conv1"), ("second", "conv2")):
        rules += _linear(f"convolutions.{ours}", f"encoder/{theirs}")
    return Names(tuple(rules), (Twin("decoder/projection/weight", _EMBEDDING),))


def _block(config: Seq2SeqConfig, side: str, layer: int) -> list[Rule]:
    here, there, dim = f"{side}.blocks.{layer}", f"{side}/layer_{layer}", config.dim
    rules = [
        same(f"{here}.attention.qkv.weight", f"{there}/self_attention/linear_0/weight"),
        Rule(f"{here}.attention.qkv.bias", (f"{there}/self_attention/linear_0/bias",), (ZerosAt(dim, 2 * dim),)),
        *_linear(f"{here}.attention.output", f"{there}/self_attention/linear_1"),
        *_norm(f"{here}.attention_norm", f"{there}/self_attention"),
        *_linear(f"{here}.feedforward.input", f"{there}/ffn/linear_0"),
        *_linear(f"{here}.feedforward.output", f"{there}/ffn/linear_1"),
        *_norm(f"{here}.feedforward_norm", f"{there}/ffn"),
    ]
    if side == "encoder":
        return rules
    return [
        *rules,
        *_linear(f"{here}.cross.query", f"{there}/attention/linear_0"),
        same(f"{here}.cross.key_value.weight", f"{there}/attention/linear_1/weight"),
        Rule(f"{here}.cross.key_value.bias", (f"{there}/attention/linear_1/bias",), (ZerosAt(0, dim),)),
        *_linear(f"{here}.cross.output", f"{there}/attention/linear_2"),
        *_norm(f"{here}.cross_norm", f"{there}/attention"),
    ]


def _linear(ours: str, theirs: str) -> list[Rule]:
    return [same(f"{ours}.{part}", f"{theirs}/{part}") for part in ("weight", "bias")]


def _norm(ours: str, theirs: str) -> list[Rule]:
    return [
        same(f"{ours}.weight", f"{theirs}/layer_norm/gamma"),
        same(f"{ours}.bias", f"{theirs}/layer_norm/beta"),
    ]
