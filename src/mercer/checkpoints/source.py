"""The tensors of a folder of the hub's format: model.safetensors, or shards with an index; mapped, not copied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from mercer.errors import InvalidArgument, StorageError
from mercer.runtime.files import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONSOLIDATED = "consolidated"
_UNSAFE = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")


class Source(ABC):
    """Tensors by name. Nothing is read until it is asked for."""

    @property
    @abstractmethod
    def where(self) -> str:
        """What to call it in a message."""

    @property
    @abstractmethod
    def names(self) -> frozenset[str]: ...

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """The tensor. Of a file it is a private view: pages are read when first used, and writing changes no file."""

    def equal(self, one: str, other: str) -> bool:
        """Whether two tensors are the same in shape and numbers."""
        return self.shape(one) == self.shape(other) and bool((self.read(one) == self.read(other)).all())

    def renamed(self, names: Mapping[str, str]) -> Source:
        """The same tensors under other names; those that are not mentioned keep theirs.

        Raises:
            InvalidArgument: two tensors would have one name.
        """
        if all(old == new for old, new in names.items()):
            return self
        return _Renamed(self, names)


class _Renamed(Source):
    def __init__(self, inner: Source, names: Mapping[str, str]) -> None:
        self._inner, self._old = inner, {}
        for old in sorted(inner.names):
            new = names.get(old, old)
            if new in self._old:
                raise InvalidArgument(f"{inner.where} has both {self._old[new]} and {old}, which mean the same")
            self._old[new] = old

    @property
    def where(self) -> str:
        return self._inner.where

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._old)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(self._old[name])

    def read(self, name: str) -> Tensor:
        return self._inner.read(self._old[name])


class Safetensors(Source):
    """One safetensors file or several. Each read maps its tensor alone, so that what was copied from it is let go.

    Raises:
        StorageError: a file is missing, unreadable or damaged.
        InvalidArgument: the folder has no safetensors, or its index does not describe them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, _files(folder)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in sorted(set(self._files.values())):
            with _opened(path) as file:
                there = set(file.keys())
                listed = {name for name, owner in self._files.items() if owner == path} if len(self._files) else there
                if missing := sorted(listed - there):
                    raise InvalidArgument(f"{folder / INDEX} says that {path.name} has {missing[0]}, which it has not")
                if extra := sorted(there - listed):
                    raise InvalidArgument(f"{path} has {extra[0]}, which {INDEX} does not list")
                self._shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in listed}

    @property
    def where(self) -> str:
        return str(self._folder)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        path = self._files[name]
        with _opened(path) as file:
            try:
                return file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise StorageError(f"cannot read {name} of {path}: {error}") from error


def _files(folder: Path) -> dict[str, Path]:
    """Of each tensor the file that holds it."""
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX)
        listed = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(listed, dict) or not listed:
            raise InvalidArgument(
                f"{folder / INDEX} must hold weight_map, a JSON object of tensor names and file names"
            )
        for name, file in listed.items():
            # A name that leaves the folder would read whatever the index's writer liked.
            if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
                raise InvalidArgument(f"{folder / INDEX} puts {name} into {file!r}; a file of the same folder is meant")
        return {name: folder / file for name, file in listed.items()}
    path = folder / SINGLE
    if path.exists():
        with _opened(path) as file:
            return dict.fromkeys(file.keys(), path)
    others = _found(folder, ("*.safetensors",))
    if own := [name for name in others if name.startswith(CONSOLIDATED)]:
        raise InvalidArgument(
            f"{folder} has neither {SINGLE} nor {INDEX}, but {own[0]}, whose tensors have the names of Mistral's own "
            f"layout; the hub's is read, with {SINGLE}"
        )
    if others:
        raise InvalidArgument(f"{folder} has neither {SINGLE} nor {INDEX}, but {others[0]}; rename it to {SINGLE}")
    if unsafe := _found(folder, _UNSAFE):
        raise InvalidArgument(
            f"{folder} has no safetensors but {unsafe[0]}, a format that can run code when it is read; convert it with "
            "the library that wrote it, whose save_pretrained writes safetensors"
        )
    raise StorageError(f"cannot read {path}: no such file")


def _found(folder: Path, patterns: Iterable[str]) -> list[str]:
    return sorted(path.name for pattern in patterns for path in folder.glob(pattern))


def _opened(path: Path) -> safe_open:  # pyright: ignore[reportGeneralTypeIssues]
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise StorageError(f"cannot read {path}: no such file") from error
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot read {path}: {error}") from error
