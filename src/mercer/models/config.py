"""What a decoder language model is, as data: validated, frozen, written beside the weights as JSON."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mercer.errors import InvalidArgument
from mercer.runtime.words import count

if TYPE_CHECKING:
    from mercer.core.kernels import Kernel
    from mercer.core.normalizers import Normalizer
    from mercer.nn.rope_scaling import RopeScaling

Positive = Annotated[int, Field(ge=1)]


def _as_pattern(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_scaling(value: Any) -> Any:
    """A scaling given as a value, as the dictionary that is saved."""
    if value is None or isinstance(value, dict):
        return value
    from mercer.nn.rope_config import scaling_to_dict

    return scaling_to_dict(value)


def causal_attention(name: str) -> "tuple[Kernel, Normalizer]":
    """Kernel and normaliser of an attention that a language model can be made of.

    Raises:
        InvalidArgument: the name is unknown, or the two cannot be combined; the message gives names that can.
    """
    from mercer.core.kernels import Power, Taylor
    from mercer.core.merged import merge
    from mercer.core.names import attention_name, parse_attention  # keeps `import mercer.models.config` free of torch
    from mercer.core.structures import Causal
    from mercer.core.support import unsupported

    kernel, normalizer = parse_attention(name)
    reason = unsupported(kernel, normalizer, merge(Causal()), "chunked", "pairs")
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


class ModelConfig(BaseModel):
    """The shape and the parts of a `DecoderLM`.

    Raises InvalidArgument, in one sentence that names the fields, for unknown keys and values that do not fit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    vocab_size: Positive
    """Number of token ids."""
    dim: Positive = 128
    """Channels of the residual stream."""
    layers: Positive = 4
    heads: Positive = 8
    """Query heads of each attention."""
    kv_heads: Positive | None = None
    """Key and value heads, a divisor of `heads`; None: as many as `heads`."""
    head_dim: Positive | None = None
    """Channels of a head; None: dim / heads."""
    attention: Annotated[str | tuple[str, ...], BeforeValidator(_as_pattern)] = "softmax"
    """Kernel and normaliser by name ("softmax", "exp-l2", "taylor4-l2", "elu-sum", ...), or a pattern of names that is
    repeated over the layers: ["elu-sum", "elu-sum", "elu-sum", "softmax"] makes every fourth layer softmax. At most as
    many names as layers, each of an attention that can be computed (not "taylor3-sum", whose denominator may be 0)."""
    gain: Literal["none", "head", "channel"] = "none"
    """Learned gain on the output of the layers whose normaliser is L2, RMS or layernorm; at least one must be."""
    gain_init: float | None = None
    """Where the gains start; None: 1, which changes nothing at first. Only with a gain."""
    attention_scale: float | None = None
    """Factor of q.k; None: the kernel's own (1/sqrt(head_dim) for the exponential and its Taylor series)."""
    recency: bool = False
    """Weigh the past of every layer by a learned gate for each key head and token, S = g S + (1 - g) phi(k) v^T with
    g = sigmoid(x W + b), as random-feature attention does."""
    position: Literal["rotary", "sinusoidal", "learned", "alibi", "t5", "none"] = "rotary"
    rope_base: Annotated[float, Field(gt=0)] = 10000.0
    rope_turned: Positive | None = None
    """Channels of a head that rotary positions turn, an even number; None: all of them."""
    rope_scaling: Annotated[dict[str, Any] | None, BeforeValidator(_as_scaling)] = None
    """Other rates of rotary positions, for sequences longer than max_length: {"rope_type": "yarn", "factor": 4.0}, with
    the types and keys of `mercer.nn.rope_config`, or a scaling such as YaRN(4.0, trained=1024). A missing
    original_max_position_embeddings is max_length."""
    t5_buckets: Positive = 32
    """Buckets of distances of T5's bias, which all layers share; half of them are one distance each."""
    t5_max_distance: Positive = 128
    """From which distance on T5's bias is one and the same."""
    window: Positive | None = None
    """A token sees this many tokens, itself included; None: all before it."""
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: Annotated[float, Field(ge=0)] = 1e-6
    norm_position: Literal["pre", "post"] = "pre"
    feedforward: Literal["swiglu", "gelu", "gelu_tanh", "relu"] = "swiglu"
    hidden: Positive | None = None
    """Channels inside the feed-forward; None: 4 dim, and for swiglu 8/3 dim rounded up to a multiple of 32."""
    bias: bool = False
    """Biases in all linear layers of the blocks and in layer norms."""
    max_length: Positive = 1024
    """Longest sequence the model is trained for; the size of the table of learned positions. Longer ones are refused
    under rotary positions without a scaling and under sinusoidal ones, unless allow_longer says otherwise."""
    allow_longer: bool = False
    """Let rotary and sinusoidal positions run on past what the model is trained for."""
    tie_embeddings: bool = True
    """Read tokens and score them with one matrix."""
    init_std: Annotated[float, Field(ge=0)] = 0.02
    """Standard deviation of the initial weights; the two outputs of a block into the residual stream get
    init_std / sqrt(2 layers)."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Fixes every initial weight, by its own name: models that differ in their attention start with equal weights."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            plain = {"extra_forbidden": "no such key", "missing": "required"}
            faults: list[str] = []
            for fault in error.errors():
                where = ".".join(map(str, fault["loc"])) or "its fields"
                faults.append(f"{where}: {plain.get(fault['type'], fault['msg'].removeprefix('Value error, '))}")
            raise InvalidArgument(f"model configuration: {'; '.join(faults)}") from error

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        from mercer.core.normalizers import L2, RMS, Standardize

        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of {self.heads} heads; set head_dim")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")
        if self.position == "rotary" and self.rope_turned is None and self.head_size % 2:
            raise ValueError(f"rotary positions need an even head_dim, not {self.head_size}")
        self._check_rope()
        if self.position == "sinusoidal" and self.dim % 2:
            raise ValueError(f"sinusoidal positions need an even dim, not {self.dim}")
        if not self.pattern:
            raise ValueError("attention needs at least one name")
        if len(self.pattern) > self.layers:
            raise ValueError(
                f"attention has {len(self.pattern)} names for {count(self.layers, 'layer')}; name at most one a layer"
            )
        normalizers = [causal_attention(name)[1] for name in self.attentions]
        if self.position == "t5":
            self._check_t5()
        if self.gain != "none" and not any(isinstance(n, L2 | RMS | Standardize) for n in normalizers):
            raise ValueError(
                f'gain "{self.gain}" needs a layer whose normaliser is L2, RMS or layernorm, such as "exp-l2"'
            )
        if self.gain == "none" and self.gain_init is not None:
            raise ValueError('gain_init needs gain "head" or "channel"')
        return self

    def _check_t5(self) -> None:
        import torch

        from mercer.core.log_weights import RelativeBias
        from mercer.core.merged import merge
        from mercer.core.structures import Causal
        from mercer.core.support import unsupported

        if self.t5_buckets < 2 or self.t5_max_distance <= self.t5_buckets // 2:
            raise ValueError(
                "t5_buckets must be at least 2 and t5_max_distance above half of them, not "
                f"{self.t5_buckets} and {self.t5_max_distance}"
            )
        biased = merge(Causal() & RelativeBias(torch.zeros(self.heads, self.t5_max_distance + 1)))
        for name in self.pattern:
            reason = unsupported(*causal_attention(name), biased, "chunked", "pairs")
            if reason is not None:
                raise ValueError(f'attention {name!r} with position "t5": {reason}')

    def _check_rope(self) -> None:
        turned = self.rope_turned
        if self.position != "rotary" and (turned is not None or self.rope_scaling is not None):
            name = "rope_turned" if turned is not None else "rope_scaling"
            raise ValueError(f'{name} is for position "rotary", not "{self.position}"')
        if turned is not None and (turned % 2 or turned > self.head_size):
            raise ValueError(f"rope_turned must be even and at most {self.head_size}, a head's channels, not {turned}")
        if self.allow_longer and self.position == "learned":
            raise ValueError("learned positions end with their table: raise max_length instead of allow_longer")
        try:
            scaling = self.scaling
            if scaling is not None:
                scaling.check(self.head_size if turned is None else turned)
        except InvalidArgument as error:
            raise ValueError(f"rope_scaling: {error}") from error

    @property
    def scaling(self) -> "RopeScaling | None":
        """The scaling that `rope_scaling` describes."""
        if self.rope_scaling is None:
            return None
        from mercer.nn.rope_config import scaling_from_dict

        return scaling_from_dict(self.rope_scaling, max_length=self.max_length)

    @property
    def reach(self) -> int | None:
        """The longest sequence that the model does not refuse; None: any."""
        if self.allow_longer or self.position not in ("rotary", "sinusoidal", "learned"):
            return None
        scaling = self.scaling
        return self.max_length if scaling is None else scaling.reach(self.max_length)

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
