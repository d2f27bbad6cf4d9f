"""From a folder named on the command line to a model: a run, one of its checkpoints, or a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mercer.errors import InvalidArgument, StorageError

if TYPE_CHECKING:
    from mercer.models.decoder import DecoderLM
    from mercer.models.vocabulary import Vocabulary


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


def open_model(path: Path, checkpoint: str, device: str) -> tuple[DecoderLM, Vocabulary]:
    """The model, ready for inference, and its vocabulary."""
    from mercer.models.io import load_model
    from mercer.models.vocabulary import load_vocabulary
    from mercer.runtime.device import find_device

    where = find_device(device)
    folder = model_folder(path, checkpoint)
    model = load_model(folder)
    model.to(where)
    return model.eval().requires_grad_(False), load_vocabulary(folder, model.config.vocab_size)
