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


class RecallTrial(Record):
    """One training run: an attention, a width, a number of pairs, a learning rate and a seed."""

    attention: str
    dim: int = Field(ge=1)
    pairs: int = Field(ge=1)
    learning_rate: float = Field(gt=0)
    seed: int
    status: Literal["finished", "diverged"] = "finished"
    reason: str | None = None
    accuracy: float | None = Field(default=None, ge=0, le=1, description="share of held-out queries answered rightly")
    loss: float | None = Field(default=None, description="final held-out loss, nats per query")
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
    predicted: float = Field(ge=0, le=1, description="what an untrained memory of random keys recalls")


class Capacity(Record):
    """How many pairs an attention holds: what the memory view predicts and what training finds.

    A capacity is the number of pairs at which recall falls through a half, interpolated; null means that it did not
    within the numbers of pairs tried.
    """

    attention: str
    dim: int
    feature_dim: int | None = Field(description="features of one head; null: no finite feature map")
    predicted: float | None = Field(description="a memory of random unit keys, one head, no training")
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
    trials: list[RecallTrial]
    summaries: list[RecallSummary]
    capacities: list[Capacity]
    findings: list[Finding]
