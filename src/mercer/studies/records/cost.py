"""The record of ``mercer study cost``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mercer.studies.records.common import Finding, Provenance, Record

Phase = Literal["prefill", "decode"]


class CostShape(Record):
    """The shapes everything was measured with."""

    batch: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    dtype: str
    lengths: list[int]
    repeats: int = Field(ge=1)
    decode_steps: int = Field(ge=1, description="tokens decoded in one timing")


class MachineRates(Record):
    """What the machine did on this day."""

    flops_per_second: float = Field(gt=0, description="large matrix product in the study's dtype")
    bytes_per_second: float = Field(gt=0, description="reading a tensor larger than the caches")


class CostPoint(Record):
    """One attention, form, phase and context length."""

    attention: str
    form: str
    path: str
    phase: Phase
    length: int = Field(ge=1)
    status: Literal["measured", "skipped"] = "measured"
    reason: str | None = None
    seconds_per_token: float | None = Field(default=None, gt=0, description="median over the repeats")
    low: float | None = Field(default=None, description="lower quartile")
    high: float | None = Field(default=None, description="upper quartile")
    state_bytes: int | None = Field(default=None, ge=0, description="measured: the bytes of the state's tensors")
    planned_flops: float | None = Field(default=None, ge=0, description="of the whole call")
    planned_bytes: float | None = Field(
        default=None, ge=0, description="of the whole call: its own tensors, and the state that a decoded token reads"
    )
    planned_state_bytes: int | None = Field(default=None, ge=0)
    planned_seconds_per_token: float | None = Field(
        default=None, ge=0, description="by the model of mercer.advise, with numbers measured at the start"
    )


class Where(Record):
    """Whether and where a curve falls below another one within the lengths measured."""

    kind: Literal["at", "always", "never", "unknown"]
    length: float | None = Field(default=None, description="tokens, interpolated; only for 'at'")


class Crossing(Record):
    """The context length from which ``challenger`` is cheaper than ``incumbent``."""

    quantity: Literal["time", "state"]
    phase: Phase
    incumbent: str
    challenger: str
    measured: Where
    planned: Where


class CostRecord(Record):
    """Everything the page of ``mercer study cost`` is rendered from."""

    study: Literal["cost"] = "cost"
    schema_version: Literal[1] = 1
    finished: bool
    provenance: Provenance
    shape: CostShape
    rates: MachineRates
    points: list[CostPoint]
    crossings: list[Crossing]
    findings: list[Finding]
