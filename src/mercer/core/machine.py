"""What a machine takes for the ways in which a call can be computed: few numbers, measured once, kept as JSON.

A way is a form by a path on a backend. Its time is

    seconds = calls call + items item + entries entry + flops / rate + bytes / bandwidth

with the counts of :class:`~mercer.core.work.Work`. The terms are added: in what runs here, products do not hide the
moving of states and caches.
"""

from __future__ import annotations

import json
import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from mercer.core.support import Sizes
from mercer.core.work import FUSED, WAYS, Part
from mercer.errors import InvalidArgument

DTYPES = ("float32", "float64", "half")
"""What numbers are kept for. Half is bfloat16 and float16: sums are float32, and it is measured in bfloat16."""


@dataclass(frozen=True)
class Cost:
    """One way of computing.

    Attributes:
        call: seconds of a call on next to nothing.
        item: seconds for each thing that is not a product: a pair's profile, a token, an operator that is called. Which
            of them a way counts: ``mercer.core.work``.
        rate: floating-point operations a second of the products.
        training: forward and backward together take this many times the forward pass; 1 where there is no backward.
    """

    call: float
    item: float
    rate: float
    training: float


@dataclass(frozen=True)
class Machine:
    """Numbers of one machine; :func:`mercer.measure_machine` measures them.

    Attributes:
        name: what was measured, in words.
        device: ``cpu``, ``cuda``, ...
        threads: torch's, of the measurement.
        bandwidth: bytes a second, read and written counted.
        entry: seconds for one entry of a feature that torch's elementwise operators make.
        costs: for float32, float64 and half (bfloat16 or float16), and for each way, its :class:`Cost`.
    """

    name: str
    device: str
    threads: int
    bandwidth: float
    entry: float
    costs: dict[str, dict[str, Cost]]

    def __post_init__(self) -> None:
        _check(self)

    def seconds(self, parts: list[Part], sizes: Sizes) -> float:
        """Time of a call of these sizes that consists of these parts: the forward pass, and the backward pass too if
        a gradient is wanted (``sizes.trained``).
        """
        dtype = "float64" if sizes.itemsize == 8 else "half" if sizes.cache_itemsize == 2 else "float32"
        total = 0.0
        for part in parts:
            widened = part.way == "fused_softmax" and dtype == "half" and not sizes.bfloat16
            cost, work = self.costs["float32" if widened else dtype][part.way], part.work
            # A fused kernel gives each thread whole heads: fewer heads than threads leave some idle.
            idle = self.threads / min(self.threads, max(part.heads, 1)) if part.way in FUSED else 1.0
            once = work.calls * cost.call + work.entries * self.entry + work.bytes / self.bandwidth
            once += idle * (work.items * cost.item + work.flops / cost.rate)
            total += once * (cost.training if sizes.trained else 1.0)
        return total

    def to_json(self) -> str:
        """As JSON text, the inverse of :meth:`from_json`."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What :meth:`to_json` wrote.

        Raises:
            InvalidArgument: anything else.
        """
        try:
            given: Any = json.loads(text)
        except ValueError as error:
            raise InvalidArgument(f"This is not the JSON of a machine: {error}.") from error
        names = {f.name for f in fields(cls)}
        if not isinstance(given, dict) or set(given) != names or not isinstance(given["costs"], dict):
            raise InvalidArgument(f"A machine in JSON is an object of {', '.join(sorted(names))}, and nothing else.")
        try:
            costs = {
                dtype: {way: Cost(**numbers) for way, numbers in ways.items()} for dtype, ways in given["costs"].items()
            }
        except (AttributeError, TypeError) as error:
            wanted = ", ".join(f.name for f in fields(Cost))
            raise InvalidArgument(
                f"Each cost of a machine in JSON is an object of {wanted}, and nothing else."
            ) from error
        values: dict[str, Any] = {**given, "costs": costs}
        return cls(**values)


def _check(machine: Machine) -> None:
    if set(machine.costs) != set(DTYPES) or any(set(ways) != set(WAYS) for ways in machine.costs.values()):
        raise InvalidArgument(f"Machine: costs must have {', '.join(DTYPES)}, and each of them {', '.join(WAYS)}.")
    for name, text in (("name", machine.name), ("device", machine.device)):
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"Machine: {name} must be a text, not {text!r}.")
    if not isinstance(machine.threads, int) or isinstance(machine.threads, bool) or machine.threads < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"Machine: threads must be an integer of 1 or more, not {machine.threads!r}.")
    numbers: list[tuple[str, Any, bool]] = [("bandwidth", machine.bandwidth, True), ("entry", machine.entry, False)]
    for dtype, ways in machine.costs.items():
        for way, cost in ways.items():
            for name, value in asdict(cost).items():
                numbers.append((f"{name} of {way} in {dtype}", value, name in ("rate", "training")))
    for name, value, above in numbers:
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0 or (above and value == 0):
            least = "above 0" if above else "of 0 or more"
            raise InvalidArgument(f"Machine: {name} must be a finite number {least}, not {value!r}.")


_in_use: list[Machine] = []


def machine_in_use(in_tiles: tuple[bool, bool] = (False, False)) -> Machine:
    """The machine that plans are made for: the one of :func:`use_machine`, or the default numbers.

    Args:
        in_tiles: of the default numbers those for a processor on which torch, and on which the fused attention here,
            multiplies bfloat16 in tiles.
    """
    if _in_use:
        return _in_use[-1]
    from mercer.core.machine_tiles import DEFAULTS

    return DEFAULTS[in_tiles]


@contextmanager
def use_machine(machine: Machine) -> Generator[None]:
    """Within the block, plans are made with the numbers of this machine, in the whole process.

    Raises:
        InvalidArgument: ``machine`` is none.
    """
    if not isinstance(machine, Machine):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"machine must be a Machine, as mercer.measure_machine() gives it, not {machine!r}.")
    _in_use.append(machine)
    try:
        yield
    finally:
        _in_use.remove(machine)
