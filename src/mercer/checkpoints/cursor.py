"""Files that are read number by number: mapped, and never beyond their end."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from mercer.errors import StorageError


def mapped(path: Path) -> np.ndarray:
    """The bytes of a file, which are read when first used.

    Raises:
        StorageError: it is missing, unreadable or empty.
    """
    try:
        return np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read {path}: {str(error).lower()}") from error


class Cursor:
    """A place in a file, which moves on with what is read: little-endian numbers, by the letters of `struct`.

    Every method raises StorageError where the file ends too early.
    """

    def __init__(self, data: np.ndarray, path: Path) -> None:
        self._data, self.path, self.at = memoryview(data), path, 0

    def need(self, size: int) -> None:
        """Refuse to go on unless so many bytes are left."""
        if size > len(self._data) - self.at:
            raise StorageError(f"cannot read {self.path}: the file is cut off")

    def skip(self, size: int) -> int:
        """Move on; returns where it was."""
        self.need(size)
        before, self.at = self.at, self.at + size
        return before

    def take(self, size: int) -> bytes:
        start = self.skip(size)
        return bytes(self._data[start : self.at])

    def number(self, kind: str) -> Any:
        return self.numbers(kind, 1)[0]

    def numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{kind}", self.take(count * struct.calcsize("<" + kind)))

    @property
    def left(self) -> int:
        """Bytes after this place."""
        return len(self._data) - self.at
