"""A study's folder: what it was begun with, the results so far, and the time it has worked."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from mercer.errors import Interrupted, InvalidArgument
from mercer.runtime.files import read_json, write_json
from mercer.studies.records.common import Provenance

Budget = Literal["quick", "standard", "full"]
BUDGETS: tuple[Budget, ...] = ("quick", "standard", "full")
BEGUN, WORK = "begun.json", "work.json"
SETTLED = ("calibration.json", "rates.json", "machine.json")
"""What a study measures once, before its first result."""


def check_budget(name: str) -> Budget:
    """``name`` as a budget; raises :class:`InvalidArgument` for any other word."""
    for budget in BUDGETS:
        if name == budget:
            return budget
    raise InvalidArgument(f"budget {name!r} is unknown; use {', '.join(BUDGETS)}.")


class StudyFolder:
    """The folder ``path`` of one study.

    Args:
        path: made if absent.
        asked: what was asked for, as JSON values. A folder that was begun with something else is refused, so that one
            study never mixes two settings, unless nothing was finished in it yet: then it is begun anew.
        command: what to type to run it again.
    """

    def __init__(self, path: Path, asked: dict[str, Any], command: str) -> None:
        self.path, self.command = path, command
        self._clock = time.monotonic()
        begun = path / BEGUN
        old = read_json(begun) if begun.exists() else None
        if old is not None and old != asked:
            if _has_results(path):
                raise InvalidArgument(f"{path} holds a study begun with {_difference(old, asked)}.")
            for name in (BEGUN, WORK, *SETTLED):
                (path / name).unlink(missing_ok=True)
            shutil.rmtree(path / "trials", ignore_errors=True)
        if old != asked:
            write_json(begun, asked)
        work = read_json(path / WORK) if (path / WORK).exists() else {}
        self._before: float = work.get("seconds", 0.0)
        self._peak: int = work.get("peak_memory_bytes", 0)
        self._started: str = work.get("started", _now())

    def remembered(self, name: str) -> Any | None:
        """What :meth:`remember` kept in a former call, or None."""
        path = self.path / f"{name}.json"
        return read_json(path) if path.exists() else None

    def remember(self, name: str, content: Any) -> None:
        """Keep JSON values for the calls that continue this study."""
        write_json(self.path / f"{name}.json", content)

    def save_work(self) -> None:
        """Write down the time worked and the memory used so far."""
        self._peak = max(self._peak, peak_memory_bytes())
        work = {"seconds": self.seconds, "peak_memory_bytes": self._peak, "started": self._started}
        write_json(self.path / WORK, work)

    @property
    def seconds(self) -> float:
        """Working time over all calls."""
        return self._before + time.monotonic() - self._clock

    def provenance(self, budget: Budget, seeds: list[int], device: str) -> Provenance:
        """How the numbers came to be, as of now."""
        import mercer
        from mercer.runtime.environment import environment

        self.save_work()
        return Provenance(
            command=self.command,
            mercer_version=mercer.__version__,
            budget=budget,
            seeds=seeds,
            device=device,
            started=self._started,
            updated=_now(),
            seconds=self.seconds,
            peak_memory_bytes=self._peak,
            environment=environment(),
        )


def _has_results(path: Path) -> bool:
    """Whether a trial is finished or a checkpoint kept, or a length of the study of cost measured."""
    patterns = ("trials/*/trial.json", "trials/*/checkpoints/step-*", "points-*.json")
    return any(True for pattern in patterns for _ in path.glob(pattern))


def _difference(old: dict[str, Any], asked: dict[str, Any]) -> str:
    key = next(key for key in sorted({*old, *asked}) if old.get(key) != asked.get(key))
    if key == "sha256":
        return "another text, or the text has changed since; give the old text or name another folder with --out"
    was, now = (_words(value.get(key)) for value in (old, asked))
    return f"{key.replace('_', ' ')} {was}, now it is {now}; give the old value or name another folder with --out"


def _words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "not given" if value is None else str(value)


@contextmanager
def interruptible(folder: Path) -> Iterator[None]:
    """An interrupt while no checkpoint is due becomes the sentence that says how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"what was finished is kept; run the same command again to continue in {folder}") from None


def peak_memory_bytes() -> int:
    """The largest resident size this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the others KiB


def slug(name: str) -> str:
    """An arm's name as a folder's: letters, digits, dots and dashes."""
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in name).strip("-") or os.fspath("arm")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
