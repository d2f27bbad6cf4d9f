"""A model of decisions: episodes as sequences of returns, observations and actions."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from mercer.core.state import State
from mercer.core.structures import Causal
from mercer.errors import InvalidArgument
from mercer.models.bricks import make_attention, make_block, make_norm
from mercer.models.configured import ConfiguredModel
from mercer.models.decision_config import DecisionConfig
from mercer.models.initial import initialise
from mercer.nn.positions import LearnedPositions

PARTS = 3
"""Tokens of a step: its return, its observation, its action."""


class Predictions(NamedTuple):
    """What a model says of each step. actions: [B, T, actions], from what came before and the step's return and
    observation. observations [B, T, observed] and returns [B, T, 1]: of the step after, from the step's action too.
    """

    actions: Tensor
    observations: Tensor
    returns: Tensor


class DecisionTransformer(ConfiguredModel):
    """A model that a `DecisionConfig` describes (Chen et al. 2021, arXiv 2106.01345).

    A step is three tokens: the return that is still to come, the observation (the paper's state) and the action,
    x_0 = norm(W x + b + steps[t]) + c. Then x_l = block_l(x_{l-1}) over all tokens, each seeing those before it. The
    numbers t of the steps are the only positions. Actions are read from the tokens of observations; the next
    observation and return from those of actions.
    """

    def __init__(self, config: DecisionConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        with torch.random.fork_rng(devices=[]):  # torch's default draws are replaced below; leave the caller's stream
            self.embed_return = nn.Linear(1, dim)
            self.embed_observation = nn.Linear(config.observed, dim)
            self.embed_action = nn.Linear(config.actions, dim)
            self.steps = LearnedPositions(config.max_length, dim)
            self.embedding_norm = make_norm(config.model_copy(update={"norm_eps": config.embedding_norm_eps}))
            self.positions = LearnedPositions(config.position_rows, dim)
            self.blocks = nn.ModuleList(
                make_block(config, layer, make_attention(config, layer, Causal())) for layer in range(config.layers)
            )
            self.norm = nn.Identity() if config.norm_position == "post" else make_norm(config)
            self.predict_action = nn.Linear(dim, config.actions)
            self.predict_observation = nn.Linear(dim, config.observed)
            self.predict_return = nn.Linear(dim, 1)
        initialise(self, std=config.init_std, seed=config.seed, residual_outputs=2 * config.layers)

    @overload
    def forward(
        self,
        returns: Tensor,
        observations: Tensor,
        actions: Tensor,
        steps: Tensor,
        *,
        padding: Tensor | None = None,
        states: Sequence[State] | None = None,
        return_states: Literal[False] = False,
    ) -> Predictions: ...

    @overload
    def forward(
        self,
        returns: Tensor,
        observations: Tensor,
        actions: Tensor,
        steps: Tensor,
        *,
        padding: Tensor | None = None,
        states: Sequence[State] | None = None,
        return_states: Literal[True],
    ) -> tuple[Predictions, list[State]]: ...

    def forward(
        self,
        returns: Tensor,
        observations: Tensor,
        actions: Tensor,
        steps: Tensor,
        *,
        padding: Tensor | None = None,
        states: Sequence[State] | None = None,
        return_states: bool = False,
    ) -> Predictions | tuple[Predictions, list[State]]:
        """What the model predicts in whole steps, and the states, one a layer, if return_states.

        returns: [B, T, 1], the sum of rewards from each step on. observations: [B, T, observed]. actions: [B, T,
        actions]. steps: integers [B, T], the number of each step in its episode. padding: bool [B, T], True for real
        steps, in any place; what stands at masked places changes nothing, and predictions there mean nothing. states:
        what a former call, or `took`, returned; these steps continue it.
        """
        batch, length = self._size("steps", steps)
        read = [
            self._embed("returns", returns, self.embed_return, batch, length),
            self._embed("observations", observations, self.embed_observation, batch, length),
            self._embed("actions", actions, self.embed_action, batch, length),
        ]
        x = torch.stack(read, 2) + self.steps(steps).unsqueeze(2)
        if padding is not None:
            if padding.shape != steps.shape or padding.dtype != torch.bool:
                raise InvalidArgument(
                    f"padding must be bool [{batch}, {length}], got {padding.dtype} {list(padding.shape)}"
                )
            padding = padding.repeat_interleave(PARTS, 1)
        _check_turn(states, 0, "whole steps follow an action: call took first")
        x, after = self._run(x.flatten(1, 2), padding, states, keep=return_states)
        tokens = x.unflatten(1, (length, PARTS))
        found = Predictions(self._action(tokens[:, :, 1]), *self._after_action(tokens[:, :, 2]))
        return (found, after) if return_states else found

    def act(
        self, returns: Tensor, observations: Tensor, steps: Tensor, *, states: Sequence[State] | None = None
    ) -> tuple[Tensor, list[State]]:
        """The action [B, actions] that the model would take now, and the states after the observation.

        returns: [B, 1], still wanted. observations: [B, observed]. steps: integers [B]. states: what `took` or
        `forward` returned of the steps before; None: there were none.
        """
        steps = steps.unsqueeze(-1)
        batch, length = self._size("steps", steps)
        read = [
            self._embed("returns", returns.unsqueeze(1), self.embed_return, batch, length),
            self._embed("observations", observations.unsqueeze(1), self.embed_observation, batch, length),
        ]
        _check_turn(states, 0, "the last observation has no action yet: call took with the one that was taken")
        x, after = self._run(torch.cat(read, 1) + self.steps(steps), None, states, keep=True)
        return self._action(x[:, 1]), after

    def took(
        self, actions: Tensor, steps: Tensor, states: Sequence[State]
    ) -> tuple[tuple[Tensor, Tensor], list[State]]:
        """The observation [B, observed] and the return [B, 1] that the model expects next, and the states after the
        action, which the next `act` continues.

        actions: [B, actions], what was done, which need not be what `act` said. steps: integers [B], as of that `act`.
        states: what it returned.
        """
        steps = steps.unsqueeze(-1)
        batch, length = self._size("steps", steps)
        x = self._embed("actions", actions.unsqueeze(1), self.embed_action, batch, length) + self.steps(steps)
        _check_turn(states, 2, "an action follows an observation: call act first")
        x, after = self._run(x, None, states, keep=True)
        return self._after_action(x[:, 0]), after

    def _size(self, what: str, steps: Tensor) -> tuple[int, int]:
        if steps.dim() != 2 or steps.is_floating_point() or steps.dtype == torch.bool:
            raise InvalidArgument(f"{what} must be integers, one for each step, got {steps.dtype} {list(steps.shape)}")
        return steps.shape[0], steps.shape[1]

    def _embed(self, what: str, given: Tensor, layer: nn.Linear, batch: int, length: int) -> Tensor:
        wanted = [batch, length, layer.in_features]
        if list(given.shape) != wanted or not given.is_floating_point():
            raise InvalidArgument(
                f"{what} must be floating-point numbers, {layer.in_features} for each of {batch} x {length} steps, got "
                f"{given.dtype} {list(given.shape)}"
            )
        return layer(given)

    def _run(
        self, x: Tensor, padding: Tensor | None, states: Sequence[State] | None, *, keep: bool
    ) -> tuple[Tensor, list[State]]:
        if states is not None and len(states) != len(self.blocks):
            raise InvalidArgument(
                f"the model needs a state for each of its {len(self.blocks)} layers, got {len(states)}"
            )
        x = self.embedding_norm(x) + self.positions.weight[0]
        after: list[State] = []
        for i, block in enumerate(self.blocks):
            state = None if states is None else states[i]
            if keep:
                x, state = block(x, padding=padding, state=state, return_state=True)
                after.append(state)
            else:
                x = block(x, padding=padding, state=state)
        return self.norm(x), after

    def _action(self, x: Tensor) -> Tensor:
        action = self.predict_action(x)
        return torch.tanh(action) if self.config.bounded else action

    def _after_action(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.predict_observation(x), self.predict_return(x)


def _check_turn(states: Sequence[State] | None, part: int, reason: str) -> None:
    """Refuse tokens out of turn: states hold whole steps, or one token less."""
    if states and bool((states[0].length % PARTS != part).any()):
        raise InvalidArgument(reason)
