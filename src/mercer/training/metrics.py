"""The record of a run: one JSON line for each logged event, cut back to a checkpoint when a run is continued."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mercer.errors import StorageError, Unsupported
from mercer.runtime.files import storage_error, write_file

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS_FILE = "metrics.jsonl"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The events of a run so far, oldest first. A last line that a crash cut short is left out.

    Each has ``event`` ("train" or "eval"), ``step`` (steps done), ``loss`` in nats per token and, under ``time``, what
    depends on the machine. "train" adds ``learning_rate``, ``gradient_norm`` and ``tokens``; "eval" ``bits_per_byte``.

    Raises:
        StorageError: the file cannot be read.
    """
    path = folder / METRICS_FILE
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise StorageError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from error
    return [json.loads(line) for line in lines[:-1]]  # only a line with its line end is whole


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
        self._file = self.path.open("a", encoding="utf-8")

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
