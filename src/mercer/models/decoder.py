"""The decoder language model: token embedding, blocks, final norm, scores over the vocabulary."""

import copy
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from mercer.core.names import parse_attention
from mercer.core.state import State
from mercer.core.structures import Causal, Window
from mercer.errors import InvalidArgument
from mercer.models.config import ModelConfig
from mercer.models.initial import generator_of, initialise
from mercer.nn.attention import Attention
from mercer.nn.block import Block
from mercer.nn.feedforward import FeedForward
from mercer.nn.loss import default_block, linear_cross_entropy
from mercer.nn.norms import LayerNorm, RMSNorm
from mercer.nn.options import takes_gain
from mercer.nn.positions import LearnedPositions, Sinusoidal, token_positions
from mercer.nn.reach import longest, refuse_longer
from mercer.nn.rope_scaling import RopeScaling
from mercer.nn.rotary import Rotary
from mercer.nn.t5 import T5Bias


class DecoderLM(nn.Module):
    """A causal language model that a `ModelConfig` describes.

    x_0 = embed(tokens) [+ positions];  x_l = block_l(x_{l-1});  logits = norm(x_L) W^T, W the embedding if tied.

    With sinusoidal positions the embedding is multiplied by sqrt(dim), as the original transformer does, so that
    sinusoids of size 1 do not drown it. Post-norm models end in their last block's norm and have no final one.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.reach = config, config.reach
        with torch.random.fork_rng(devices=[]):  # torch's default draws are replaced below; leave the caller's stream
            self.embedding = nn.Embedding(config.vocab_size, config.dim)
            self.positions: LearnedPositions | Sinusoidal | None = None
            if config.position == "learned":
                self.positions = LearnedPositions(config.max_length, config.dim)
            elif config.position == "sinusoidal":
                self.positions = Sinusoidal(config.dim)
            self.relative: T5Bias | None = None  # of all layers
            if config.position == "t5":
                self.relative = T5Bias(config.heads, buckets=config.t5_buckets, max_distance=config.t5_max_distance)
            rotary = _rotary(config)
            self.blocks = nn.ModuleList(_block(config, layer, rotary) for layer in range(config.layers))
            self.norm = _norm(config) if config.norm_position == "pre" else nn.Identity()
            tied = config.tie_embeddings
            self.head = None if tied else nn.Linear(config.dim, config.vocab_size, bias=False)
        initialise(self, std=config.init_std, seed=config.seed, residual_outputs=2 * config.layers)

    @property
    def head_weight(self) -> Tensor:
        """[vocab_size, dim]: the matrix that scores tokens."""
        return self.embedding.weight if self.head is None else self.head.weight

    def redraw(self, seed: int | None = None) -> None:
        """Draw the random features of every layer that has some anew, in place: the next draw of each layer's seed, or,
        from `seed`, directions that depend on it and on the layer's number alone.
        """
        layers = {i: block.attention for i, block in enumerate(self.blocks) if block.attention.has_random_features}
        if not layers:
            raise InvalidArgument("redraw is for random features, and no layer of this model has any")
        for i, attention in layers.items():
            own = None if seed is None else generator_of(seed, f"blocks.{i}.attention.redraw").initial_seed()
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
        values = self.config.model_dump()
        values["rope_scaling"] = rope_scaling if isinstance(rope_scaling, RopeScaling | None) else dict(rope_scaling)
        values["allow_longer"] = allow_longer
        config = ModelConfig(**values)
        shared = {id(tensor): tensor for tensor in chain(self.parameters(), self.buffers())}
        twin = copy.deepcopy(self, shared)
        twin.config, twin.reach, rotary = config, config.reach, _rotary(config)
        for block in twin.blocks:
            block.attention.rotary = rotary
        return twin

    @property
    def parameter_count(self) -> int:
        """Numbers in all parameters, shared ones once."""
        return sum(p.numel() for p in self.parameters())

    @overload
    def hidden(
        self,
        tokens: Tensor,
        *,
        padding: Tensor | None = None,
        states: Sequence[State] | None = None,
        return_states: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def hidden(
        self,
        tokens: Tensor,
        *,
        padding: Tensor | None = None,
        states: Sequence[State] | None = None,
        return_states: Literal[True],
    ) -> tuple[Tensor, list[State]]: ...

    def hidden(
        self,
        tokens: Tensor,
        *,
        padding: Tensor | None = None,
        states: Sequence[State] | None = None,
        return_states: bool = False,
    ) -> Tensor | tuple[Tensor, list[State]]:
        """The last hidden states [B, T, dim], ready for the head; arguments as in `forward`."""
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise InvalidArgument(f"tokens must be integers [B, T], got {tokens.dtype} of shape {list(tokens.shape)}")
        if states is not None and len(states) != len(self.blocks):
            raise InvalidArgument(
                f"the model needs a state for each of its {len(self.blocks)} layers, got {len(states)}"
            )
        offset = None if states is None else states[0].length
        if self.reach is not None and self.config.position != "learned":  # that table says so itself
            self._refuse_longer(longest(tokens.shape[1], padding, offset))
        x = self.embedding(tokens)
        if self.positions is not None:
            where = token_positions(*tokens.shape, padding=padding, offset=offset, device=tokens.device)
            if isinstance(self.positions, Sinusoidal):
                x = x * self.config.dim**0.5
            x = x + self.positions(where).to(x.dtype)
        structure = None if self.relative is None else self.relative()
        after: list[State] = []
        for i, block in enumerate(self.blocks):
            state = None if states is None else states[i]
            if return_states:
                x, state = block(x, padding=padding, structure=structure, state=state, return_state=True)
                after.append(state)
            else:
                x = block(x, padding=padding, structure=structure, state=state)
        x = self.norm(x)
        return (x, after) if return_states else x

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
        logits = nn.functional.linear(x, self.head_weight)
        return logits if after is None else (logits, after)

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
        """Cross entropy in nats a target ("mean") or in all ("sum"); targets [B, T] of -100 do not count.

        The logits held at once are never more numbers than the model has parameters.
        """
        weight = self.head_weight
        block = min(default_block(*weight.shape), max(self.parameter_count // weight.shape[0], 1))
        hidden = self.hidden(tokens, padding=padding)
        return linear_cross_entropy(hidden, weight, targets, block=block, reduction=reduction)


def _rotary(config: ModelConfig) -> Rotary | None:
    """The turning of all layers. How long a sequence may be the model asks once, not each layer."""
    if config.position != "rotary":
        return None
    return Rotary(config.head_size, base=config.rope_base, turned=config.rope_turned, scaling=config.scaling)


def _block(config: ModelConfig, layer: int, rotary: Rotary | None) -> Block:
    kernel, normalizer = parse_attention(config.attentions[layer])
    attention = Attention(
        config.dim,
        config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        kernel=kernel,
        normalizer=normalizer,
        structure=Causal() if config.window is None else Causal() & Window.last(config.window),
        scale=config.attention_scale,
        rotary=rotary,
        alibi=config.position == "alibi",
        gain=config.gain if takes_gain(normalizer) else "none",
        gain_init=1.0 if config.gain_init is None else config.gain_init,
        recency=config.recency,
        bias=config.bias,
        generator=generator_of(config.seed, f"blocks.{layer}.attention.kernel_tensors"),
    )
    feedforward = FeedForward(config.dim, config.hidden, kind=config.feedforward, bias=config.bias)
    return Block(attention, feedforward, _norm(config), _norm(config), norm_position=config.norm_position)


def _norm(config: ModelConfig) -> LayerNorm | RMSNorm:
    if config.norm == "rms":
        return RMSNorm(config.dim, eps=config.norm_eps)
    return LayerNorm(config.dim, eps=config.norm_eps, bias=config.bias)
