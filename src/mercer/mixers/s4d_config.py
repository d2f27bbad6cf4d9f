"""The options of diagonal state spaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import model_validator

from mercer.mixers.head_sizes import conjugate_pairs, steps_in_order
from mercer.mixers.mixer_config import MixerConfig, Positive, Ratio

if TYPE_CHECKING:
    from mercer.mixers.s4d import S4D

Form = Literal["auto", "recurrent", "chunked", "convolution"]


class StateSpaceConfig(MixerConfig):
    """What state spaces of single channels have in common."""

    state: Positive = 64
    """Real numbers in the state of a channel."""
    step_least: Ratio = 0.001
    step_most: Ratio = 0.1
    """Time steps start log-uniform between these two."""
    glu: bool = True
    """Whether half of the channels of the linear layer behind the state space gate the other half."""
    form: Form = "auto"
    """How it is computed: token by token, by matrix products in blocks of tokens, by transforms of long pieces, or what
    is expected to be quickest. All give the same."""

    @model_validator(mode="after")
    def _steps_are_in_order(self) -> Self:
        steps_in_order(self.step_least, self.step_most)
        return self


class S4DConfig(StateSpaceConfig):
    """Diagonal state spaces (Gu et al. 2022, arXiv 2206.11893): see `mercer.mixers.s4d.S4D`."""

    init: Literal["lin", "inv", "legs", "real"] = "lin"
    """Where A starts: S4D-Lin, S4D-Inv, S4D-LegS or S4D-Real."""
    rule: Literal["zoh", "bilinear"] = "zoh"
    """How continuous time becomes steps: the input stays the same between tokens, or the bilinear transform."""

    @model_validator(mode="after")
    def _state_is_of_pairs(self) -> Self:
        if self.init != "real":
            conjugate_pairs("s4d", self.state, f" for init {self.init!r}")
        return self

    def build(self, dim: int, heads: int, *, layer: int, layers: int) -> S4D:
        from mercer.mixers.s4d import S4D

        return S4D(
            dim,
            state=self.state,
            init=self.init,
            rule=self.rule,
            step_least=self.step_least,
            step_most=self.step_most,
            glu=self.glu,
            form=self.form,
        )
