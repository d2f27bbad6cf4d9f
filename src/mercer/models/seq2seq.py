"""An encoder, and a decoder that looks at what the encoder made of its input."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mercer.core.state import State
from mercer.core.structures import Causal, Full
from mercer.errors import InvalidArgument
from mercer.models.bricks import make_attention, make_block, make_cross_attention, make_feedforward, make_norm
from mercer.models.configured import ConfiguredModel
from mercer.models.initial import initialise, undrawn_embedding
from mercer.models.seq2seq_config import Seq2SeqConfig
from mercer.models.token_ids import token_ids
from mercer.nn.cross_block import CrossBlock
from mercer.nn.positions import LearnedPositions, Sinusoidal, token_positions
from mercer.nn.routing import Routing
from mercer.nn.t5 import T5Bias


class Side(nn.Module):
    """The blocks of an encoder or a decoder, with their positions and their final norm."""

    def __init__(self, config: Seq2SeqConfig, blocks: Iterable[nn.Module], limit: int, *, both_sides: bool) -> None:
        super().__init__()
        self.positions: LearnedPositions | Sinusoidal | None = None
        if config.position == "learned":
            self.positions = LearnedPositions(limit, config.dim)
        elif config.position == "sinusoidal":
            self.positions = Sinusoidal(config.dim, layout="split", max_length=limit)
        self.relative: T5Bias | None = None  # of all layers
        if config.position == "t5":
            self.relative = T5Bias(
                config.heads,
                bidirectional=both_sides,
                buckets=config.t5_buckets,
                max_distance=config.t5_max_distance,
            )
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.Identity() if config.norm_position == "post" else make_norm(config)

    def placed(self, x: Tensor, padding: Tensor | None, offset: Tensor | None = None) -> Tensor:
        """x with its positions, which count real tokens."""
        if self.positions is None:
            return x
        where = token_positions(*x.shape[:2], padding=padding, offset=offset, device=x.device)
        return x + self.positions(where).to(x.dtype)


class Convolutions(nn.Module):
    """gelu(conv_2(gelu(conv_1(frames)))), both of width 3, the second with stride 2 (Radford et al. 2022)."""

    def __init__(self, bins: int, dim: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(bins, dim, 3, padding=1)
        self.second = nn.Conv1d(dim, dim, 3, stride=2, padding=1)

    def forward(self, frames: Tensor) -> Tensor:
        """frames: [B, bins, T]; returns [B, ceil(T / 2), dim]."""
        x = nn.functional.gelu(self.first(frames))
        return nn.functional.gelu(self.second(x)).transpose(1, 2)


class Seq2Seq(ConfiguredModel):
    """A model that a `Seq2SeqConfig` describes.

    m = encoder(source);  x_l = block_l(x_{l-1}, m);  logits = score_scale x_L W^T [+ b], W the embedding if tied.
    """

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.config, self.reach = config, config.reach
        read = config.encoder
        with torch.random.fork_rng(devices=[]):  # torch's default draws are replaced below; leave the caller's stream
            self.embedding = undrawn_embedding(config.vocab_size, config.dim)
            self.convolutions = Convolutions(config.bins, config.dim) if config.source == "frames" else None
            blocks = (
                make_block(read, i, make_attention(read, i, Full(), name="encoder.blocks"))
                for i in range(config.encoder_layers)
            )
            self.encoder = Side(config, blocks, config.max_source, both_sides=True)
            self.decoder = Side(
                config, (_cross_block(config, i) for i in range(config.layers)), config.max_length, both_sides=False
            )
            self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
            bias = torch.zeros(config.vocab_size) if config.score_bias else None
            self.score_bias: Tensor | None
            self.register_buffer("score_bias", bias)  # fixed, as Marian's, which keeps tokens from being chosen
        initialise(self, std=config.init_std, seed=config.seed, residual_outputs=3 * config.layers)
        if config.source == "frames" and isinstance(self.encoder.positions, LearnedPositions):
            table = self.encoder.positions.weight.requires_grad_(False)
            if not table.is_meta:
                table.copy_(fixed_sinusoids(config.max_source, config.dim))

    def encode(self, source: Tensor, *, padding: Tensor | None = None, routings: list[Routing] | None = None) -> Tensor:
        """The memory [B, S, dim] of a source: token ids [B, S], or frames [B, bins, 2 S].

        padding: bool [B, S], True for real tokens, in any place; what stands at masked places changes nothing.
        """
        if self.convolutions is not None:
            if source.dim() != 3 or source.shape[1] != self.config.bins or not source.is_floating_point():
                raise InvalidArgument(
                    f"the source must be frames [B, {self.config.bins}, T], got {source.dtype} of {list(source.shape)}"
                )
            x = self.convolutions(source)
        else:
            x = self._embed(source, "the source")
        x = self.encoder.placed(x, padding)
        structure = None if self.encoder.relative is None else self.encoder.relative()
        for block in self.encoder.blocks:
            x = block(x, padding=padding, structure=structure, routings=routings)
        return self.encoder.norm(x)

    def remember(self, memory: Tensor, *, padding: Tensor | None = None) -> list[State]:
        """What the decoder's layers need of a memory [B, S, dim], computed once."""
        return [block.cross.remember(memory, padding=padding) for block in self.decoder.blocks]

    def hidden(
        self,
        tokens: Tensor,
        memory: Tensor | Sequence[State],
        *,
        memory_padding: Tensor | None = None,
        padding: Tensor | None = None,
        states: Sequence[State] | None = None,
        routings: list[Routing] | None = None,
        return_states: bool = False,
    ) -> Any:
        """The decoder's last hidden states [B, T, dim], ready for `score`, and its states if return_states.

        tokens: integers [B, T]. memory: what `encode` gives, with its padding, or what `remember` made of it. padding:
        bool [B, T] of the tokens. states: what a former call returned; tokens continue it.
        """
        count = len(self.decoder.blocks)
        for what, given in (("states", states), ("memory", None if isinstance(memory, Tensor) else memory)):
            if given is not None and len(given) != count:
                raise InvalidArgument(f"the model needs {what} for each of its {count} layers, got {len(given)}")
        x = self._embed(tokens, "tokens")
        x = self.decoder.placed(x, padding, None if states is None else states[0].length)
        structure = None if self.decoder.relative is None else self.decoder.relative()
        after: list[State] = []
        for i, block in enumerate(self.decoder.blocks):
            found = block(
                x,
                memory if isinstance(memory, Tensor) else memory[i],
                memory_padding=memory_padding,
                padding=padding,
                structure=structure,
                state=None if states is None else states[i],
                routings=routings,
                return_state=return_states,
            )
            x, state = found if return_states else (found, None)
            if state is not None:
                after.append(state)
        x = self.decoder.norm(x)
        return (x, after) if return_states else x

    def score(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab_size] of the decoder's last hidden states [..., dim]."""
        if self.config.score_scale != 1:
            hidden = hidden * self.config.score_scale
        weight = self.embedding.weight if self.head is None else self.head.weight
        return nn.functional.linear(hidden, weight, self.score_bias)

    def forward(
        self,
        source: Tensor,
        tokens: Tensor,
        *,
        source_padding: Tensor | None = None,
        padding: Tensor | None = None,
        routings: list[Routing] | None = None,
    ) -> Tensor:
        """Logits [B, T, vocab_size] for the token after each of a target that begins with `config.start_token`.

        source: token ids [B, S] or frames [B, bins, 2 S]. tokens: integers [B, T]. source_padding and padding: bool,
        True for real tokens, in any place.
        """
        memory = self.encode(source, padding=source_padding, routings=routings)
        hidden = self.hidden(tokens, memory, memory_padding=source_padding, padding=padding, routings=routings)
        return self.score(hidden)

    def conditioned(self, source: Tensor, *, padding: Tensor | None = None) -> "Conditioned":
        """The decoder as a language model of the targets of a source, which is encoded once: what generates text."""
        return Conditioned(self, self.remember(self.encode(source, padding=padding), padding=padding))

    def _embed(self, tokens: Tensor, what: str) -> Tensor:
        x = self.embedding(token_ids(tokens, what))
        return x if self.config.embedding_scale == 1 else x * self.config.embedding_scale


class Conditioned(nn.Module):
    """The decoder of a `Seq2Seq` with a memory for each row: called as a `DecoderLM` is, with tokens that begin with
    `config.start_token`. Its states are those of the layers, then those of the memory: both go by rows together.
    """

    def __init__(self, model: Seq2Seq, memory: Sequence[State]) -> None:
        super().__init__()
        self.model, self.memory = model, list(memory)
        self.config, self.reach = model.config, model.reach

    def hidden(
        self,
        tokens: Tensor,
        *,
        padding: Tensor | None = None,
        states: Sequence[State] | None = None,
        return_states: bool = False,
    ) -> Any:
        """The last hidden states [B, T, dim], and the states if return_states; arguments as in `forward`."""
        count = len(self.memory)
        own, memory = (None, self.memory) if states is None else (states[:count], states[count:])
        found = self.model.hidden(tokens, memory, padding=padding, states=own, return_states=return_states)
        return (found[0], [*found[1], *memory]) if return_states else found

    def score(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab_size] of last hidden states [..., dim]."""
        return self.model.score(hidden)

    def forward(
        self,
        tokens: Tensor,
        *,
        padding: Tensor | None = None,
        states: Sequence[State] | None = None,
        return_states: bool = False,
    ) -> Any:
        """Logits [B, T, vocab_size] for the token after each, and the states if return_states.

        tokens: integers [B, T]; padding: bool [B, T], True for real tokens; states: what a former call returned.
        """
        found = self.hidden(tokens, padding=padding, states=states, return_states=return_states)
        return (self.score(found[0]), found[1]) if return_states else self.score(found)


def fixed_sinusoids(length: int, dim: int) -> Tensor:
    """[length, dim]: [sin(p w_i) | cos(p w_i)], w_i = 10000^(-i / (dim/2 - 1)): positions of Whisper's encoder."""
    half = dim // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / max(half - 1, 1))
    angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), 1).float()


def _cross_block(config: Seq2SeqConfig, layer: int) -> CrossBlock:
    return CrossBlock(
        make_attention(config, layer, Causal(), name="decoder.blocks"),
        make_cross_attention(config, layer, name="decoder.blocks"),
        make_feedforward(config, layer),
        (make_norm(config), make_norm(config), make_norm(config)),
        norm_position=config.norm_position,
    )
