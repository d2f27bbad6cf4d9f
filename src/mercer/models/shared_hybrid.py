"""Decoders of mixers, some of which also read a transformer block that they share."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from mercer.core.mixer_state import JoinedState
from mercer.core.state import State
from mercer.core.structures import Structure
from mercer.errors import InvalidArgument
from mercer.mixers.base import Mixer
from mercer.mixers.block import MixerBlock
from mercer.mixers.names import mixer_config
from mercer.models.bricks import make_attention, make_feedforward, make_norm
from mercer.models.decoder import DecoderLM
from mercer.models.shared_hybrid_config import SharedHybridConfig
from mercer.models.visibility import causal_structure
from mercer.nn.feedforward import FeedForward
from mercer.nn.low_rank import LowRank
from mercer.nn.norms import LayerNorm, RMSNorm
from mercer.nn.rotary import Rotary
from mercer.nn.routing import Routing

_PARTS = ("attention", "mixer")


class Adapters(nn.Module):
    """What one use of a shared block adds to it: low-rank maps beside its projections."""

    def __init__(self, config: SharedHybridConfig, shared: "SharedBlock") -> None:
        super().__init__()
        width, rank = shared.attention.dim, config.attention_rank
        self.attention: nn.ModuleList | None = None
        if rank is not None:
            sizes = (config.heads, config.kv_heads or config.heads, config.kv_heads or config.heads)
            self.attention = nn.ModuleList(LowRank(width, rank, n * config.head_size) for n in sizes)
        self.feedforward: LowRank | None = None
        if config.feedforward_rank is not None:
            self.feedforward = LowRank(config.dim, config.feedforward_rank, shared.feedforward.input.out_features)


class SharedBlock(nn.Module):
    """What several layers read of the stream x and of the embedding e, without a residual:

    feedforward(norm(attention(norm([x | e]))))
    """

    def __init__(self, config: SharedHybridConfig, number: int, rotary: Rotary | None) -> None:
        super().__init__()
        self.attention = make_attention(
            config,
            number,
            causal_structure(config.structures[number], config.window),
            rotary=rotary,
            alibi=config.position == "alibi",
            recency=config.recency,
            name="shared",
            width=2 * config.dim,
        )
        feedforward = make_feedforward(config, 0)
        assert isinstance(feedforward, FeedForward)  # there are no experts
        self.feedforward = feedforward
        self.attention_norm, self.feedforward_norm = make_norm(config, 2 * config.dim), make_norm(config)

    def forward(
        self,
        x: Tensor,
        embedding: Tensor,
        adapters: Adapters,
        *,
        padding: Tensor | None,
        structure: Structure | None,
        state: State | None,
        return_state: bool,
    ) -> tuple[Tensor, State | None]:
        """x, embedding: [B, L, dim]; returns [B, L, dim], and the state of the attention if asked."""
        read = self.attention_norm(torch.cat((x, embedding), -1))
        added = None if adapters.attention is None else torch.cat([part(read) for part in adapters.attention], -1)
        options: dict[str, Any] = {"padding": padding, "structure": structure, "state": state, "added": added}
        after: State | None = None
        if return_state:
            attended, after = self.attention(read, **options, return_state=True)
        else:
            attended = self.attention(read, **options)
        read = self.feedforward_norm(attended)
        inner = None if adapters.feedforward is None else adapters.feedforward(read)
        return self.feedforward(read, added=inner), after


class HybridBlock(nn.Module):
    """x + mixer(norm(x + W shared(x, e))): the mixer reads what the shared block gives, and the stream does not."""

    def __init__(self, mixer: Mixer, mixer_norm: LayerNorm | RMSNorm, adapters: Adapters, dim: int) -> None:
        super().__init__()
        self.mixer, self.mixer_norm, self.adapters = mixer, mixer_norm, adapters
        self.bridge = nn.Linear(dim, dim, bias=False)

    def forward(
        self,
        x: Tensor,
        embedding: Tensor,
        shared: SharedBlock,
        *,
        padding: Tensor | None = None,
        structure: Structure | None = None,
        state: State | None = None,
        carried: dict[Any, Any] | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, State | None]:
        """x, embedding: [B, L, dim]; returns x's shape, and a `JoinedState` of attention and mixer if asked."""
        if state is not None and not (isinstance(state, JoinedState) and {*state.parts} == {*_PARTS}):
            raise InvalidArgument(
                f"this block needs the JoinedState of its attention and its mixer that it returned, got {state!r}"
            )
        own = dict.fromkeys(_PARTS) if state is None else state.parts
        told, attention = shared(
            x,
            embedding,
            self.adapters,
            padding=padding,
            structure=structure,
            state=own["attention"],
            return_state=return_state,
        )
        mixed, mixer = self.mixer(
            self.mixer_norm(x + self.bridge(told)),
            padding=padding,
            state=own["mixer"],
            carried=carried,
            return_state=True,
        )
        after = None if attention is None else JoinedState({"attention": attention, "mixer": mixer})
        return x + mixed, after


class SharedHybridLM(DecoderLM):
    """A causal language model that a `SharedHybridConfig` describes: a stream of mixers, where some layers also read a
    transformer block that is stored once and used by several of them,

        e = embed(tokens),   x_0 = e,
        x_l = x_{l-1} + mixer_l(norm(x_{l-1})),   or for the layers of `shared_at`
        x_l = x_{l-1} + mixer_l(norm(x_{l-1} + W_l shared(x_{l-1}, e))).

    Each use has a matrix W_l of its own, and low-rank adapters of the shared block if the configuration has ranks for
    them. Called as a `DecoderLM` is; the state of a layer of `shared_at` is a `JoinedState`.

    Source: Glorioso et al. 2024 (Zamba), arXiv 2405.16712; 2024 (Zamba2), arXiv 2411.15242.
    """

    config: SharedHybridConfig

    def _make_blocks(self, rotary: Rotary | None) -> nn.ModuleList:
        config = self.config
        self.shared = nn.ModuleList(SharedBlock(config, number, rotary) for number in range(config.shared))
        return nn.ModuleList(self._block(layer) for layer in range(config.layers))

    def _block(self, layer: int) -> MixerBlock | HybridBlock:
        config = self.config
        options = mixer_config(config.mixer, config.mixers.get(config.mixer))
        mixer, number = (
            options.build(config.dim, config.heads, layer=layer, layers=config.layers),
            config.block_of(layer),
        )
        if number is None:
            return MixerBlock(mixer, make_norm(config))
        adapters = Adapters(config, cast(SharedBlock, self.shared[number]))
        return HybridBlock(mixer, make_norm(config), adapters, config.dim)

    def _through(
        self,
        x: Tensor,
        padding: Tensor | None,
        structure: Structure | None,
        states: Sequence[State] | None,
        routings: list[Routing] | None,
        return_states: bool,
    ) -> tuple[Tensor, list[State]]:
        embedding = x
        after: list[State] = []
        carried: dict[Any, Any] = {}
        for layer, block in enumerate(self.blocks):
            state = None if states is None else states[layer]
            options: dict[str, Any] = {"padding": padding, "state": state, "carried": carried}
            number = self.config.block_of(layer)
            if number is None:
                x, state = block(x, **options, return_state=True)
            else:
                shared = self.shared[number]
                x, state = block(x, embedding, shared, **options, structure=structure, return_state=return_states)
            if return_states:
                after.append(state)
        return x, after
