"""What :func:`mercer.approximation_error` found, as a value to read, print and write down."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from mercer.approximation.comparison import Scores
from mercer.approximation.intervals import Estimate
from mercer.approximation.needed import NeededFeatures, NeededOrder
from mercer.approximation.spread import Spread
from mercer.runtime.words import count


@dataclass(frozen=True)
class ApproximationError:
    """How far a kernel's attention is from softmax's.

    Attributes:
        kernel, normalizer, structure: what was compared, in words.
        scale: softmax's.
        kernel_scale: the kernel's; None for ``Mixed`` with a scale for each part.
        batch, heads, keys, dim: sizes.
        rows: positions measured, of ``positions`` queries.
        seed: by which they were drawn.
        draws: independent draws of random features, also of those in ``Mixed``; None for other kernels.
        error: |o - o*| / |o*|, both over all heads, measured rows and the batch; for random features the mean over the
            draws. Its interval says what rows and draws leave open.
        by_head: the same for every query head.
        by_draw: the same for every draw of random features; empty for other kernels.
        variation: total variation between the weights, each row divided by its sum, and softmax's: the mean over rows
            (0 equal, 1 disjoint, more where weights are negative). None where the weights of a row need not have a sum
            to divide by: signed kernels without ``signed=True``.
        negative: the part of a row's weights that is below 0, sum |min(w, 0)| / sum |w|, mean over rows and draws.
        not_positive: share of rows whose weights sum to 0 or less.
        scores: of the pairs that the measured rows see.
        spread: of random features; None for other kernels, and for ``Mixed``, which is random for some pairs only.
        needed: what reaches ``target``: a :class:`NeededOrder` for ``Taylor``, a :class:`NeededFeatures` for random
            features, for ``Mixed`` whichever its far part is; None for kernels without such a dial, or if no target was
            given.
        no_dial: why a target changed nothing, in words; None if it did, or if none was given.
    """

    kernel: str
    normalizer: str
    structure: str
    scale: float
    kernel_scale: float | None
    batch: int
    heads: int
    keys: int
    dim: int
    rows: int
    positions: int
    seed: int
    draws: int | None
    error: Estimate
    by_head: tuple[Estimate, ...]
    by_draw: tuple[float, ...]
    variation: Estimate | None
    negative: float
    not_positive: float
    scores: Scores
    spread: Spread | None
    needed: NeededOrder | NeededFeatures | None
    no_dial: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values; infinities become None."""
        return _plain(asdict(self))

    def __str__(self) -> str:
        every = self.rows == self.positions
        rows = f"all {self.positions:,} rows" if every else f"{self.rows:,} of {self.positions:,} rows"
        lines = [
            f"{self.kernel} under {self.normalizer}, {self.structure}, against softmax: {count(self.heads, 'head')}, "
            f"{rows}" + ("" if self.draws is None else f", {count(self.draws, 'draw')}"),
            f"relative error of the outputs {_interval(self.error)}",
        ]
        if len(self.by_head) > 1:
            values = [head.value for head in self.by_head]
            lines.append(f"by head {min(values):.3g} to {max(values):.3g}")
        if self.variation is not None:
            lines.append(f"total variation of the weights {_interval(self.variation)}")
        if self.negative > 0:
            lines.append(
                f"{self.negative:.2%} of the weights are negative, {self.not_positive:.2%} of the rows sum to 0 or less"
            )
        s = self.scores
        lines.append(
            f"scores from {s.low:.2f} to {s.high:.2f}, mean {s.mean:.2f}, standard deviation {s.deviation:.2f}"
        )
        if self.spread is not None:
            lines.append(
                f"relative variance of a kernel value {self.spread.theory:.3g} in theory (median "
                f"{self.spread.median:.3g}), {_interval(self.spread.measured)} measured"
            )
        elif self.draws is not None:
            lines.append("the variance of a kernel value is not looked up: it is random for some pairs only")
        if self.needed is not None:
            lines.append(str(self.needed))
        if self.no_dial is not None:
            lines.append(self.no_dial)
        return "\n".join(lines)


def _interval(found: Estimate) -> str:
    return str(found) if found.low is None else f"{found} ({100 * found.confidence:g} %, over {found.over})"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
