"""States: what the past leaves behind. A state is a value: no call changes one that the caller holds.

:class:`FeatureState` is the fixed-size state of a finite kernel; :class:`CacheState` keeps keys and values, for
kernels or structures that need them. Keeping an old state is all that going back takes, and two continuations of one
state do not touch each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Self, cast

import torch
from torch import Tensor

from mercer.core.growth import Joined, Spot
from mercer.core.layout import PastKeys
from mercer.errors import InvalidArgument


class State(ABC):
    """What a call leaves for the next one. Saved with :meth:`tensors`, loaded with :meth:`from_tensors`."""

    length: Tensor
    """``[B]`` int64: real (unpadded) tokens absorbed so far."""

    @abstractmethod
    def _own_tensors(self) -> dict[str, Tensor]: ...

    @property
    def batch(self) -> int:
        return self.length.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: of the tokens they show, not of free places behind a cache."""
        return sum(t.numel() * t.element_size() for t in self._own_tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The state as named contiguous tensors, ready for safetensors."""
        return {name: t.contiguous() for name, t in self._own_tensors().items()}

    @staticmethod
    def from_tensors(tensors: dict[str, Tensor]) -> State:
        """Make the state that :meth:`tensors` described."""
        if "mixer" in tensors or any("/" in name for name in tensors):
            from mercer.core.mixer_state import JoinedState, MixerState  # which are made of this class

            return MixerState.read(tensors) if "mixer" in tensors else JoinedState.read(tensors)
        if "near.keys" in tensors:
            parts = (
                State.from_tensors({n.removeprefix(p): t for n, t in tensors.items() if n.startswith(p)})
                for p in ("near.", "far.")
            )
            near, far = parts
            if isinstance(near, CacheState) and isinstance(far, FeatureState):
                return MixedState(near, far)
        kind = FeatureState if "features" in tensors else CacheState if "keys" in tensors else None
        if kind is None:
            raise InvalidArgument(f"No state has the tensors {sorted(tensors)}; expected those of State.tensors().")
        names = {f.name for f in fields(kind) if f.init}
        optional = {"mass": None} if kind is FeatureState else {}
        values: dict[str, Any] = optional | tensors
        if "kernel" in values:
            try:
                values["kernel"] = bytes(values["kernel"].tolist()).decode()
            except (TypeError, ValueError) as error:
                raise InvalidArgument("The tensor 'kernel' of a state holds the bytes of a name in UTF-8.") from error
        if set(values) - names:
            raise InvalidArgument(f"A {kind.__name__} has no tensors {sorted(set(values) - names)}.")
        needed = {f.name for f in fields(kind) if f.default is MISSING}
        if needed - set(values):
            raise InvalidArgument(
                f"A {kind.__name__} needs the tensors {sorted(needed - set(values))}, which are missing."
            )
        return kind(**values)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.init}  # pyright: ignore[reportArgumentType]
        return type(self)(**{name: change(v) if isinstance(v, Tensor) else v for name, v in given.items()})

    def clone(self) -> Self:
        """A copy that shares no memory."""
        return self._map(lambda t: t.clone())

    def detach(self) -> Self:
        """The same values, cut from the graph."""
        return self._map(lambda t: t.detach())

    def to(self, device: torch.device | str) -> Self:
        return self._map(lambda t: t.to(device))

    def __repr__(self) -> str:
        """The fields, with the shape and dtype of each tensor in place of its numbers."""
        shown = [f"{field.name}={_told(getattr(self, field.name))}" for field in fields(cast(Any, self)) if field.repr]
        return f"{type(self).__name__}({', '.join(shown)})"

    def select(self, index: Tensor) -> Self:
        """The states of the batch rows ``index`` (integers, repeats allowed, or a boolean mask), in that order."""
        rows = index.nonzero().squeeze(-1) if index.dtype == torch.bool else index
        batch = self.batch
        return self._map(lambda t: t.index_select(0, rows) if t.shape[0] == batch else t)


@dataclass(frozen=True, eq=False, repr=False)
class FeatureState(State):
    """The state of a finite kernel: S = sum_j w_j phi(k_j) v_j^T and z = sum_j w_j phi(k_j).

    Attributes:
        features: S, ``[B, H, F, Dv]`` float32 (float64 for float64 inputs).
        mass: z, ``[B, H, F]``, or None if the normaliser did not need it.
        length: ``[B]`` int64.
        log_decay: ``[B, H]`` float64: the log of the total decay over the tokens absorbed (0 without decay).
        kernel: which kernel's features these are.
        peak: ``[B, H]`` float64 for a kernel whose features are exponentials: S and z are kept divided by exp(peak);
            minus infinity if nothing was absorbed. None for the others.
    """

    features: Tensor
    mass: Tensor | None
    length: Tensor
    log_decay: Tensor
    kernel: str
    peak: Tensor | None = None

    def _own_tensors(self) -> dict[str, Tensor]:
        name = torch.tensor(list(self.kernel.encode()), dtype=torch.uint8)
        out = {"features": self.features, "length": self.length, "log_decay": self.log_decay, "kernel": name}
        optional = {"mass": self.mass, "peak": self.peak}
        return out | {name: t for name, t in optional.items() if t is not None}

    def merge(self, later: FeatureState) -> FeatureState:
        """The state of this state's tokens followed by ``later``'s. Associative; without decay commutative too."""
        if self.kernel != later.kernel or self.features.shape != later.features.shape:
            raise InvalidArgument(
                f"Cannot merge a state of {self.kernel} {list(self.features.shape)} with one of {later.kernel} "
                f"{list(later.features.shape)}."
            )
        if (self.mass is None) != (later.mass is None):
            raise InvalidArgument("Cannot merge a state that has a mass (denominators) with one that has none.")
        if (self.peak is None) != (later.peak is None):
            raise InvalidArgument("Cannot merge a state that is kept relative to a peak with one that is not.")
        peak, fade, rise = None, later.log_decay, torch.zeros_like(later.log_decay)
        if self.peak is not None and later.peak is not None:
            before = self.peak + later.log_decay
            peak = torch.maximum(before, later.peak).detach()  # a reference: no value depends on it
            reference = peak.masked_fill(peak == -torch.inf, 0)
            fade, rise = before - reference, later.peak - reference
        first, second = (x.exp().to(self.features.dtype) for x in (fade, rise))
        mass = None
        if self.mass is not None and later.mass is not None:
            mass = self.mass * first[..., None] + later.mass * second[..., None]
        return FeatureState(
            features=self.features * first[..., None, None] + later.features * second[..., None, None],
            mass=mass,
            length=self.length + later.length,
            log_decay=self.log_decay + later.log_decay,
            kernel=self.kernel,
            peak=peak,
        )


@dataclass(frozen=True, eq=False, repr=False)
class CacheState(State):
    """Keys and values of the past, as they came.

    A cache that a call returns is a view of a buffer with free places behind it, which the next call fills without
    moving what is there (:mod:`mercer.core.growth`); so keys and values of it are not contiguous, and share memory with
    the caches before and after. None of them ever changes.

    Attributes:
        keys: ``[B, Hk, Lp, D]`` in the dtype of the input; under a window only what can still be seen.
        values: ``[B, Hk, Lp, Dv]``.
        length: ``[B]`` int64; may exceed Lp under a window.
        valid: ``[B, Lp]`` bool, or None if every cached token is real.
        log: ``[B, h, Lp]`` float64 cumulative log-decay after each token, relative to the newest; None without decay.
    """

    keys: Tensor
    values: Tensor
    length: Tensor
    valid: Tensor | None = None
    log: Tensor | None = None
    _spot: Spot | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, kept: Joined, length: Tensor, valid: Tensor | None, log: Tensor | None) -> Self:
        """The cache of tokens that may stand in a buffer."""
        state = cls(kept.keys, kept.values, length, valid, log)
        if kept.spot is not None:
            object.__setattr__(state, "_spot", kept.spot)
        return state

    @property
    def spot(self) -> Spot | None:
        """Where keys and values stand in a buffer that can take more; None if they are tensors of their own."""
        return self._spot

    def detach(self) -> Self:
        """The same values, cut from the graph."""
        cut = super().detach()
        return cut if self._spot is None else self.of(Joined(cut.keys, cut.values, self._spot), *_rest(cut))

    def to(self, device: torch.device | str) -> Self:
        moved = super().to(device)
        if self._spot is None or moved.keys is not self.keys:
            return moved
        return self.of(Joined(moved.keys, moved.values, self._spot), *_rest(moved))

    def __getstate__(self) -> dict[str, Any]:
        """For copies and other processes: the tokens it shows, without the buffer."""
        return self.tensors() | {"valid": self.valid, "log": self.log}

    def _own_tensors(self) -> dict[str, Tensor]:
        out = {"keys": self.keys, "values": self.values, "length": self.length}
        optional = {"valid": self.valid, "log": self.log}
        return out | {name: t for name, t in optional.items() if t is not None}

    def __repr__(self) -> str:
        """The fields, with the shape and dtype of each tensor in place of its numbers."""
        shown = [f"{field.name}={_told(getattr(self, field.name))}" for field in fields(cast(Any, self)) if field.repr]
        return f"{type(self).__name__}({', '.join(shown)})"

    def select(self, index: Tensor) -> Self:
        """The caches of the batch rows ``index``, without the places in front that are padding in all of them."""
        if self.valid is None:
            return super().select(index)
        rows = index.nonzero().squeeze(-1) if index.dtype == torch.bool else index
        valid = self.valid.index_select(0, rows)
        real = valid.any(0)
        first = int(real.to(torch.uint8).argmax()) if bool(real.any()) else real.shape[0]
        short = type(self)(
            self.keys[:, :, first:],
            self.values[:, :, first:],
            self.length,
            self.valid[:, first:],
            None if self.log is None else self.log[:, :, first:],
        )
        chosen = super(CacheState, short).select(rows)
        return replace(chosen, valid=None) if bool(valid[:, first:].all()) else chosen

    @property
    def present(self) -> Tensor:
        """Which cached tokens are real, ``[B, Lp]``."""
        if self.valid is not None:
            return self.valid
        return torch.ones(self.keys.shape[0], self.keys.shape[2], dtype=torch.bool, device=self.keys.device)

    def past(self) -> PastKeys:
        """Positions, validity and decay of the cached keys, for a layout."""
        kept = self.keys.shape[2]
        newest = self.length.unsqueeze(1)
        if self.valid is None:
            position = newest - torch.arange(kept, 0, -1, device=newest.device)
        else:  # each key stands as far from the end as there are real keys from it on
            position = newest - self.valid.flip(1).cumsum(1).flip(1)
        return PastKeys(position, self.valid, self.length, self.log)


def _told(value: object) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _rest(state: CacheState) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return state.length, state.valid, state.log


@dataclass(frozen=True, eq=False, repr=False)
class MixedState(State):
    """The state of :class:`~mercer.Mixed`: the last keys and values, and the feature state of all that came before.

    Attributes:
        near: the cache of the last ``window`` tokens; its length counts all of them.
        far: the state of those that have left the window.
    """

    near: CacheState
    far: FeatureState

    @property
    def length(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """``[B]`` int64: real tokens absorbed so far."""
        return self.near.length

    def _own_tensors(self) -> dict[str, Tensor]:
        parts = (("near", self.near), ("far", self.far))
        return {f"{part}.{name}": t for part, state in parts for name, t in state.tensors().items()}

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(self.near._map(change), self.far._map(change))

    def detach(self) -> Self:
        """The same values, cut from the graph."""
        return type(self)(self.near.detach(), self.far.detach())

    def to(self, device: torch.device | str) -> Self:
        return type(self)(self.near.to(device), self.far.to(device))
