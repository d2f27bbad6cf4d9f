"""A corpus as tokens: memory-mapped, split into training and held-out text, and cut into deterministic batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mercer.errors import InvalidArgument
from mercer.models.vocabulary import BPE, Bytes, Vocabulary, load_vocabulary
from mercer.runtime.files import new_folder, read_json, write_json
from mercer.runtime.words import count
from mercer.training.corpus import (
    Split,
    TextFile,
    find_files,
    fingerprint,
    python_library_files,
    python_library_text,
    read,
    search,
    split_files,
)

__all__ = ["Corpus", "TextFile", "batch", "find_files", "python_library_files", "python_library_text", "windows"]

_PIECE = 1 << 20  # text is given to the BPE in pieces of about this size: its memory is many times its input


@dataclass(frozen=True)
class Corpus:
    """Tokens of a training and a held-out text.

    Attributes:
        vocabulary: what the tokens mean.
        train, held_out: [n] tokens, mapped from the cache and never read whole.
        info: sha256, vocabulary, split (by, share, held-out names), and files, bytes and tokens of each side.
        folder: the cache folder that holds them.
        notes: sentences for the user about how the text was found.
    """

    vocabulary: Vocabulary
    train: np.ndarray
    held_out: np.ndarray
    info: dict[str, Any]
    folder: Path
    notes: tuple[str, ...] = ()

    @classmethod
    def build(
        cls,
        text: Iterable[str | Path | TextFile],
        cache: str | Path,
        *,
        vocabulary: str = "bytes",
        held_out: float = 0.05,
        held_out_text: Sequence[str | Path] = (),
        without: Sequence[str | Path] = (),
        length: int = 0,
    ) -> Corpus:
        """Read the text, or find its tokens in ``cache`` where the same text was prepared the same way before.

        Args:
            text: files, folders, globs, or `TextFile` values such as `python_library_files` gives.
            cache: a folder for token files; one sub-folder for each different text, vocabulary or split.
            vocabulary: "bytes", or "bpe:4096": a byte-level BPE of that many tokens trained on the training text.
            held_out: share of the bytes to hold out, by whole files; the tail of a single file.
            held_out_text: files to hold out instead, all of them.
            without: folders that are not read wherever they lie, such as the one a run is written to. Every folder
                that holds a run, a study or prepared tokens is left out anyway.
            length: tokens of context that a window will have; a side without one window is refused.

        Raises:
            InvalidArgument: a file is missing, unreadable or (for BPE) not UTF-8; a side of the split has no text or
                no window. Nothing is written then.
            StorageError: the cache cannot be written.
        """
        size = _vocabulary_size(vocabulary)
        never = list(map(Path, without))
        files, skipped = _files(list(text), never)
        if held_out_text:
            held, more = search(held_out_text, never)
            skipped += [folder for folder in more if folder not in skipped]
            twice = {file.path.resolve() for file in files} & {file.path.resolve() for file in held}
            if twice:
                raise InvalidArgument(f"{min(twice)} is both training and held-out text")
            split, share = Split("given", files, held), None
        else:
            split, share = split_files(files, held_out), held_out
        every = [*split.train, *split.held_out] if split.by != "tail" else split.train
        sha256 = fingerprint((file.name, read(file)) for file in every)
        recipe = {"sha256": sha256, "vocabulary": vocabulary, "split": {"by": split.by, "share": share}}
        recipe["split"]["held_out"] = [file.name for file in split.held_out]
        folder = Path(cache) / hashlib.sha256(repr(recipe).encode()).hexdigest()[:16]
        if not (folder / "corpus.json").exists():
            with _no_empty_folders(folder.parent), new_folder(folder) as fresh:
                _require_windows(_write(fresh, split, share, size, recipe | {"files": len(every)}), length)
        corpus = cls.load(folder)
        _require_windows(corpus.info, length)
        notes = tuple(
            f"{folder} is left out of the text: it is for a run, a study or prepared tokens" for folder in skipped
        )
        return replace(corpus, notes=notes)

    @classmethod
    def load(cls, folder: str | Path) -> Corpus:
        """Open a prepared cache folder."""
        folder = Path(folder)
        info = read_json(folder / "corpus.json")
        vocabulary = load_vocabulary(folder, info["vocabulary_size"])
        sides = [np.memmap(folder / f"{side}.bin", dtype=vocabulary.dtype, mode="r") for side in ("train", "held_out")]
        for side, tokens in zip(("train", "held_out"), sides, strict=True):
            if len(tokens) != info[side]["tokens"]:
                raise InvalidArgument(
                    f"{folder / side}.bin has {len(tokens)} tokens, not {info[side]['tokens']}; delete {folder}"
                )
        return cls(vocabulary, sides[0], sides[1], info, folder)


def _files(text: list[str | Path | TextFile], without: Iterable[Path]) -> tuple[list[TextFile], list[Path]]:
    """The files in the order of their names, those given by path looked up, and the folders left out."""
    files = [item for item in text if isinstance(item, TextFile)]
    paths = [item for item in text if not isinstance(item, TextFile)]
    skipped: list[Path] = []
    if paths or not files:
        found, skipped = search(paths, without)
        files += found
    return sorted(files, key=lambda file: (file.name, str(file.path))), skipped


def _require_windows(info: dict[str, Any], length: int) -> None:
    for side, name in (("train", "training"), ("held_out", "held-out")):
        tokens, files = info[side]["tokens"], info[side]["files"]
        if tokens <= length:
            raise InvalidArgument(
                f"the {name} text is too short: a window of length={length} needs {length + 1} tokens and its "
                f"{count(files, 'file')} {'have' if files > 1 else 'has'} {tokens}; give more text, another split "
                "or a smaller length"
            )


@contextmanager
def _no_empty_folders(folder: Path) -> Iterator[None]:
    """Take away again, when the block fails, the folders that it made on the way to ``folder`` and left empty."""
    fresh = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        for path in fresh:
            with suppress(OSError):  # not empty, or never made
                path.rmdir()
        raise


def _vocabulary_size(vocabulary: str) -> int | None:
    """None for bytes, the number of tokens for "bpe:N"."""
    if vocabulary == "bytes":
        return None
    kind, _, number = vocabulary.partition(":")
    if kind == "bpe" and number.isdecimal() and int(number) > 256:
        return int(number)
    raise InvalidArgument(
        f"vocabulary {vocabulary!r} is unknown; use 'bytes', or 'bpe:N' with N above 256, such as 'bpe:4096'"
    )


def _write(folder: Path, split: Split, share: float | None, size: int | None, recipe: dict[str, Any]) -> dict[str, Any]:
    """Tokens, vocabulary and record of a corpus into a fresh folder; returns the record."""
    vocabulary = Bytes() if size is None else BPE.train(_texts(_side(split, share, "train")), size)
    vocabulary.save(folder)
    info = recipe | {"vocabulary_size": vocabulary.size}
    for side in ("train", "held_out"):
        total = tokens = 0
        with (folder / f"{side}.bin").open("wb") as out:
            for file, data in _side(split, share, side):
                total += len(data)
                for piece in [data] if size is None else _pieces(data):
                    encoded = _encode(vocabulary, file, piece)
                    out.write(encoded.tobytes())
                    tokens += len(encoded)
        if not tokens:
            raise InvalidArgument(_empty(side, split))
        info[side] = {"bytes": total, "tokens": tokens, "files": len(getattr(split, side))}
    write_json(folder / "corpus.json", info)
    return info


def _empty(side: str, split: Split) -> str:
    files = getattr(split, side)
    name = "training" if side == "train" else "held-out"
    if split.by == "tail":
        return (
            f"the text is too short to hold out a part of it: {files[0].path} has {files[0].path.stat().st_size} bytes"
        )
    return f"the {name} text is empty: {count(len(files), 'file')} without bytes"


def _side(split: Split, share: float | None, side: str) -> Iterator[tuple[TextFile, bytes]]:
    if split.by != "tail":
        for file in split.train if side == "train" else split.held_out:
            yield file, read(file)
        return
    assert share is not None
    file = split.train[0]
    data = read(file)
    cut = len(data) - round(share * len(data))
    for _ in range(3):  # not inside a UTF-8 character, whose later bytes are 10xxxxxx
        if 0 < cut < len(data) and data[cut] & 0xC0 == 0x80:
            cut -= 1
    yield file, data[:cut] if side == "train" else data[cut:]


def _texts(contents: Iterable[tuple[TextFile, bytes]]) -> Iterator[str]:
    for file, data in contents:
        for piece in _pieces(data):
            yield _text(file, piece)


def _pieces(data: bytes) -> Iterator[bytes]:
    """Cut at line ends, about every megabyte."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start + _PIECE) + 1 or len(data)
        yield data[start:end]
        start = end


def _text(file: TextFile, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"{file.path} is not UTF-8 (byte {data[error.start]:#04x}), which a BPE vocabulary needs; "
            "convert it or use bytes"
        ) from error


def _encode(vocabulary: Vocabulary, file: TextFile, data: bytes) -> np.ndarray:
    if isinstance(vocabulary, BPE):
        _text(file, data)  # for the sentence that names the file
    return vocabulary.encode(data)


def batch(tokens: np.ndarray, length: int, size: int, seed: int, step: int) -> torch.Tensor:
    """The windows of one step, a pure function of its arguments: a resumed run needs no random state.

    Starts are uniform over the text (with replacement), drawn from Philox keyed by (seed, step), whose raw output numpy
    guarantees never to change.

    Args:
        tokens: [n] with n > length.
        length, size: tokens of context a window, windows.
        seed, step: below 2^64.

    Returns:
        [size, length + 1] int64; columns 0..length-1 are inputs, 1..length their targets.
    """
    draws = np.random.Philox(key=np.array([seed, step], dtype=np.uint64)).random_raw(size)
    starts = draws % np.uint64(len(tokens) - length)
    return _gather(tokens, starts.tolist(), length)


def windows(tokens: np.ndarray, length: int, count: int) -> torch.Tensor:
    """At most ``count`` non-overlapping windows, evenly spaced over the text: [count, length + 1] int64."""
    whole = (len(tokens) - 1) // length
    count = min(count, whole)
    return _gather(tokens, [i * whole // count * length for i in range(count)], length)


def _gather(tokens: np.ndarray, starts: list[int], length: int) -> torch.Tensor:
    rows = np.empty((len(starts), length + 1), dtype=np.int64)
    for row, start in zip(rows, starts, strict=True):
        row[:] = tokens[start : start + length + 1]
    return torch.from_numpy(rows)
