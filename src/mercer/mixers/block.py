"""The residual block around a mixer."""

from __future__ import annotations

from typing import Any, Literal, cast, overload

from torch import Tensor, nn

from mercer.core.mixer_state import JoinedState
from mercer.core.state import State
from mercer.core.structures import Structure
from mercer.errors import InvalidArgument
from mercer.mixers.base import Mixer
from mercer.nn.experts import Experts
from mercer.nn.feedforward import FeedForward
from mercer.nn.norms import LayerNorm, RMSNorm
from mercer.nn.routing import Routing


class MixerBlock(nn.Module):
    """y = x + mixer(norm(x)), and where there is a feed-forward, then y + feedforward(norm(y)).

    The feed-forward may be a mixer of its own (RWKV's channel mixing shifts tokens); the block's state is then a
    `JoinedState` of both, "mixer" and "feedforward".
    """

    def __init__(
        self,
        mixer: Mixer,
        mixer_norm: LayerNorm | RMSNorm,
        feedforward: FeedForward | Experts | Mixer | None = None,
        feedforward_norm: LayerNorm | RMSNorm | None = None,
    ) -> None:
        super().__init__()
        if (feedforward is None) != (feedforward_norm is None):
            raise InvalidArgument("a feed-forward and its norm are given together, or neither")
        self.mixer, self.mixer_norm = mixer, mixer_norm
        self.feedforward, self.feedforward_norm = feedforward, feedforward_norm

    @overload
    def forward(
        self,
        x: Tensor,
        *,
        padding: Tensor | None = None,
        structure: Structure | None = None,
        state: State | None = None,
        routings: list[Routing] | None = None,
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
        routings: list[Routing] | None = None,
        carried: dict[Any, Any] | None = None,
        return_state: Literal[True],
    ) -> tuple[Tensor, State]: ...

    def forward(
        self,
        x: Tensor,
        *,
        padding: Tensor | None = None,
        structure: Structure | None = None,
        state: State | None = None,
        routings: list[Routing] | None = None,
        carried: dict[Any, Any] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, State]:
        """x: [B, L, dim]; padding, structure and state as `Mixer.forward` takes them; routings: a list that the routing
        of experts, if there are any, is appended to; carried: what the mixers of one call of a model share. Returns x's
        shape, and the state if asked.
        """
        joined = isinstance(self.feedforward, Mixer)
        if joined and state is not None and not (isinstance(state, JoinedState) and {*state.parts} == _PARTS):
            raise InvalidArgument(
                f"this block needs the JoinedState of its mixer and its feed-forward that it returned, got {state!r}"
            )
        states = cast(JoinedState, state).parts if joined and state is not None else {"mixer": state}
        mixed, after = self.mixer(
            self.mixer_norm(x),
            padding=padding,
            structure=structure,
            state=states["mixer"],
            carried=carried,
            return_state=True,
        )
        y = x + mixed
        if self.feedforward is None or self.feedforward_norm is None:
            return (y, after) if return_state else y
        read = self.feedforward_norm(y)
        if isinstance(self.feedforward, Mixer):
            fed, last = self.feedforward(
                read, padding=padding, structure=structure, state=states.get("feedforward"), return_state=True
            )
            after = JoinedState({"mixer": after, "feedforward": last})
        elif isinstance(self.feedforward, Experts):
            fed = self.feedforward(read, padding=padding, routings=routings)
        else:
            fed = self.feedforward(read)
        y = y + fed
        return (y, after) if return_state else y


_PARTS = {"mixer", "feedforward"}
