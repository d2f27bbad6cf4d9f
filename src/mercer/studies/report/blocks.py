"""What a page is made of: sections of text, figures and tables. Pure data; ``page`` turns it into HTML."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A line of a figure's legend; pressing it shows or hides its traces. ``shown``: whether they are there at "
    "first."""

    label: str
    colour: str
    dash: str
    traces: tuple[int, ...]
    shown: bool = True

    def with_trace(self, trace: int) -> Entry:
        """The same entry, which shows and hides one trace more."""
        return replace(self, traces=(*self.traces, trace))


@dataclass(frozen=True)
class Figure:
    """A plot with the words that replace it (``alt``) and the words below it (``caption``)."""

    name: str
    title: str
    alt: str
    caption: str
    spec: dict[str, Any]
    legend: tuple[Entry, ...] = ()
    height: int = 380


@dataclass(frozen=True)
class Cell:
    """A cell of a table. ``colour`` draws a swatch before the text, ``strong`` marks the best of a column."""

    text: str
    colour: str | None = None
    strong: bool = False
    note: str | None = None


@dataclass(frozen=True)
class Table:
    """A table; columns after the first ``words`` are numbers and align to the right. ``folded`` opens on a press."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    words: int = 1
    caption: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Section:
    """A heading, what to look for, and the evidence."""

    title: str
    text: str = ""
    parts: tuple[Figure | Table, ...] = ()


@dataclass(frozen=True)
class Page:
    """Everything specific to one study; ``page`` adds findings, environment and command from the record."""

    title: str
    summary: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    method: tuple[tuple[str, str], ...] = field(default=())
