"""Two kernels in one row: one for the keys nearby, a finite one for all those behind them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from mercer.core.carrying import CarryingKernel
from mercer.core.kernels import Kernel
from mercer.errors import InvalidArgument, Unsupported


@dataclass(frozen=True, eq=False, repr=False)
class Mixed(CarryingKernel):
    """``near`` for the last ``window`` keys, ``far`` for all earlier ones, under one normaliser:

        K(q_i, k_j) = exp(r) near(q_i, k_j)  if i - j < window,  else  far(q_i, k_j).

    With ``Sum`` the denominator is that of both parts together. Needs a causal structure. By features the state is the
    feature state of ``far`` with a cache of the last ``window`` keys and values (:class:`~mercer.MixedState`): of
    constant size, and exact in the window.

    Args:
        near: any kernel, usually ``Exp()``.
        far: any kernel; a finite one where a state is wanted.
        window: keys, the query's own included, that ``near`` takes; 1 or more.
        log_ratio: r, a tensor ``[Hq]``, or None for 0: how the parts are weighed against each other. A parameter in a
            module.

    ``scale=None`` gives each part its own default scale, a number goes to both.

    Source: Zhang et al. 2024 (LoLCATs), arXiv 2410.10254; Arora et al. 2024 (Based), arXiv 2402.18668.
    """

    near: Kernel
    far: Kernel
    window: int = 64
    log_ratio: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"Mixed: window must be an integer of 1 or more, not {self.window!r}.")
        for name, part in (("near", self.near), ("far", self.far)):
            if not isinstance(part, Kernel) or isinstance(part, Mixed):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidArgument(f"Mixed: {name} must be a kernel that is not itself Mixed, not {part!r}.")

        if self.log_ratio is not None and not isinstance(self.log_ratio, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"Mixed: log_ratio must be a tensor [Hq] or None, not {self.log_ratio!r}.")

    @property
    def positive(self) -> bool:
        return self.near.positive and self.far.positive

    @property
    def allows_negative_denominator(self) -> bool:
        return all(k.positive or k.allows_negative_denominator for k in (self.near, self.far))

    def default_scale(self, dim: int) -> float:
        raise Unsupported(f"{self} has no one scale: each part has its own default.")

    def profile(self, score: Tensor) -> Tensor:
        raise Unsupported(f"{self} depends on the distance of query and key: it works in mercer.attention alone.")

    def map_query(self, query: Tensor) -> Tensor:
        return self.profile(query)

    def map_key(self, key: Tensor) -> Tensor:
        return self.profile(key)

    def feature_dim(self, dim: int) -> int | None:
        return self.far.feature_dim(dim)

    def features(self, mapped: Tensor) -> Tensor:
        return self.far.features(mapped)

    def mapped_dim(self, dim: int) -> int:
        return self.far.mapped_dim(dim)

    def polynomial(self) -> tuple[float, ...] | None:
        return self.far.polynomial()

    def bind(self, dim: int, query_heads: int, key_heads: int, generator: torch.Generator | None = None) -> Self:
        near, far = (part.bind(dim, query_heads, key_heads, generator) for part in (self.near, self.far))
        return replace(self, near=near, far=far)

    def tensors(self) -> dict[str, Tensor]:
        named = {f"{part}_{name}": t for part in ("near", "far") for name, t in getattr(self, part).tensors().items()}
        return named if self.log_ratio is None else named | {"log_ratio": self.log_ratio}

    def with_tensors(self, tensors: dict[str, Tensor]) -> Self:
        wanted = set(self.tensors()) | ({"log_ratio"} & set(tensors))
        if set(tensors) != wanted:
            raise InvalidArgument(f"{self} has the tensors {sorted(wanted)}, not {sorted(tensors)}.")

        def part(name: str) -> Kernel:
            own: Kernel = getattr(self, name)
            held = {n: tensors[f"{name}_{n}"] for n in own.tensors()}
            return own.with_tensors(held) if held else own  # one that is not bound yet has none to replace

        return replace(self, near=part("near"), far=part("far"), log_ratio=tensors.get("log_ratio"))

    def is_parameter(self, name: str) -> bool:
        part, _, own = name.partition("_")
        return name == "log_ratio" or getattr(self, part).is_parameter(own)

    def check(self, dim: int, query_heads: int, key_heads: int) -> None:
        for part in (self.near, self.far):
            part.check(dim, query_heads, key_heads)
        if self.log_ratio is not None and self.log_ratio.shape != (query_heads,):
            raise InvalidArgument(
                f"Mixed: log_ratio must be [{query_heads}], one per query head, not {list(self.log_ratio.shape)}."
            )
