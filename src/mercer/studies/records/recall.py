"""The record of ``mercer study recall``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mercer.studies.records.common import Finding, Interval, Provenance, Record


class RecallTask(Record):
    """The associative recall task: what was asked, and of how large a vocabulary."""

    vocabulary: int = Field(ge=8)
    pairs: list[int] = Field(description="numbers of key-value pairs asked for")
    length_per_pair: int = Field(ge=4, description="sequence length divided by the number of pairs")
    power: float = Field(gt=0, description="exponent a of the power law of the gaps between queries")
    heldout_sequences: int = Field(ge=1)


class RecallResult(Record):
    """Held-out recall at one number of pairs."""

    pairs: int = Field(ge=1)
    accuracy: float = Field(ge=0, le=1, description="share of held-out queries answered rightly")
    loss: float = Field(description="nats per query")


class RecallTrial(Record):
    """One training run, on all numbers of pairs in turn: an attention, a width, a learning rate and a seed."""

    attention: str = Field(
        description="a name, or names separated by commas, one a layer in turn; 7*mamba is that seven times in a row"
    )
    dim: int = Field(ge=1)
    learning_rate: float = Field(gt=0)
    seed: int
    status: Literal["finished", "diverged"] = "finished"
    reason: str | None = None
    results: list[RecallResult]
    parameters: int = Field(ge=0)
    steps: int = Field(ge=0)
    seconds: float = Field(ge=0)


class RecallSummary(Record):
    """An attention, a width and a number of pairs, at the best learning rate of those tried."""

    attention: str
    dim: int
    pairs: int
    accuracy: Interval | None
    learning_rate: float | None
    state_bytes: int = Field(ge=0, description="state of the whole model at this length, float32, one sequence")
    predicted: float | None = Field(
        ge=0, le=1, description="what a memory of the last layer's size recalls of random keys; null: it is a mixer"
    )


class Capacity(Record):
    """How many pairs an attention holds: what the memory view, which says nothing of mixers, predicts and what training
    finds.

    A capacity is the number of pairs at which recall falls through a half, interpolated; null means that it did not
    within the numbers of pairs tried.
    """

    attention: str
    dim: int
    feature_dim: int | None = Field(description="features of one head; null: no finite feature map")
    effective_features: float = Field(gt=0, description="F = K(k, k)^2 / E[K(k, k')^2] over random keys")
    predicted: float | None = Field(description="for random keys and the heads of the last layer, no training")
    found: float | None
    largest_tried: int
    smallest_tried: int


class RecallRecord(Record):
    """Everything the page of ``mercer study recall`` is rendered from."""

    study: Literal["recall"] = "recall"
    schema_version: Literal[1] = 1
    finished: bool
    provenance: Provenance
    task: RecallTask
    model: dict[str, Any]
    training: dict[str, Any]
    calibration: dict[str, float] = Field(
        default_factory=dict, description="seconds a step took for each attention before the number of steps was fixed"
    )
    trials: list[RecallTrial]
    summaries: list[RecallSummary]
    capacities: list[Capacity]
    findings: list[Finding]
