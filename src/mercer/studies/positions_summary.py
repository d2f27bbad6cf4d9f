"""From measurements to the curves, the table and the numbers behind the conclusions of ``mercer study positions``.

Two positions of one window hold different text, whose difficulty varies far more than what a position does to a loss.
So every loss is compared with what the same model loses on the same tokens when its context begins anew: the excess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from mercer.studies.records.common import Interval
from mercer.studies.records.positions import PositionsArm, PositionsMeasurement, PositionsSummary
from mercer.studies.statistics import mean_interval

MARGIN = 0.05
"""Nats per token by which a loss may exceed that of starting over and still count as holding."""
INSIDE_MARGIN = 0.02
"""Nats per token that count as no difference within the trained length, as in the study of orders."""


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


@dataclass(frozen=True)
class Measured:
    """The measurements of one study, by arm and seed.

    Attributes:
        arms: all arms, those that start over among them.
        inside: buckets within the trained length.
    """

    arms: Sequence[PositionsArm]
    measurements: Sequence[PositionsMeasurement]
    inside: int

    @cached_property
    def losses(self) -> dict[str, dict[int, list[list[float]]]]:
        """arm -> seed -> [block][bucket], of the finished ones."""
        found: dict[str, dict[int, list[list[float]]]] = {}
        for m in (m for m in self.measurements if m.reason is None):
            found.setdefault(m.arm, {})[m.seed] = m.losses
        return found

    def restart(self, arm: str) -> dict[int, list[list[float]]]:
        """The losses of the same models when the context begins anew."""
        return self.losses.get(f"{arm.partition('+')[0]}+restart", {})

    def complete(self, arm: str) -> bool:
        """Whether each of the arm's seeds has its restart; without one nothing can be said."""
        ours = self.losses.get(arm, {})
        return bool(ours) and ours.keys() <= self.restart(arm).keys()

    def interval(self, of: Callable[[int, int], float], seeds: Sequence[int], blocks: int) -> Interval:
        """Of ``of(seed, block)``: over seeds, of the means over blocks, or over the blocks of the only seed."""
        if len(seeds) > 1:
            return mean_interval([_mean([of(seed, block) for block in range(blocks)]) for seed in seeds])
        return mean_interval([of(seeds[0], block) for block in range(blocks)], "blocks")

    def excess(self, arm: str, first: int, last: int) -> Interval:
        """Mean excess over the buckets ``first`` to ``last - 1``."""
        ours, theirs = self.losses[arm], self.restart(arm)
        some = next(iter(ours.values()))

        def of(seed: int, block: int) -> float:
            return _mean(ours[seed][block][first:last]) - _mean(theirs[seed][block][first:last])

        return self.interval(of, list(ours), len(some))

    def difference(self, arm: str, other: str, first: int, last: int) -> Interval | None:
        """Loss of ``arm`` minus loss of ``other`` on the same tokens, over the seeds that both have."""
        ours, theirs = self.losses.get(arm, {}), self.losses.get(other, {})
        seeds = [seed for seed in ours if seed in theirs]
        if not seeds:
            return None

        def of(seed: int, block: int) -> float:
            return _mean(ours[seed][block][first:last]) - _mean(theirs[seed][block][first:last])

        return self.interval(of, seeds, len(ours[seeds[0]]))

    def level(self, arm: str) -> float:
        """Mean loss of starting over on all tokens, for the arm's scheme and seeds."""
        theirs = self.restart(arm)
        return _mean([loss for seed in self.losses[arm] for row in theirs[seed] for loss in row])

    def buckets(self, arm: str) -> int:
        """Buckets that the arm has losses for."""
        return len(next(iter(self.losses[arm].values()))[0])

    def curve(self, arm: str) -> list[Interval]:
        """The loss at each bucket, freed of the difficulty of its text: level plus excess.

        Over seeds, the level is that of each seed; over blocks it is the mean of all, so that an interval says how
        surely the excess is known.
        """
        ours, theirs = self.losses[arm], self.restart(arm)
        blocks = len(next(iter(ours.values())))
        level = {seed: _mean([loss for row in theirs[seed] for loss in row]) for seed in ours}

        def at(bucket: int) -> Interval:
            def of(seed: int, block: int) -> float:
                return level[seed] + ours[seed][block][bucket] - theirs[seed][block][bucket]

            return self.interval(of, list(ours), blocks)

        return [at(bucket) for bucket in range(self.buckets(arm))]


def summarize(measured: Measured, bucket: int, margin: float = MARGIN) -> list[PositionsSummary]:
    """One summary for each arm that was measured, and whose restart was."""
    return [_summary(measured, arm, bucket, margin) for arm in measured.arms if measured.complete(arm.name)]


def _summary(measured: Measured, arm: PositionsArm, bucket: int, margin: float) -> PositionsSummary:
    inside, end, name = measured.inside, measured.buckets(arm.name), arm.name
    level = measured.level(name)
    each = [measured.excess(name, b, b + 1) for b in range(end)]
    ours = measured.losses[name]
    within = measured.interval(
        lambda seed, block: _mean(ours[seed][block][:inside]), list(ours), len(next(iter(ours.values())))
    )
    if end <= inside:
        beyond = excess = last = reach = None
    else:
        excess, last = measured.excess(name, inside, end), measured.excess(name, max(inside, end - inside), end)
        beyond = level + excess.mean
        over = (b for b in range(inside, end) if each[b].mean > margin)
        reach = 0 if each[inside - 1].mean > margin else next(over, end) * bucket
    return PositionsSummary(
        arm=name, inside=within, restart=level, beyond=beyond, excess=excess, last=last, reach=reach,
        curve=measured.curve(name), excess_curve=each,
    )  # fmt: skip
