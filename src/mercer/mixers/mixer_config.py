"""What a mixer is, as data: validated, frozen, part of a model's configuration."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mercer.errors import InvalidArgument
from mercer.runtime.faults import faults

if TYPE_CHECKING:
    from mercer.mixers.base import Mixer

Positive = Annotated[int, Field(ge=1)]
Ratio = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class MixerConfig(BaseModel):
    """The options of one kind of mixer; the defaults are those of its paper.

    Raises InvalidArgument, in one sentence that names the options, for unknown ones and values that do not fit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InvalidArgument(faults(error, type(self).model_fields)) from error

    def check(self, dim: int, heads: int) -> None:
        """Refuse options that do not fit a model of `dim` and `heads`, as `build` does, before there is a mixer.

        Raises:
            InvalidArgument: sizes that do not fit.
        """

    @abstractmethod
    def build(self, dim: int, heads: int, *, layer: int, layers: int) -> Mixer:
        """The mixer of one layer of a model. dim: channels of the residual stream. heads: those of the model's
        attention, for mixers whose own options leave their number open. layer, layers: which of how many, counted from
        0, for mixers that start differently by depth.

        Raises:
            InvalidArgument: sizes that do not fit.
        """
