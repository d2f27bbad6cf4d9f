"""A run's folder: what was begun in it, by whom it is held, and whether it may be continued."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mercer.errors import InvalidArgument
from mercer.runtime.files import read_json, storage_error, write_json
from mercer.training.config import FREE_ON_RESUME
from mercer.training.metrics import METRICS_FILE

RUN_FILE = "run.json"
_TOKEN_KEYS = ("sha256", "vocabulary", "split")


# What may move the last digits of a run besides its config.
_DIGITS = ("processor", "threads", "device", "torch")


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Make the folder and keep other processes out of it; a killed process lets go by itself.

    Raises:
        InvalidArgument: another process is training there.
        StorageError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise storage_error(error, folder) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise InvalidArgument(f"another process is training in {folder}; wait for it or name another folder") from error
    try:
        yield
    finally:
        os.close(lock)


def begin(folder: Path, record: dict[str, Any], restart: bool) -> list[str]:
    """Record a new run, or check that ``record`` continues the one that was begun here.

    Args:
        folder: the run's folder.
        record: ``model``, ``train``, ``corpus`` and ``environment``.
        restart: forget what is there and begin anew.

    Returns:
        Sentences about differences that are allowed but may move the last digits (threads, versions).

    Raises:
        InvalidArgument: the run in the folder was begun with another model, recipe or text.
    """
    if restart:
        for name in ("checkpoints", "tensorboard"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in (RUN_FILE, METRICS_FILE):
            (folder / name).unlink(missing_ok=True)
    if not (folder / RUN_FILE).exists():
        write_json(folder / RUN_FILE, record)
        return []
    old = read_json(folder / RUN_FILE)
    for part in ("model", "train", "corpus"):
        keys = _TOKEN_KEYS if part == "corpus" else sorted({*old[part], *record[part]} - FREE_ON_RESUME)
        for key in keys:
            was, now = old[part].get(key), record[part].get(key)
            if was != now:
                raise InvalidArgument(
                    f"{folder} holds a run begun with {_difference(f'{part}.{key}', was, now)}; "
                    "give the old value, another folder, or restart"
                )
    was, now = _digits(old["environment"]), _digits(record["environment"])
    return [
        f"the run was begun with {key} {was[key]}, now it is {now[key]}: the last digits may differ"
        for key in _DIGITS
        if was[key] != now[key]
    ]


def _digits(environment: dict[str, Any]) -> dict[str, Any]:
    return {key: environment["packages"]["torch"] if key == "torch" else environment[key] for key in _DIGITS}


def _difference(key: str, was: Any, now: Any) -> str:
    if len(f"{was!r}{now!r}") > 160:  # a list of held-out files, for example
        return f"another {key}"
    return f"{key} = {was!r}, now it is {now!r}"
