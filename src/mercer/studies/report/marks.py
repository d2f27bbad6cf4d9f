"""One colour, dash and symbol for each attention, the same in every figure and table of every page.

Every colour has a contrast of at least 3:1 against both the light and the dark background, and no meaning rests on
colour alone: normalisers differ by dash, even and odd orders by symbol, and every legend entry is a name.
"""

from __future__ import annotations

import re
from typing import NamedTuple

LIGHT_BACKGROUND, DARK_BACKGROUND = "#ffffff", "#14171c"

_SOFTMAX, _OTHER = "#7a8494", "#8f7a2f"
GUIDE = "#868686"
"""A line that joins different attentions, each of which is marked in its own colour."""
_KERNELS = {
    "exp": "#0f9488",
    "elu": "#b4690e",
    "relu": "#4f8f2f",
    "cosine": "#3f78c9",
    "dpfp": "#a8487f",
    "expfeatures": "#2e8aa6",
    "favor": "#3f78c9",
    "hyperbolic": "#8a5fd3",
    "trig": "#c2543f",
    "rfa": "#9a6b3f",
}
_WORDS = {
    "elu": "elu",
    "relu": "relu",
    "dpfp": "DPFP",
    "expfeatures": "exp features",
    "favor": "FAVOR+",
    "hyperbolic": "FAVOR+ hyperbolic",
    "trig": "Trigonometric",
    "rfa": "RFA",
}
_MIXERS = {
    "mamba": ("Mamba", "#c2543f"),
    "mamba2": ("Mamba-2", "#d25f2c"),
    "retnet": ("RetNet", "#3f78c9"),
    "gla": ("GLA", "#2e8aa6"),
    "deltanet": ("DeltaNet", "#4f8f2f"),
    "gated-deltanet": ("Gated DeltaNet", "#0f9488"),
    "rwkv4": ("RWKV-4", "#a8487f"),
    "rwkv5": ("RWKV-5", "#b04fae"),
    "rwkv6": ("RWKV-6", "#8a5fd3"),
    "rwkv7": ("RWKV-7", "#cc4a74"),
    "s4": ("S4", "#8f7a2f"),
    "s4d": ("S4D", "#b4690e"),
    "rg-lru": ("RG-LRU", "#9a6b3f"),
}
"""Of each mixer its word and its colour."""
_ORDERS = ("#b4690e", "#d25f2c", "#cc4a74", "#b04fae", "#8a5fd3", "#5f76d8", "#2f86b8")
_DASHES = {"sum": "dash", "l2": "solid", "rms": "dot", "identity": "longdash"}


class Mark(NamedTuple):
    """How an attention is drawn."""

    colour: str
    dash: str
    symbol: str
    width: float


def _parts(name: str) -> tuple[str, str, str, str, str]:
    """Kernel, number, ``"-signed"`` or nothing, normaliser and what follows a plus sign."""
    base, _, extra = name.partition("+")
    base = {"softmax": "exp-sum", "linear": "elu-sum"}.get(base, base)
    found = re.fullmatch(r"([a-z]+)(\d*)(-signed)?-([a-z0-9]+)", base)
    kernel, number, signed, normalizer = found.groups() if found else (base, "", None, "")
    return kernel, number, signed or "", normalizer, extra


def mark(name: str) -> Mark:
    """The mark of an attention's or a mixer's name, such as ``"taylor4-l2"`` or ``"exp-l2+gain"``; of a pattern, its
    last one's that is not softmax."""
    if "," in name:
        parts = [part.rpartition("*")[2] for part in name.split(",")]
        return mark(next((part for part in reversed(parts) if part != "softmax"), "softmax"))._replace(dash="longdash")
    if "@" in name:
        return mark(name.rpartition(":")[2])._replace(dash="longdash")
    if name in _MIXERS:
        return Mark(_MIXERS[name][1], "solid", "hexagon", 2.0)
    kernel, number, _, normalizer, extra = _parts(name)
    if (kernel, normalizer) == ("exp", "sum"):
        return Mark(_SOFTMAX, "solid", "square", 3.0)
    dash = "dashdot" if extra else _DASHES.get(normalizer, "solid")
    if number and kernel in ("taylor", "power"):
        order = int(number)
        return Mark(_ORDERS[min(order, len(_ORDERS) - 1)], dash, "diamond-open" if order % 2 else "circle", 2.0)
    return Mark(_KERNELS.get(kernel, _OTHER), dash, "triangle-up", 2.0)


def label(name: str) -> str:
    """An attention's name in words: ``"taylor4-l2"`` becomes ``"Taylor 4 · L2"``.

    A pattern over layers, ``"softmax,elu-sum"``, becomes ``"softmax, then elu · sum"``, ``"7*mamba,softmax"`` ``"7
    Mamba, then softmax"``, and ``"exp@64:taylor2-sum"`` ``"Exp within 64, Taylor 2 · sum beyond"``.
    """
    mixed = re.fullmatch(r"([^,@]+)@(\d+):([^,]+)", name)
    if mixed:
        return f"{label(f'{mixed[1]}-identity').partition(' · ')[0]} within {mixed[2]}, {label(mixed[3])} beyond"
    if "," in name:
        return ", then ".join(label(part) for part in name.split(","))
    times, _, single = name.rpartition("*")
    if times:
        return f"{times} {label(single)}"
    if name in _MIXERS:
        return _MIXERS[name][0]
    kernel, number, signed, normalizer, extra = _parts(name)
    if (kernel, normalizer) == ("exp", "sum"):
        text = "softmax"
    else:
        word = _WORDS.get(kernel, kernel.capitalize())
        ending = {"l2": "L2", "rms": "RMS", "identity": "no normaliser"}.get(normalizer, normalizer)
        text = f"{word} {number}".rstrip() + (" signed" if signed else "") + (f" · {ending}" if ending else "")
    return f"{text} + {extra}" if extra else text


def numbered(place: int) -> Mark:
    """The mark of the ``place``-th of several lines that are told apart by a number or by being variants."""
    symbols = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")
    dashes = ("solid", "dash", "dashdot", "longdash", "dot")
    colour = _ORDERS[(3 * place + 6) % len(_ORDERS)]
    return Mark(colour, dashes[place % len(dashes)], symbols[place % len(symbols)], 2.0)


def contrast(first: str, second: str) -> float:
    """The contrast ratio of two ``#rrggbb`` colours by WCAG 2: 1 (equal) to 21 (black on white)."""

    def luminance(colour: str) -> float:
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((luminance(first), luminance(second)))
    return (lighter + 0.05) / (darker + 0.05)


def all_colours() -> tuple[str, ...]:
    """Every colour a mark can have."""
    return (_SOFTMAX, _OTHER, GUIDE, *_KERNELS.values(), *(colour for _, colour in _MIXERS.values()), *_ORDERS)
