"""What whoever waits for a study sees, on standard error: the part at work, its loss, and the time left for the "
"whole."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from mercer.studies.report.numbers import duration

LINE_EVERY = 15.0
"""Seconds between lines where standard error is a file and no bar can move."""


class StudyProgress:
    """A bar for the whole study, in units of equal cost, and a line about the part at work.

    Args:
        total: units of the whole study.
        done: units that a former call has done.
        quiet: show nothing.
    """

    def __init__(self, total: float, done: float = 0.0, *, quiet: bool = False) -> None:
        self.total, self.first, self.done, self.quiet = total, done, done, quiet
        self.console = Console(stderr=True, quiet=quiet)
        self.moving = self.console.is_terminal and not quiet
        self._began = time.monotonic()
        self._said = 0.0
        self._text = ""
        self._bar = Progress(
            BarColumn(bar_width=16),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[left]} left", markup=False),
            TextColumn("{task.description}", markup=False),
            console=self.console,
            transient=True,
            disable=not self.moving,
        )
        self._task = self._bar.add_task("", total=total, completed=done, left="? s")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    @property
    def seconds_left(self) -> float | None:
        """What the rest takes at the pace of this call; None before there is one."""
        worked = self.done - self.first
        if worked <= 0:
            return None
        return (time.monotonic() - self._began) / worked * (self.total - self.done)

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def found_done(self, units: float) -> None:
        """``units`` of the part that begins now were done by a former call: they do not count for the pace."""
        self.first += units

    def update(self, done: float, text: str) -> None:
        """``done`` units of the whole study; ``text`` about the part at work."""
        self.done, self._text = done, text
        left = self.seconds_left
        if self.moving:
            words = "? s" if left is None else duration(max(left, 1))
            self._bar.update(self._task, completed=done, description=text, left=words)
        elif time.monotonic() - self._said >= LINE_EVERY:
            self._said = time.monotonic()
            ending = "" if left is None else f", {duration(max(left, 1))} left for the study"
            self.say(f"{100 * done / self.total:3.0f} %  {text}{ending}")
