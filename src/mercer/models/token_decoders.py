"""The text of single tokens, by the `decoder` of a tokenizer.json.

Every decoder of the hub's generative and masked models but one makes the text of a token out of that token alone, and
treats it otherwise only where a text begins: a space is dropped there. So a text can be written token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mercer.errors import Unsupported
from mercer.models.vocabulary import byte_characters

Step = Callable[[str, bool], "str | bytes"]
KNOWN = "ByteLevel, Metaspace, WordPiece, or a Sequence of Replace, ByteFallback, Fuse and Strip"
# What WordPiece takes out, from English as its tokens were cut (tokenizers, decoders/wordpiece.rs).
CLEAN = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


@dataclass(frozen=True)
class TokenText:
    """From the name of a token to its bytes.

    Attributes:
        steps: applied to the name in turn; the last gives bytes, or a string that is UTF-8.
        opening_spaces: spaces that are dropped from where the whole text begins, at most.
    """

    steps: tuple[Step, ...] = field(default=())
    opening_spaces: int = 0

    def __call__(self, name: str, first: bool) -> bytes:
        """first: whether the token is the first of its text."""
        value: str | bytes = name
        for step in self.steps:
            if isinstance(value, bytes):
                break
            value = step(value, first)
        return value if isinstance(value, bytes) else value.encode("utf-8")


def token_text(decoder: Mapping[str, Any] | None, where: str) -> TokenText:
    """How a decoder, as a tokenizer.json describes it, writes tokens; ``where`` names the file in errors.

    Raises:
        Unsupported: the decoder has a part whose text depends on more than the token.
    """
    if decoder is None:  # tokens are words
        return TokenText((lambda name, first: name if first else f" {name}",))
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    steps: list[Step] = []
    opening, fused = 0, False
    for part in parts:
        kind = part["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and part["content"] == " " and not part["stop"]:
            opening = part["start"]
        elif kind == "Strip" and not fused:
            steps.append(_strip(part["content"], part["start"], part["stop"]))
        elif kind == "Replace" and "String" in part["pattern"] and not fused:
            steps.append(_replace(part["pattern"]["String"], part["content"]))
        elif kind in MAKERS and not fused:
            steps.append(MAKERS[kind](part))
        else:
            raise Unsupported(
                f"{where} writes text by the decoder {_told(part)}, which is not known; known are {KNOWN}"
            )
    return TokenText(tuple(steps), opening)


def _told(part: Mapping[str, Any]) -> str:
    values = ", ".join(f"{key}={value!r}" for key, value in part.items() if key != "type")
    return f"{part['type']}({values})"


def _byte_level(_part: Mapping[str, Any]) -> Step:
    values = {character: value for value, character in byte_characters().items()}

    def step(name: str, _first: bool) -> bytes:
        try:
            return bytes(values[character] for character in name)
        except KeyError:  # an added token is written as it is
            return name.encode("utf-8")

    return step


def _byte_fallback(_part: Mapping[str, Any]) -> Step:
    def step(name: str, _first: bool) -> str | bytes:
        if len(name) != 6 or not (name.startswith("<0x") and name.endswith(">")):
            return name
        try:
            return bytes((int(name[3:5], 16),))
        except ValueError:
            return name

    return step


def _replace(old: str, new: str) -> Step:
    return lambda name, _first: name.replace(old, new)


def _strip(content: str, start: int, stop: int) -> Step:
    def step(name: str, _first: bool) -> str:
        for _ in range(start):
            name = name.removeprefix(content)
        for _ in range(stop):
            name = name.removesuffix(content)
        return name

    return step


def _metaspace(part: Mapping[str, Any]) -> Step:
    mark, drops = part["replacement"], part["prepend_scheme"] != "never"
    return lambda name, first: name.replace(mark, "" if first and drops else " ")


def _word_piece(part: Mapping[str, Any]) -> Step:
    prefix, clean = part["prefix"], part["cleanup"]

    def step(name: str, first: bool) -> str:
        if not first:
            name = name[len(prefix) :] if name.startswith(prefix) else f" {name}"
        for old, new in CLEAN if clean else ():
            name = name.replace(old, new)
        return name

    return step


MAKERS: dict[str, Callable[[Mapping[str, Any]], Step]] = {
    "ByteLevel": _byte_level,
    "ByteFallback": _byte_fallback,
    "Metaspace": _metaspace,
    "WordPiece": _word_piece,
}
