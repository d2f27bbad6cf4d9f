"""What a decoder language model is, as data: validated, frozen, written beside the weights as JSON."""

from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mercer.errors import InvalidArgument
from mercer.mixers.names import CHANNEL_MIXING
from mercer.models.block_config import BlockConfig, Positive, as_layers, block_attention
from mercer.models.visibility import as_names, causal_structure, check_structures, ending
from mercer.runtime.words import count

if TYPE_CHECKING:
    from mercer.core.kernels import Kernel
    from mercer.core.normalizers import Normalizer
    from mercer.core.structures import Structure
    from mercer.nn.rope_scaling import RopeScaling


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
    from mercer.core.structures import Causal
    from mercer.mixers.names import is_mixer

    if is_mixer(name):
        raise InvalidArgument(f"{name!r} is a recurrent mixer, which has no kernel: name an attention")
    return block_attention(name, Causal())


def layer_attention(name: str) -> "tuple[Kernel, Normalizer]":
    """As `causal_attention`, of a name that could have been a mixer's.

    Raises:
        InvalidArgument: as there; if no attention is spelt like it, the message also has the names of mixers.
    """
    from mercer.mixers.names import mixer_names

    try:
        return causal_attention(name)
    except InvalidArgument as error:
        close = get_close_matches(name, mixer_names(), 1, 0.7)
        if "did you mean" in str(error) or ("-" in name and not close):
            raise
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise InvalidArgument(
            f"{name!r} is neither a mixer{meant}, which are {', '.join(mixer_names())}, nor an attention. {error}"
        ) from error


class ModelConfig(BlockConfig):
    """The shape and the parts of a `DecoderLM`.

    Raises InvalidArgument, in one sentence that names the fields, for unknown keys and values that do not fit.
    """

    vocab_size: Positive
    """Number of token ids."""
    mixers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of the mixers that `attention` names: {"mamba": {"state": 16}}. `mercer.mixers` has them, with defaults;
    sizes that they leave open come from `heads`, and those that do not fit `dim` and `heads` are refused."""
    feedforward: Literal[
        "swiglu", "geglu", "geglu_tanh", "reglu", "gelu", "gelu_tanh", "relu", "silu", "none", "rwkv4", "rwkv7"
    ] = "swiglu"
    """As in every block; with mixers in all layers also "none", or the channel mixing of RWKV by its version."""
    recency: bool = False
    """Weigh the past of every layer by a learned gate for each key head and token, S = g S + (1 - g) phi(k) v^T with
    g = sigmoid(x W + b), as random-feature attention does."""
    position: Literal["rotary", "sinusoidal", "learned", "alibi", "t5", "none"] = "rotary"
    """How the model knows places; the default is "none" where every layer is a mixer."""
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
    structure: Annotated[str | tuple[str, ...], BeforeValidator(as_names)] = "causal"
    """Which of them a token sees, by name ("causal": all, "strided(16)", "window(64) | global(first=4)", ..., see
    `mercer.parse_structure`; values such as Strided(16) become their names), or a pattern of names that is repeated
    over the layers as that of `attention` is. Whatever the name, no token sees what comes after it."""
    max_length: Positive = 1024
    """Longest sequence the model is trained for; the size of the table of learned positions. Longer ones are refused
    under rotary positions without a scaling and under sinusoidal ones, unless allow_longer says otherwise."""
    allow_longer: bool = False
    """Let rotary and sinusoidal positions run on past what the model is trained for."""
    embedding_scale: Annotated[float, Field(gt=0)] | None = None
    """Factor of the embedding; None: 1, and sqrt(dim) with sinusoidal positions."""
    embedding_norm: bool = False
    """A norm on the embedding, before the first block (as in BLOOM)."""
    tie_embeddings: bool = True
    """Read tokens and score them with one matrix."""
    head_bias: bool = False
    """A bias on the scores. Only without tie_embeddings."""
    logit_cap: Annotated[float, Field(gt=0)] | None = None
    """Scores s become cap tanh(s / cap) (as in Gemma 2); None: as they are."""

    @classmethod
    def sees(cls) -> "Structure":
        from mercer.core.structures import Causal

        return Causal()

    def _attention(self, name: str) -> "tuple[Kernel, Normalizer]":
        return layer_attention(name)

    @model_validator(mode="before")
    @classmethod
    def _no_positions_by_default(cls, values: Any) -> Any:
        """Mixers know where they are: where all layers are, only positions that are asked for are added."""
        from mercer.mixers.names import is_mixer

        if isinstance(values, dict) and "position" not in values:
            pattern = as_layers(values.get("attention"))
            names = pattern if isinstance(pattern, tuple) and pattern else (pattern,)  # or what will be refused
            if all(isinstance(name, str) and is_mixer(name) for name in names):
                return {**values, "position": "none"}
        return values

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.position == "rotary" and self.rope_turned is None and self.head_size % 2:
            raise ValueError(f"rotary positions need an even head_dim, not {self.head_size}")
        self._check_rope()
        if self.position == "sinusoidal" and self.dim % 2:
            raise ValueError(f"sinusoidal positions need an even dim, not {self.dim}")
        if self.position == "t5":
            self._check_t5()
        names = self.structure_pattern
        if not 1 <= len(names) <= self.layers:
            raise ValueError(
                f"structure has {len(names)} names for {count(self.layers, 'layer')}; name 1 to {self.layers}"
            )
        check_structures(self.attentions, self.structures, self.window, self.heads)
        if self.has_mixers_only:
            self._check_nothing_for_pairs()
        if self.head_bias and self.tie_embeddings:
            raise ValueError("head_bias needs tie_embeddings=False")
        return self

    def _check_mixers(self) -> None:
        from mercer.mixers.names import is_mixer, mixer_config

        named = dict.fromkeys(filter(is_mixer, self.pattern))
        for name in self.mixers:
            if name not in named:
                raise ValueError(f"mixers has options of {name!r}, which attention does not name")
        for name in named:
            try:
                mixer_config(name, self.mixers.get(name)).check(self.dim, self.heads)
            except InvalidArgument as error:
                raise ValueError(f"mixers: {error}") from error
        if named and (self.norm_position != "pre" or self.parallel != "none"):
            raise ValueError(f'layers of {", ".join(named)} have norm_position "pre" and parallel "none"')
        own = self.feedforward in ("none", *CHANNEL_MIXING)
        if own and len(named) < len(set(self.pattern)):
            attention = next(name for name in self.pattern if name not in named)
            raise ValueError(f"feedforward {self.feedforward!r} is for mixers, and attention names {attention!r}")
        if own and (self.experts is not None or "feedforward" in self.biased):
            what = "experts" if self.experts is not None else 'bias "feedforward"'
            raise ValueError(f"{what} and feedforward {self.feedforward!r} exclude each other")
        if self.feedforward == "none" and self.hidden is not None:
            raise ValueError('hidden is the size of a feed-forward, and feedforward "none" leaves it out')

    def _check_nothing_for_pairs(self) -> None:
        """Refuse what says which pairs of tokens there are, or weighs them, where no layer has any."""
        given = {
            "window": self.window is not None,
            "structure": any(name != "causal" for name in self.structure_pattern),
            "recency": self.recency,
            "attention_scale": self.attention_scale is not None,
            "kv_heads": self.kv_heads is not None,
            "head_dim": self.head_dim is not None,
            "bias": not isinstance(self.bias, bool) and not {"feedforward", "norm"}.issuperset(self.bias),
            f'position "{self.position}"': self.position in ("rotary", "alibi", "t5"),
        }
        for name in (name for name, there in given.items() if there):
            mixers = ", ".join(dict.fromkeys(self.pattern))
            raise ValueError(f"{name} is for layers that are attentions, and here all are {mixers}")

    def _check_t5(self) -> None:
        import torch

        from mercer.core.log_weights import RelativeBias
        from mercer.core.merged import merge
        from mercer.core.structures import Causal
        from mercer.core.support import unsupported
        from mercer.mixers.names import is_mixer

        if self.t5_buckets < 2 or self.t5_max_distance <= self.t5_buckets // 2:
            raise ValueError(
                "t5_buckets must be at least 2 and t5_max_distance above half of them, not "
                f"{self.t5_buckets} and {self.t5_max_distance}"
            )
        biased = merge(Causal() & RelativeBias(torch.zeros(self.heads, self.t5_max_distance + 1)))
        for name in self.pattern:
            if is_mixer(name):
                continue
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
    def has_mixers_only(self) -> bool:
        """Whether no layer is an attention, so that none turns anything by its position."""
        from mercer.mixers.names import is_mixer

        return all(map(is_mixer, self.pattern))

    @property
    def structure_pattern(self) -> tuple[str, ...]:
        """The names of the structures before they are repeated over the layers."""
        return (self.structure,) if isinstance(self.structure, str) else self.structure

    @property
    def structures(self) -> tuple[str, ...]:
        """The name of the structure of each layer."""
        names = self.structure_pattern
        return tuple(names[i % len(names)] for i in range(self.layers))

    @property
    def refuses_states(self) -> str | None:
        """Why no state continues the model, so that it writes no text, as a sentence; None if one does."""
        from mercer.mixers.names import is_mixer

        for number, (attention, name) in enumerate(zip(self.attentions, self.structures, strict=True), 1):
            if is_mixer(attention):
                continue
            reason = ending(causal_structure(name, self.window))
            if reason is not None:
                return (
                    f"the structure {name!r} of layer {number} {reason}, so that no state can continue it and the "
                    "model cannot write a text; structures such as bigbird(size, causal=true) can be continued"
                )
        return None
