"""Models on disk: model.safetensors (the weights, and the configuration as metadata) beside a readable config.json."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from mercer.errors import InvalidArgument, StorageError
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.models.shared_hybrid import SharedHybridLM
from mercer.models.shared_hybrid_config import SharedHybridConfig
from mercer.runtime.files import TEMPORARY, read_json, storage_error, sync, write_json

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def save_model(model: DecoderLM, folder: str | Path) -> None:
    """Write the model into folder (made if absent), replacing each file in one step; other files there stay.

    Raises:
        StorageError: a file could not be written; the old one is as it was.
    """
    folder = Path(folder)
    config = model.config.model_dump(mode="json")
    target = folder / WEIGHTS
    temporary = target.with_name(WEIGHTS + TEMPORARY)
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, metadata={"config": json.dumps(config, sort_keys=True)})
        sync(temporary)
        temporary.replace(target)
        sync(folder)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(error, target, "the old file is as it was" if target.exists() else "") from error
    write_json(folder / CONFIG, config)


def load_model(folder: str | Path) -> DecoderLM:
    """Read what `save_model` wrote: a model on the CPU, in training mode, with the dtype of the saved weights.

    Raises:
        StorageError: a file is missing, unreadable or damaged.
        InvalidArgument: config.json has an unknown or invalid key, is not the configuration that the weights were saved
            with, or the tensors are not exactly those of the model.
    """
    folder = Path(folder)
    values, path = read_json(folder / CONFIG), folder / WEIGHTS
    if not isinstance(values, dict):
        raise InvalidArgument(f"{folder / CONFIG} must hold a JSON object of configuration keys")
    try:
        config = _config(values)
    except InvalidArgument as error:
        raise InvalidArgument(f"{folder / CONFIG} does not describe a model: {error}") from error
    try:
        with safe_open(path, framework="pt") as file:
            saved = (file.metadata() or {}).get("config")
        tensors = load_file(path)
    except FileNotFoundError as error:
        raise StorageError(f"cannot read {path}: no such file") from error
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot read {path}: {error}") from error
    if saved is not None and _config(json.loads(saved)) != config:
        raise InvalidArgument(f"{folder / CONFIG} is not the configuration that {path} was saved with; restore it")
    model = SharedHybridLM(config) if isinstance(config, SharedHybridConfig) else DecoderLM(config)
    expected = model.state_dict()
    missing, left_over = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or left_over:
        parts = [
            f"{what} {', '.join(names)}"
            for what, names in (("lacks", missing), ("has the unknown", left_over))
            if names
        ]
        raise InvalidArgument(f"{path} does not fit its configuration: it {' and '.join(parts)}")
    for name, tensor in tensors.items():
        wanted = expected[name].shape
        if tensor.shape != wanted:
            raise InvalidArgument(
                f"{path}: {name} has shape {list(tensor.shape)} but the configuration asks for {list(wanted)}"
            )
    model.load_state_dict(tensors, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_()
    return model


def _config(values: dict[str, Any]) -> ModelConfig:
    """The configuration of whichever model has such keys."""
    return SharedHybridConfig(**values) if "shared_at" in values else ModelConfig(**values)
