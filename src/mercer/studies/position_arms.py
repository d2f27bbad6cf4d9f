"""The position schemes a study compares, by name, and the ways to read beyond the trained length."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import get_args

from mercer.errors import InvalidArgument
from mercer.studies.records.positions import PositionsArm, Reading

POSITIONS = ("none", "sinusoidal", "learned", "rotary", "alibi", "t5")
"""What a model can be trained with, as its configuration calls it."""
SCALINGS = ("linear", "ntk", "dynamic", "yarn")
READINGS: tuple[Reading, ...] = tuple(reading for reading in get_args(Reading) if reading != "plain")


def parse_position_arm(name: str, extension: float) -> PositionsArm:
    """An arm from ``"alibi"``, or from ``"rotary+yarn"``: a model trained with rotary positions that reads with YaRN.

    A scaling's factor may follow, as in ``"rotary+yarn=4"``. Without one it is ``extension``, the evaluated length over
    the trained one; dynamic NTK's is 1, with which its base always fits the length read.

    Raises:
        InvalidArgument: an unknown scheme or reading, or two that do not fit together.
    """
    position, plus, rest = name.partition("+")
    if position not in POSITIONS:
        raise InvalidArgument(f"positions {name!r} are unknown; use {', '.join(POSITIONS[:-1])} or {POSITIONS[-1]}.")
    bounded = position == "learned"
    if not plus:
        return PositionsArm(name=name, position=position, bounded=bounded)
    word, equals, number = rest.partition("=")
    reading = next((r for r in READINGS if r == word), None)
    if reading is None:
        raise InvalidArgument(
            f"positions {name!r}: what follows the plus sign must be {', '.join(READINGS[:-1])} or {READINGS[-1]}."
        )
    if equals and reading not in SCALINGS:
        raise InvalidArgument(f"positions {name!r}: only a scaling has a factor, such as 'rotary+yarn=4'.")
    if reading in SCALINGS and position != "rotary":
        raise InvalidArgument(
            f"positions {name!r}: {reading} scales the angles of rotary positions; use rotary+{rest}."
        )
    if reading == "window" and bounded:
        raise InvalidArgument(
            f"positions {name!r}: a window does not give learned positions any beyond their table; use learned+restart."
        )
    factor = None
    if reading in SCALINGS:
        factor = _factor(name, number) if equals else 1.0 if reading == "dynamic" else float(extension)
    return PositionsArm(name=name, position=position, reading=reading, factor=factor, bounded=False)


def _factor(name: str, number: str) -> float:
    value = float(number) if re.fullmatch(r"\d+\.?\d*", number) else math.nan
    if not value >= 1:
        raise InvalidArgument(f"positions {name!r}: the factor must be a number of at least 1, as in 'rotary+yarn=4'.")
    return value


def parse_position_arms(names: Iterable[str], extension: float) -> list[PositionsArm]:
    """Arms from names, each once, in the order given; after them the restart of every scheme among them, which all is
    measured against."""
    arms: dict[str, PositionsArm] = {}
    for name in names:
        arm = parse_position_arm(name, extension)
        arms.setdefault(arm.name, arm)
    if not arms:
        raise InvalidArgument("a study needs at least one position scheme.")
    for position in dict.fromkeys(arm.position for arm in list(arms.values())):
        restart = parse_position_arm(f"{position}+restart", extension)
        arms.setdefault(restart.name, restart)
    return list(arms.values())
