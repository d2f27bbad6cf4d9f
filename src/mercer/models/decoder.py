"""The decoder language model: token embedding, blocks, final norm, scores over the vocabulary."""

import copy
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from mercer.core.state import State
from mercer.core.structures import Structure
from mercer.errors import InvalidArgument
from mercer.mixers.block import MixerBlock
from mercer.mixers.names import is_mixer
from mercer.models.bricks import make_attention, make_block, make_mixer_block, make_norm
from mercer.models.config import ModelConfig
from mercer.models.configured import ConfiguredModel
from mercer.models.endless import is_endless
from mercer.models.initial import generator_of, initialise, undrawn_embedding
from mercer.models.token_ids import token_ids
from mercer.models.visibility import causal_structure
from mercer.nn.attention import Attention
from mercer.nn.block import Block
from mercer.nn.loss import default_block, linear_cross_entropy
from mercer.nn.positions import LearnedPositions, Sinusoidal, token_positions
from mercer.nn.product import linear
from mercer.nn.reach import longest, refuse_longer
from mercer.nn.rope_scaling import RopeScaling
from mercer.nn.rotary import Rotary
from mercer.nn.routing import Routing, balance_loss, z_loss
from mercer.nn.scored_loss import scored_cross_entropy
from mercer.nn.t5 import T5Bias


class DecoderLM(ConfiguredModel):
    """A causal language model that a `ModelConfig` describes.

    x_0 = embed(tokens) [+ positions];  x_l = block_l(x_{l-1});  logits = norm(x_L) W^T, W the embedding if tied.

    The embedding may have a factor and a norm of its own, the scores a bias and a cap. With sinusoidal positions the
    factor is sqrt(dim), as in the original transformer, so that sinusoids of size 1 do not drown the embedding.
    Post-norm models end in their last block's norm and have no final one.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.reach = config, config.reach
        sinusoidal = config.position == "sinusoidal"
        self.embedding_scale = config.embedding_scale or (config.dim**0.5 if sinusoidal else 1.0)
        with torch.random.fork_rng(devices=[]):  # torch's default draws are replaced below; leave the caller's stream
            self.embedding = undrawn_embedding(config.vocab_size, config.dim)
            self.positions: LearnedPositions | Sinusoidal | None = None
            if config.position == "learned":
                self.positions = LearnedPositions(config.max_length, config.dim)
            elif config.position == "sinusoidal":
                self.positions = Sinusoidal(config.dim)
            self.relative: T5Bias | None = None  # of all layers
            if config.position == "t5":
                self.relative = T5Bias(config.heads, buckets=config.t5_buckets, max_distance=config.t5_max_distance)
            rotary = _rotary(config)
            self.blocks = self._make_blocks(rotary)
            self.embedding_norm = make_norm(config) if config.embedding_norm else None
            self.norm = nn.Identity() if config.norm_position == "post" else make_norm(config)
            tied = config.tie_embeddings
            self.head = None if tied else nn.Linear(config.dim, config.vocab_size, bias=config.head_bias)
        initialise(self, std=config.init_std, seed=config.seed, residual_outputs=2 * config.layers)

    def _make_blocks(self, rotary: Rotary | None) -> nn.ModuleList:
        """The layers. rotary: of their attentions."""
        return nn.ModuleList(_block(self.config, layer, rotary) for layer in range(self.config.layers))

    @property
    def endless(self) -> bool:
        """Whether it reads a text of any length as one sequence, in states of bounded size: `is_endless`."""
        return is_endless(self)

    @property
    def head_weight(self) -> Tensor:
        """[vocab_size, dim]: the matrix that scores tokens."""
        return self.embedding.weight if self.head is None else self.head.weight

    def redraw(self, seed: int | None = None) -> None:
        """Draw the random features of every layer that has some anew, in place: the next draw of each layer's seed, or,
        from `seed`, directions that depend on it and on the layer's number alone.
        """
        attentions = {name: module for name, module in self.named_modules() if isinstance(module, Attention)}
        random = {name: attention for name, attention in attentions.items() if attention.has_random_features}
        if not random:
            raise InvalidArgument("redraw is for random features, and no layer of this model has any")
        for name, attention in random.items():
            own = None if seed is None else generator_of(seed, f"{name}.redraw").initial_seed()
            attention.redraw(own)

    def with_positions(
        self, *, rope_scaling: RopeScaling | Mapping[str, Any] | None = None, allow_longer: bool = False
    ) -> "DecoderLM":
        """The same model for longer sequences than it was trained on: a model that shares this one's weights, with the
        given scaling of its rotary positions, or with positions that simply run on.

        rope_scaling: None takes a scaling away. Sequences are refused beyond `config.reach`.

        Raises:
            InvalidArgument: the model's positions have no scaling, or end with their table.
        """
        if not isinstance(rope_scaling, RopeScaling | Mapping | None):
            raise InvalidArgument(
                "rope_scaling must be an object such as YaRN(factor=4, trained=2048) or a mapping such as "
                f'{{"rope_type": "yarn", "factor": 4}}, not {rope_scaling!r}'
            )
        values = self.config.model_dump()
        values["rope_scaling"] = rope_scaling if isinstance(rope_scaling, RopeScaling | None) else dict(rope_scaling)
        values["allow_longer"] = allow_longer
        config = type(self.config)(**values)
        shared = {id(tensor): tensor for tensor in chain(self.parameters(), self.buffers())}
        twin = copy.deepcopy(self, shared)
        twin.config, twin.reach, rotary = config, config.reach, _rotary(config)
        for module in twin.modules():
            if isinstance(module, Attention):
                module.rotary = rotary
        return twin

    def embed(self, tokens: Tensor, *, padding: Tensor | None = None, offset: Tensor | None = None) -> Tensor:
        """What the first block reads, [B, T, dim]. offset: int64 [B], real tokens before these."""
        x = self.embedding(tokens)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        if self.positions is not None:
            where = token_positions(*tokens.shape, padding=padding, offset=offset, device=tokens.device)
            x = x + self.positions(where).to(x.dtype)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    @overload
    def hidden(
        self,
        tokens: Tensor,
        *,
        padding: Tensor | None = None,
        states: Sequence[State] | None = None,
        routings: list[Routing] | None = None,
        return_states: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def hidden(
        self,
        tokens: Tensor,
        *,
        padding: Tensor | None = None,
        states: Sequence[State] | None = None,
        routings: list[Routing] | None = None,
        return_states: Literal[True],
    ) -> tuple[Tensor, list[State]]: ...

    def hidden(
        self,
        tokens: Tensor,
        *,
        padding: Tensor | None = None,
        states: Sequence[State] | None = None,
        routings: list[Routing] | None = None,
        return_states: bool = False,
    ) -> Tensor | tuple[Tensor, list[State]]:
        """The last hidden states [B, T, dim], ready for the head; arguments as in `forward`. routings: a list that what
        the routers of experts decide in each layer is appended to.
        """
        tokens = token_ids(tokens)
        if states is not None and len(states) != len(self.blocks):
            raise InvalidArgument(
                f"the model needs a state for each of its {len(self.blocks)} layers, got {len(states)}"
            )
        if states is not None and any(not isinstance(state, State) for state in states):
            raise InvalidArgument(
                "every one of states must be a state that the model returned; leave states out to begin"
            )
        offset = None if states is None else states[0].length
        if self.reach is not None and self.config.position != "learned":  # that table says so itself
            self._refuse_longer(longest(tokens.shape[1], padding, offset))
        x = self.embed(tokens, padding=padding, offset=offset)
        structure = None if self.relative is None else self.relative()
        x, after = self._through(x, padding, structure, states, routings, return_states)
        x = self.norm(x)
        return (x, after) if return_states else x

    def _through(
        self,
        x: Tensor,
        padding: Tensor | None,
        structure: Structure | None,
        states: Sequence[State] | None,
        routings: list[Routing] | None,
        return_states: bool,
    ) -> tuple[Tensor, list[State]]:
        """What the layers make of the embedding x, and their states if asked."""
        after: list[State] = []
        carried: dict[Any, Any] = {}
        for i, block in enumerate(self.blocks):
            state = None if states is None else states[i]
            mixer = isinstance(block, MixerBlock)
            own = {"carried": carried} if mixer else {"structure": structure}
            if return_states:
                x, state = block(x, padding=padding, state=state, routings=routings, return_state=True, **own)
                after.append(state)
            else:
                x = block(x, padding=padding, state=state, routings=routings, **own)
        return x, after

    @overload
    def forward(
        self,
        tokens: Tensor,
        *,
        padding: Tensor | None = None,
        states: Sequence[State] | None = None,
        return_states: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        tokens: Tensor,
        *,
        padding: Tensor | None = None,
        states: Sequence[State] | None = None,
        return_states: Literal[True],
    ) -> tuple[Tensor, list[State]]: ...

    def forward(
        self,
        tokens: Tensor,
        *,
        padding: Tensor | None = None,
        states: Sequence[State] | None = None,
        return_states: bool = False,
    ) -> Tensor | tuple[Tensor, list[State]]:
        """Logits [B, T, vocab_size] for the token after each, and the states, one a layer, if return_states.

        tokens: integers [B, T]. padding: bool [B, T], True for real tokens, in any place; what stands at masked places
        changes nothing, and logits there mean nothing. states: what a former call returned; tokens continue it.
        """
        result = self.hidden(tokens, padding=padding, states=states, return_states=return_states)
        x, after = result if isinstance(result, tuple) else (result, None)
        logits = self.score(x)
        return logits if after is None else (logits, after)

    def score(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab_size] of last hidden states [..., dim]."""
        logits = linear(hidden, self.head_weight, None if self.head is None else self.head.bias)
        return logits if self.config.logit_cap is None else capped(logits, self.config.logit_cap)

    def _refuse_longer(self, length: int) -> None:
        if self.reach is None or length <= self.reach:
            return
        scaling = self.config.scaling
        whose = "the model was trained for (max_length)" if scaling is None else f"{scaling} carries it to"
        fix = "with_positions(allow_longer=True) lets positions run on"
        if self.config.position == "rotary":
            trained = self.config.max_length
            fix = f"with_positions(rope_scaling=YaRN(factor=..., trained={trained})) gives them a scaling, or {fix}"
        refuse_longer(whose, length, self.reach, fix)

    def loss(
        self, tokens: Tensor, targets: Tensor, *, padding: Tensor | None = None, reduction: str = "mean"
    ) -> Tensor:
        """Cross entropy in nats a target ("mean") or in all ("sum"); targets [B, T] of -100 do not count. In training
        mode the losses of experts' routers are added to the mean.

        The logits held at once are never more numbers than the model has parameters.
        """
        weight = self.head_weight
        block = min(default_block(*weight.shape), max(self.parameter_count // weight.shape[0], 1))
        routings: list[Routing] = []
        hidden = self.hidden(tokens, padding=padding, routings=routings)
        if self.config.head_bias or self.config.logit_cap is not None:
            loss = scored_cross_entropy(self.score, hidden, targets, block=block, reduction=reduction)
        else:
            loss = linear_cross_entropy(hidden, weight, targets, block=block, reduction=reduction)
        experts = self.config.experts
        if experts is not None and self.training and reduction == "mean":
            loss = loss + experts.balance * balance_loss(*routings) + experts.z_loss * z_loss(*routings)
        return loss


def capped(scores: Tensor, cap: float) -> Tensor:
    """cap tanh(s / cap): within cap of 0, and s where that is small (Gemma 2's logits)."""
    return torch.tanh(scores / cap) * cap


def _rotary(config: ModelConfig) -> Rotary | None:
    """The turning of all layers. How long a sequence may be the model asks once, not each layer."""
    if config.position != "rotary":
        return None
    return Rotary(config.head_size, base=config.rope_base, turned=config.rope_turned, scaling=config.scaling)


def _block(config: ModelConfig, layer: int, rotary: Rotary | None) -> Block | MixerBlock:
    if is_mixer(config.attentions[layer]):
        return make_mixer_block(config, layer)
    attention = make_attention(
        config,
        layer,
        causal_structure(config.structures[layer], config.window),
        rotary=rotary,
        alibi=config.position == "alibi",
        recency=config.recency,
    )
    return make_block(config, layer, attention)
