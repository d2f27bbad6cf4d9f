"""Write docs/cli.md: the help page of every command, as the command itself prints it.

python scripts/cli_docs.py            write it
python scripts/cli_docs.py --check    only compare; exit code 1 and a hint if it is out of date
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
WIDTH = 100
INTRODUCTION = """# The command line

This page lists what `mercer --help` and the `--help` of each command say, word for word, and is written by `make docs`.
What training does with its options is in [training.md](training.md).

Results go to standard output, progress and errors to standard error. Exit codes: 0 done, 1 a fault of Mercer's own
(with its traceback), 2 wrong use or input (one sentence says what), 130 interrupted. `MERCER_DEBUG=1` shows the
traceback of wrong input as well, and `MERCER_MALLOC=0` leaves glibc's allocator as it is.
"""


def pages(command: Any, name: str, parent: Any = None) -> Iterator[tuple[str, str]]:
    """(full name, help page) of a command and of everything below it, in the order they were registered."""
    context = command.context_class(
        command, info_name=name.rsplit(" ", 1)[-1], parent=parent, terminal_width=WIDTH, **command.context_settings
    )
    yield name, command.get_help(context)
    for below, subcommand in getattr(command, "commands", {}).items():
        yield from pages(subcommand, f"{name} {below}", context)


def render() -> str:
    # Set before typer is imported: pages without frames and colours, which do not depend on the terminal.
    os.environ["TYPER_USE_RICH"] = "0"
    import typer

    from mercer.cli.main import app

    parts = [INTRODUCTION]
    for name, page in pages(typer.main.get_command(app), "mercer"):
        text = "\n".join(line.rstrip() for line in page.strip().splitlines())
        parts.append(f"## {name}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def main() -> int:
    text = render()
    if sys.argv[1:] == ["--check"]:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE} is out of date; run: make docs", file=sys.stderr)
        return 1
    if sys.argv[1:]:
        print("usage: python scripts/cli_docs.py [--check]", file=sys.stderr)
        return 2
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
