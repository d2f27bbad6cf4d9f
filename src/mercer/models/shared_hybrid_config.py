"""What a decoder of mixers with shared attention is, as data."""

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from mercer.errors import InvalidArgument
from mercer.models.block_config import Positive, as_pattern
from mercer.models.config import ModelConfig


class SharedHybridConfig(ModelConfig):
    """The shape and the parts of a `SharedHybridLM`.

    `heads`, `head_dim`, `attention`, `feedforward`, `hidden` and the positions are those of the shared blocks, whose
    attention reads 2 dim channels: without a `head_dim` its heads have 2 dim / heads. A pattern of `attention` is
    repeated over the shared blocks.

    Raises InvalidArgument, in one sentence that names the fields, for unknown keys and values that do not fit.
    """

    mixer: str = "mamba2"
    """The mixer of every layer; `mixers` may have its options."""
    shared_at: Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(as_pattern)]
    """The layers, counted from 0 and in order, whose mixer also reads what a shared block gives."""
    shared: Positive = 1
    """How many shared blocks there are; the layers of `shared_at` take them in turn."""
    attention_rank: Positive | None = None
    """Rank of what each use adds to the queries, keys and values of its shared block; None: nothing."""
    feedforward_rank: Positive | None = None
    """Rank of what each use adds inside the feed-forward of its shared block; None: nothing."""

    @model_validator(mode="before")
    @classmethod
    def _heads_of_both(cls, values: object) -> object:
        """Fill head_dim in, which is a share of 2 dim here."""
        if isinstance(values, dict) and values.get("head_dim") is None:
            dim, heads = values.get("dim", 128), values.get("heads", 8)
            if isinstance(dim, int) and isinstance(heads, int) and heads > 0:
                if 2 * dim % heads:
                    raise ValueError(f"2 dim = {2 * dim} is not a multiple of {heads} heads; set head_dim")
                return {**values, "head_dim": 2 * dim // heads}
        return values

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if list(self.shared_at) != sorted(set(self.shared_at)) or any(i >= self.layers for i in self.shared_at):
            raise ValueError(f"shared_at must be layers from 0 to {self.layers - 1} in order, not {self.shared_at}")
        if len(self.shared_at) < self.shared:
            raise ValueError(f"{self.shared} shared blocks need as many layers in shared_at, not {len(self.shared_at)}")
        if len(self.pattern) > self.shared:
            raise ValueError(f"attention has {len(self.pattern)} names for {self.shared} shared blocks")
        if self.experts is not None:
            raise ValueError("shared blocks have a feed-forward of their own and no experts")
        return self

    def _check_mixers(self) -> None:
        from mercer.mixers.names import is_mixer, mixer_config

        named = next(filter(is_mixer, self.pattern), None)
        if named is not None:
            raise ValueError(f"attention is that of the shared blocks, and {named!r} is a mixer: name it as mixer")
        if self.norm_position != "pre" or self.parallel != "none":
            raise ValueError('shared blocks have norm_position "pre" and parallel "none"')
        if other := [name for name in self.mixers if name != self.mixer]:
            raise ValueError(f"mixers has options of {other[0]!r}, and mixer is {self.mixer!r}")
        try:
            mixer_config(self.mixer, self.mixers.get(self.mixer)).check(self.dim, self.heads)
        except InvalidArgument as error:
            raise ValueError(f"mixer: {error}") from error
        if self.feedforward in ("none", "rwkv4", "rwkv7"):
            raise ValueError(f"shared blocks have a feed-forward of two matrices, not {self.feedforward!r}")

    def block_of(self, layer: int) -> int | None:
        """Which shared block a layer reads; None: none."""
        return self.shared_at.index(layer) % self.shared if layer in self.shared_at else None
