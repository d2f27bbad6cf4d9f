"""The keys of a config.json, each of which is used, must have a certain value, or is left aside by name.

A key that nobody looked at is how a model comes to compute something else than the one it was saved from: so whatever
is left over is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from mercer.errors import InvalidArgument, Unsupported

T = TypeVar("T")
_NONE: Any = object()
_MOST = 2**40

SAID_OF_THE_FILE = (
    "architectures",
    "model_type",
    "transformers_version",
    "dtype",  # tensors say theirs themselves
    "torch_dtype",
    "_name_or_path",
    "_commit_hash",
    "name_or_path",
    "auto_map",
    "transformers.js_config",
    "custom_pipelines",
)
SAID_OF_TRAINING = (
    "initializer_range",
    "initializer_factor",
    "gradient_checkpointing",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "hidden_dropout",
    "hidden_dropout_prob",
    "activation_dropout",
    "dropout",
    "dropout_rate",
    "layerdrop",
    "decoder_layerdrop",
    "encoder_layerdrop",
    "classifier_dropout",
    "classif_dropout",
    "pretraining_tp",
    "slow_but_exact",
)
SAID_OF_USE = (
    "use_cache",
    "is_decoder",
    "output_past",
    "cache_implementation",
    "return_dict",
    "return_dict_in_generate",
    "output_scores",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "torchscript",
    "use_bfloat16",
    "xla_device",
    "tf_legacy_loss",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "chunk_size_feed_forward",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "sep_token_id",
    "cls_token_id",
    "mask_token_id",
    "unk_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "forced_decoder_ids",
    "eos_token_ids",
    "prefix",
    "task_specific_params",
    "problem_type",
    "id2label",
    "label2id",
    "num_labels",
    "_num_labels",
    "tokenizer_class",
    "max_length",
    "max_new_tokens",
    "min_length",
    "do_sample",
    "num_beams",
    "num_beam_groups",
    "diversity_penalty",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "num_return_sequences",
    "repetition_penalty",
    "length_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "remove_invalid_values",
    "early_stopping",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "finetuning_task",
)
LEFT_ASIDE = frozenset((*SAID_OF_THE_FILE, *SAID_OF_TRAINING, *SAID_OF_USE))
"""Keys of any model that change no logit of a forward pass in evaluation: about the file, about training (there is no
dropout here), and about use (special tokens, generation)."""
ASKING_FOR_NOTHING: dict[str, tuple[Any, ...]] = {
    "pruned_heads": ({}, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "is_encoder_decoder": (False, None),
    "tie_encoder_decoder": (False, None),
    "quantization_config": (None,),
}
"""Keys that any configuration may have, and the values with which they change nothing; a family takes those that are
something to it."""


class Keys:
    """The keys of one configuration, taken one by one.

    where: the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._values = dict(values)
        self._left = {name for name in values if name not in LEFT_ASIDE}
        self.ignored: dict[str, Any] = {name: values[name] for name in values if name in LEFT_ASIDE}
        """What was left aside, by name."""

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def take(self, name: str, default: T = _NONE, *, kind: type | tuple[type, ...] | None = None) -> Any | T:
        """The value of a key; where it is absent, the default. A key that is there and null is None, whatever the
        default: a file that says null may mean something else than one that says nothing.

        Raises:
            InvalidArgument: it is absent or null and there is no default, or it is not of the kind.
        """
        self._left.discard(name)
        self.ignored.pop(name, None)
        value = self._values.get(name)
        if value is None:
            if default is _NONE:
                raise InvalidArgument(f"{self.where} lacks {name}")
            return None if name in self._values else default
        if kind is not None:
            kinds = kind if isinstance(kind, tuple) else (kind,)
            wanted = (*kinds, int) if float in kinds else kinds
            if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
                names = " or ".join(each.__name__ for each in kinds)
                raise InvalidArgument(f"{self.where}: {name} is {value!r}, not of type {names}")
            if isinstance(value, int) and float not in kinds and abs(value) >= _MOST:
                raise InvalidArgument(f"{self.where}: {name} is {value}, more than any model has")
        return value

    def first(self, *names: str, default: T = _NONE, kind: type | tuple[type, ...] | None = None) -> Any | T:
        """The value of a key that older files call otherwise: of the first name that is there."""
        there = [name for name in names if self._values.get(name) is not None]
        for name in names:
            self.take(name, None)
        if there and any(self._values[name] != self._values[there[0]] for name in there):
            raise InvalidArgument(f"{self.where}: {' and '.join(there)} differ, and mean the same")
        return self.take((there or names)[0], default, kind=kind)

    def one_of(self, name: str, allowed: Mapping[Any, T], default: Any = _NONE) -> T:
        """What a value stands for.

        Raises:
            Unsupported: it is not among the allowed ones.
        """
        value = self.take(name, default)
        try:
            return allowed[value]
        except (KeyError, TypeError):
            known = ", ".join(map(repr, allowed))
            raise Unsupported(f"{self.where}: {name} is {value!r}; what can be computed is {known}") from None

    def must_be(self, name: str, *allowed: Any, why: str = "") -> None:
        """Refuse any other value of a key; absent and null are always fine."""
        value = self.take(name, None)
        if value is not None and value not in allowed:
            known = " or ".join(map(repr, allowed))
            raise Unsupported(
                f"{self.where}: {name} is {value!r}, and only {known} can be computed{why and '; ' + why}"
            )

    def aside(self, *names: str) -> None:
        """Keys that change nothing here."""
        for name in names:
            if name in self._left:
                self._left.discard(name)
                self.ignored[name] = self._values[name]

    def finish(self) -> None:
        """Refuse what nobody has taken.

        Raises:
            InvalidArgument: a key is left.
            Unsupported: a key that is fine where it asks for nothing asks for something.
        """
        for name in sorted(self._left & ASKING_FOR_NOTHING.keys()):
            if self._values[name] not in ASKING_FOR_NOTHING[name]:
                raise Unsupported(
                    f"{self.where}: {name} is {self._values[name]!r}, and only {ASKING_FOR_NOTHING[name][0]!r} can be "
                    "computed"
                )
            self._left.discard(name)
        if self._left:
            first = sorted(self._left)
            listed = ", ".join(f"{name} = {self._values[name]!r}" for name in first[:4])
            more = f" and {len(first) - 4} more" if len(first) > 4 else ""
            raise InvalidArgument(
                f"{self.where} has keys that are not known, {listed}{more}; what they ask for might be left out, so "
                "the model is not loaded"
            )
