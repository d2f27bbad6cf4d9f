"""What the blocks of every model are made of, as data: validated, frozen, the base of each model's configuration."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mercer.errors import InvalidArgument
from mercer.models.experts_config import ExpertsConfig
from mercer.runtime.faults import faults
from mercer.runtime.words import count

if TYPE_CHECKING:
    from mercer.core.kernels import Kernel
    from mercer.core.normalizers import Normalizer
    from mercer.core.structures import Structure

Positive = Annotated[int, Field(ge=1)]
Layers = Annotated[int, Field(ge=1, le=10_000)]
"""Bounded, since a configuration from elsewhere could otherwise ask for more modules than memory holds."""
BiasPart = Literal["qkv", "query", "key", "value", "output", "gate", "feedforward", "norm"]


def as_pattern(value: Any) -> Any:
    """A list, as JSON has it, as the tuple that can be hashed."""
    return tuple(value) if isinstance(value, list) else value


def as_layers(value: Any) -> Any:
    """A pattern of layers, as text or as a list, as the tuple of its names."""
    if isinstance(value, str) and ("," in value or "*" in value):
        from mercer.models.layer_names import expand

        return expand(value)
    return as_pattern(value)


def block_attention(name: str, structure: "Structure") -> "tuple[Kernel, Normalizer]":
    """Kernel and normaliser of an attention that a model whose tokens see each other by `structure` can be made of.

    Raises:
        InvalidArgument: the name is unknown, or the two cannot be combined; the message gives names that can.
    """
    from mercer.core.kernels import Power, Taylor
    from mercer.core.merged import merge
    from mercer.core.names import attention_name, parse_attention  # keeps this module free of torch
    from mercer.core.support import unsupported

    kernel, normalizer = parse_attention(name)
    reason = unsupported(kernel, normalizer, merge(structure), "chunked", "pairs")
    if reason is None:
        return kernel, normalizer
    if normalizer.needs_denominator and not kernel.positive:
        word, _, ending = name.rpartition("-")
        even = ""
        if isinstance(kernel, Taylor | Power):
            number = kernel.order if isinstance(kernel, Taylor) else kernel.degree
            even = f"an even order such as {word.rstrip('0123456789')}{number + 1}-{ending}, "
        raise InvalidArgument(
            f"attention {name!r} cannot be computed: {word} takes negative values, so its sum may be zero or change "
            f"sign; use {word}-l2, {word}-rms, {even}or {attention_name(_signed(kernel), normalizer)}"
        )
    raise InvalidArgument(f"attention {name!r} cannot be computed: {reason}")


def _signed(kernel: "Kernel") -> "Kernel":
    """The kernel with the consent that `Sum` may divide by what it sums to, in each part that needs it."""
    from mercer.core.mixed import Mixed

    if kernel.positive:
        return kernel
    if isinstance(kernel, Mixed):
        return replace(kernel, near=_signed(kernel.near), far=_signed(kernel.far))
    return replace(kernel, signed=True)  # pyright: ignore[reportCallIssue]


class BlockConfig(BaseModel):
    """The shape and the parts of residual blocks of attention and feed-forward.

    Raises InvalidArgument, in one sentence that names the fields, for unknown keys and values that do not fit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    dim: Positive = 128
    """Channels of the residual stream."""
    layers: Layers = 4
    heads: Positive = 8
    """Query heads of each attention."""
    kv_heads: Positive | None = None
    """Key and value heads, a divisor of `heads`; None: as many as `heads`."""
    head_dim: Positive | None = None
    """Channels of a head; None: dim / heads."""
    attention: Annotated[str | tuple[str, ...], BeforeValidator(as_layers)] = "softmax"
    """Kernel and normaliser by name ("softmax", "exp-l2", "taylor4-l2", "elu-sum", ...), or a pattern of names that is
    repeated over the layers: ["elu-sum", "elu-sum", "elu-sum", "softmax"] makes every fourth layer softmax, and so
    does "3*elu-sum,softmax". At most as many names as layers, each of an attention that can be computed (not
    "taylor3-sum", whose denominator may be 0). In decoders a name may also be that of a mixer ("mamba", "rwkv7", ...;
    `mercer.mixers.names`)."""
    gain: Literal["none", "head", "channel"] = "none"
    """Learned gain on the output of the layers whose normaliser is L2, RMS or layernorm; at least one must be."""
    gain_init: float | None = None
    """Where the gains start; None: 1, which changes nothing at first. Only with a gain."""
    attention_scale: float | None = None
    """Factor of q.k; None: the kernel's own (1/sqrt(head_dim) for the exponential and its Taylor series)."""
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: Annotated[float, Field(ge=0)] = 1e-6
    norm_offset: float = 0.0
    """Added to the weights of RMS norms: with 1, as in Gemma, a weight of 0 changes nothing."""
    norm_position: Literal["pre", "post", "both"] = "pre"
    """Where a block's two parts have their norms: before them ("pre"), after the sum ("post", the original
    transformer), or before them and on what they give ("both", as in Gemma 2)."""
    parallel: Literal["none", "own_norms", "one_norm"] = "none"
    """Whether attention and feed-forward both read the block's input and are added together, each behind a norm of its
    own (as in GPT-NeoX) or behind the same one (GPT-J, PaLM)."""
    feedforward: Literal["swiglu", "geglu", "geglu_tanh", "reglu", "gelu", "gelu_tanh", "relu", "silu"] = "swiglu"
    hidden: Positive | None = None
    """Channels inside the feed-forward; None: 4 dim, and for gated kinds 8/3 dim rounded up to a multiple of 32."""
    experts: ExpertsConfig | None = None
    """Experts, each of `feedforward` and `hidden`, in the place of the feed-forward; None: none."""
    bias: Annotated[bool | tuple[BiasPart, ...], BeforeValidator(as_pattern)] = False
    """Biases in all linear layers of the blocks and in layer norms, or in the parts that are named: "query", "key" and
    "value" (all three: "qkv"), "output" and "gate" of the attention, "feedforward", "norm"."""
    init_std: Annotated[float, Field(ge=0)] = 0.02
    """Standard deviation of the initial weights; the two outputs of a block into the residual stream get
    init_std / sqrt(2 layers)."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Fixes every initial weight, by its own name: models that differ in their attention start with equal weights."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InvalidArgument(f"model configuration: {faults(error, type(self).model_fields)}") from error

    def __hash__(self) -> int:  # options may be dictionaries
        return hash(self.model_dump_json())

    @classmethod
    def sees(cls) -> "Structure":
        """Who sees whom before any pattern or window."""
        from mercer.core.structures import Full

        return Full()

    @model_validator(mode="after")
    def _block_fits_together(self) -> Self:
        from mercer.core.normalizers import L2, RMS, Standardize
        from mercer.mixers.names import is_mixer

        attends = not all(map(is_mixer, self.pattern))
        if attends and self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of {self.heads} heads; set head_dim")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")
        if self.experts is not None:
            if "feedforward" in self.biased:
                raise ValueError("experts have no biases; name the other parts in bias")
            if not any(map(self.experts.at, range(self.layers))):
                raise ValueError(
                    f"experts.offset {self.experts.offset} leaves {count(self.layers, 'layer')} without any"
                )
        if not self.pattern:
            raise ValueError("attention needs at least one name")
        if len(self.pattern) > self.layers:
            raise ValueError(
                f"attention has {len(self.pattern)} names for {count(self.layers, 'layer')}; name at most one a layer"
            )
        self._check_mixers()
        kinds = [name for name in self.attentions if not is_mixer(name)]
        normalizers = [self._attention(name)[1] for name in kinds]
        if self.gain != "none" and not any(isinstance(n, L2 | RMS | Standardize) for n in normalizers):
            raise ValueError(
                f'gain "{self.gain}" needs a layer whose normaliser is L2, RMS or layernorm, such as "exp-l2"'
            )
        if self.gain == "none" and self.gain_init is not None:
            raise ValueError('gain_init needs gain "head" or "channel"')
        if self.norm_offset and self.norm != "rms":
            raise ValueError('norm_offset is for norm "rms"')
        if self.parallel != "none" and self.norm_position != "pre":
            raise ValueError(f'parallel "{self.parallel}" goes with norm_position "pre", not "{self.norm_position}"')
        return self

    def _attention(self, name: str) -> "tuple[Kernel, Normalizer]":
        return block_attention(name, self.sees())

    def _check_mixers(self) -> None:
        """Refuse mixers where none can stand."""
        from mercer.mixers.names import is_mixer

        named = next(filter(is_mixer, self.pattern), None)
        if named is not None:
            raise ValueError(f"{named!r} reads a text from its beginning to its end: only decoders are made of it")

    @property
    def biased(self) -> tuple[BiasPart, ...]:
        """The parts that have biases, "qkv" for queries, keys and values."""
        if isinstance(self.bias, bool):
            return ("qkv", "output", "gate", "feedforward", "norm") if self.bias else ()
        return self.bias

    @property
    def head_size(self) -> int:
        """Channels of a head."""
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    @property
    def pattern(self) -> tuple[str, ...]:
        """The names of the attentions before they are repeated over the layers."""
        return (self.attention,) if isinstance(self.attention, str) else self.attention

    @property
    def attentions(self) -> tuple[str, ...]:
        """The name of the attention of each layer."""
        return tuple(self.pattern[i % len(self.pattern)] for i in range(self.layers))
