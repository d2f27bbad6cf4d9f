"""Encoders of token sequences: every token sees every other, or what a sparse pattern shows it."""

import torch
from torch import Tensor, nn

from mercer.core.bigbird import BigBird
from mercer.core.names import parse_attention
from mercer.core.structures import Full, Structure
from mercer.errors import InvalidArgument
from mercer.models.bricks import make_attention, make_block, make_norm
from mercer.models.configured import ConfiguredModel
from mercer.models.encoder_config import EncoderConfig
from mercer.models.heads import Pooler, TokenHead, mean_tokens
from mercer.models.initial import generator_of, initialise, undrawn_embedding
from mercer.models.token_ids import token_ids
from mercer.nn.attention import Attention
from mercer.nn.longformer import LongformerAttention
from mercer.nn.positions import LearnedPositions, token_positions
from mercer.nn.rotary import Rotary
from mercer.nn.values import with_values

MASKED_IN_TRAINING = 0.15 * 0.8


class Encoder(ConfiguredModel):
    """An encoder that an `EncoderConfig` describes.

    x_0 = norm(embed(tokens) + types + positions);  x_l = block_l(x_{l-1}), with a final norm where blocks have theirs
    before their parts. A call gives x_L, scores of tokens, or scores of classes, as `config.head` says.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):  # torch's default draws are replaced below; leave the caller's stream
            self.embedding = undrawn_embedding(config.vocab_size, config.dim)
            self.types = undrawn_embedding(config.token_types, config.dim) if config.token_types else None
            rows = config.max_length + config.position_start
            self.positions = LearnedPositions(rows, config.dim) if config.position == "learned" else None
            self.embedding_norm = make_norm(config) if config.embedding_norm else None
            rotary = None
            if config.position == "rotary":
                rotary = Rotary(config.head_size, base=config.rope_base, max_length=config.max_length)
            self.blocks = nn.ModuleList(
                make_block(config, layer, _attention(config, layer, rotary)) for layer in range(config.layers)
            )
            self.norm = nn.Identity() if config.norm_position == "post" else make_norm(config)
            self.pooler = Pooler(config.dim) if config.pool else None
            self.tokens: TokenHead | None = None
            if config.head == "tokens":
                self.tokens = TokenHead(config.dim, config.vocab_size, make_norm(config), config.head_activation)
            self.classes = nn.Linear(config.dim, config.classes) if config.classes else None
        initialise(self, std=config.init_std, seed=config.seed, residual_outputs=2 * config.layers)

    def hidden(
        self,
        tokens: Tensor,
        *,
        types: Tensor | None = None,
        padding: Tensor | None = None,
        global_mask: Tensor | None = None,
    ) -> Tensor:
        """The last hidden states [B, T, dim]; arguments as in `forward`."""
        tokens = token_ids(tokens)
        if global_mask is not None and self.config.longformer_windows is None:
            raise InvalidArgument("global_mask marks the global tokens of a Longformer, and this model is none")
        x = self._embed(tokens, types, padding)
        more = {} if global_mask is None else {"global_mask": global_mask}
        structure = self._structure(tokens.shape[1])
        for block in self.blocks:
            x = block(x, padding=padding, structure=structure, **more)
        return self.norm(x)

    def forward(
        self,
        tokens: Tensor,
        *,
        types: Tensor | None = None,
        padding: Tensor | None = None,
        global_mask: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, T, dim], scores of tokens [B, T, vocab_size] or scores of classes [B, classes].

        tokens: integers [B, T]. types: integers [B, T], the kind (segment) of each token; default 0. padding: bool
        [B, T], True for real tokens, in any place; what stands at masked places changes nothing. global_mask: bool
        [B, T], the global tokens of a Longformer; default none.
        """
        x = self.hidden(tokens, types=types, padding=padding, global_mask=global_mask)
        if self.tokens is not None:
            return self.tokens(x, self.embedding.weight)
        if self.classes is None or self.pooler is None:
            return x
        return self.classes(self.pooler(x, padding))

    def sentences(self, tokens: Tensor, *, types: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        """One vector of length 1 a sequence, [B, dim]: the mean of its real tokens, divided by its norm. Their products
        are cosine similarities (Reimers & Gurevych 2019).
        """
        return nn.functional.normalize(mean_tokens(self.hidden(tokens, types=types, padding=padding), padding), dim=-1)

    def _embed(self, tokens: Tensor, types: Tensor | None, padding: Tensor | None) -> Tensor:
        config = self.config
        if tokens.shape[1] > config.max_length:
            real = tokens.shape[1] if padding is None else int(padding.sum(1).max())
            if real > config.max_length:
                raise InvalidArgument(f"the model takes {config.max_length} tokens (max_length), got {real}")
        x = self.embedding(tokens)
        if config.embedding_scale != 1:
            x = x * config.embedding_scale
        if config.mask_token is not None:
            x = _without_masked(x, tokens == config.mask_token, padding)
        if self.types is not None:
            x = x + (self.types.weight[0] if types is None else self.types(types))
        elif types is not None:
            raise InvalidArgument("types are given, but the model has one kind of tokens (token_types)")
        if self.positions is not None:
            where = token_positions(*tokens.shape, padding=padding, device=tokens.device)
            x = x + self.positions(where + config.position_start).to(x.dtype)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def _structure(self, length: int) -> Structure | None:
        config = self.config
        if config.bigbird_block is None or length <= (5 + 2 * config.bigbird_random) * config.bigbird_block:
            return None
        return BigBird(config.bigbird_block, config.bigbird_random, hf_compat=True)


def _without_masked(x: Tensor, masked: Tensor, padding: Tensor | None) -> Tensor:
    """The embeddings without those of masked tokens, and larger by what was masked more in training."""
    if padding is not None:
        masked = masked & padding
    real = masked.shape[1] if padding is None else padding.sum(1).clamp_min(1)
    share = masked.sum(1) / real
    x = x.masked_fill(masked.unsqueeze(-1), 0)
    return (x * ((1 - MASKED_IN_TRAINING) / (1 - share))[:, None, None]).to(x.dtype)


def _attention(config: EncoderConfig, layer: int, rotary: Rotary | None) -> Attention | LongformerAttention:
    if config.longformer_windows is None:
        return make_attention(config, layer, Full(), rotary=rotary)
    kernel, normalizer = parse_attention(config.attentions[layer])
    with with_values():
        generator = generator_of(config.seed, f"blocks.{layer}.attention.kernel_tensors")
    return LongformerAttention(
        config.dim,
        config.heads,
        window=config.longformer_windows[layer],
        kernel=kernel,
        normalizer=normalizer,
        scale=config.attention_scale,
        bias="qkv" in config.biased,
        generator=generator,
    )
