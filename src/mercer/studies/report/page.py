"""From a record to one HTML file."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from mercer.runtime.files import write_file
from mercer.studies.records import (
    AnyRecord,
    ApproximationRecord,
    CostRecord,
    OrdersRecord,
    PositionsRecord,
    RecallRecord,
)
from mercer.studies.records.files import read_record
from mercer.studies.report import approximation, cost, numbers, orders, positions, recall
from mercer.studies.report.blocks import Figure, Page, Table


def _script(value: Any) -> Markup:
    """JSON that can stand inside a script element whatever strings it holds."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


@cache
def _plotly() -> Markup:
    """plotly.js itself. A closing tag inside would end the element early, so it is broken up."""
    return Markup(re.sub(r"</(?=script)", r"<\\/", get_plotlyjs(), flags=re.IGNORECASE))


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mercer.studies.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["script"] = _script
    environment.filters["size"] = numbers.size
    environment.filters["duration"] = numbers.duration
    environment.filters["day"] = numbers.day
    environment.tests["figure"] = lambda part: isinstance(part, Figure)
    environment.tests["table"] = lambda part: isinstance(part, Table)
    return environment


def _build(record: AnyRecord) -> Page:
    match record:
        case OrdersRecord():
            return orders.build(record)
        case RecallRecord():
            return recall.build(record)
        case CostRecord():
            return cost.build(record)
        case ApproximationRecord():
            return approximation.build(record)
        case PositionsRecord():
            return positions.build(record)


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """A nested dictionary as rows of a table."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, dict):
            rows.extend(_flat(value, f"{name} · "))
        elif isinstance(value, list):
            rows.append((name, ", ".join(str(item) for item in value)))
        else:
            rows.append((name, "none" if value is None else str(value)))
    return rows


def render(record: AnyRecord) -> str:
    """The page of a record, as HTML."""
    page = _build(record)
    figures = [part for section in page.sections for part in section.parts if isinstance(part, Figure)]
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            page=page,
            record=record,
            provenance=record.provenance,
            environment=_flat(record.provenance.environment),
            plots={figure.name: figure.spec for figure in figures},
            plotly=_plotly() if figures else None,
        )
    )


def write_page(json_path: Path, html_path: Path | None = None) -> Path:
    """Render the JSON at ``json_path`` to ``html_path`` (default: beside it) and return where it went."""
    page = render(read_record(json_path))
    target = html_path or json_path.with_suffix(".html")
    write_file(target, page)
    return target
