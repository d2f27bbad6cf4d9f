"""The vocabulary of a model that others trained, from the tokenizer.json of a folder in the hub's format."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mercer.errors import InvalidArgument
from mercer.models.literal import Literal, Spelling
from mercer.models.token_decoders import token_text
from mercer.models.vocabulary import TOKENIZER_FILE, Vocabulary, as_bytes
from mercer.runtime.files import read_json, write_json

if TYPE_CHECKING:
    from tokenizers import AddedToken, Encoding, Tokenizer

CONFIG_FILE = "tokenizer_config.json"
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class HubVocabulary(Vocabulary):
    """A tokenizer of the library `tokenizers`, with its special tokens: byte-level BPE (GPT-2, Llama 3), BPE and
    Unigram over text with marked spaces (Llama 2, Mistral, Gemma, T5) or WordPiece (BERT).

    ``decode(encode(data)) == data`` holds for byte-level BPE without a normalizer, and for text with marked spaces up
    to what its normalizer changes; WordPiece forgets spaces before punctuation, and case where it is lowered. A byte
    that is not part of UTF-8 is decoded to itself, whatever stands beside it.

    Args:
        tokenizer: its truncation and padding are switched off.
        names: the special tokens by their roles, as templates of chats name them: {"bos_token": "<s>", ...}.
        ends: tokens with which the model says that it is done; None takes that of the role eos_token.
        where: names the tokenizer in errors.

    Raises:
        InvalidArgument: a role or an end is of a token that the tokenizer does not have.
        Unsupported: text is written from tokens in a way that is not known.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        names: Mapping[str, str] | None = None,
        ends: Iterable[int] | None = None,
        where: str = "the tokenizer",
    ) -> None:
        import json

        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer, self.names = tokenizer, dict(names or {})
        for role, name in self.names.items():
            if tokenizer.token_to_id(name) is None:
                raise InvalidArgument(f"{where} has no token {name!r}, which {role} names")
        # Of the decoder alone: the whole tokenizer as JSON is as long as its vocabulary.
        decoder = None if tokenizer.decoder is None else json.loads(tokenizer.decoder.__getstate__())
        self._text = token_text(decoder, where)
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, fields in added.items() if fields.special)
        self._size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if ends is None:
            ends = [] if "eos_token" not in self.names else [tokenizer.token_to_id(self.names["eos_token"])]
        self._ends = frozenset(int(token) for token in ends)
        if wrong := sorted(token for token in self._ends if tokenizer.id_to_token(token) is None):
            raise InvalidArgument(f"{where} has no token {wrong[0]}, which is to end a text")
        self._pieces: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})
        self._switch = threading.Lock()

    @property
    def size(self) -> int:
        return self._size

    @property
    def special(self) -> frozenset[int]:
        return self._special

    @property
    def ends(self) -> frozenset[int]:
        return self._ends

    @cached_property
    def beginning(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        around = self.tokenizer.encode("a")
        begin = next((i for i, mask in enumerate(around.special_tokens_mask) if not mask), 0)
        return tuple(around.ids[:begin])

    @cached_property
    def byte_lengths(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[size] int64: how many bytes each token stands for inside a text; 0 for special tokens and unused numbers."""
        return np.array([len(self.token_bytes(token)) for token in range(self.size)], dtype=np.int64)

    def encode(self, data: bytes) -> np.ndarray:
        """Bytes -> [n] tokens, none of them special: a name such as ``</s>`` in the text is read as it is spelt."""
        return np.array(self._ids(data, added=False, spelt=True), dtype=self.dtype)

    def prompt(self, data: bytes, *, added: bool = True) -> list[int]:
        return self._ids(data, added=added, spelt=False)

    def literal(self) -> Literal | None:
        return Literal(self._spelling) if self._special else None

    @cached_property
    def _spelling(self) -> Spelling:
        return Spelling(self.tokenizer, lambda text: self._read(text, added=False, spelt=False))

    def _ids(self, data: bytes, *, added: bool, spelt: bool) -> list[int]:
        return self._read(as_bytes(data).decode("utf-8"), added=added, spelt=spelt).ids

    def _read(self, text: str, *, added: bool, spelt: bool) -> Encoding:
        with self._switch:
            self.tokenizer.encode_special_tokens = spelt
            return self.tokenizer.encode(text, add_special_tokens=added)

    @property
    def opening_spaces(self) -> int:
        return self._text.opening_spaces

    def token_bytes(self, token: int) -> bytes:
        return self._piece(token, first=False)

    def first_bytes(self, token: int) -> bytes:
        return self._piece(token, first=True)

    def _piece(self, token: int, *, first: bool) -> bytes:
        known = self._pieces[first]
        if token not in known:
            name = None if token in self._special or token < 0 else self.tokenizer.id_to_token(token)
            known[token] = b"" if name is None else self._text(name, first)
        return known[token]

    def name(self, token: int) -> str:
        """The token as its file writes it; empty for an unused number."""
        return self.tokenizer.id_to_token(token) or ""

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``, the roles of special tokens as ``tokenizer_config.json``, and, where they are not
        the eos_token alone, the ends as ``generation_config.json``."""
        (folder / TOKENIZER_FILE).write_text(self.tokenizer.to_str(pretty=True), encoding="utf-8")
        write_json(folder / CONFIG_FILE, {"tokenizer_class": "PreTrainedTokenizerFast", **self.names})
        if self.ends != HubVocabulary(self.tokenizer, names=self.names).ends:
            write_json(folder / "generation_config.json", {"eos_token_id": sorted(self.ends)})


def load_hub_vocabulary(folder: str | Path, size: int | None = None) -> HubVocabulary:
    """The vocabulary of a folder in the hub's format.

    ``tokenizer.json`` has the tokens and what is put around a text. ``tokenizer_config.json`` (in older folders
    ``special_tokens_map.json``) adds special tokens and their roles. The ends are the eos_token_id, one or several, of
    ``generation_config.json``, else of ``config.json``, else the eos_token. Other keys change nothing here, as in
    transformers 5 for such a folder: add_bos_token and add_eos_token, which were for tokenizers without this file, and
    clean_up_tokenization_spaces, which would take spaces out of what a model wrote.

    Args:
        folder: where the files are.
        size: the model's vocabulary size; it may be larger, as many are rounded up, and never smaller.

    Raises:
        InvalidArgument: a file is missing, damaged, or does not fit the others or the size.
        Unsupported: text is written from tokens in a way that is not known.
    """
    folder = Path(folder)
    tokenizer = _read(folder / TOKENIZER_FILE)
    config = _object(folder / CONFIG_FILE)
    if "added_tokens_decoder" not in config:
        config |= _object(folder / "special_tokens_map.json")
    roles: dict[str, dict[str, Any]] = {}
    for role in NAMES:
        value = config.get(role)
        if isinstance(value, str):
            roles[role] = {"content": value, "special": True}
        elif isinstance(value, dict) and isinstance(value.get("content"), str):
            roles[role] = value | {"special": True}
        elif value is not None:
            raise InvalidArgument(f"{folder / CONFIG_FILE}: {role} is {value!r}; it is a token's text or a description")
    _add(tokenizer, config, roles.values(), folder / CONFIG_FILE)
    names = {role: fields["content"] for role, fields in roles.items()}
    vocabulary = HubVocabulary(tokenizer, names=names, ends=_ends(folder), where=str(folder / TOKENIZER_FILE))
    if size is not None and vocabulary.size > size:
        raise InvalidArgument(f"{folder / TOKENIZER_FILE} has {vocabulary.size} tokens, but the model has {size}")
    return vocabulary


def _read(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidArgument(f"{path} is missing: without it the tokens of the model have no text") from None
    except Exception as error:
        raise InvalidArgument(f"cannot read {path}: {error}") from error


def _object(path: Path) -> dict[str, Any]:
    """The object of a JSON file, empty where there is no file."""
    if not path.exists():
        return {}
    values = read_json(path)
    if not isinstance(values, dict):
        raise InvalidArgument(f"{path} must hold a JSON object")
    return values


def _add(tokenizer: Tokenizer, config: dict[str, Any], roles: Iterable[dict[str, Any]], path: Path) -> None:
    """Add the tokens that only the configuration has, or has with other properties."""
    known = tokenizer.get_added_tokens_decoder()
    listed = config.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(number.isdecimal() for number in listed):
        raise InvalidArgument(f"{path}: added_tokens_decoder is no object of numbers and tokens")
    for number, fields in sorted(
        ((int(number), fields) for number, fields in listed.items()), key=lambda item: item[0]
    ):
        token = _token(fields, path)
        if repr(known.get(number)) == repr(token):
            continue
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != number:
            raise InvalidArgument(
                f"{path} numbers {token.content!r} {number}, but in {TOKENIZER_FILE} it is "
                f"{tokenizer.token_to_id(token.content)}"
            )
    have = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    more = [token for key in ("extra_special_tokens", "additional_special_tokens") for token in _list(config.get(key))]
    extra = [({"content": token} if isinstance(token, str) else token) | {"special": True} for token in more]
    tokens = [_token(fields, path) for fields in (*roles, *extra)]
    tokenizer.add_tokens([token for token in tokens if token.content not in have])


def _list(value: Any) -> list[Any]:
    return [token for token in value if isinstance(token, str | dict)] if isinstance(value, list) else []


def _token(fields: Any, path: Path) -> AddedToken:
    from tokenizers import AddedToken

    if not isinstance(fields, dict) or not isinstance(fields.get("content"), str):
        raise InvalidArgument(f"{path} describes a token by {fields!r}; its content must be a string")
    flags = {
        key: bool(fields[key]) for key in ("lstrip", "rstrip", "normalized", "single_word", "special") if key in fields
    }
    return AddedToken(fields["content"], **flags)


def _ends(folder: Path) -> list[int] | None:
    for name in ("generation_config.json", "config.json"):
        value = _object(folder / name).get("eos_token_id")
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**32 for token in values):
            raise InvalidArgument(f"{folder / name}: eos_token_id is {value!r}; it is a token's number or several")
        return values
    return None
