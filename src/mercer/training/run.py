"""A run's folder: what was begun in it, by whom it is held, and whether it may be continued."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mercer.errors import InvalidArgument, StorageError
from mercer.runtime.files import read_json, storage_error, write_json
from mercer.training import checkpoint
from mercer.training.config import FREE_ON_RESUME, TrainConfig
from mercer.training.integrity import verify
from mercer.training.metrics import METRICS_FILE

RUN_FILE = "run.json"
Reader = Callable[[dict[str, Any]], dict[str, Any]]
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


def begin(
    folder: Path, record: dict[str, Any], restart: bool, read_model: Reader | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Record a new run, or check that ``record`` continues the one that was begun here and has a checkpoint.

    Args:
        folder: the run's folder.
        record: ``model``, ``train``, ``corpus`` and ``environment``.
        restart: forget what is there and begin anew.
        read_model: see :func:`require_same`.

    Returns:
        The record that the run was begun with, and sentences about differences that are allowed but may move the last
        digits (threads, versions) and about a lost run.json that was written anew from a checkpoint.

    Raises:
        InvalidArgument: the run in the folder was begun with another model, recipe or text.
        StorageError: run.json is damaged or missing, and no checkpoint says how the run was begun.
    """
    if restart:
        for name in ("checkpoints", "tensorboard"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in (RUN_FILE, METRICS_FILE):
            (folder / name).unlink(missing_ok=True)
    old, notes = _begun(folder)
    if old is None or not checkpoint.folders(folder):  # without a checkpoint there is nothing to continue or to lose
        write_json(folder / RUN_FILE, record)
        return record, []
    require_same(folder, old, record, read_model)
    if notes:
        write_json(folder / RUN_FILE, old)
    was, now = _digits(old["environment"]), _digits(record["environment"])
    notes += [
        f"the run was begun with {key} {was[key]}, now it is {now[key]}: the last digits may differ"
        for key in _DIGITS
        if was[key] != now[key]
    ]
    return old, notes


def _begun(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The record of the run in the folder, from its last whole checkpoint if run.json is lost; None: no run."""
    path = folder / RUN_FILE
    try:
        old = read_json(path)
        if _is_record(old):
            return old, []
        fault = "is damaged"
    except StorageError:
        fault = "cannot be read" if path.exists() else "is missing"
    there = checkpoint.folders(folder)
    for kept in reversed(there):
        try:
            verify(kept)
            old = read_json(kept / "trainer.json").get("run")
        except StorageError:
            continue
        if _is_record(old):
            return old, [
                f"{RUN_FILE} {fault}; it was written anew from the checkpoint of step {checkpoint.step_of(kept)}"
            ]
    if path.exists() or there:
        raise StorageError(
            f"{path} {fault} and no whole checkpoint says how the run was begun; put it back, name another folder, or "
            "restart"
        )
    return None, []


def _is_record(value: Any) -> bool:
    try:
        return all(isinstance(value[part], dict) for part in ("model", "train", "corpus")) and bool(
            _digits(value["environment"])
        )
    except (KeyError, TypeError):
        return False


def require_same(folder: Path, old: Any, record: dict[str, Any], read_model: Reader | None = None) -> None:
    """Refuse to continue the run that ``old`` describes with the model, recipe and text of ``record``.

    ``read_model`` gives the description of a model as this version writes it, for one that an earlier version wrote:
    fields that were not there yet have their defaults. Those of the recipe are filled in likewise.

    Raises:
        InvalidArgument: they differ, or ``old`` is not the record of a run.
    """
    if not _is_record(old):
        raise InvalidArgument(f"{folder} has checkpoints that are not of such a run; name another folder, or restart")
    readers = {"train": _read_recipe, "model": read_model}
    for part in ("train", "model", "corpus"):
        begun, asked = (_as_now(one[part], readers.get(part)) for one in (old, record))
        keys = _TOKEN_KEYS if part == "corpus" else sorted({*begun, *asked} - FREE_ON_RESUME)
        for key in keys:
            was, now = begun.get(key), asked.get(key)
            if was != now:
                raise InvalidArgument(
                    f"{folder} holds a run begun with {_difference(f'{part}.{key}', was, now)}; "
                    f"give the old {'text' if part == 'corpus' else 'value'}, another folder, or restart"
                )


def _read_recipe(values: dict[str, Any]) -> dict[str, Any]:
    """A recipe as this version writes it."""
    return TrainConfig(**values).model_dump(mode="json")


def _as_now(values: dict[str, Any], read: Reader | None) -> dict[str, Any]:
    """The values as this version writes them, or as they are where it cannot read them."""
    try:
        return values if read is None else read(values)
    except InvalidArgument:
        return values


def _digits(environment: dict[str, Any]) -> dict[str, Any]:
    return {key: environment["packages"]["torch"] if key == "torch" else environment[key] for key in _DIGITS}


def _difference(key: str, was: Any, now: Any) -> str:
    if key == "corpus.sha256":
        return "another text, or the text has changed since"
    if key == "corpus.split":
        return "another split of the text"
    key = key.removeprefix("corpus.")
    if len(f"{was!r}{now!r}") > 160:  # a list of held-out files, for example
        return f"another {key}"
    return f"{key} = {was!r}, now it is {now!r}"
