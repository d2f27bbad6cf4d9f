"""`mercer`: the closed list of commands, and what happens when one of them fails.

Exit codes: 0 done, 1 a fault of ours (with its traceback), 2 wrong use or input, 130 interrupted. Results go to
standard output, progress and errors to standard error. MERCER_DEBUG=1 shows the traceback of wrong input too.
"""

import errno
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from mercer.cli import advise, chat, generate, info, report, score, study, train, version
from mercer.errors import Interrupted, MercerError
from mercer.runtime.allocator import tune

COMMANDS = (train, generate, chat, score, study, report, advise, info, version)

WRONG_USE = 2
INTERRUPTED = 130  # what a shell reports of a process ended by the interrupt signal


class Commands(TyperGroup):
    """Turns the errors a user can cause into one sentence and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            _say("Interrupted.")
            raise typer.Exit(INTERRUPTED) from None
        except Interrupted as error:
            _say(f"Interrupted: {error}")
            raise typer.Exit(INTERRUPTED) from None
        except MercerError as error:
            if os.environ.get("MERCER_DEBUG") == "1":
                typer.echo(traceback.format_exc(), err=True, nl=False)
            _say(f"Error: {error}")
            raise typer.Exit(WRONG_USE) from None
        except OSError as error:
            # Of a file it has the name; a pipe that nobody reads any more ends in silence, as typer does it.
            if error.filename is not None or error.errno in (None, errno.EPIPE):
                raise
            sys.stdout = _nowhere()  # or the interpreter complains of what is left in the buffer when it ends
            _say(f"Error: cannot write the output: {os.strerror(error.errno).lower()}")
            raise typer.Exit(WRONG_USE) from None


app = typer.Typer(
    name="mercer",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=version.print_version, is_eager=True),
    ] = False,
) -> None:
    """Attention as a kernel, a normaliser and a structure: train, study and measure."""


for command in COMMANDS:
    command.register(app)


def main() -> None:
    """The console script. The allocator comes first: what is taken before it is tuned stays where it is."""
    signal.signal(signal.SIGTERM, _terminate)
    # Threads of torch that spin while they wait take time from those that compute; on an idle machine it makes no
    # difference. OpenMP reads it when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison] (closed by who started it)
        sys.stdout = _nowhere()
    try:
        tune()
        app(prog_name="mercer")
    except KeyboardInterrupt:
        _say("Interrupted.")
        raise SystemExit(INTERRUPTED) from None


def _terminate(_number: int, _frame: FrameType | None) -> None:
    """A polite request to end is an interrupt, so that no work needs to know which of the two it was."""
    raise KeyboardInterrupt


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


def _say(sentence: str) -> None:
    typer.echo(sentence if sentence.endswith((".", "!", "?")) else f"{sentence}.", err=True)
