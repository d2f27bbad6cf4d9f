"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from mercer.studies.records.common import Interval

MISSING = "–"


def decimal(value: float | None, digits: int = 3, sign: bool = False) -> str:
    """Fixed decimals with a true minus sign, and none where they are all zero; a dash for a missing number."""
    if value is None:
        return MISSING
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    return text.replace("-", "\u2212") if float(text) else text.lstrip("+-")


def interval(value: Interval | None, digits: int = 3, sign: bool = False) -> str:
    """``mean ± half width``, or the mean alone where there is one sample."""
    if value is None:
        return MISSING
    mean = decimal(value.mean, digits, sign)
    if value.low is None or value.high is None:
        return mean
    return f"{mean} ± {decimal((value.high - value.low) / 2, digits)}"


def bounds(value: Interval | None) -> str:
    """``mean [low, high]`` in three digits, for intervals that need not be symmetric."""
    if value is None:
        return MISSING
    if value.low is None or value.high is None:
        return f"{value.mean:.3g}"
    return f"{value.mean:.3g} [{value.low:.3g}, {value.high:.3g}]"


def short(value: float | None, unit: str = "") -> str:
    """Three significant digits with k, M, G: 1 234 567 becomes 1.23M, or with a unit 1.23 MB."""
    gap = " " if unit else ""
    if value is None:
        return MISSING
    for factor, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * factor:
            return f"{value / factor:.3g}{gap}{suffix}{unit}"
    return f"{value:.3g}{gap}{unit}"


def size(count: float | None) -> str:
    """Bytes with binary units."""
    if count is None:
        return MISSING
    for factor, suffix in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= factor:
            return f"{count / factor:.3g} {suffix}"
    return f"{count:.0f} B"


def duration(seconds: float | None) -> str:
    """Seconds as ``42 s``, ``9 min 3 s`` or ``2 h 5 min``; below a second in ms, µs or ns."""
    if seconds is None:
        return MISSING
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    for factor, suffix in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {suffix}"
    return f"{seconds * 1e9:.3g} ns"


def day(stamp: str) -> str:
    """An ISO time as a date and a minute, in UTC."""
    moment = datetime.fromisoformat(stamp)
    if moment.tzinfo is not None:
        moment = moment.astimezone(UTC)
    return f"{moment.day} {moment:%B %Y, %H:%M} UTC"


def ticks(values: Iterable[float], base: int, words: Callable[[float], str]) -> dict[str, object]:
    """A logarithmic axis marked at the powers of ``base`` around the values, each in words.

    One that spans less than two powers of ten is marked at 1, 2 and 5 too.
    """
    known = [value for value in values if value > 0]
    if not known:
        return {}
    first, last = math.floor(math.log(min(known), base) + 1e-9), math.ceil(math.log(max(known), base) - 1e-9)
    marks = [float(base) ** power for power in range(first, max(last, first + 1) + 1)]
    if base == 10 and max(known) < 100 * min(known):
        fine = [step * mark for mark in marks for step in (1, 2, 5)]
        marks = [mark for mark in fine if min(known) / 2 <= mark <= max(known) * 2]
    return {"tickvals": marks, "ticktext": [words(value) for value in marks], "dtick": None}
