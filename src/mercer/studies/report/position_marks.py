"""One name, colour and dash for each position scheme and way to read, the same in every figure and table."""

from __future__ import annotations

from mercer.studies.report.marks import Mark

_COLOURS = {
    "none": "#7a8494",
    "sinusoidal": "#b4690e",
    "learned": "#a8487f",
    "rotary": "#c2543f",
    "rotary+linear": "#cc4a74",
    "rotary+ntk": "#8a5fd3",
    "rotary+dynamic": "#3f78c9",
    "rotary+yarn": "#2e8aa6",
    "rotary+window": "#8f7a2f",
    "alibi": "#0f9488",
    "t5": "#4f8f2f",
}
_DASHES = {"": "solid", "linear": "dash", "ntk": "dashdot", "dynamic": "dashdot", "yarn": "dash", "window": "longdash",
           "restart": "dot"}  # fmt: skip
_SCHEMES = {"none": "no positions", "alibi": "ALiBi", "t5": "T5 bias"}
_READINGS = {
    "linear": "linear scaling",
    "ntk": "NTK scaling",
    "dynamic": "dynamic NTK",
    "yarn": "YaRN",
    "window": "window",
    "restart": "starting over",
}


def position_label(name: str) -> str:
    """An arm's name in words: ``"rotary+yarn"`` becomes ``"rotary · YaRN"``."""
    position, _, rest = name.partition("+")
    reading, _, factor = rest.partition("=")
    text = _SCHEMES.get(position, position)
    if reading:
        text += f" · {_READINGS.get(reading, reading)}"
    return f"{text} × {factor}" if factor else text


def position_mark(name: str) -> Mark:
    """How an arm is drawn. Ways to read without a colour of their own have that of the scheme and another dash."""
    position, _, rest = name.partition("+")
    reading, _, factor = rest.partition("=")
    colour = _COLOURS.get(f"{position}+{reading}", _COLOURS.get(position, _COLOURS["none"]))
    dash = "dot" if factor else _DASHES.get(reading, "solid")
    return Mark(colour, dash, "square" if reading == "restart" else "circle", 1.5 if reading == "restart" else 2.2)


def position_colours() -> tuple[str, ...]:
    """Every colour a mark can have."""
    return tuple(_COLOURS.values())
