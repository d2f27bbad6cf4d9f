"""The record of ``mercer study orders``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mercer.studies.records.common import Corpus, Finding, Interval, Provenance, Record

Family = Literal["softmax", "exp", "taylor", "linear", "mixer", "pattern"]


class Arm(Record):
    """One attention, mixer or pattern of layers: a name, what it is made of, and whether a gain is learned."""

    name: str = Field(description="unique in the study, such as 'exp-l2+gain'")
    attention: str = Field(
        description="the name models are configured with, such as 'exp-l2', or names separated by commas, one a layer "
        "in turn; 7*mamba is that seven times in a row"
    )
    family: Family
    normalizer: str = Field(description="'none' for a mixer or a pattern")
    order: int | None = Field(default=None, ge=0, description="Taylor order")
    gain_init: float | None = Field(default=None, description="start of the learned gain per head; null: no gain")

    @property
    def parity(self) -> Literal["even", "odd"] | None:
        """Even truncations of exp are positive, odd ones are not."""
        return None if self.order is None else ("odd" if self.order % 2 else "even")


class Point(Record):
    """A loss at a step, in nats per token."""

    step: int = Field(ge=0)
    loss: float


class OrdersTrial(Record):
    """One training run: an arm and a seed."""

    arm: str
    seed: int
    status: Literal["finished", "diverged"] = "finished"
    reason: str | None = Field(default=None, description="why a run has no final loss")
    parameters: int = Field(ge=0)
    steps: int = Field(ge=0, description="steps run")
    train_curve: list[Point]
    heldout_curve: list[Point]
    heldout_blocks: list[float] = Field(
        default_factory=list,
        description="final loss of each block of held-out text, nats per token, same blocks for all",
    )
    loss: float | None = Field(default=None, description="final held-out loss, nats per token")
    bits_per_byte: float | None = None
    tokens_per_second: float | None = Field(default=None, gt=0)
    seconds: float = Field(ge=0)


class ArmSummary(Record):
    """An arm over its seeds: final loss and the paired difference to the reference (same seed or blocks of text)."""

    arm: str
    loss: Interval | None
    bits_per_byte: float | None
    gap: Interval | None = Field(
        default=None, description="loss minus the reference's, nats per token; null for the reference"
    )
    tokens_per_second: float | None
    diverged: int = Field(default=0, ge=0)


class OrdersRecord(Record):
    """Everything the page of ``mercer study orders`` is rendered from."""

    study: Literal["orders"] = "orders"
    schema_version: Literal[1] = 1
    finished: bool = Field(description="false while trials are still missing")
    provenance: Provenance
    corpus: Corpus
    model: dict[str, Any] = Field(description="the model's configuration, without the attention")
    training: dict[str, Any] = Field(description="the training configuration")
    calibration: dict[str, float] = Field(
        default_factory=dict, description="seconds a step took for each arm before the number of steps was fixed"
    )
    equivalence_margin: float = Field(gt=0, description="nats per token that count as no difference")
    seed_allowance: float = Field(
        ge=0, description="nats by which an interval over blocks is widened on both sides before it decides anything"
    )
    reference: str = Field(
        default="softmax",
        description="the arm that gaps are from: softmax, or the first arm where that is none of them",
    )
    arms: list[Arm]
    trials: list[OrdersTrial]
    summaries: list[ArmSummary]
    findings: list[Finding]
