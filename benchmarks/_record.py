"""The JSON that `linear_attention` writes, as types: `Record.model_json_schema()` is its schema.

Times are seconds, rates FLOP or bytes a second. "Spread" is a median with its quartiles.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from benchmarks._clock import Spread
from benchmarks._machine import Limits
from benchmarks._work import Shape

NAME: Literal["mercer.benchmarks.linear_attention/1"] = "mercer.benchmarks.linear_attention/1"
PACKAGES = (
    "performer-pytorch",
    "x-transformers",
    "linear-attention-transformer",
    "fla-core",
    "einops",
)


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Rates(Part):
    """The limits of the machine, measured before the first and after the last case; the better of both."""

    products: dict[str, dict[str, float]]
    copy_bytes: float
    read_bytes: float

    @staticmethod
    def of(limits: Limits) -> Rates:
        return Rates(products=limits.products, copy_bytes=limits.copy, read_bytes=limits.read)


class Quartiles(Part):
    median: float
    low: float
    high: float

    @staticmethod
    def of(spread: Spread) -> Quartiles:
        return Quartiles(median=spread.median, low=spread.low, high=spread.high)


class Row(Part):
    """One contestant in one case: either timed, or left out with the reason.

    Attributes:
        error: largest error against the formula in float64, relative to the largest entry, on a short sequence.
        differs: what it is known to compute otherwise; empty where it has to agree.
        plan: for our own, what the library says it does.
        times: seconds of every call, in the order of the rounds.
        ratio: its time over ours, round by round; above 1 we are faster.
    """

    name: str
    skipped: str = ""
    error: float | None = None
    differs: str = ""
    plan: str = ""
    times: list[float] = []
    seconds: Quartiles | None = None
    times_limit: float | None = None
    ratio: Quartiles | None = None


class Case(Part):
    """A task on one shape. ``flops`` and ``bytes`` cannot be done without; ``limit_seconds`` is their time at best."""

    task: str
    batch: int
    heads: int
    length: int
    dim: int
    dtype: str
    backward: bool
    flops: int
    bytes: int
    limit_seconds: float
    rows: list[Row]

    @property
    def shape(self) -> Shape:
        return Shape(self.batch, self.heads, self.length, self.dim)

    def limited(self, limits: Limits) -> Case:
        """The same with the limit, and every ratio to it, from these rates."""
        least = limits.least_seconds(self.flops, self.bytes, self.dtype)
        rows = [
            row.model_copy(update={"times_limit": row.seconds.median / least if row.seconds else None})
            for row in self.rows
        ]
        return self.model_copy(update={"limit_seconds": least, "rows": rows})


class Record(Part):
    """Everything of one run."""

    kind: Literal["mercer.benchmarks.linear_attention/1"] = NAME
    environment: dict[str, Any]
    packages: dict[str, str]
    missing: dict[str, str]
    rounds: int
    limits: Rates
    cases: list[Case]


def packages() -> dict[str, str]:
    """Versions of the peers that are installed."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
