"""The record of a run: one JSON line for each logged event, cut back to a checkpoint when a run is continued."""

from __future__ import annotations

import contextlib
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mercer.errors import StorageError, Unsupported
from mercer.runtime.files import storage_error, write_file

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from mercer.training.config import TrainConfig

METRICS_FILE = "metrics.jsonl"
_FACTS = {"train": ("loss",), "eval": ("loss", "bits_per_byte")}  # kinds of events, and the numbers none is without


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The events of a run so far, oldest first. A last line that a crash cut short is left out.

    Each has ``event`` ("train" or "eval"), ``step`` (steps done), ``loss`` in nats per token and, under ``time``, what
    depends on the machine. "train" adds ``learning_rate``, ``gradient_norm`` and ``tokens``; "eval" ``bits_per_byte``.

    Raises:
        StorageError: the file cannot be read, or a line is not an event; the message has its number.
    """
    path = folder / METRICS_FILE
    if not path.exists():
        return []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise StorageError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error
    return [_event(line, path, number) for number, line in enumerate(lines[:-1], 1)]  # a line is whole with its end


def _event(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        event = json.loads(line.decode(), parse_constant=_refuse)
        whole = type(event["step"]) is int and all(math.isfinite(event[key]) for key in _FACTS[event["event"]])
    except (ValueError, TypeError, KeyError, OverflowError):
        whole = False
    if not whole:
        raise StorageError(f"cannot read {path}: line {number} is damaged; delete that line to go on without it")
    return event


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is never written")


def lacking(events: list[dict[str, Any]], step: int, config: TrainConfig) -> str | None:
    """A sentence about the events up to ``step`` that a run has written and that are not in ``events``; None if none.

    The recipe fixes them: an evaluation before the first step, every ``eval_every`` and after the last; a line of
    training every ``log_every`` and after the last.
    """
    last = {step} if step == config.steps else set()
    due = {(at, "train") for at in {*range(config.log_every, step + 1, config.log_every), *last}}
    due |= {(at, "eval") for at in {*range(0, step + 1, config.eval_every), *last}}
    lost = due - {(event["step"], event["event"]) for event in events}
    if not lost:
        return None
    at, kind = min(lost)
    return (
        f"{METRICS_FILE} lacks {len(lost)} of the {len(due)} events up to step {step}, the first of them {kind} at "
        f"step {at}: the curve has a hole there, which training does not fill"
    )


class Metrics:
    """Appends events to ``metrics.jsonl`` and, if asked, mirrors them to TensorBoard.

    Args:
        folder: the run's folder.
        step: the step the run continues from; later lines are dropped. None begins a new file.
        tensorboard: also write event files to ``folder/tensorboard``.

    Raises:
        Unsupported: ``tensorboard`` without the package.
    """

    def __init__(self, folder: Path, step: int | None, tensorboard: bool = False) -> None:
        self.path = folder / METRICS_FILE
        self._board: SummaryWriter | None = _board(folder, step) if tensorboard else None
        kept = [] if step is None else [event for event in read_metrics(folder) if event["step"] <= step]
        content = "".join(map(_line, kept)).encode()
        if not self.path.exists() or self.path.read_bytes() != content:
            write_file(self.path, content)
        try:
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise storage_error(error, self.path, "the checkpoints are intact") from error

    def write(self, event: dict[str, Any]) -> None:
        """Append one event; it is with the operating system when this returns, so a killed process loses nothing."""
        try:
            self._file.write(_line(event))
            self._file.flush()
        except OSError as error:
            raise storage_error(error, self.path, "the checkpoints are intact") from error
        if self._board is not None:
            for key, value in event.items():
                if isinstance(value, float):
                    self._board.add_scalar(f"{event['event']}/{key}", value, event["step"])
            self._board.add_scalar(f"{event['event']}/seconds", event["time"]["seconds"], event["step"])

    def sync(self) -> None:
        """Force the lines to the disk, before a checkpoint relies on them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what a full disk refused is still in the buffer; write has reported it
            self._file.close()
        if self._board is not None:
            self._board.close()


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, allow_nan=False) + "\n"


def _board(folder: Path, step: int | None) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise Unsupported(
            "TensorBoard is not installed; install mercer[track], or leave --tensorboard out: metrics.jsonl has it all"
        ) from error
    return SummaryWriter(str(folder / "tensorboard"), purge_step=None if step is None else step + 1)
