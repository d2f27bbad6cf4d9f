"""Whether a checkpoint is still what was written: the SHA-256 of each of its files, checked before it is believed."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mercer.errors import StorageError
from mercer.runtime.files import read_json, write_json

CHECKSUMS = "sha256.json"
_ALWAYS = ("config.json", "model.safetensors", "optimizer.safetensors", "trainer.json")


class Damaged(StorageError):
    """A checkpoint is incomplete or has changed since it was written; ``folder`` is the one."""

    def __init__(self, folder: Path, fault: str) -> None:
        super().__init__(f"{folder} is damaged: {fault}")
        self.folder, self.fault = folder, fault


def seal(folder: Path) -> None:
    """Write ``sha256.json``, the SHA-256 of each file in the folder by name."""
    write_json(folder / CHECKSUMS, {path.name: _sha256(path) for path in sorted(folder.iterdir())})


def verify(folder: Path) -> None:
    """Compare every file of a checkpoint with its SHA-256.

    Raises:
        Damaged: a file is missing, unreadable or not what was written.
        StorageError: this user may not read it.
    """
    if not (folder / CHECKSUMS).exists():
        raise Damaged(folder, f"{CHECKSUMS} is missing")
    try:
        sums = read_json(folder / CHECKSUMS)
    except StorageError as error:
        raise Damaged(folder, str(error)) from error
    if not isinstance(sums, dict) or not all(name in sums for name in _ALWAYS):
        raise Damaged(folder, f"{CHECKSUMS} does not list {', '.join(_ALWAYS)}")
    for name, expected in sums.items():
        try:
            actual = _sha256(folder / name)
        except PermissionError as error:  # a matter of rights, not of content: another user can still continue from it
            raise StorageError(f"cannot read {folder / name}: permission denied") from error
        except FileNotFoundError as error:
            raise Damaged(folder, f"{name} is missing") from error
        except OSError as error:
            raise Damaged(folder, f"{name} cannot be read ({(error.strerror or str(error)).lower()})") from error
        if actual != expected:
            raise Damaged(folder, f"{name} has changed since it was written")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
