"""Which files a corpus has, which of them are held out, and its fingerprint."""

from __future__ import annotations

import glob
import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mercer.errors import InvalidArgument

_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class TextFile:
    """One file of a corpus.

    Attributes:
        name: its path relative to the folder it was found from, with forward slashes: the same on every machine.
        path: where it is on this machine.
    """

    name: str
    path: Path


def find_files(paths: Iterable[str | Path]) -> list[TextFile]:
    """The files that ``paths`` name, sorted by name, each once.

    A path is a file, a folder (every file below it, hidden ones excepted) or a glob (``data/**/*.txt``). A file's name
    is relative to the folder, or to the part of the glob before the first wildcard.

    Raises:
        InvalidArgument: a path does not exist, a glob matches nothing, or no file is found at all.
    """
    found: dict[Path, TextFile] = {}
    for given in paths:
        for file in _expand(str(given)):
            found.setdefault(file.path.resolve(), file)
    if not found:
        raise InvalidArgument("the corpus is empty: name at least one file, folder or glob")
    return sorted(found.values(), key=lambda file: (file.name, str(file.path)))


def _expand(given: str) -> list[TextFile]:
    path = Path(given).expanduser()
    if path.is_dir():
        below = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path)))
        if not below:
            raise InvalidArgument(f"the folder {given} has no files (hidden ones are not read)")
        return [TextFile(p.relative_to(path).as_posix(), p) for p in below]
    if path.exists():
        return [TextFile(path.name, path)]
    if not glob.has_magic(given):
        raise InvalidArgument(f"there is no file or folder {given}")
    fixed = []
    for part in path.parts:
        if glob.has_magic(part):
            break
        fixed.append(part)
    root = Path(*fixed) if fixed else Path()
    matches = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())  # noqa: PTH207
    if not matches:
        raise InvalidArgument(f"no file matches {given}")
    return [TextFile(p.relative_to(root).as_posix(), p) for p in matches]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def python_library_text() -> list[Path]:
    """The ``.py`` files of the running Python's standard library, sorted: about 12 MB of text on every machine.

    Installed packages are left out because they differ between machines, and the library's own tests because they are
    long, repetitive and often missing.

    Raises:
        InvalidArgument: the library's source is not on this machine (a frozen or stripped Python).
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(p for p in root.rglob("*.py") if not _NOT_LIBRARY & set(p.relative_to(root).parts))
    if not files:
        raise InvalidArgument(f"the Python library's source is not in {root}; name your own text instead")
    return files


def python_library_files() -> list[TextFile]:
    """`python_library_text` with names relative to the library's folder."""
    root = Path(sysconfig.get_path("stdlib"))
    return [TextFile(p.relative_to(root).as_posix(), p) for p in python_library_text()]


def read(file: TextFile) -> bytes:
    """A file's bytes.

    Raises:
        InvalidArgument: it cannot be read; the message names it.
    """
    try:
        return file.path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"cannot read {file.path}: {(error.strerror or str(error)).lower()}") from error


@dataclass(frozen=True)
class Split:
    """How a corpus is divided.

    Attributes:
        by: "file" (whole files are held out), "tail" (the last share of the bytes of all files together) or "given".
        train, held_out: the files of each side; the same list for "tail".
    """

    by: str
    train: list[TextFile]
    held_out: list[TextFile]


def split_files(files: Sequence[TextFile], share: float) -> Split:
    """Hold out whole files: deterministic, whatever the order in which files are found.

    Files are visited in the order of the SHA-256 of their names; one is held out if its size still fits into ``share``
    of all bytes. If none fits, the smallest is held out. One file alone cannot be split by file: its tail is held out.
    Files without bytes are left out.
    """
    if not 0 < share < 1:
        raise InvalidArgument(f"the held-out share is {share}; it lies between 0 and 1, for example 0.05")
    sizes = {file: size for file in files if (size := _size(file))}
    if not sizes:
        raise InvalidArgument(
            f"the corpus is empty: its {len(files)} files have no bytes, the first is {files[0].path}"
        )
    if len(sizes) == 1:
        return Split("tail", list(sizes), list(sizes))
    room = share * sum(sizes.values())
    held: set[TextFile] = set()
    for file in sorted(sizes, key=lambda file: hashlib.sha256(file.name.encode()).digest()):
        if sizes[file] <= room:
            held.add(file)
            room -= sizes[file]
    if not held:
        held.add(min(sizes, key=lambda file: (sizes[file], file.name)))
    return Split("file", [f for f in sizes if f not in held], [f for f in sizes if f in held])


def _size(file: TextFile) -> int:
    try:
        return file.path.stat().st_size
    except OSError as error:
        raise InvalidArgument(f"cannot read {file.path}: {(error.strerror or str(error)).lower()}") from error


def fingerprint(contents: Iterable[tuple[str, bytes]]) -> str:
    """SHA-256 over the lines ``name NUL sha256(content)`` in the order given: the same text gives the same value."""
    total = hashlib.sha256()
    for name, content in contents:
        total.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return total.hexdigest()
