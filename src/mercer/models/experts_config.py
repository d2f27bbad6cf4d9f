"""Which layers have experts for a feed-forward, and how many, as data."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(ge=1)]


class ExpertsConfig(BaseModel):
    """A mixture of experts in the place of a feed-forward (`mercer.nn.Experts`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    count: Positive
    """How many experts there are."""
    chosen: Positive = 2
    """How many of them serve a token."""
    renormalise: bool = True
    """Whether the weights of the chosen ones sum to 1 (Mixtral), or are their probabilities among all experts."""
    capacity: Positive | None = None
    """The most tokens of a sequence that an expert takes; None: any number."""
    router_bias: bool = False
    every: Positive = 1
    """Layers offset, offset + every, offset + 2 every, ... have experts, the others a feed-forward."""
    offset: Annotated[int, Field(ge=0)] = 0
    balance: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the load-balancing loss of all layers in the training loss (Fedus et al. 2022)."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the mean squared log-sum of the routers' logits in the training loss (Zoph et al. 2022)."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.chosen > self.count:
            raise ValueError(f"chosen {self.chosen} is more than the {self.count} experts there are")
        if self.offset >= self.every:
            raise ValueError(f"offset {self.offset} is not below every {self.every}")
        return self

    def at(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer % self.every == self.offset
