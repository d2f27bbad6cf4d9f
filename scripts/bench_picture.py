"""Draw a record of `benchmarks linear_attention`: `python scripts/bench_picture.py FILE [--task NAME] [--out FILE]`.

Four panels: float32 and bfloat16, forward and with backward; time against length, both in logarithms, one line a
contestant, over the region below the machine's measured limit. One SVG, readable on light and dark pages.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

PICTURE = Path(__file__).parent.parent / "docs" / "images"
WIDTH, PANEL, TALL, LEFT, TOP, GAP = 960, 380, 230, 70, 84, 96
INK, QUIET, LINE = "#1f2430", "#667085", "#d9dee7"
OURS = ("#0f766e", "#14a39a", "#7cc8c1", "#b5d8d4")
THEIRS = ("#c2410c", "#7c3aed", "#1d4ed8", "#be185d", "#64748b", "#a16207")
Case = dict[str, Any]


def text(
    x: float, y: float, words: str, size: int = 12, colour: str = INK, anchor: str = "start", weight: int = 400
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{colour}" font-weight="{weight}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str = LINE, width: float = 1) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'


def milliseconds(value: float) -> str:
    return f"{value:g} ms" if value < 1000 else f"{value / 1000:g} s"


def colours(cases: Sequence[Case]) -> dict[str, str]:
    """One colour a contestant that was timed anywhere: greens for ours, others for the rest."""
    names = list(dict.fromkeys(row["name"] for case in cases for row in case["rows"] if row["seconds"]))
    ours, theirs = ([n for n in names if n.startswith("ours") == mine] for mine in (True, False))
    chosen = {n: OURS[min(i, len(OURS) - 1)] for i, n in enumerate(ours)}
    return chosen | {n: THEIRS[i % len(THEIRS)] for i, n in enumerate(theirs)}


def panel(
    cases: Sequence[Case], title: str, left: float, top: float, low: float, high: float, ink: dict[str, str]
) -> list[str]:
    """One panel; ``low`` and ``high`` are powers of ten of a millisecond."""
    lengths = sorted({case["length"] for case in cases})
    first, last = math.log2(lengths[0]), math.log2(lengths[-1])
    if first == last:  # a single length stands in the middle
        first, last = first - 1, last + 1

    def x(length: float) -> float:
        return left + (math.log2(length) - first) / (last - first) * PANEL

    def y(seconds: float) -> float:
        return top + TALL - (math.log10(1e3 * seconds) - low) / (high - low) * TALL

    out = [text(left, top - 12, title, 13, weight=600)]
    least = [(x(c["length"]), y(c["limit_seconds"])) for c in cases]
    if len(least) == 1:
        least = [(left, least[0][1]), (left + PANEL, least[0][1])]
    floor = f"{least[-1][0]:.1f},{top + TALL} {least[0][0]:.1f},{top + TALL}"
    out.append(f'<polygon points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in least)} {floor}" fill="#eef1f6"/>')
    for power in range(math.ceil(low), math.floor(high) + 1):
        at = y(10**power / 1e3)
        out += [line(left, at, left + PANEL, at), text(left - 8, at + 4, milliseconds(10**power), 11, QUIET, "end")]
    out += [text(x(n), top + TALL + 18, f"{n:,}", 11, QUIET, "middle") for n in lengths]
    for name, colour in ink.items():
        points = [
            (x(case["length"]), y(row["seconds"]["median"]))
            for case in cases
            for row in case["rows"]
            if row["name"] == name and row["seconds"]
        ]
        if not points:
            continue
        width = 2.6 if name == "ours" else 1.5
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{width + 0.6:.1f}" fill="{colour}"/>' for a, b in points]
    return out


def draw(record: dict[str, Any], task: str, group: tuple[int, int, int]) -> str:
    """The picture of one task on shapes of one batch, number of heads and head dimension."""
    batch, heads, dim = group
    cases = [c for c in record["cases"] if c["task"] == task and (c["batch"], c["heads"], c["dim"]) == group]
    cases.sort(key=lambda case: case["length"])
    ink = colours(cases)
    times = [1e3 * row["seconds"]["median"] for c in cases for row in c["rows"] if row["seconds"]]
    low = math.log10(min(1e3 * c["limit_seconds"] for c in cases)) - 0.2
    high = math.log10(max(times)) + 0.1
    threads = record["environment"]["threads"]
    out = [
        text(LEFT, 30, f"Causal {task} attention, batch {batch}, {heads} heads of {dim}", 17, weight=600),
        text(LEFT, 50, f"Median time of one call against the length; {threads} threads", 12, QUIET),
    ]
    kinds = [(d, b) for d in ("float32", "bfloat16") for b in (False, True)]
    kinds = [k for k in kinds if any((c["dtype"], c["backward"]) == k for c in cases)]
    bottom = TOP
    for i, (dtype, backward) in enumerate(kinds):
        left, top = LEFT + (i % 2) * (PANEL + GAP), TOP + (i // 2) * (TALL + 66)
        title = f"{dtype}, {'forward and backward' if backward else 'forward'}"
        some = [c for c in cases if (c["dtype"], c["backward"]) == (dtype, backward)]
        out += panel(some, title, left, top, low, high, ink)
        bottom = top + TALL + 44
    entries = [*ink.items(), ("below the measured limit of the machine", "#c9d1de")]
    for i, (name, colour) in enumerate(entries):
        left, at = LEFT + (i % 2) * (PANEL + GAP), bottom + 16 + 19 * (i // 2)
        out += [line(left, at - 4, left + 26, at - 4, colour, 3), text(left + 34, at, name)]
    height = bottom + 30 + 19 * ((len(entries) + 1) // 2)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" '
        'font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">'
        f"<title>Time of causal {task} attention against length, beside other libraries</title>"
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#ffffff"/>'
    )
    return "\n".join([head, *out, "</svg>"]) + "\n"


def main(arguments: list[str], show: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(prog="bench_picture", description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("--task", help="default: the record's first")
    parser.add_argument("--out", type=Path, help="default: docs/images/bench-TASK.svg")
    options = parser.parse_args(arguments)
    record = json.loads(options.record.read_text())
    task = options.task or record["cases"][0]["task"]
    cases = [c for c in record["cases"] if c["task"] == task]
    if not cases:
        raise SystemExit(
            f"{options.record} has no task {task!r}; it has {sorted({c['task'] for c in record['cases']})}"
        )
    groups = [(c["batch"], c["heads"], c["dim"]) for c in cases]
    longest = max(set(groups), key=groups.count)
    target = options.out or PICTURE / f"bench-{task}.svg"
    target.write_text(draw(record, task, longest))
    show(str(target))


if __name__ == "__main__":
    main(sys.argv[1:])
