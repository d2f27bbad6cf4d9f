"""Draw the README's picture from a study's JSON: `python scripts/picture.py docs/results/orders.json`.

Left, the profiles f of the kernels on the scale of their score; right, the held-out loss of the same small language
model under each attention of the study. One SVG, readable on light and dark pages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from mercer.core.kernels import Exp, Kernel, Taylor
from mercer.studies.records.files import read_record
from mercer.studies.records.orders import Arm, OrdersRecord

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "orders.svg"
WIDTH, HEIGHT, TOP, BOTTOM = 960, 400, 56, 348
INK, QUIET, LINE = "#1f2430", "#667085", "#d9dee7"
COLOURS = {"exp": "#1f2430", "even": "#0f766e", "odd": "#c2410c", "linear": "#7c3aed"}


def text(
    x: float, y: float, words: str, size: int = 13, colour: str = INK, anchor: str = "start", weight: int = 400
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{colour}" font-weight="{weight}">{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str = LINE, width: float = 1, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {place} stroke="{colour}" stroke-width="{width}"{dashes}/>'


def profiles() -> list[str]:
    """The kernels on scores from -4 to 3."""
    left, right, low, high = 56, 430, -2.0, 8.0

    def x(score: float) -> float:
        return left + (score + 4) / 7 * (right - left)

    def y(value: float) -> float:
        return BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP)

    out = [text(left, 30, "A kernel is a profile of the score", 16, weight=600)]
    for tick in range(-2, 9, 2):
        out += [
            line(left, y(tick), right, y(tick), QUIET if tick == 0 else LINE),
            text(left - 8, y(tick) + 4, str(tick), 12, QUIET, "end"),
        ]
    for tick in range(-4, 4):
        out.append(text(x(tick), BOTTOM + 20, str(tick), 12, QUIET, "middle"))
    out.append(text((left + right) / 2, BOTTOM + 40, "scaled score q.k", 13, QUIET, "middle"))
    kernels: list[tuple[Kernel, str, str]] = [
        (Taylor(p), f"order {p}", COLOURS["odd" if p % 2 else "even"]) for p in (1, 2, 3, 4)
    ]
    scores = torch.linspace(-4, 3, 281, dtype=torch.float64)
    for kernel, label, colour in [*kernels, (Exp(), "exp", COLOURS["exp"])]:
        values = kernel.profile(scores).tolist()
        inside = [(x(s), y(v)) for s, v in zip(scores.tolist(), values, strict=True) if low <= v <= high]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in inside)
        dash = {"order 1": "2 4", "order 2": "2 4", "order 3": "7 4", "order 4": "7 4"}.get(label, "")
        out.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.2" stroke-dasharray="{dash}"/>'
        )
    for i, (label, colour, dash) in enumerate(
        [
            ("exp (softmax)", COLOURS["exp"], ""),
            ("Taylor 2, 4: positive", COLOURS["even"], "7 4"),
            ("Taylor 1, 3: negative below", COLOURS["odd"], "7 4"),
        ]
    ):
        out += [
            line(left + 12, 74 + 20 * i, left + 40, 74 + 20 * i, colour, 2.2, dash),
            text(left + 48, 78 + 20 * i, label),
        ]
    return out


def losses(record: OrdersRecord) -> list[str]:
    """Held-out loss of every arm, best first. Without bars: what varies between blocks of text cancels in
    comparisons.
    """
    left, right = 650, 930
    arms: dict[str, Arm] = {arm.name: arm for arm in record.arms}
    rows = sorted(((s.loss, s.arm) for s in record.summaries if s.loss is not None), key=lambda row: row[0].mean)
    low, high = rows[0][0].mean - 0.05, rows[-1][0].mean + 0.05

    def x(loss: float) -> float:
        return left + (loss - low) / (high - low) * (right - left)

    steps = record.trials[0].steps
    out = [text(500, 30, f"A small language model after {steps} steps", 16, weight=600)]
    step = (BOTTOM - TOP) / max(len(rows), 1)
    for i, (loss, name) in enumerate(rows):
        arm, at = arms[name], TOP + step * (i + 0.5)
        colour = COLOURS[arm.parity or ("linear" if arm.family == "linear" else "exp")]
        out += [line(left, at, right, at), text(left - 12, at + 4, name, 13, colour, "end")]
        out.append(f'<circle cx="{x(loss.mean):.1f}" cy="{at:.1f}" r="5.5" fill="{colour}"/>')
        out.append(text(x(loss.mean), at - 9, f"{loss.mean:.2f}", 11, QUIET, "middle"))
    out.append(
        text((left + right) / 2, BOTTOM + 40, "held-out loss, nats per byte (lower is better)", 13, QUIET, "middle")
    )
    return out


def draw(record: OrdersRecord) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        'font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">'
        "<title>Kernel profiles, and the loss of one language model under each attention</title>"
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#ffffff"/>'
    )
    return "\n".join([head, *profiles(), *losses(record), "</svg>"]) + "\n"


def main(arguments: list[str], show: Callable[[str], None] = print) -> None:
    record = read_record(Path(arguments[0]))
    assert isinstance(record, OrdersRecord), "the picture is drawn from the record of mercer study orders"
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(draw(record))
    show(str(PICTURE))


if __name__ == "__main__":
    main(sys.argv[1:])
