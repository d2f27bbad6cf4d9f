"""What an encoder and a decoder that looks at it are, as data: the original transformer, T5, Switch, Whisper."""

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from mercer.models.block_config import BlockConfig, Layers, Positive
from mercer.models.experts_config import ExpertsConfig

if TYPE_CHECKING:
    from mercer.core.structures import Structure


class Seq2SeqConfig(BlockConfig):
    """The shape and the parts of a `Seq2Seq`. `layers` and `experts` are those of its decoder.

    Raises InvalidArgument, in one sentence that names the fields, for unknown keys and values that do not fit.
    """

    vocab_size: Positive
    """Number of token ids, of the source and of the target."""
    encoder_layers: Layers = 4
    encoder_experts: ExpertsConfig | None = None
    """Experts in the encoder, as `experts` in the decoder."""
    source: Literal["tokens", "frames"] = "tokens"
    """What the encoder reads: token ids, or frames of a spectrogram through two convolutions, the second of which
    halves their number (Whisper)."""
    bins: Positive = 80
    """Numbers in a frame; only with source "frames", whose encoder has fixed sinusoids for learned positions."""
    position: Literal["sinusoidal", "learned", "t5", "none"] = "sinusoidal"
    """Sinusoids are laid out as [sines | cosines]. "t5" is a bias by distance, of both sides of an encoder's tokens."""
    t5_buckets: Positive = 32
    t5_max_distance: Positive = 128
    max_source: Positive = 512
    """Longest source; the size of its table of learned positions. Counted after the convolutions."""
    max_length: Positive = 512
    """Longest target; the size of its table of learned positions."""
    embedding_scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the embedding, on both sides."""
    tie_embeddings: bool = True
    """Read tokens and score them with one matrix."""
    score_scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the decoder's last hidden states before the scores (T5: dim^-1/2)."""
    score_bias: bool = False
    """A bias on the scores (Marian)."""
    start_token: Annotated[int, Field(ge=0)] = 0
    """What a target begins with."""

    @classmethod
    def sees(cls) -> "Structure":
        from mercer.core.structures import Causal

        return Causal()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.position == "sinusoidal" and self.dim % 2:
            raise ValueError(f"sinusoidal positions need an even dim, not {self.dim}")
        if self.position == "t5" and (self.t5_buckets < 4 or self.t5_max_distance <= self.t5_buckets // 2):
            raise ValueError(
                "t5_buckets must be at least 4 and t5_max_distance above half of them, not "
                f"{self.t5_buckets} and {self.t5_max_distance}"
            )
        if self.source == "frames" and (self.position != "learned" or self.dim % 2):
            raise ValueError('source "frames" goes with position "learned" and an even dim')
        if self.norm_position == "both" or self.parallel != "none":
            raise ValueError('decoders with a memory have norm_position "pre" or "post" and parallel "none"')
        if self.start_token >= self.vocab_size:
            raise ValueError(f"start_token {self.start_token} is not below vocab_size {self.vocab_size}")
        return self

    @property
    def reach(self) -> int | None:
        """The longest target that is not refused; None: any."""
        return None if self.position in ("t5", "none") else self.max_length

    @property
    def encoder(self) -> "Seq2SeqConfig":
        """The configuration of the encoder's blocks, with its layers and experts for `layers` and `experts`."""
        pattern = self.attention if isinstance(self.attention, str) else self.pattern[: self.encoder_layers]
        changed = {"layers": self.encoder_layers, "experts": self.encoder_experts, "attention": pattern}
        return self.model_copy(update=changed)
