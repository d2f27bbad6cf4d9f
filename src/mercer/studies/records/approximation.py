"""The record of ``mercer study approximation``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mercer.studies.records.common import Corpus, Finding, Interval, Provenance, Record

ArmFamily = Literal["taylor", "features", "other"]


class ApproximationArm(Record):
    """One kernel and normaliser. Its errors are against the exponential under the same normaliser."""

    name: str = Field(description="unique in the study, such as 'favor256-sum+independent'")
    family: ArmFamily
    series: str = Field(description="the name without its number: arms that differ only in that")
    order: int | None = Field(default=None, ge=0, description="Taylor order")
    count: int | None = Field(default=None, ge=1, description="number of random features")

    @property
    def parity(self) -> Literal["even", "odd"] | None:
        """Even truncations of exp are positive, odd ones are not."""
        return None if self.order is None else ("odd" if self.order % 2 else "even")


class ApproximationInputs(Record):
    """Queries, keys and values that all arms were measured on, and the scores of their measured rows."""

    name: str = Field(description="'random-D16-sd1' or 'layer0'")
    kind: Literal["random", "model"]
    dim: int = Field(ge=1)
    batch: int = Field(ge=1)
    heads: int = Field(ge=1)
    length: int = Field(ge=1)
    rows: int = Field(ge=1, description="positions measured, the same for all heads and arms")
    spread: float | None = Field(default=None, gt=0, description="standard deviation that random scores were drawn for")
    layer: int | None = Field(default=None, ge=0)
    score_low: float
    score_mean: float
    score_deviation: float = Field(ge=0)
    score_high: float


class ApproximationPoint(Record):
    """One arm on one set of inputs. A number that left the range of float64 is null."""

    inputs: str
    arm: str
    error: Interval | None = Field(description="|o - o*| / |o*| over all heads and measured rows, mean over draws")
    by_head: list[float | None]
    by_draw: list[float] = Field(default_factory=list, description="of random features")
    variation: Interval | None = Field(default=None, description="total variation of the weights, mean over rows")
    negative: float | None = Field(ge=0, le=1, description="part of the weights below 0, mean over rows")
    not_positive: float | None = Field(ge=0, le=1, description="share of rows whose weights sum to 0 or less")
    theory: float | None = Field(
        default=None, ge=0, description="relative variance of a kernel value, over pairs as softmax attends to them"
    )
    median: float | None = Field(default=None, ge=0, description="the same, the median over the pairs")
    measured: Interval | None = Field(default=None, description="the same as theory, over the draws")


class ApproximationNeed(Record):
    """What a series needs on one set of inputs to reach the target."""

    inputs: str
    series: str
    kind: Literal["order", "features"]
    number: int | None = Field(description="Taylor order or number of features; null: none was found")
    error: float | None = Field(default=None, description="measured at that number")
    pointwise: int | None = Field(default=None, description="order that truncates exp so well at every score seen")
    exponent: Interval | None = Field(default=None, description="b of error ~ m^(-b)")
    holds: bool | None = Field(default=None, description="whether b is 1/2 as nearly as the law asks")
    predicted: float | None = Field(default=None, description="features by the law, whether it holds or not")
    text: str = Field(description="the same in words")


class ApproximationRecord(Record):
    """Everything the page of ``mercer study approximation`` is rendered from."""

    study: Literal["approximation"] = "approximation"
    schema_version: Literal[1] = 1
    finished: bool
    provenance: Provenance
    corpus: Corpus
    model: dict[str, Any] = Field(description="configuration of the trained model")
    training: dict[str, Any] = Field(description="how it was trained here; empty if it was given")
    model_source: str = Field(description="name of the folder that was given, or 'trained here'")
    heldout_loss: float | None = Field(default=None, description="of the model trained here, nats per token")
    target: float = Field(gt=0, lt=1, description="relative error that orders and numbers of features are sought for")
    draws: int = Field(ge=2, description="independent draws of random features")
    arms: list[ApproximationArm]
    inputs: list[ApproximationInputs]
    points: list[ApproximationPoint]
    needs: list[ApproximationNeed]
    findings: list[Finding]
