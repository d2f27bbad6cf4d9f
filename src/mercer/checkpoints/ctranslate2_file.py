"""The file model.bin of CTranslate2: a list of named tensors, and of further names for some of them.

The format is what `ModelSpec.save` of https://github.com/OpenNMT/CTranslate2 writes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mercer.checkpoints.cursor import Cursor, mapped
from mercer.checkpoints.source import Source
from mercer.errors import InvalidArgument, StorageError, Unsupported

FILE = "model.bin"
VERSION = 6
_KINDS = ("float32", "int8", "int16", "int32", "float16", "bfloat16")
_NUMPY = {"float32": "<f4", "int8": "<i1", "int16": "<i2", "int32": "<i4", "float16": "<f2", "bfloat16": "<i2"}
_MOST_DIMENSIONS = 8


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies."""

    shape: tuple[int, ...]
    kind: str
    start: int


def is_ctranslate2(folder: Path) -> bool:
    """Whether a folder holds a model of CTranslate2, of any version, rather than one of another program's model.bin."""
    try:
        with (folder / FILE).open("rb") as file:
            front = file.read(64)
    except OSError:
        return False
    end = 6 + int.from_bytes(front[4:6], "little")
    return front[1:4] == b"\0\0\0" and front[6:end].endswith(b"Spec\0")


class CTranslate2(Source):
    """The tensors of one file. Those without dimensions are settings.

    kind: what the model is ("WhisperSpec"), revision: of that. settings: numbers by name.

    Raises:
        StorageError: the file is missing, unreadable or cut off.
        InvalidArgument: it is of another version, or no such file.
        Unsupported: weights are quantised.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._data = mapped(self._path)
        cursor = Cursor(self._data, self._path)
        version = cursor.number("I")
        if version != VERSION:
            raise InvalidArgument(f"{self._path} is of version {version} of the format; read is {VERSION}")
        self.kind, self.revision = _text(cursor), cursor.number("I")
        entries: dict[str, Entry] = {}
        for _ in range(cursor.number("I")):
            name = _text(cursor)
            self._refuse_twice(name, entries)
            entries[name] = _entry(cursor, name)
        for _ in range(cursor.number("I")):
            name, target = _text(cursor), _text(cursor)
            self._refuse_twice(name, entries)
            if target not in entries:
                raise InvalidArgument(f"{self._path} says that {name} is {target}, which it has not")
            entries[name] = entries[target]
        if cursor.left:
            raise InvalidArgument(f"{self._path} goes on after its end, by {cursor.left} bytes")
        self._entries = {name: entry for name, entry in entries.items() if entry.shape}
        self.settings = {name: self._values(entry).item() for name, entry in entries.items() if not entry.shape}
        for name, entry in self._entries.items():
            if entry.kind.startswith("int"):
                raise Unsupported(
                    f"{self._path} has quantised weights, {name} of {entry.kind}; convert the model with quantization "
                    "float32, float16 or bfloat16"
                )

    @property
    def where(self) -> str:
        return str(self._path)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def read(self, name: str) -> Tensor:
        entry = self._entries[name]
        tensor = torch.from_numpy(
            self._values(entry).copy()
        )  # where it lies, no number begins at a multiple of its size
        return tensor.view(torch.bfloat16) if entry.kind == "bfloat16" else tensor

    def _values(self, entry: Entry) -> Any:
        kind = np.dtype(_NUMPY[entry.kind])
        raw = np.asarray(self._data[entry.start : entry.start + math.prod(entry.shape) * kind.itemsize])
        return raw.view(kind).reshape(entry.shape)

    def _refuse_twice(self, name: str, entries: dict[str, Entry]) -> None:
        if name in entries:
            raise InvalidArgument(f"{self._path} has two tensors of the name {name}")


def _entry(cursor: Cursor, name: str) -> Entry:
    dimensions = cursor.number("B")
    if dimensions > _MOST_DIMENSIONS:
        raise InvalidArgument(f"{cursor.path}: {name} has {dimensions} dimensions")
    shape = cursor.numbers("I", dimensions)
    kind = cursor.number("B")
    if kind >= len(_KINDS):
        raise InvalidArgument(f"{cursor.path}: {name} is of the unknown type {kind}")
    size, wanted = cursor.number("I"), math.prod(shape) * np.dtype(_NUMPY[_KINDS[kind]]).itemsize
    if size != wanted:
        raise InvalidArgument(
            f"{cursor.path}: {name} has {size} bytes, and {list(shape)} of {_KINDS[kind]} are {wanted}"
        )
    return Entry(shape, _KINDS[kind], cursor.skip(size))


def _text(cursor: Cursor) -> str:
    """Text that ends with a zero, which its length counts."""
    raw = cursor.take(cursor.number("H"))
    if not raw.endswith(b"\0"):
        raise StorageError(f"cannot read {cursor.path}: a name in it does not end where it should")
    return raw[:-1].decode("utf-8", "surrogateescape")
