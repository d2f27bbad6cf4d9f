"""The vocabulary and the chat template that a GGUF file carries, as those of a folder in the hub's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from mercer.errors import InvalidArgument, Unsupported
from mercer.models.chat import ChatTemplate
from mercer.models.tokenizer import HubVocabulary

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_UNKNOWN, _CONTROL, _USER = 2, 3, 4
_SPACE = "▁"

# How these models cut text into words before merging; each is a fact of the model that it was published with.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _words(kind: str, where: str) -> pre_tokenizers.PreTokenizer:
    if kind in ("default", "gpt-2"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if kind == "llama-bpe":
        return _split(_LLAMA3)
    if kind == "qwen2":
        return _split(_QWEN2)
    raise Unsupported(
        f"{where} cuts text as {kind!r} does; known are default, gpt-2, smollm, llama-bpe and qwen2 ({PREFIX}pre)"
    )


def gguf_vocabulary(metadata: Mapping[str, Any], where: str, size: int) -> HubVocabulary:
    """The vocabulary of a file: byte-level BPE ("gpt2"), or SentencePiece's BPE ("llama"), whose merges follow from the
    scores of its tokens.

    Raises:
        InvalidArgument: the file has none, or it does not fit the model's size.
        Unsupported: it is of another kind.
    """
    kind, tokens = metadata.get(PREFIX + "model"), _listed(metadata, "tokens", str, where)
    if not tokens:
        raise InvalidArgument(f"{where} has no vocabulary")
    if len(tokens) > size:
        raise InvalidArgument(f"{where} has {len(tokens)} tokens, but the model has {size}")
    if kind not in ("gpt2", "llama"):
        raise Unsupported(f"{where} has a vocabulary of kind {kind!r}; read are 'gpt2' and 'llama'")
    numbers = {role: metadata.get(f"{PREFIX}{key}_token_id") for role, key in _ROLES.items()}
    for role, number in numbers.items():
        if number is not None and not (isinstance(number, int) and 0 <= number < len(tokens)):
            raise InvalidArgument(f"{where}: the number of {role} is {number!r}, and there are {len(tokens)} tokens")
    make = _byte_level if kind == "gpt2" else _sentence_piece
    try:
        tokenizer = make(metadata, tokens, where)
    except (InvalidArgument, Unsupported):
        raise
    except Exception as error:  # of the library `tokenizers`, which has no narrower kind
        raise InvalidArgument(f"the vocabulary of {where} is damaged: {error}") from error
    special: list[AddedToken] = []
    for token, kind_of_token in zip(tokens, _listed(metadata, "token_type", int, where), strict=False):
        if kind_of_token in (_CONTROL, _USER) or (kind_of_token == _UNKNOWN and kind == "llama"):
            special.append(AddedToken(token, special=kind_of_token != _USER, normalized=False))
    tokenizer.add_tokens(special)
    names = {role: tokens[number] for role, number in numbers.items() if number is not None}
    begin = metadata.get(PREFIX + "add_bos_token", kind == "llama") and "bos_token" in names
    end = metadata.get(PREFIX + "add_eos_token", False) and "eos_token" in names
    if begin or end:
        around = [names["bos_token"]] * begin + ["$A"] + [names["eos_token"]] * end
        listed = [(tokens[numbers[role]], numbers[role]) for role in ("bos_token", "eos_token") if role in names]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(around), pair=None, special_tokens=listed
        )
    ends = {numbers["eos_token"], metadata.get(PREFIX + "eot_token_id")} - {None}
    return HubVocabulary(tokenizer, names=names, ends=sorted(ends), where=where)


def gguf_template(metadata: Mapping[str, Any], names: Mapping[str, str], where: str) -> ChatTemplate | None:
    """The chat template of a file, or None."""
    source = metadata.get(TEMPLATE)
    return None if source is None else ChatTemplate(source, names, where=f"the chat template of {where}")


def _listed(metadata: Mapping[str, Any], name: str, kind: type, where: str) -> list[Any]:
    """A list of the vocabulary, empty where the file has none."""
    values = metadata.get(PREFIX + name, [])
    if not isinstance(values, list) or not all(type(value) is kind for value in values):  # pyright: ignore[reportUnknownVariableType]
        raise InvalidArgument(f"{where}: {PREFIX}{name} is no list of {kind.__name__}")
    return values  # pyright: ignore[reportUnknownVariableType]


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], where: str) -> Tokenizer:
    pairs: list[tuple[str, str]] = []
    for merge in _listed(metadata, "merges", str, where):
        first, _, second = merge.partition(" ")
        pairs.append((first, second))
    kind = metadata.get(PREFIX + "pre", "default")
    numbered = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(numbered, pairs, ignore_merges=kind == "llama-bpe"))
    tokenizer.pre_tokenizer = _words(kind, where)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(metadata: Mapping[str, Any], tokens: list[str], where: str) -> Tokenizer:
    scores = _listed(metadata, "scores", float, where)
    if len(scores) != len(tokens):
        raise InvalidArgument(f"{where} has {len(tokens)} tokens and not as many scores")
    numbered = {token: number for number, token in enumerate(tokens)}
    merges: list[tuple[float, int, int, str, str]] = []
    for token, number in numbered.items():
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in numbered and second in numbered:
                merges.append((-scores[number], numbered[first], numbered[second], first, second))
    merges.sort(key=lambda merge: merge[0])  # of one score in the order of the tokens and their parts
    pairs = [(first, second) for *_, first, second in merges]
    unknown = tokens[metadata.get(PREFIX + "unknown_token_id") or 0]
    tokenizer = Tokenizer(BPE(numbered, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get(PREFIX + "add_space_prefix", True)
    steps = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return tokenizer
