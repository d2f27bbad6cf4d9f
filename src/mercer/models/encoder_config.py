"""What an encoder of token sequences is, as data: BERT and its relatives."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mercer.models.block_config import BlockConfig, Positive, as_pattern


class EncoderConfig(BlockConfig):
    """The shape and the parts of an `Encoder`.

    Raises InvalidArgument, in one sentence that names the fields, for unknown keys and values that do not fit.
    """

    vocab_size: Positive
    """Number of token ids."""
    position: Literal["learned", "rotary", "none"] = "learned"
    position_start: Annotated[int, Field(ge=0)] = 0
    """The row of the table of learned positions that the first token takes; those before it are not used."""
    rope_base: Annotated[float, Field(gt=0)] = 10000.0
    max_length: Positive = 512
    """Longest sequence; the table of learned positions has position_start more rows."""
    token_types: Annotated[int, Field(ge=0)] = 0
    """Kinds of tokens (segments) with an embedding of their own; 0: none."""
    embedding_scale: Annotated[float, Field(gt=0)] = 1.0
    embedding_norm: bool = True
    """A norm on the sum of the embeddings, before the first block."""
    mask_token: Annotated[int, Field(ge=0)] | None = None
    """A token whose embedding is 0, and for which the others of its sequence make up: they are multiplied by
    (1 - 0.15 0.8) / (1 - its share), as in ESM; None: no token is treated so."""
    longformer_windows: Annotated[tuple[Positive, ...] | None, BeforeValidator(as_pattern)] = None
    """Of each layer the whole width of its window: layers with global tokens and projections of their own for them
    (Beltagy et al. 2020). Even numbers. None: every token sees every other."""
    bigbird_block: Positive | None = None
    """Tokens in a block of BigBird's pattern (Zaheer et al. 2020), as the hub's models compute it in evaluation.
    Sequences of at most (5 + 2 bigbird_random) blocks are attended in full. None: every token sees every other."""
    bigbird_random: Annotated[int, Field(ge=0)] = 3
    """Random blocks of that pattern."""
    pool: bool = False
    """A layer tanh(W x + b) on the first token."""
    head: Literal["none", "tokens", "classes"] = "none"
    """What a call gives: hidden states; scores of all tokens, for masked language models; or of classes."""
    head_activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    """Inside of the scores of tokens."""
    classes: Positive | None = None
    """How many classes there are; needs head "classes"."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.position == "rotary" and self.head_size % 2:
            raise ValueError(f"rotary positions need an even head_dim, not {self.head_size}")
        if (self.head == "classes") != (self.classes is not None):
            raise ValueError('classes goes with head "classes"')
        if self.head == "classes" and not self.pool:
            raise ValueError('head "classes" needs pool')
        if self.longformer_windows is not None:
            if self.bigbird_block is not None:
                raise ValueError("longformer_windows and bigbird_block are two patterns; name one")
            if len(self.longformer_windows) != self.layers or any(width % 2 for width in self.longformer_windows):
                raise ValueError(f"longformer_windows needs an even number for each of the {self.layers} layers")
            if self.position == "rotary" or self.kv_heads not in (None, self.heads):
                raise ValueError("longformer_windows goes with as many kv_heads as heads and without rotary positions")
        if self.mask_token is not None and self.mask_token >= self.vocab_size:
            raise ValueError(f"mask_token {self.mask_token} is not below vocab_size {self.vocab_size}")
        return self
