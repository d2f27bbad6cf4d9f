"""Draw the gallery of structures: `python scripts/structures_picture.py`, which writes docs/images/structures.svg.

Each panel is what `structure.plot()` shows: queries from the top down, keys from left to right, 64 of each; what a
query does not see is empty, and paler means a smaller weight. One SVG, readable on light and dark pages.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

import torch

from mercer import (
    Alibi,
    BigBird,
    Blocks,
    Causal,
    Documents,
    Fixed,
    Global,
    Longformer,
    Padding,
    PrefixLM,
    Strided,
    Visible,
    Window,
)
from mercer.core.picture import weights
from mercer.core.structures import Structure

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "structures.svg"
LENGTH, CELL, ACROSS, GAP, TOP = 64, 3, 4, 28, 40
INK, QUIET, EMPTY, SEEN = "#1f2430", "#667085", "#eef1f6", "#0f766e"
SHADES = 10
"""Steps of colour for weights."""

REAL = (torch.arange(LENGTH) >= 10).unsqueeze(0)


def own(_row: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Keys whose bits are among those of the query: Pascal's triangle modulo 2."""
    return key & ~query == 0


GALLERY: list[tuple[str, Structure]] = [
    ("Causal()", Causal()),
    ("Window.last(12)", Window.last(12)),
    ("Window(6, 6, dilation=3)", Window(6, 6, dilation=3)),
    ("Blocks(12, before=1) & Causal()", Blocks(12, before=1) & Causal()),
    ("Strided(8)", Strided(8)),
    ("Fixed(8, columns=2)", Fixed(8, 2)),
    ("Longformer(12, (0, 40))", Longformer(12, (0, 40))),
    ("BigBird(4, random=2)", BigBird(4, random=2)),
    ("PrefixLM(20)", PrefixLM(20)),
    ("Window(9, 0) | Global((0, 1), see=False)", Window(9, 0) | Global((0, 1), see=False)),
    ("Blocks(16) | Strided(16)", Blocks(16) | Strided(16)),
    ("Visible(a function)", Visible(own)),
    ("Causal() & Documents([0, 14, 40, 64])", Causal() & Documents(torch.tensor([0, 14, 40, 64]))),
    ("Window(20, 4) & Padding(mask)", Window(20, 4) & Padding(mask=REAL)),
    ("Causal() & Alibi(slopes)", Causal() & Alibi(torch.tensor([0.08]))),
    ("Strided(8) & Alibi(slopes)", Strided(8) & Alibi(torch.tensor([0.04]))),
]


def text(x: float, y: float, words: str, size: int, colour: str = INK, weight: int = 400) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" font-weight="{weight}">{escape(words)}</text>'


def shades(structure: Structure) -> torch.Tensor:
    """Steps from 0 (hidden) to ``SHADES`` (a weight of 1), ``[queries, keys]``."""
    found = weights(structure, LENGTH)
    seen = found.share[0, 0]
    strength = seen if found.log_weight is None else found.log_weight[0, 0].exp()
    return torch.where(seen > 0, (strength * SHADES).ceil().clamp(1, SHADES), 0).to(torch.int64)


def panel(structure: Structure, left: int, top: int) -> list[str]:
    """One panel: for each shade a path of rectangles, equal rows together."""
    side = LENGTH * CELL
    paths: dict[int, list[str]] = {}
    row = 0
    for line, same in groupby(map(tuple, shades(structure).tolist())):
        deep, column = len(list(same)), 0
        for shade, run in groupby(line):
            wide = len(list(run))
            if shade:
                corner = f"M{left + column * CELL} {top + row * CELL}"
                paths.setdefault(shade, []).append(f"{corner}h{wide * CELL}v{deep * CELL}h-{wide * CELL}z")
            column += wide
        row += deep
    out = [f'<rect x="{left}" y="{top}" width="{side}" height="{side}" fill="{EMPTY}"/>']
    for shade, parts in sorted(paths.items()):
        opacity = "" if shade == SHADES else f' fill-opacity="{0.08 + 0.92 * shade / SHADES:.2f}"'
        out.append(f'<path d="{"".join(parts)}" fill="{SEEN}"{opacity}/>')
    return out


def draw() -> str:
    side = LENGTH * CELL
    width = ACROSS * (side + GAP) + GAP
    out = [text(GAP, 30, "Who sees whom: queries from the top down, keys from left to right", 15, weight=600)]
    for i, (name, structure) in enumerate(GALLERY):
        left, top = GAP + i % ACROSS * (side + GAP), TOP + 28 + i // ACROSS * (side + 44)
        out += [text(left, top - 8, name, 10, QUIET), *panel(structure, left, top)]
    height = TOP + 28 + (len(GALLERY) + ACROSS - 1) // ACROSS * (side + 44)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        'font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">'
        "<title>Structures of attention: which keys each query sees</title>"
        f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>'
    )
    return "\n".join([head, *out, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw())
