"""The run of a study: its parts in order, each measured once and kept, under one bar, with a page after every part."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from mercer.errors import InvalidArgument
from mercer.runtime.files import read_json, write_json
from mercer.studies.calibration import fitting_steps
from mercer.studies.folder import Budget, StudyFolder, interruptible
from mercer.studies.progress import StudyProgress

Part = TypeVar("Part")
Result = TypeVar("Result")


def check_counts(
    seeds: int | None = None, steps: int | None = None, learning_rate: float | None = None, layers: int | None = None
) -> None:
    """Refuse numbers of a study that are out of range; None is the budget's own.

    Raises:
        InvalidArgument: in one sentence.
    """
    for name, value in (("seeds", seeds), ("steps", steps), ("layers", layers)):
        if value is not None and value < 1:
            raise InvalidArgument(f"{name} is {value}; it must be at least 1.")
    if learning_rate is not None and not 0 < learning_rate < math.inf:
        raise InvalidArgument(f"learning_rate is {learning_rate}; it must be above 0, such as 0.003.")


class Study(ABC, Generic[Part, Result]):
    """Base of studies, whose subclasses say what the parts are and how one is measured.

    A part's result is written to a file as soon as there is one; a part whose file is there is read back instead of
    measured. So a study that was stopped at any moment goes on where it was.

    Attributes:
        folder: where the study is; set by the subclass, once nothing can be wrong with what was asked for.
        results: of the parts so far, in their order.
        done: units of work of all parts that are finished, those of former calls too.
        calibration: seconds of a step of each arm, where the number of steps was fitted to the time.
        notes: sentences to begin with.
    """

    folder: StudyFolder

    def __init__(self, budget: Budget, out: Path, device: str, quiet: bool) -> None:
        self.budget, self.out, self.device, self.quiet = budget, out, device, quiet
        self.results: list[Result] = []
        self.done = 0.0
        self.calibration: dict[str, float] = {}
        self.notes: Sequence[str] = ()

    @abstractmethod
    def parts(self) -> Sequence[Part]:
        """What is to be measured, in order."""

    @abstractmethod
    def kept_at(self, part: Part) -> tuple[Path, Any]:
        """The file of a part's result, and the result's type."""

    @abstractmethod
    def opening(self) -> str:
        """The first line, which says what there is to do; ``done`` is what former calls have done."""

    @abstractmethod
    def measure(self, part: Part, place: str, progress: StudyProgress) -> Result | None:
        """Measure a part; ``place`` is its number of all, as "3/12". None if there is nothing to measure."""

    @abstractmethod
    def write(self) -> Path:
        """Write the record of the results so far; returns the path of its page."""

    def work(self, part: Part) -> float:
        """What a part costs, in units of the progress."""
        return 1.0

    def line(self, part: Part, result: Result) -> str | None:
        """What is said when a part has been measured, if anything."""
        return None

    def run(self) -> Path:
        """Do what is left of the study. Returns the path of its page."""
        parts = self.parts()
        kept = [self._kept(part) for part in parts]
        total = sum(self.work(part) for part in parts)
        self.done = sum(self.work(part) for part, found in zip(parts, kept, strict=True) if found is not None)
        try:
            with interruptible(self.out), StudyProgress(total, self.done, quiet=self.quiet) as progress:
                for note in self.notes:
                    progress.say(f"Note: {note}.")
                progress.say(self.opening())
                page = self.write()
                for number, (part, former) in enumerate(zip(parts, kept, strict=True), 1):
                    found = former
                    if found is None:
                        found = self._measured(part, f"{number}/{len(parts)}", progress)
                    if found is not None:
                        self.results.append(found)
                        page = self.write()
        finally:
            self.folder.save_work()
        return page

    def _measured(self, part: Part, place: str, progress: StudyProgress) -> Result | None:
        found = self.measure(part, place, progress)
        if found is None:
            return None
        path, kind = self.kept_at(part)
        write_json(path, TypeAdapter(kind).dump_python(found, mode="json"))
        self.done += self.work(part)
        line = self.line(part, found)
        if line is not None:
            progress.say(line)
        return found

    def _kept(self, part: Part) -> Result | None:
        path, kind = self.kept_at(part)
        return TypeAdapter(kind).validate_python(read_json(path)) if path.exists() else None

    def settle_steps(
        self,
        asked: int | None,
        most: int,
        limit: float | None,
        seconds: Callable[[], dict[str, float]],
        *,
        runs: int,
        evaluations: float,
    ) -> int:
        """The number of steps, the same for every arm, decided once for the whole study.

        Args:
            asked: the number that was asked for, if any.
            most: the budget's.
            limit: seconds for the whole study; None: the budget's steps are run whatever they take.
            seconds: measures a step of each arm.
            runs, evaluations: as of :func:`~mercer.studies.calibration.fitting_steps`.
        """
        if asked is not None or limit is None:
            return asked or most
        kept = self.folder.remembered("calibration")
        if kept is None:
            StudyProgress(1, quiet=self.quiet).say("Measuring how long a step takes, to fix one number for all.")
            times = seconds()
            room = limit - self.folder.seconds
            steps = fitting_steps(times, runs=runs, most=most, room=room, evaluations=evaluations)
            kept = {"steps": steps, "seconds": times}
            self.folder.remember("calibration", kept)
        self.calibration = kept["seconds"]
        return kept["steps"]
