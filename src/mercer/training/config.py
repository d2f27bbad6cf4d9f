"""How a model is trained: one validated value that fixes the whole loss curve."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mercer.errors import InvalidArgument
from mercer.runtime.faults import faults


class TrainConfig(BaseModel):
    """The recipe of a run: with the model's config, the text and the thread count it fixes every digit of the curve.

    Attributes:
        steps: optimiser steps.
        batch: sequences a step, over all micro-batches.
        length: tokens of context a sequence; the loss has as many terms.
        accumulate: micro-batches a step (divides ``batch``); the data are the same for every value, memory is less.
        learning_rate: the peak of the schedule.
        warmup: steps of linear warm-up from 0. None: a tenth of the steps, at most 100.
        floor: the cosine ends at ``floor * learning_rate`` with the last step.
        weight_decay: AdamW's decoupled decay, on matrices only (not on vectors or gains).
        beta1, beta2, epsilon: AdamW's moments.
        clip: the largest gradient norm; longer gradients are scaled to it. None leaves them.
        dtype: "float32", or "bfloat16": matrix products under autocast, parameters, moments and loss in float32.
        seed: of the data order.
        device: "auto" (a CUDA device if there is one, else the CPU), "cpu", "cuda", "cuda:1", ...
        log_every: steps between lines of ``metrics.jsonl``.
        eval_every: steps between evaluations on held-out text; there is one before the first and after the last step.
        eval_windows: at most so many windows of ``length`` held-out tokens, evenly spaced and always the same.
        checkpoint_every: steps between checkpoints; after the last step there is one. None: only that one.
        keep: checkpoints kept: the last ones and, besides, the one with the best held-out loss.

    Raises InvalidArgument, in one sentence that names the fields, for unknown keys and values that do not fit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    steps: int = Field(default=1000, ge=1)
    batch: int = Field(default=16, ge=1)
    length: int = Field(default=256, ge=1)
    accumulate: int = Field(default=1, ge=1)
    learning_rate: float = Field(default=3e-3, gt=0)
    warmup: int | None = Field(default=None, ge=0)
    floor: float = Field(default=0.1, ge=0, le=1)
    weight_decay: float = Field(default=0.1, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    epsilon: float = Field(default=1e-8, gt=0)
    clip: float | None = Field(default=1.0, gt=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = Field(default=0, ge=0, lt=2**63)
    device: str = "auto"
    log_every: int = Field(default=10, ge=1)
    eval_every: int = Field(default=100, ge=1)
    eval_windows: int = Field(default=64, ge=1)
    checkpoint_every: int | None = Field(default=100, ge=1)
    keep: int = Field(default=2, ge=1)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InvalidArgument(f"training configuration: {faults(error, type(self).model_fields)}") from error

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate={self.accumulate} must divide batch={self.batch}")
        if self.warmup is not None and self.warmup > self.steps:
            raise ValueError(f"warmup={self.warmup} must not exceed steps={self.steps}")
        return self

    @property
    def warmup_steps(self) -> int:
        """The steps of warm-up, with the default worked out."""
        return min(100, self.steps // 10) if self.warmup is None else self.warmup


# Fields that do not move a single digit of the curve: they may differ when a run is continued.
FREE_ON_RESUME = frozenset({"checkpoint_every", "keep", "device"})
