"""What :func:`mercer.advise` found, as a value to read, print and write down."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mercer.planning import duration

QUALITY = (
    "These are costs and say nothing of quality: mercer.approximation_error measures how far a kernel is from softmax, "
    "and mercer study orders how well a model learns with it."
)


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
        fixed: whether the state has the same size at any length.
        crossings: against softmax; None for softmax itself and for whatever else keeps a cache that grows.
    """

    attention: str
    reading: Choice
    decode: Choice
    state_bytes: int
    fixed: bool
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

    @property
    def least_reading(self) -> Option:
        """What reads the context, or trains on it, in the least time: an option, or softmax."""
        return min((*self.options, self.softmax), key=lambda option: option.reading.seconds)

    @property
    def least_decode(self) -> Option:
        """What writes a token after the context in the least time."""
        return min((*self.options, self.softmax), key=lambda option: option.decode.seconds)

    @property
    def least_memory(self) -> Option:
        """Whose state after the context is smallest."""
        return min((*self.options, self.softmax), key=lambda option: option.state_bytes)

    def recommendations(self) -> dict[str, str]:
        """A sentence for each goal: ``reading`` (or training), ``decode`` and ``memory``."""
        reading, decode, memory, softmax = self.least_reading, self.least_decode, self.least_memory, self.softmax
        verb = "train on" if self.training else "read"
        return {
            "reading": f"Least time to {verb} {self.context:,} tokens: {reading.attention}, "
            f"{duration(reading.reading.seconds)} ({reading.reading}); softmax {duration(softmax.reading.seconds)}.",
            "decode": f"Least time for a token after them: {decode.attention}, {duration(decode.decode.seconds)} "
            f"({decode.decode}); softmax {duration(softmax.decode.seconds)}.",
            "memory": f"Least memory: {memory.attention}, a state of {size(memory.state_bytes)}; "
            f"softmax's cache {size(self.cache_bytes)}.",
        }

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values, the recommendations included."""
        return asdict(self) | {"recommendations": self.recommendations(), "quality": QUALITY}

    def __str__(self) -> str:
        heads = f"{self.heads} heads" + (f" on {self.kv_heads} key heads" if self.kv_heads != self.heads else "")
        width = f"{self.dim}" if self.dim == self.value_dim else f"{self.dim}, values of {self.value_dim}"
        about = f"{heads} of {width}, {self.context:,} tokens, batch {self.batch}, {self.dtype}; times as of "
        rows = [
            ("", "training" if self.training else "reading", "", "a token", "", "state", "from a context of: state",
             "token", "training" if self.training else "reading"),
            *(_row(option) for option in self.options),
        ]  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([about + self.machine, *table, *self.recommendations().values(), QUALITY])


def _row(option: Option) -> tuple[str, ...]:
    found = option.crossings
    from_on = ("",) * 3 if found is None else tuple(map(_length, (found.state, found.decode, found.reading)))
    return (
        option.attention,
        duration(option.reading.seconds),
        str(option.reading),
        duration(option.decode.seconds),
        str(option.decode),
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
