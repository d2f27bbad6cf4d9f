"""From a folder of the hub's format to a model, strictly: no key, no tensor, no shape passes unseen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mercer.checkpoints.ctranslate2 import ctranslate2_vocabulary, read_ctranslate2
from mercer.checkpoints.ctranslate2_file import CTranslate2, is_ctranslate2
from mercer.checkpoints.family import Family, find_family
from mercer.checkpoints.gguf import SUFFIX, read_gguf
from mercer.checkpoints.gguf_file import GGUF
from mercer.checkpoints.gguf_text import gguf_template, gguf_vocabulary
from mercer.checkpoints.hub import find_folder
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names, Rule
from mercer.checkpoints.source import Safetensors, Source
from mercer.errors import InvalidArgument, Unsupported
from mercer.mixers.base import Mixer
from mercer.models.block_config import BlockConfig
from mercer.models.chat import ChatTemplate, load_chat_template
from mercer.models.configured import swapped
from mercer.models.decoder import DecoderLM
from mercer.models.io import load_model
from mercer.models.seq2seq import Seq2Seq
from mercer.models.tokenizer import load_hub_vocabulary
from mercer.models.vocabulary import Vocabulary, load_vocabulary
from mercer.nn.norms import LayerNorm, RMSNorm
from mercer.runtime.device import find_device
from mercer.runtime.files import read_json

CONFIG = "config.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Checkpoint:
    """A model and what is known of the file it came from.

    family: the architecture's name, or "mercer" for a model that was trained here. ignored: the keys of config.json
    that change no logit, and their values: special tokens, dropout, generation.
    """

    model: nn.Module
    family: str
    folder: Path
    ignored: dict[str, Any] = field(default_factory=dict)
    file: GGUF | CTranslate2 | None = None

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What the model's token numbers mean.

        Raises:
            InvalidArgument: the checkpoint has no vocabulary, or one that does not fit its model.
        """
        size: int = self.model.config.vocab_size
        if isinstance(self.file, GGUF):
            return gguf_vocabulary(self.file.metadata, str(self.folder), size)
        if isinstance(self.file, CTranslate2):
            return ctranslate2_vocabulary(self.folder, size)
        return load_vocabulary(self.folder, size) if self.family == "mercer" else load_hub_vocabulary(self.folder, size)

    @cached_property
    def chat(self) -> ChatTemplate:
        """How its chats are written.

        Raises:
            InvalidArgument: the checkpoint has no template.
        """
        names = getattr(self.vocabulary, "names", {})
        if not isinstance(self.file, GGUF):
            return load_chat_template(self.folder, names=names)
        template = gguf_template(self.file.metadata, names, str(self.folder))
        if template is None:
            raise InvalidArgument(f"{self.folder} has no chat template, so it is no model for chats")
        return template


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    attention: str | Sequence[str] | None = None,
) -> Any:
    """The model of a checkpoint, in evaluation mode; arguments and errors as for :func:`open_checkpoint`.

    A language model called on token ids [B, T] gives logits [B, T, vocab_size].
    """
    return open_checkpoint(path, dtype=dtype, device=device, attention=attention).model


def open_checkpoint(
    path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    attention: str | Sequence[str] | None = None,
) -> Checkpoint:
    """Read a folder that `transformers` or this library wrote.

    Tensors that are stored as they are needed stay mapped: their pages are read when first used, and written to in
    memory alone. Others are copied one by one, so that a model never takes much more than its own size.

    path: a folder with config.json and model.safetensors, or shards with an index; or a GGUF file, whose quantised
        weights become float32; or a folder of CTranslate2's with a Whisper; or owner/name on the hub (the extra hub),
        where no such folder exists.
    dtype: of the parameters; None: as stored, or if that is several, the narrowest that holds all matrices;
        "float32", "bfloat16", "float16", "float64" or a torch dtype.
    attention: names of kernel and normaliser that replace the model's own, one or a pattern over the layers, as in
        `ModelConfig.attention`. What a kernel has to learn starts as it does in a new model.

    Raises:
        StorageError: a file is missing, unreadable or damaged.
        InvalidArgument: an unknown architecture, key or tensor, a missing tensor, one of another shape.
        Unsupported: the configuration asks for what is not computed here.
    """
    kind = _dtype(dtype)
    device = find_device(device) if isinstance(device, str) else device
    folder = find_folder(path)
    if folder.suffix.lower() == SUFFIX and folder.is_file():
        file, config, names, ignored = read_gguf(folder)
        model = fill(DecoderLM, config, names, file, dtype=kind, device=device, attention=attention)
        return Checkpoint(model, file.metadata["general.architecture"], folder, ignored, file)
    if is_ctranslate2(folder):
        source, config, names, ignored = read_ctranslate2(folder)
        model = fill(Seq2Seq, config, names, source, dtype=kind, device=device, attention=attention)
        return Checkpoint(model, "whisper", folder, ignored, source)
    if folder.is_file():
        raise InvalidArgument(f"{folder} is a file; name its folder, which has {CONFIG} too, or a GGUF file")
    if (folder / "run.json").exists() and not (folder / CONFIG).exists():
        raise InvalidArgument(f"{folder} is a run; name one of its checkpoints, {folder / 'checkpoints' / 'step-...'}")
    values = read_json(folder / CONFIG)
    if not isinstance(values, dict):
        raise InvalidArgument(f"{folder / CONFIG} must hold a JSON object of configuration keys")
    if "model_type" not in values:
        if "vocab_size" not in values or "dim" not in values:
            raise InvalidArgument(f"{folder / CONFIG} has no model_type, so its architecture is unknown")
        return Checkpoint(_native(folder, kind, device, attention), "mercer", folder)
    family = find_family(values["model_type"])
    architecture = _architecture(values, family, folder)
    keys = Keys(values, str(folder / CONFIG))
    config = family.read_config(keys, architecture)
    keys.finish()
    source = _current(family, Safetensors(folder))
    if family.settled is not None:
        config = family.settled(config, keys, source)
    names = family.names(config)
    model = fill(family.build, config, names, source, dtype=kind, device=device, attention=attention)
    return Checkpoint(model, family.name, folder, keys.ignored)


def fill(
    build: Callable[[Any], nn.Module],
    config: Any,
    names: Names,
    source: Source,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    attention: str | Sequence[str] | None = None,
) -> nn.Module:
    """A model of a configuration with the tensors of a source."""
    parts = (getattr(config, "layers", 0), getattr(config, "encoder_layers", 0))
    if max(parts) > len(source.names):  # before as many modules are made
        raise InvalidArgument(
            f"{source.where} does not fit its configuration: it has {len(source.names)} tensors for {max(parts)} layers"
        )
    try:
        with torch.device("meta"):  # what no file has, such as random directions, gets values all the same
            model = build(config)
    except RuntimeError as error:  # nothing is computed here, so that it can only be a size that no tensor has
        raise InvalidArgument(f"{source.where}: no tensor has the sizes of its configuration ({error})") from error
    check(source, names, stored(model, names))
    if attention is not None:
        with torch.device("meta"):
            model = build(with_attention(config, attention))
    tensors = _of_one_dtype(model, dict(read_all(source, names, dtype, device)))
    model.load_state_dict(tensors, strict=False, assign=True)
    computed = tensors[names.rules[0].ours].dtype  # of an embedding or what stands for it
    for name, parameter in model.named_parameters():  # what another attention has to learn
        if name not in tensors:
            parameter.data = parameter.data.to(computed)
    return model.to(device).eval()


def stored(model: nn.Module, names: Names) -> dict[str, Tensor]:
    """The model's parameters, and those of its buffers that a rule names: fixed tables that are saved."""
    ruled = {rule.ours for rule in names.rules}
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in ruled}
    return dict(model.named_parameters()) | buffers


def check(source: Source, names: Names, parameters: dict[str, Tensor]) -> None:
    """Compare what is there with what is needed, before anything is read.

    Raises:
        InvalidArgument: something is missing, left over or of another shape; the message has the first of each.
    """
    covered = {rule.ours for rule in names.rules}
    if covered != parameters.keys():
        odd = sorted(covered ^ parameters.keys())
        raise InvalidArgument(f"the rules of this architecture and its parameters differ in {', '.join(odd[:4])}")
    wanted: dict[str, tuple[int, ...]] = {}
    for rule in names.rules:
        pieces = rule.write(torch.empty(parameters[rule.ours].shape, device="meta"))
        wanted |= {name: tuple(piece.shape) for name, piece in zip(rule.theirs, pieces, strict=True)}
    ignorable = re.compile("|".join(f"(?:{pattern})" for pattern in names.without_meaning) or r"(?!)")
    twins = {twin.theirs for twin in names.twins}
    missing = sorted(wanted.keys() - source.names)
    left = sorted(name for name in source.names - wanted.keys() - twins if not ignorable.fullmatch(name))
    parts = [
        f"{what} {', '.join(several[:4])}{f' and {len(several) - 4} more' if len(several) > 4 else ''}"
        for what, several in (("lacks", missing), ("has the unknown", left))
        if several
    ]
    if parts:
        raise InvalidArgument(f"{source.where} does not fit its configuration: it {' and '.join(parts)}")
    for name, shape in wanted.items():
        if source.shape(name) != shape:
            raise InvalidArgument(
                f"{source.where}: {name} has shape {list(source.shape(name))}, but the configuration asks for "
                f"{list(shape)}"
            )


def read_all(
    source: Source, names: Names, dtype: torch.dtype | None, device: torch.device | str
) -> Iterator[tuple[str, Tensor]]:
    """Our tensors, one by one, so that the pieces of each are let go before the next."""
    for rule in names.rules:
        yield rule.ours, _read(source, rule, dtype, device)
    for twin in names.twins:
        if twin.theirs in source.names and not source.equal(twin.theirs, twin.of):
            raise InvalidArgument(
                f"{source.where}: {twin.theirs} differs from {twin.of}, but the configuration says that they are one "
                f"({twin.why})"
            )


def _read(source: Source, rule: Rule, dtype: torch.dtype | None, device: torch.device | str) -> Tensor:
    return rule.read((_piece(source, name, dtype) for name in rule.theirs), dtype=dtype, device=device)


def _piece(source: Source, name: str, dtype: torch.dtype | None) -> Tensor:
    piece = source.read(name)
    if not piece.is_floating_point():
        raise InvalidArgument(
            f"{source.where}: {name} has dtype {piece.dtype}; weights are floating-point numbers, and quantised ones "
            "are read from GGUF files"
        )
    if dtype is None and piece.dtype not in DTYPES.values():
        raise Unsupported(
            f"{source.where}: {name} is stored as {str(piece.dtype).removeprefix('torch.')}, in which nothing is "
            f"computed; choose another dtype: {', '.join(DTYPES)}"
        )
    return piece


def _of_one_dtype(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in the narrowest dtype that holds all, since matrices are multiplied in one. Norms, and decays of
    mixers and the like, stay: they are computed in float32 at least.
    """
    apart = {
        f"{place}.{name}"
        for place, module in model.named_modules()
        if isinstance(module, LayerNorm | RMSNorm | Mixer)
        for name, _ in module.named_parameters(recurse=False)
        if not isinstance(module, Mixer) or name in module.undecayed
    }
    kinds = {tensor.dtype for name, tensor in tensors.items() if name not in apart}
    wide = reduce(torch.promote_types, kinds)
    return {name: tensor if name in apart else tensor.to(wide) for name, tensor in tensors.items()}


def with_attention(config: Any, attention: str | Sequence[str]) -> Any:
    """A configuration with another attention in its layers."""
    if not isinstance(config, BlockConfig):
        raise InvalidArgument(f"the attention of a {type(config).__name__} cannot be named")
    return swapped(config, attention)


def _native(
    folder: Path, dtype: torch.dtype | None, device: torch.device | str, attention: str | Sequence[str] | None
) -> nn.Module:
    model = load_model(folder)
    if attention is not None:
        model = model.with_attention(attention)
    return model.to(device=device, dtype=dtype).eval()


def _current(family: Family, source: Source) -> Source:
    """The source under the names that the family's rules use."""
    names = {name: name if family.renamed is None else family.renamed(name) for name in source.names}
    if family.prefix and not any(name.startswith(family.prefix) for name in names.values()):
        names = {old: family.prefix + new for old, new in names.items()}
    return source.renamed(names)


def _architecture(values: dict[str, Any], family: Family, folder: Path) -> str:
    listed = values.get("architectures") or [family.architectures[0]]
    if not isinstance(listed, list) or listed[0] not in family.architectures:
        raise InvalidArgument(
            f"{folder / CONFIG}: architectures is {listed}; of {family.name} there are "
            f"{', '.join(family.architectures)}"
        )
    return listed[0]


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise InvalidArgument(f"dtype is {dtype!r}; it is one of {', '.join(DTYPES)}")
        return DTYPES[dtype]
    if dtype is not None and not dtype.is_floating_point:
        raise InvalidArgument(f"dtype is {dtype}; parameters are floating-point numbers")
    return dtype
