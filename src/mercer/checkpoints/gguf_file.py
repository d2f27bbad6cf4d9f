"""GGUF files: their metadata, and their tensors, mapped and dequantised one by one by the `gguf` package.

Only the header is read here: the package's own reader maps every string of a vocabulary by itself, which takes seconds
where one pass takes a fraction of one. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
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

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PLAIN = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
_MOST_DIMENSIONS = 8


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies. shape: as here, rows first."""

    shape: tuple[int, ...]
    kind: int
    start: int


class GGUF(Source):
    """The tensors of one file.

    metadata: its keys, with strings as text and arrays as lists.

    Raises:
        StorageError: the file is missing, unreadable or cut off.
        InvalidArgument: it is no GGUF file of a version that is known.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._data = path, mapped(path)
        self.metadata, self._entries = _Header(Cursor(self._data, path)).read()

    @property
    def where(self) -> str:
        return str(self._path)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def read(self, name: str) -> Tensor:
        """float32 of quantised weights; float64, float32, float16 and bfloat16 as they are stored."""
        quants = _package()
        entry = self._entries[name]
        try:
            kind = quants.GGMLQuantizationType(entry.kind)
            block, size = quants.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise Unsupported(
                f"{self.where}: {name} is of the type {entry.kind}, which the gguf package lacks"
            ) from None
        numbers = math.prod(entry.shape)
        columns = entry.shape[-1] if entry.shape else 1
        if columns % block:
            raise InvalidArgument(f"{self.where}: {name} has rows of {columns} numbers, no multiple of {block}")
        end = entry.start + numbers // block * size
        if end > len(self._data):
            raise StorageError(f"cannot read {name} of {self.where}: the file is cut off")
        raw = np.asarray(self._data[entry.start : end])
        if kind.name in _PLAIN:
            return torch.from_numpy(raw.view(_PLAIN[kind.name]).reshape(entry.shape).copy())
        if kind.name == "BF16":
            return torch.from_numpy(raw.view(np.int16).reshape(entry.shape).copy()).view(torch.bfloat16)
        rows = raw.reshape(-1, columns // block * size)
        try:
            return torch.from_numpy(quants.dequantize(rows, kind).reshape(entry.shape))
        except NotImplementedError:
            raise Unsupported(
                f"{self.where}: {name} is {kind.name}, which the gguf package cannot dequantise"
            ) from None


class _Header:
    """Everything before the tensors."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor, self._path, self._number = cursor, cursor.path, cursor.number

    def read(self) -> tuple[dict[str, Any], dict[str, Entry]]:
        if self._cursor.take(4) != MAGIC:
            raise InvalidArgument(f"{self._path} is no GGUF file")
        version = self._number("I")
        if version not in VERSIONS:
            raise InvalidArgument(
                f"{self._path} is GGUF of version {version}; read are {VERSIONS[0]} and {VERSIONS[1]}"
            )
        tensors, keys = self._number("Q"), self._number("Q")
        metadata = {self._text(): self._value(self._number("I")) for _ in range(keys)}
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(tensors):
            name, dimensions = self._text(), self._number("I")
            if dimensions > _MOST_DIMENSIONS:
                raise InvalidArgument(f"{self._path}: {name} has {dimensions} dimensions")
            shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
            found.append((name, shape, self._number("I"), self._number("Q")))
        align = metadata.get(ALIGNMENT, 32)
        if not isinstance(align, int) or align < 1:
            raise InvalidArgument(f"{self._path}: {ALIGNMENT} is {align!r}")
        start = -(-self._cursor.at // align) * align
        entries = {name: Entry(shape, kind, start + offset) for name, shape, kind, offset in found}
        if len(entries) != len(found):
            raise InvalidArgument(f"{self._path} has two tensors of one name")
        return metadata, entries

    def _text(self) -> str:
        return self._cursor.take(self._number("Q")).decode("utf-8", "surrogateescape")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY or depth > _MOST_DIMENSIONS:
            raise InvalidArgument(f"{self._path} has a value of the unknown type {kind}")
        inner, count = self._number("I"), self._number("Q")
        if inner in _SCALARS:
            letter = _SCALARS[inner]
            return list(self._cursor.numbers(letter, count))
        self._cursor.need(count)
        return [self._value(inner, depth + 1) for _ in range(count)]


def _package() -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise Unsupported("reading GGUF files needs the extra gguf: pip install 'mercer[gguf]'") from error
    return gguf
