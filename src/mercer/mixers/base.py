"""What all mixers share: padding, packed documents, and states as values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, overload

import torch
from torch import Tensor

from mercer.core.mixer_state import MixerState
from mercer.core.state import State
from mercer.core.structures import Causal, Documents, Full, Padding, Structure
from mercer.errors import InvalidArgument, Unsupported
from mercer.mixers.rows import Rows, lay_out
from mercer.nn.start import HasStart


class Mixer(HasStart):
    """A layer y = f(x) in which a token reads what came before it through a state of fixed size.

    Every mixer is given x [B, L, dim] and returns [B, L, dim], called at once, in pieces or token by token with the
    state of one piece handed to the next; all agree. Masked tokens are as if absent: they add nothing, decay nothing,
    and no convolution or shift sees them. A subclass writes `mix` for rows whose real tokens come first.
    """

    dim: int
    carries: ClassVar[bool] = False
    """Whether `mix` takes a fourth argument: a dictionary that the layers of one call of a model share."""
    unpacked: ClassVar[tuple[str, ...]] = ()
    """Linear layers whose weights are used without calling them, so that inference cannot put packed ones there."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """The mixer and the sizes that decide what its state means, such as ``mamba(64, state=16, width=4)``."""

    @abstractmethod
    def mix(
        self, x: Tensor, lengths: Tensor | None, past: Mapping[str, Tensor] | None, *carried: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """x: [B, L, dim], L at least 1; the first lengths[b] (int64 [B]; None: all) tokens of row b are real, and zeros
        stand behind them. past: the parts of the rows' state, or None for rows that begin. Returns y [B, L, dim], of
        any value behind the real tokens, and the parts of the state after the last real token, each [B, ...]; a row
        without any keeps its parts to the bit.
        """

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        padding: Tensor | None = None,
        structure: Structure | None = None,
        state: State | None = None,
        carried: dict[Any, Any] | None = None,
        return_state: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        padding: Tensor | None = None,
        structure: Structure | None = None,
        state: State | None = None,
        carried: dict[Any, Any] | None = None,
        return_state: Literal[True],
    ) -> tuple[Tensor, MixerState]: ...

    def forward(
        self,
        x: Tensor,
        *,
        padding: Tensor | None = None,
        structure: Structure | None = None,
        state: State | None = None,
        carried: dict[Any, Any] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, MixerState]:
        """x: [B, L, dim]; returns [B, L, dim], 0 at masked tokens, with the state after x if return_state.

        padding: bool [B, L], True for real tokens, anywhere. structure: `Documents`, for sequences packed one behind
        the other, each with a state of its own (entry b N + d is document d of row b), and `Padding`; a mixer has no
        pairs of tokens that another structure could hide or weigh. state: what earlier tokens left behind. carried:
        what the layers of one call of a model share.
        """
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise InvalidArgument(f"{self.kind} expects [B, L, {self.dim}], got a tensor of {list(x.shape)}")
        if not x.is_floating_point():
            raise InvalidArgument(f"{self.kind} expects floating-point numbers, got {x.dtype}")
        padding, documents = self._parts(x, padding, structure)
        shared = {} if carried is None else carried
        batch, length, _ = x.shape
        if padding is None and documents is None and length:
            past = self._past(state, batch)
            y, parts = self._mix(x, None, past, shared, 0)
            if not return_state:
                return y
            before = torch.zeros(batch, dtype=torch.int64, device=x.device) if state is None else state.length
            return y, MixerState(self.kind, parts, before + length)
        count, groups = lay_out(batch, length, padding, documents, x.device)
        past = self._past(state, count)
        out = x.new_zeros(batch * length, self.dim)
        pieces: list[dict[str, Tensor]] = []
        for number, rows in enumerate(groups):
            own = None if past is None else {name: part[rows.entries] for name, part in past.items()}
            laid = rows.gather(x) if length else x.new_zeros(len(rows.entries), 1, self.dim)
            y, parts = self._mix(laid, rows.lengths, own, shared, number)
            out = rows.put(out.to(y.dtype), y) if length else out
            pieces.append(parts)
        y = out.view(batch, length, self.dim)
        return (y, self._after(pieces, groups, state, count)) if return_state else y

    def _mix(
        self,
        x: Tensor,
        lengths: Tensor | None,
        past: Mapping[str, Tensor] | None,
        carried: dict[Any, Any],
        group: int,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if not self.carries:
            return self.mix(x, lengths, past)
        return self.mix(x, lengths, past, carried.setdefault(group, {}))

    def _parts(
        self, x: Tensor, padding: Tensor | None, structure: Structure | None
    ) -> tuple[Tensor | None, Documents | None]:
        documents: Documents | None = None
        for part in () if structure is None else structure.parts:
            if isinstance(part, Documents):
                documents = part
            elif isinstance(part, Padding):
                mask = _mask(part, x.shape[1])
                padding = mask if padding is None else padding & mask
            elif not isinstance(part, Causal | Full):
                raise Unsupported(
                    f"{self.kind} has a state instead of pairs, which {part} cannot hide or weigh: use an attention in "
                    "this layer, or leave the structure out"
                )
        return padding, documents

    def _past(self, state: State | None, count: int) -> Mapping[str, Tensor] | None:
        """The parts of a state, once it is this mixer's and has a row for each sequence."""
        if state is None:
            return None
        if not isinstance(state, MixerState) or state.kind != self.kind:
            what = state.kind if isinstance(state, MixerState) else type(state).__name__
            raise InvalidArgument(f"the state is of {what}, and this layer is {self.kind}: pass the state it returned")
        if state.batch != count:
            raise InvalidArgument(
                f"the state has {state.batch} sequences and the input {count}: pass one state for each sequence, and "
                "for each packed document of a row"
            )
        return state.parts

    def _after(
        self, pieces: list[dict[str, Tensor]], groups: list[Rows], state: State | None, count: int
    ) -> MixerState:
        """The state of all sequences, in their order."""
        entries = torch.cat([rows.entries for rows in groups])
        lengths = torch.cat([rows.lengths for rows in groups])
        back = torch.argsort(entries)
        parts = {name: torch.cat([piece[name] for piece in pieces])[back] for name in pieces[0]}
        before = torch.zeros(count, dtype=torch.int64, device=entries.device) if state is None else state.length
        return MixerState(self.kind, parts, before + lengths[back])


def _mask(padding: Padding, length: int) -> Tensor:
    if padding.mask is not None:
        return padding.mask
    assert padding.lengths is not None
    return torch.arange(length, device=padding.lengths.device) < padding.lengths.unsqueeze(1)
