"""`mercer version`: what is installed here and what it runs on, for a bug report."""

import json
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    app.command()(version)


def version(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Print the versions, the processor, the threads and the allocator's state, as a bug report needs them."""
    from mercer.runtime.environment import environment

    facts = environment()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        typer.echo(f"{name.replace('_', ' '):14}{_line(value)}")


def print_version(asked: bool) -> None:
    """The callback of `mercer --version`."""
    if asked:
        from mercer import __version__

        typer.echo(__version__)
        raise typer.Exit


def _line(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_line(item)}" for key, item in value.items()) or "none"
    return "none" if value is None else str(value)
