"""From a folder named on the command line to a model: a run, one of its checkpoints, or a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mercer.errors import InvalidArgument, StorageError, Unsupported

if TYPE_CHECKING:
    from mercer.checkpoints import Checkpoint


def model_folder(path: Path, checkpoint: str = "last") -> Path:
    """The folder that holds the weights.

    Raises:
        InvalidArgument: the path is not a folder, or holds no such checkpoint.
        StorageError: the checkpoint is damaged; the message names the others.
    """
    from mercer.training.checkpoint import find, folders, step_of
    from mercer.training.integrity import CHECKSUMS, Damaged, verify

    if path.is_file():
        raise InvalidArgument(f"{path} is a file; name the folder of a run, a checkpoint or a model")
    if not path.is_dir():
        raise InvalidArgument(f"there is no folder {path}")
    if (path / "model.safetensors").exists():
        if checkpoint != "last":
            raise InvalidArgument(f"{path} is itself a checkpoint or model; name the run's folder to use --checkpoint")
        if (path / CHECKSUMS).exists():
            verify(path)
        return path
    folder = find(path, checkpoint)
    try:
        verify(folder)
    except Damaged as error:
        others = ", ".join(str(step_of(there)) for there in folders(path) if there != folder)
        raise StorageError(
            f"{error}; {f'there is also --checkpoint {others}' if others else 'there is no other checkpoint'}"
        ) from error
    return folder


def open_model(
    path: str,
    checkpoint: str = "last",
    *,
    device: str = "cpu",
    dtype: str | None = None,
    attention: str | None = None,
    translating: bool = False,
) -> Checkpoint:
    """A language model that continues texts, ready for inference, with its vocabulary and its chats.

    path: the folder of a run, of one checkpoint or of a model, in this library's format or the hub's, a GGUF file, or
    owner/name on the hub. attention: as it is typed, with commas between the names of a pattern. translating: take
    encoder-decoders that read texts as well.

    Raises:
        InvalidArgument, StorageError: there is no such model, or it is damaged.
        Unsupported: it is of another kind.
    """
    from mercer.models.decoder import DecoderLM
    from mercer.models.seq2seq import Seq2Seq

    opened = open_any(path, checkpoint, device=device, dtype=dtype, attention=attention)
    answers = translating and isinstance(opened.model, Seq2Seq) and opened.model.config.source == "tokens"
    if not isinstance(opened.model, DecoderLM) and not answers:
        what = "neither continues texts nor answers them" if translating else "does not continue texts; decoders do"
        raise Unsupported(f"{path} is of the family {opened.family}, which {what}")
    return opened


def open_any(
    path: str, checkpoint: str = "last", *, device: str = "cpu", dtype: str | None = None, attention: str | None = None
) -> Checkpoint:
    """A model of any kind, ready for inference; arguments as for :func:`open_model`.

    Raises:
        InvalidArgument, StorageError: there is no such model, or it is damaged.
        Unsupported: it cannot be computed here.
    """
    from mercer.checkpoints import open_checkpoint
    from mercer.runtime.device import find_device

    where = find_device(device)
    try:
        opened = open_checkpoint(_weights(path, checkpoint), dtype=dtype, device=where, attention=attention)
    except InvalidArgument as error:  # of the configuration it can only be the attention that was typed
        raise InvalidArgument(str(error).removeprefix("model configuration: ")) from error
    opened.model.eval().requires_grad_(False)
    return opened


def _weights(path: str, checkpoint: str) -> str | Path:
    """What to open: the path, or a checkpoint of the run there."""
    there = Path(path)
    if there.is_dir() and (files := sorted(there.glob("*.gguf"))) and not (there / "config.json").exists():
        raise InvalidArgument(f"{path} is a folder that holds {files[0].name}; name that file")
    if there.is_dir() and not _of_the_hub(there):
        return model_folder(there, checkpoint)
    if there.is_file() and there.suffix.lower() != ".gguf":
        raise InvalidArgument(f"{path} is a file; name the folder of a run, a checkpoint or a model, or a GGUF file")
    if checkpoint != "last":
        raise InvalidArgument(f"{path} is no run, so there is no --checkpoint {checkpoint} to choose")
    return path


def _of_the_hub(folder: Path) -> bool:
    from mercer.checkpoints.ctranslate2_file import is_ctranslate2
    from mercer.runtime.files import read_json

    if is_ctranslate2(folder):
        return True
    if not (folder / "config.json").exists():
        return False
    values = read_json(folder / "config.json")
    return isinstance(values, dict) and "model_type" in values
