"""Who takes part: a function on (query, key, value), and what to know before it is called on something large."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from benchmarks._work import Shape

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Contestant:
    """One way to compute a task, or what a user would take instead.

    Attributes:
        name: as printed.
        run: ``[B, H, L, D]`` three times -> ``[B, H, L, D]``, causal.
        growth: the power of the length that its time grows with: 1 or 2.
        memory: float32 numbers it keeps beyond tensors of the inputs' size, from (shape, whether backward follows).
        differs: what it computes that the task does not ask for; empty if it has to agree.
        dtypes: those it takes.
        multiple: lengths must be a multiple of this.
        plan: for our own, what the library says it does.
    """

    name: str
    run: Run
    growth: int = 1
    memory: Callable[[Shape, bool], float] = lambda _shape, _backward: 0.0
    differs: Mapping[str, str] | str = ""
    dtypes: tuple[str, ...] = DTYPES
    multiple: int = 1
    plan: str = ""

    def difference(self, dtype: str) -> str:
        """What it is known to compute otherwise in this dtype."""
        return self.differs if isinstance(self.differs, str) else self.differs.get(dtype, "")
