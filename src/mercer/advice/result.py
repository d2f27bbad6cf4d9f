"""What :func:`mercer.advise` found, as a value to read, print and write down."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from mercer.planning import duration

QUALITY = (
    "These are costs and say nothing of quality: mercer.approximation_error measures how far a kernel is from softmax, "
    "and mercer study orders how well a model learns with it."
)
WIDTH, LONGEST_NAME = 100, 24
"""Columns that the printed advice takes at most, and that a name may take beside its numbers."""


@dataclass(frozen=True)
class Choice:
    """How a call would be computed, and how long it should take.

    Attributes:
        form, path, backend: as in :class:`~mercer.planning.Plan`.
        seconds: of the whole call.
    """

    form: str
    path: str
    backend: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.form}, {self.path}, {self.backend}"


@dataclass(frozen=True)
class Crossings:
    """Least context lengths from which on a kernel costs less than softmax, up to 16,777,216 tokens; None: never.

    Attributes:
        state: its state takes less memory than the key/value cache.
        decode: a token is written in less time.
        reading: the context is read (or trained on) in less time.
    """

    state: int | None
    decode: int | None
    reading: int | None


@dataclass(frozen=True)
class Option:
    """One attention at the given sizes.

    Attributes:
        attention: its name.
        reading: of the whole context, leaving a state; in training forward and backward, without a state.
        decode: of one more token after the context.
        state_bytes: of the state after the context.
        fixed: whether the state has the same size at any greater length: a state of features, or a window's cache.
        grows_because: why it is no state of features, and a cache of keys and values is kept; empty if it is one.
        crossings: against softmax; None for softmax itself and for whatever else keeps a cache that grows.
    """

    attention: str
    reading: Choice
    decode: Choice
    state_bytes: int
    fixed: bool
    grows_because: str
    crossings: Crossings | None


@dataclass(frozen=True)
class Advice:
    """Costs of several attentions at one size, by a model of the machine.

    Attributes:
        dim, value_dim, heads, kv_heads, context, dtype, batch, training: what was asked for.
        machine: whose numbers were used.
        cache_bytes: of softmax's keys and values after the context.
        softmax: what the others are compared with.
        options: the attentions asked for, in their order.
        structure: which of the tokens before it a token sees, by name.
    """

    dim: int
    value_dim: int
    heads: int
    kv_heads: int
    context: int
    dtype: str
    batch: int
    training: bool
    machine: str
    cache_bytes: int
    softmax: Option
    options: tuple[Option, ...]
    structure: str = "causal"

    @property
    def least_reading(self) -> Option:
        """What reads the context, or trains on it, in the least time: softmax, or an option that takes less."""
        return min((self.softmax, *self.options), key=lambda option: option.reading.seconds)

    @property
    def least_decode(self) -> Option:
        """What writes a token after the context in the least time: softmax, or an option that takes less."""
        return min((self.softmax, *self.options), key=lambda option: option.decode.seconds)

    @property
    def least_memory(self) -> Option:
        """Whose state after the context is smallest: softmax, or an option whose is smaller."""
        return min((self.softmax, *self.options), key=lambda option: option.state_bytes)

    def recommendations(self) -> dict[str, str]:
        """A sentence for each goal: ``reading`` (or training), ``decode`` and ``memory``. Those that come to the same
        in three digits are named together, softmax first.
        """
        verb = "train on" if self.training else "read"
        return {
            "reading": self._sentence(
                f"Least time to {verb} {self.context:,} tokens",
                self.least_reading,
                lambda option: duration(option.reading.seconds),
                lambda option: f" ({option.reading})",
            ),
            "decode": self._sentence(
                "Least time for a token after them",
                self.least_decode,
                lambda option: duration(option.decode.seconds),
                lambda option: f" ({option.decode})",
            ),
            "memory": self._sentence(
                "Least memory", self.least_memory, lambda option: size(option.state_bytes), lambda _option: ""
            ),
        }

    def _sentence(self, goal: str, least: Option, cost: Callable[[Option], str], how: Callable[[Option], str]) -> str:
        alike = {option.attention: option for option in (self.softmax, *self.options) if cost(option) == cost(least)}
        *others, last = alike
        names = f"{', '.join(others)} and {last} alike" if others else last
        ways = {how(option) for option in alike.values()}
        found = f"{goal}: {names}, {cost(least)}{ways.pop() if len(ways) == 1 else ''}"
        return f"{found}." if "softmax" in alike else f"{found}; softmax {cost(self.softmax)}."

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values, the recommendations included."""
        return asdict(self) | {"recommendations": self.recommendations(), "quality": QUALITY}

    def __str__(self) -> str:
        heads = f"{self.heads} heads" + (f" on {self.kv_heads} key heads" if self.kv_heads != self.heads else "")
        width = f"{self.dim}" if self.dim == self.value_dim else f"{self.dim}, values of {self.value_dim}"
        under = "" if self.structure == "causal" else f" under {self.structure}"
        about = f"{heads} of {width}, {self.context:,} tokens{under}, batch {self.batch}, {self.dtype}; times as of "
        phase = "training" if self.training else "reading"
        rows = [
            ("", "", "", "", "less than softmax from a context of", "", ""),
            ("", phase, "a token", "state", "state", "a token", phase),
            *(_row(option) for option in self.options),
        ]
        # The first line's words stand over three columns, and a name that is long has a line of its own.
        widths = [max(len(row[i]) for row in rows[1:] if i or len(row[i]) <= LONGEST_NAME) for i in range(len(rows[0]))]
        lines = [_line(row, widths) for row in rows]
        for place, option in enumerate(self.options, 2):
            lines[place] += f"\n  {phase}: {option.reading}; a token: {option.decode}"
            if option.grows_because and option is not self.softmax:
                lines[place] += "\n" + _wrapped(f"keeps a cache, since {option.grows_because}", "  ")
        said = (about + self.machine, *self.recommendations().values(), QUALITY)
        first, *last = (_wrapped(text) for text in said)
        return "\n".join([first, *lines, *last])


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    name, *rest = row
    above = ""
    if len(name) > LONGEST_NAME:
        above, name = _wrapped(name) + "\n", ""
    cells = "  ".join(text.ljust(width) for text, width in zip((name, *rest), widths, strict=True))
    return above + cells.rstrip()


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)


def _row(option: Option) -> tuple[str, ...]:
    found = option.crossings
    from_on = ("",) * 3 if found is None else tuple(map(_length, (found.state, found.decode, found.reading)))
    return (
        option.attention,
        duration(option.reading.seconds),
        duration(option.decode.seconds),
        size(option.state_bytes) + ("" if option.fixed else ", growing"),
        *from_on,
    )


def _length(value: int | None) -> str:
    return "never" if value is None else "always" if value == 1 else f"{value:,}"


def size(count: int) -> str:
    """Bytes in three digits: 640 B, 65.5 kB, 16.8 MB."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"
