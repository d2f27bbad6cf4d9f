"""The parts every study's record shares."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Verdict = Literal["supported", "refuted", "undecided"]
Over = Literal["seeds", "blocks", "rows", "draws", "rows and draws", "nothing"]


class Record(BaseModel):
    """A frozen piece of a study's JSON. Unknown keys are errors, and numbers are finite (a missing one is null)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Interval(Record):
    """A mean and its confidence interval by the t-distribution.

    ``over`` names what varied between the ``count`` samples: ``"seeds"`` (whole training runs), ``"blocks"`` (blocks
    of held-out text, one run: it says nothing about another seed), ``"rows"`` (of an attention), ``"draws"`` (of random
    features) or both (on the scale of logarithms then). ``low`` and ``high`` are null for one sample.
    """

    mean: float
    low: float | None = None
    high: float | None = None
    count: int = Field(ge=1)
    over: Over = "seeds"
    confidence: float = Field(default=0.95, gt=0, lt=1)

    @property
    def decided(self) -> bool:
        """Whether there is an interval at all."""
        return self.low is not None and self.high is not None


class Finding(Record):
    """A question, what the numbers say about it, and the sentence that says it with the numbers in it."""

    question: str
    verdict: Verdict
    text: str


class Corpus(Record):
    """The text a study trained on: where it came from and the hash that identifies it."""

    name: str
    sha256: str
    train_files: int = Field(ge=0)
    heldout_files: int = Field(ge=0)
    train_tokens: int = Field(ge=0)
    heldout_tokens: int = Field(ge=0)


class Provenance(Record):
    """How the numbers came to be: enough to run the study again."""

    command: str
    mercer_version: str
    budget: Literal["quick", "standard", "full"]
    seeds: list[int]
    device: str
    started: str = Field(description="ISO 8601, UTC")
    updated: str = Field(description="ISO 8601, UTC")
    seconds: float = Field(ge=0, description="working time over all calls that continued this study")
    peak_memory_bytes: int | None = Field(default=None, description="largest resident size of the process")
    environment: dict[str, Any] = Field(default_factory=dict)
