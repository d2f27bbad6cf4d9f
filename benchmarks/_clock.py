"""Times: one call, and rounds in which contestants take turns, so that what else the machine does falls on all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of one value or more; a single one is its own quartiles."""
        if len(values) == 1:
            return Spread(values[0], values[0], values[0])
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(middle, low, high)


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it; the CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Wall time of one call, the device's work included."""
    synchronise(device)
    began = time.perf_counter()
    call()
    synchronise(device)
    return time.perf_counter() - began


def interleave(
    calls: Mapping[str, Callable[[], object]], rounds: int, budget: float, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of every call in turns; a slow one sits out further rounds once 3 or more took ``budget`` seconds.

    Everyone has one untimed call first. Every other round runs backwards, so that nobody always follows the same one.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        seconds(call, device)
    names = list(calls)
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            spent = times[name]
            if len(spent) < 3 or sum(spent) < budget:
                spent.append(seconds(calls[name], device))
    return times


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Theirs over ours, round by round as far as both ran: above 1 we are faster."""
    return Spread.of([b / a for a, b in zip(ours, theirs, strict=False)])
