"""Checkpoints: models of the Hugging Face hub's format and GGUF files, read strictly and written back.

`load(path)` gives a model, `open_checkpoint(path)` the model with what was left aside, `save(model, path)` writes one.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mercer.checkpoints.reading import Checkpoint, load, open_checkpoint
    from mercer.checkpoints.writing import save

_HOMES = {
    "Checkpoint": "mercer.checkpoints.reading",
    "load": "mercer.checkpoints.reading",
    "open_checkpoint": "mercer.checkpoints.reading",
    "save": "mercer.checkpoints.writing",
}

__all__ = ["Checkpoint", "load", "open_checkpoint", "save"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mercer.checkpoints' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
