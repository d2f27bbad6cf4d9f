"""`mercer report`: the page of a study, rendered again from its JSON."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command()(report)


def report(
    path: Annotated[Path, typer.Argument(metavar="JSON", help="A study's JSON, such as orders.json.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The page (beside the JSON).")] = None,
) -> None:
    """Render a study's page again from its JSON alone."""
    from mercer.studies.report import write_page

    typer.echo(write_page(path, out))
