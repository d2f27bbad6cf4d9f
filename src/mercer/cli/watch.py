"""What a person sees on standard error while a run goes on: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mercer.training.loop import Progress

Watcher = Callable[["Progress"], None]


@contextmanager
def watch_training(quiet: bool = False) -> Iterator[Watcher]:
    """Yield the callback for `mercer.training.trainer.train`; when quiet, it writes the notes alone."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet:
        yield lambda progress: _notes(console.file.write, progress)
        return
    if not console.is_terminal:
        yield _lines(console.file.write)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=None, facts="")

        def show(progress: Progress) -> None:
            for note in progress.notes:
                console.print(f"Note: {note}.", highlight=False, markup=False, soft_wrap=True)
            bar.update(task, completed=progress.step, total=progress.steps, facts=facts(progress))

        yield show


def _lines(write: Callable[[str], object]) -> Watcher:
    """One line at each evaluation: enough for a log file."""

    def show(progress: Progress) -> None:
        _notes(write, progress)
        if progress.phase == "eval":
            write(f"{progress.step}/{progress.steps}  {facts(progress)}\n")

    return show


def _notes(write: Callable[[str], object], progress: Progress) -> None:
    for note in progress.notes:
        write(f"Note: {note}.\n")


def facts(progress: Progress) -> str:
    """Losses, rate and time left, as far as they are known."""
    parts = []
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.3f}")
    if progress.held_out is not None:
        parts.append(f"held-out {progress.held_out:.3f}")
    if progress.tokens_per_second is not None:
        parts.append(f"{progress.tokens_per_second:,.0f} tokens/s")
    if progress.seconds_left is not None:
        parts.append(f"{duration(progress.seconds_left)} left")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as 42s, 3m20s or 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"
