"""Which files a corpus has, which of them are held out, and its fingerprint."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
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
    is relative to the folder, or to the part of the glob before the first wildcard. Folders that hold a run, a study
    or prepared tokens are left out: a text must not grow by what is learned from it.

    Raises:
        InvalidArgument: a path does not exist, a glob matches nothing, or no file is found at all.
    """
    return search(paths)[0]


def search(paths: Iterable[str | Path], without: Iterable[Path] = ()) -> tuple[list[TextFile], list[Path]]:
    """`find_files`, and the folders that were left out; those of ``without`` are left out too."""
    never = {path.expanduser().resolve() for path in without}
    found: dict[Path, TextFile] = {}
    skipped: dict[Path, Path] = {}
    for given in paths:
        for file in _expand(str(given), never, skipped):
            found.setdefault(file.path.resolve(), file)
    if not found:
        raise InvalidArgument("the corpus is empty: name at least one file, folder or glob")
    return sorted(found.values(), key=lambda file: (file.name, str(file.path))), list(skipped.values())


def _expand(given: str, never: set[Path], skipped: dict[Path, Path]) -> list[TextFile]:
    path = Path(given).expanduser()
    if path.is_dir():
        _not_both(path, never)
        below = sorted(_below(path, never, skipped))
        if not below:
            raise InvalidArgument(f"the folder {given} has no files (hidden ones and those of runs are not read)")
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
    _not_both(root, never)
    matches = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())  # noqa: PTH207
    matches = [p for p in matches if not any(_ours(folder, never, skipped) for folder in _between(root, p))]
    if not matches:
        raise InvalidArgument(f"no file matches {given} (those of runs are not read)")
    return [TextFile(p.relative_to(root).as_posix(), p) for p in matches]


def _not_both(folder: Path, never: set[Path]) -> None:
    if folder.resolve() in never:
        raise InvalidArgument(
            f"the folder {folder} cannot hold both the text and what is learned from it; write to another folder, "
            "which may lie inside it"
        )


def _below(root: Path, never: set[Path], skipped: dict[Path, Path]) -> Iterator[Path]:
    for name, folders, files in os.walk(root):
        here = Path(name)
        if _ours(here, never, skipped):
            folders.clear()
            continue
        folders[:] = [folder for folder in folders if not folder.startswith(".")]
        yield from (here / file for file in files if not file.startswith(".") and (here / file).is_file())


def _between(root: Path, file: Path) -> list[Path]:
    """The folders from ``root`` down to the one that holds ``file``."""
    return [folder for folder in reversed(file.parents) if folder == root or root in folder.parents]


def _ours(folder: Path, never: set[Path], skipped: dict[Path, Path]) -> bool:
    """Whether a folder holds a run, a study or prepared tokens, or is not to be read; noted if so."""
    full = folder.resolve()
    if full in skipped:
        return True
    marks = (("run.json", "lock"), ("begun.json",), ("corpus.json", "train.bin"))
    ours = full in never or any(all((folder / name).exists() for name in mark) for mark in marks)
    if ours:
        skipped[full] = folder
    return ours


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
        of = f"its {len(files)} files have" if len(files) > 1 else "its only file has"
        raise InvalidArgument(f"the corpus is empty: {of} no bytes, see {files[0].path}")
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
