"""The options of structured state spaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import model_validator

from mercer.mixers.head_sizes import conjugate_pairs
from mercer.mixers.s4d_config import StateSpaceConfig

if TYPE_CHECKING:
    from mercer.mixers.s4 import S4


class S4Config(StateSpaceConfig):
    """Structured state spaces (Gu et al. 2021, arXiv 2111.00396): see `mercer.mixers.s4.S4`."""

    @model_validator(mode="after")
    def _state_is_of_pairs(self) -> Self:
        conjugate_pairs("s4", self.state)
        return self

    def build(self, dim: int, heads: int, *, layer: int, layers: int) -> S4:
        from mercer.mixers.s4 import S4

        return S4(
            dim,
            state=self.state,
            step_least=self.step_least,
            step_most=self.step_most,
            glu=self.glu,
            form=self.form,
        )
