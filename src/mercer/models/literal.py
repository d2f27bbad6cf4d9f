"""Texts inside a chat that are read as they are spelt, so that none of them can write a special token.

A template mixes its own text, whose special tokens are meant, with texts of messages, in which a name such as
``<|im_end|>`` would end the turn. Each place of such a text that reads as a special token, or could with what stands
beside it, is given to the template as a mark that nobody can guess. In what the template writes, whatever reads as a
special token is then the template's own. A twin of the tokenizer, in which special tokens have other, secret names,
encodes the whole: with these names where the template has special tokens, and the texts as they were where marks stand.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mercer.errors import InvalidArgument

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

PRIVATE = re.compile("[\ue000-\ue02f]")
"""What marks are written with: characters without a meaning, which no template looks for or changes."""
_OPEN, _NAME, _CLOSE = "\ue000", "\ue001", "\ue002"


PLAIN = ("role", "type")
"""Keys whose texts templates compare: only what is a special token's name is hidden in them."""


class Spelling:
    """A tokenizer's special tokens, and its twin in which they have secret names.

    read: the tokenizer's encoding of a text in which names of special tokens are those tokens.
    """

    def __init__(self, tokenizer: Tokenizer, read: Callable[[str], Encoding]) -> None:
        self._tokenizer, self._read = tokenizer, read
        self.secret = "".join(chr(0xE010 + secrets.randbelow(16)) for _ in range(16))
        added = tokenizer.get_added_tokens_decoder()
        self.names = {token: fields.content for token, fields in added.items() if fields.special}
        self._beginnings = {name[:n] for name in self.names.values() for n in range(1, len(name))}
        self._endings = {name[n:] for name in self.names.values() for n in range(1, len(name))}
        self._longest = max(map(len, self.names.values()), default=0)

    def hidden_name(self, token: int) -> str:
        """What the twin calls a special token."""
        return f"{_NAME}{self.secret}{_digits(token)}{_CLOSE}"

    def found(self, text: str) -> list[tuple[int, int, int]]:
        """Where a text reads as special tokens: (start, stop, token)."""
        read = self._read(text)
        return [
            (start, stop, token)
            for token, (start, stop) in zip(read.ids, read.offsets, strict=True)
            if token in self.names and self._spells(text[start:stop], token)
        ]

    def _spells(self, text: str, token: int) -> bool:
        """Whether a text has a special token's name, and is not something unknown that is read as that token."""
        normalizer, name = self._tokenizer.normalizer, self.names[token]
        if normalizer is None or name in text:
            return name in text
        return normalizer.normalize_str(name) in normalizer.normalize_str(text)

    def edges(self, text: str) -> list[tuple[int, int]]:
        """Where a text ends as a special token's name begins, or begins as one ends; spaces around it aside."""
        start, stop = len(text) - len(text.lstrip()), len(text.rstrip())
        sizes = range(min(self._longest - 1, stop - start), 0, -1)
        tail = next(((stop - n, stop) for n in sizes if text[stop - n : stop] in self._beginnings), None)
        head = next(((start, start + n) for n in sizes if text[start : start + n] in self._endings), None)
        return [span for span in (head, tail) if span is not None]

    def encode(self, text: str) -> list[int]:
        """Tokens of a text in which special tokens have the names of the twin, and no others are special."""
        twin, numbers = self._twin
        return [numbers.get(token, token) for token in twin.encode(text, add_special_tokens=False).ids]

    @cached_property
    def _twin(self) -> tuple[Tokenizer, dict[int, int]]:
        """The twin, and of its added tokens the numbers here."""
        from tokenizers import Tokenizer

        described = json.loads(self._tokenizer.to_str())
        secret = {name: self.hidden_name(token) for token, name in self.names.items()}
        for token in described["added_tokens"]:
            if token["special"]:
                token |= {"content": secret[token["content"]], "normalized": False}
        described["post_processor"] = None  # which puts tokens around a text
        plain = described["model"]
        described["model"] = _renamed(plain, secret)
        try:
            twin = Tokenizer.from_str(json.dumps(described))
        except Exception:  # noqa: BLE001  (what tokenizers raises: merges make a special token, whose name stays)
            twin = Tokenizer.from_str(json.dumps(described | {"model": plain}))
        numbers: dict[int, int] = {}
        for token, fields in self._tokenizer.get_added_tokens_decoder().items():
            there = twin.token_to_id(secret[fields.content] if fields.special else fields.content)
            assert there is not None
            numbers[there] = token
        return twin, numbers


def _renamed(model: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A model of tokens in which some have other names, so that no text is cut into them."""
    vocabulary, unknown = model["vocab"], model.get("unk_token")
    if isinstance(vocabulary, dict):
        vocabulary = {names.get(name, name): number for name, number in vocabulary.items()}
    else:
        vocabulary = [[names.get(name, name), score] for name, score in vocabulary]
    return model | {"vocab": vocabulary} | ({} if unknown is None else {"unk_token": names.get(unknown, unknown)})


class Literal:
    """The texts of one chat: `hide` what they spell before a template writes them, then `tokens` of what it wrote."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._texts: list[str] = []
        self._mark = f"{_OPEN}{spelling.secret}"

    def hide(self, value: Any, key: str = "") -> Any:
        """A value of JSON with marks in the place of what its texts spell; keys of objects stay as they are."""
        if isinstance(value, str):
            return self._hidden(value, key)
        if isinstance(value, dict):
            return {name: self.hide(item, name) for name, item in value.items()}
        return [self.hide(item, key) for item in value] if isinstance(value, list) else value

    def _hidden(self, text: str, key: str) -> str:
        spans = [(start, stop) for start, stop, _ in self._spelling.found(text)]
        spans += [found.span() for found in PRIVATE.finditer(text)]  # so that all others are marks
        if key not in PLAIN:
            spans += self._spelling.edges(text)
        at, parts = 0, list[str]()
        for start, stop in sorted(spans):
            start, stop = max(start, at), max(stop, at)  # what overlaps is hidden once
            if start < stop:
                parts += [text[at:start], f"{self._mark}{_digits(len(self._texts))}{_CLOSE}"]
                self._texts.append(text[start:stop])
                at = stop
        return "".join([*parts, text[at:]])

    def tokens(self, text: str) -> list[int] | None:
        """Tokens of what a template wrote; None if nothing was hidden, so that its tokens are those of any text.

        Raises:
            InvalidArgument: the template has changed a text where something was hidden.
        """
        if not self._texts:
            return None
        for start, stop, token in reversed(self._spelling.found(text)):  # the template's own
            name = self._spelling.names[token]
            at = text.find(name, start, stop)
            start, stop = (start, stop) if at < 0 else (at, at + len(name))  # spaces that belong to it stay
            text = f"{text[:start]}{self._spelling.hidden_name(token)}{text[stop:]}"
        mark = re.compile(f"{self._mark}([\ue020-\ue029]+){_CLOSE}")
        own = re.compile(f"{_NAME}{self._spelling.secret}[\ue020-\ue029]+{_CLOSE}")
        if PRIVATE.search(own.sub("", mark.sub("", text))):
            raise InvalidArgument(
                "the chat template cuts or changes a message where it spells a special token, so that it cannot be "
                "read as it is spelt; literal=False reads it as that token"
            )
        return self._spelling.encode(mark.sub(lambda found: self._texts[_number(found[1])], text))


def _digits(number: int) -> str:
    """A number in digits for private use."""
    return "".join(chr(0xE020 + int(digit)) for digit in str(number))


def _number(digits: str) -> int:
    return int("".join(str(ord(digit) - 0xE020) for digit in digits))
