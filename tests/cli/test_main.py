"""The frame around the commands: help pages, errors in one sentence, exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mercer import __version__
from mercer.cli.main import COMMANDS, Commands, app, main
from mercer.errors import InvalidArgument, StorageError, Unsupported

ROOT = Path(__file__).parents[2]
runner = CliRunner()


def names(command: object, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    below = getattr(command, "commands", {})
    return [path, *(found for name, sub in below.items() for found in names(sub, (*path, name)))]


EVERY = names(typer.main.get_command(app))


def failing(error: BaseException) -> typer.Typer:
    """An app with the frame of ours and one command that fails."""
    program = typer.Typer(cls=Commands, pretty_exceptions_enable=False)

    @program.callback()
    def root() -> None:
        """So that the command keeps its name."""

    @program.command()
    def fail() -> None:
        raise error

    return program


@pytest.mark.parametrize("path", EVERY, ids=" ".join)
def test_every_help_page_renders(path: tuple[str, ...]) -> None:
    result = runner.invoke(app, [*path, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage: " in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize("path", EVERY, ids=" ".join)
def test_every_option_is_explained(path: tuple[str, ...]) -> None:
    command = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    assert command.help, "the command has no docstring"
    unexplained = [p.name for p in command.params if not getattr(p, "hidden", False) and not getattr(p, "help", None)]
    assert unexplained == []


def test_every_command_module_registers_something() -> None:
    assert len(EVERY) - 1 >= len(COMMANDS)


def test_the_page_of_commands_is_up_to_date() -> None:
    script = [sys.executable, str(ROOT / "scripts" / "cli_docs.py"), "--check"]
    result = subprocess.run(script, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("kind", [InvalidArgument, Unsupported, StorageError])
def test_an_error_of_the_user_is_one_sentence(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MERCER_DEBUG", raising=False)
    result = runner.invoke(failing(kind("steps must be positive, got -1")), ["fail"])
    assert result.exit_code == 2
    assert result.stderr == "Error: steps must be positive, got -1.\n"
    assert result.stdout == ""


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERCER_DEBUG", "1")
    result = runner.invoke(failing(InvalidArgument("no")), ["fail"])
    assert result.exit_code == 2
    assert result.stderr.startswith("Traceback (most recent call last)")
    assert result.stderr.endswith("InvalidArgument: no\nError: no.\n")


def test_a_fault_of_ours_is_not_disguised() -> None:
    result = runner.invoke(failing(RuntimeError("a bug")), ["fail"])
    assert result.exit_code == 1
    assert isinstance(result.exception, RuntimeError)


def test_an_interrupt_is_a_sentence_too() -> None:
    result = runner.invoke(failing(KeyboardInterrupt()), ["fail"])
    assert result.exit_code == 130
    assert result.stderr == "Interrupted.\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_real_interrupt_signal_ends_with_130(number: signal.Signals) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job begins with it ignored
        "import mercer.cli.main as program\n"
        "@program.app.command()\n"
        "def wait():\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "sys.argv = ['mercer', 'wait']\n"
        "program.main()\n"
    )
    # In a new session, so that the signal reaches this process alone.
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        os.kill(process.pid, number)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr == "Interrupted.\n"


def test_wrong_use_is_exit_code_2() -> None:
    result = runner.invoke(app, ["no-such-command"])
    assert result.exit_code == 2
    assert "no-such-command" in result.stderr


def test_version() -> None:
    assert runner.invoke(app, ["--version"]).stdout == f"{__version__}\n"
    facts = json.loads(runner.invoke(app, ["version", "--json"]).stdout)
    assert facts["packages"]["mercer"] == __version__
    assert facts["cores"] >= 1
    lines = runner.invoke(app, ["version"]).stdout.splitlines()
    assert [line[:14].strip().replace(" ", "_") for line in lines] == list(facts)


MAIN = "import sys; from mercer.cli import main; sys.argv[1:] = ['version']"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        script = [sys.executable, "-c", f"{MAIN}; main.main()"]
        result = subprocess.run(script, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.stderr == "Error: cannot write the output: no space left on device.\n"
    assert result.returncode == 2


def test_a_closed_output_is_written_nowhere() -> None:
    code = f"{MAIN}; main.app = lambda **_: sys.stdout.write('text'); main.main()"
    script = ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, code]
    result = subprocess.run(script, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(("given", "found"), [(None, "passive"), ("active", "active")])
def test_threads_that_wait_do_not_spin_unless_asked(monkeypatch, given, found):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    monkeypatch.setattr("mercer.cli.main.app", lambda **_: None)
    monkeypatch.setattr("mercer.cli.main.tune", lambda: None)
    monkeypatch.setattr("mercer.cli.main.signal.signal", lambda *_: None)
    main()
    assert os.environ["OMP_WAIT_POLICY"] == found
