"""The record of ``mercer study positions``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mercer.studies.records.common import Corpus, Finding, Interval, Provenance, Record
from mercer.studies.records.orders import Point

Reading = Literal["plain", "linear", "ntk", "dynamic", "yarn", "window", "restart"]
"""How a trained model reads on beyond its trained length.

"plain": as it was trained. "linear", "ntk", "dynamic", "yarn": rotary angles scaled, without further training.
"window": each layer sees the last trained length of tokens. "restart": the context begins anew every bucket, so that
each token is predicted from one trained length of tokens or up to one bucket less, at positions that the model was
trained for.
"""


class PositionsArm(Record):
    """A position scheme that a model is trained with, and a way to read with that model."""

    name: str = Field(description="unique in the study, such as 'rotary' or 'rotary+yarn'")
    position: str = Field(description="the scheme as models are configured with it, such as 'rotary'")
    reading: Reading = "plain"
    factor: float | None = Field(default=None, ge=1, description="of a scaling: how many times the trained length")
    bounded: bool = Field(
        default=False, description="has no position beyond the trained length, so its curve ends there"
    )


class PositionsRun(Record):
    """One training run: a scheme and a seed."""

    position: str
    seed: int
    status: Literal["finished", "diverged"] = "finished"
    reason: str | None = Field(default=None, description="why a run has no final loss")
    parameters: int = Field(ge=0)
    steps: int = Field(ge=0, description="steps run")
    heldout_curve: list[Point]
    loss: float | None = Field(default=None, description="final held-out loss at the trained length, nats per token")
    tokens_per_second: float | None = Field(default=None, gt=0)
    seconds: float = Field(ge=0)


class PositionsMeasurement(Record):
    """What one arm with one seed loses on the held-out windows, which are the same for all."""

    arm: str
    seed: int
    losses: list[list[float]] = Field(
        description="nats per token, [block][bucket]: a block is a few windows, a bucket a range of positions in them; "
        "the rows of an arm without positions beyond the trained length end there"
    )
    reason: str | None = Field(default=None, description="why there are no losses")
    seconds: float = Field(ge=0)


class PositionsSummary(Record):
    """An arm over its seeds, or over blocks of held-out text if there is one seed.

    The excess at a position is the loss there minus what the same model loses on the same tokens when its context
    begins anew ("restart"). At the end of the trained range it is 0, since both are then the same.
    """

    arm: str
    inside: Interval = Field(description="mean loss at the positions within the trained length")
    restart: float = Field(description="mean loss of the same models on all tokens when the context begins anew")
    beyond: float | None = Field(description="restart plus the mean excess beyond; null for a bounded scheme")
    excess: Interval | None = Field(description="mean excess over all positions beyond the trained length")
    last: Interval | None = Field(description="mean excess over the last trained length of positions")
    reach: int | None = Field(
        description="position up to which no bucket beyond the trained length has a mean excess above the margin: the "
        "trained length itself if the first one has, 0 if the last bucket within has, null for a bounded scheme"
    )
    curve: list[Interval] = Field(
        description="the loss at each bucket of positions, freed of the difficulty of its text: restart plus the excess"
    )
    excess_curve: list[Interval] = Field(description="the excess at each bucket of positions")


class PositionsRecord(Record):
    """Everything the page of ``mercer study positions`` is rendered from."""

    study: Literal["positions"] = "positions"
    schema_version: Literal[1] = 1
    finished: bool = Field(description="false while runs or measurements are still missing")
    provenance: Provenance
    corpus: Corpus
    model: dict[str, Any] = Field(description="the model's configuration, without the positions")
    training: dict[str, Any] = Field(description="the training configuration")
    calibration: dict[str, float] = Field(
        default_factory=dict, description="seconds a step took for each scheme before the number of steps was fixed"
    )
    trained_length: int = Field(ge=2, description="tokens of a training sequence")
    evaluated_length: int = Field(ge=2, description="tokens of a held-out window")
    bucket: int = Field(ge=1, description="positions of one bucket, a divisor of both lengths")
    windows: int = Field(ge=1, description="held-out windows")
    margin: float = Field(gt=0, description="nats per token by which a loss may exceed restart's and still hold")
    inside_margin: float = Field(
        gt=0, description="nats per token that count as no difference within the trained length"
    )
    seed_allowance: float = Field(
        ge=0, description="nats by which an interval over blocks is widened on both sides before it decides anything"
    )
    arms: list[PositionsArm]
    runs: list[PositionsRun]
    measurements: list[PositionsMeasurement]
    summaries: list[PositionsSummary]
    findings: list[Finding]
