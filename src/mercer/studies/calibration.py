"""One number of steps for all attentions of a study, from what a step takes on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

LEAST_STEPS = 20


def seconds_per_step(step: Callable[[int], None], repeats: int = 3) -> float:
    """The median time of ``step(0)``, ``step(1)``, ... after a first one that is not counted."""
    times: list[float] = []
    for number in range(repeats + 1):
        began = time.perf_counter()
        step(number)
        times.append(time.perf_counter() - began)
    return sorted(times[1:])[repeats // 2]


def fitting_steps(seconds: Mapping[str, float], *, runs: int, most: int, room: float, evaluations: float) -> int:
    """The largest number of steps, at most ``most``, for which all runs fit into ``room`` seconds.

    Args:
        seconds: a step of each attention.
        runs: trainings of each attention.
        most: what would be run without a limit.
        room: seconds for everything.
        evaluations: the cost of a run's evaluations, in training steps.

    Returns:
        At least ``LEAST_STEPS``, even if they take longer: fewer would show nothing.
    """
    one = sum(seconds.values()) * runs
    return max(LEAST_STEPS, min(most, int(room / one - evaluations)))
