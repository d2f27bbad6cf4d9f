"""Patterns over the layers of a model as text: ``softmax,elu-sum`` or ``7*mamba,softmax``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from mercer.errors import InvalidArgument

_ITEM = re.compile(r"(?:([1-9]\d{0,3})\*)?([^*,]+)")


def expand(text: str) -> tuple[str, ...]:
    """The names of a pattern, one a layer: separated by commas, ``N*NAME`` for N times in a row.

    Raises:
        InvalidArgument: it is not written like that.
    """
    names: list[str] = []
    for item in text.split(","):
        found = _ITEM.fullmatch(item.strip())
        if found is None:
            raise InvalidArgument(
                f"attention {text!r}: write names separated by commas, each with how often it stands there if more "
                "than once, as in 'softmax,elu-sum' or '7*mamba,softmax'."
            )
        names += [found[2].strip()] * int(found[1] or 1)
    return tuple(names)


def shorten(names: Sequence[str]) -> str:
    """The one way to write a pattern, which `expand` reads; the name alone where all are the same."""
    if len(set(names)) == 1:
        return names[0]
    runs = [(name, sum(1 for _ in run)) for name, run in groupby(names)]
    return ",".join(name if times == 1 else f"{times}*{name}" for name, times in runs)
