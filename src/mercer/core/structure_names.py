"""Names of structures, as used on the command line and in configurations: words with numbers, joined by & and |.

    causal    window(512)    window(64, dilation=4) | global(first=4)    (strided(16) | columns(64, 2)) & window(1024)

The numbers of a word are those of the class that it names, the first ones by place or by keyword as in Python; ``&``
binds tighter than ``|``. ``window(n)`` is ``Window.last(n)``, and ``window(none, dilation=d)`` every d-th key before.
Global tokens are the ``first=n`` ones, or stand ``at=[0, 17]``.

A closed registry: a name never becomes an import path.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any

from mercer.core.bigbird import BigBird, RandomBlocks
from mercer.core.patterns import Blocks, Columns, Fixed, Global, Longformer, Strided
from mercer.core.structures import Both, Causal, Either, Pattern, Structure, Window
from mercer.errors import InvalidArgument

Positions = tuple[int, ...] | None
MOST = 16
"""Words of one name, and parentheses inside each other, at most: a union of intersections grows as their product."""
MOST_FIRST = 65_536
"""Global tokens that ``first=`` names at most: each is kept by its place."""
EXAMPLE = "window(64) | global(first=4)"


def _window(width: int | None, dilation: int = 1) -> Pattern:
    return Window(None, 0, dilation) if width is None else Window.last(width, dilation)


def _blocks(size: int, before: int = 0) -> Pattern:
    return Blocks(size, before)


def _global(first: int = 1, at: Positions = None, see: bool = True, seen: bool = True) -> Pattern:
    return Global(_places("global", first, at), see=see, seen=seen)


def _longformer(window: int, first: int = 0, at: Positions = None) -> Pattern:
    return Longformer(window, _places("longformer", first, at))


def _places(word: str, first: int, at: Positions) -> tuple[int, ...]:
    if first > MOST_FIRST:
        raise InvalidArgument(f"{word}: first must be at most {MOST_FIRST:,}, not {first}.")
    return tuple(range(first)) if at is None else at


def _randomblocks(
    size: int, count: int = 3, seed: int = 0, heads: int | None = None, apart: bool = False, causal: bool = False
) -> Pattern:
    return RandomBlocks(size, count, seed, heads, apart, causal)


def _bigbird(size: int, random: int = 3, seed: int = 0, heads: int | None = None, causal: bool = False) -> Pattern:
    return BigBird(size, random, seed, heads, causal=causal)


WORDS: dict[str, tuple[type[Pattern], Callable[..., Pattern]]] = {
    "causal": (Causal, Causal),
    "window": (Window, _window),
    "blocks": (Blocks, _blocks),
    "strided": (Strided, Strided),
    "fixed": (Fixed, Fixed),
    "columns": (Columns, Columns),
    "global": (Global, _global),
    "longformer": (Longformer, _longformer),
    "randomblocks": (RandomBlocks, _randomblocks),
    "bigbird": (BigBird, _bigbird),
}
"""Each word's class, and what makes one of the word's numbers: its parameters are those of the word."""
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("a whole number", lambda value: type(value) is int),
    "int | None": ("a whole number or none", lambda value: value is None or type(value) is int),
    "bool": ("true or false", lambda value: type(value) is bool),
    "Positions": ("whole numbers in brackets, such as [0, 17]", lambda value: isinstance(value, tuple)),
}


def parse_structure(name: str) -> Structure:
    """The structure of a name such as ``causal``, ``strided(16)`` or ``window(64) | global(first=4)``.

    Raises:
        InvalidArgument: for an unknown name; the message lists what is allowed.
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"A structure's name is text, such as {EXAMPLE!r}, not {name!r}.")
    return _Reader(name).whole()


def causal(structure: Structure) -> Structure:
    """The structure without what comes after a token."""
    return structure if any(isinstance(part, Causal) for part in structure.parts) else Causal() & structure


def structure_name(structure: Structure) -> str:
    """The name of a structure; the inverse of :func:`parse_structure`, with the words in one way of writing.

    Raises:
        InvalidArgument: for parts and settings that no word has, such as windows that look ahead, tensors, functions.
    """
    if isinstance(structure, Both):
        each = ((p, structure_name(p)) for p in structure.members)
        return " & ".join(f"({name})" if isinstance(part, Either) else name for part, name in each)
    if isinstance(structure, Either):
        each = ((p, structure_name(p)) for p in structure.members)
        return " | ".join(f"({name})" if isinstance(part, Both) else name for part, name in each)
    word = next((word for word, (cls, _) in WORDS.items() if type(structure) is cls), None)
    if word is not None:
        given = _given(word, structure)
        try:
            same = vars(WORDS[word][1](**given)) == vars(structure)
        except InvalidArgument:
            same = False
        if same:
            parameters = _parameters(word)
            needed = [_written(v) for n, v in given.items() if parameters[n].default is Parameter.empty]
            others = [f"{n}={_written(v)}" for n, v in given.items() if parameters[n].default is not Parameter.empty]
            return f"{word}({', '.join(needed + others)})" if given else word
    raise InvalidArgument(f"{structure} has no registered name: {_allowed()}.")


def split_structures(text: str) -> list[str]:
    """Names that are separated by commas, as on a command line; commas inside brackets belong to a name."""
    parts, deep = [""], 0
    for letter in text:
        deep += (letter in "([") - (letter in ")]")
        if letter == "," and deep == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _given(word: str, structure: Structure) -> dict[str, Any]:
    """What a word is given to make a structure of its class; defaults are left out."""
    found = dict(vars(structure))
    if isinstance(structure, Window):
        found["width"] = None if structure.left is None else structure.left + 1
    elif isinstance(structure, Global | Longformer):
        positions = tuple(structure.positions)
        found |= {"first": len(positions)} if positions == tuple(range(len(positions))) else {"at": positions}
    chosen = {name: found[name] for name in _parameters(word) if name in found}
    return {name: value for name, value in chosen.items() if value != _parameters(word)[name].default}


def _parameters(word: str) -> Mapping[str, Parameter]:
    return signature(WORDS[word][1]).parameters


def _written(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value).lower()


def _form(word: str) -> str:
    """How a word is written, with its defaults."""
    parameters = _parameters(word).items()
    inside = [n if p.default is Parameter.empty else f"{n}={_written(p.default)}" for n, p in parameters]
    return f"{word}({', '.join(inside)})" if inside else word


def _allowed() -> str:
    return f"write {', '.join(map(_form, WORDS))}, joined by & and | and by parentheses, for example {EXAMPLE}"


class _Reader:
    """Reads one name from left to right.

    name: and {"|" and};  and: one {"&" one};  one: "(" name ")", or a word with what stands in its parentheses.
    """

    def __init__(self, text: str) -> None:
        self.text, self.at, self.words, self.deep = text, 0, 0, 0
        self.tokens = re.findall(r"\w+|\S", text)

    def whole(self) -> Structure:
        found = self.any_of()
        if self.next is not None:
            raise self.fault(f"{self.next!r} is one too many")
        return found

    @property
    def next(self) -> str | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def fault(self, what: str, allowed: str | None = None) -> InvalidArgument:
        return InvalidArgument(f"Structure {self.text!r}: {what}; {allowed or _allowed()}.")

    def take(self, *wanted: str) -> bool:
        """Go past the next token if it is one of these."""
        if self.next is None or self.next not in wanted:
            return False
        self.at += 1
        return True

    def need(self, wanted: str) -> None:
        if not self.take(wanted):
            raise self.fault(f"{wanted!r} is missing " + ("at the end" if self.next is None else f"at {self.next!r}"))

    def any_of(self) -> Structure:
        found = self.all_of()
        while self.take("|"):
            found = found | self.all_of()
        return found

    def all_of(self) -> Structure:
        found = self.one()
        while self.take("&"):
            found = found & self.one()
        return found

    def one(self) -> Structure:
        if self.take("("):
            self.deep += 1
            if self.deep > MOST:
                raise self.fault(f"more than {MOST} parentheses stand inside each other")
            found = self.any_of()
            self.need(")")
            self.deep -= 1
            return found
        word = self.next
        if word not in WORDS:
            raise self.fault("a word is missing at the end" if word is None else f"{word!r} is unknown")
        self.at, self.words = self.at + 1, self.words + 1
        if self.words > MOST:
            raise self.fault(f"it has more than {MOST} words")
        given = self.arguments(word)
        lacking = [n for n, p in _parameters(word).items() if p.default is Parameter.empty and n not in given]
        if lacking:
            raise self.fault(f"{word} needs its {lacking[0]}", f"write {_form(word)}")
        try:
            return WORDS[word][1](**given)
        except InvalidArgument as error:
            raise InvalidArgument(f"Structure {self.text!r}: {error}") from error

    def arguments(self, word: str) -> dict[str, Any]:
        """What stands in a word's parentheses, by the names of its parameters."""
        given: dict[str, Any] = {}
        if not self.take("("):
            return given
        parameters = _parameters(word)
        named = False
        while not (not given and self.take(")")):
            names = [name for name in parameters if name not in given]
            name = names[0] if names else ""
            if self.at + 1 < len(self.tokens) and self.tokens[self.at + 1] == "=":
                name, named = str(self.next), True
                self.at += 2
            elif named:
                raise self.fault(f"{self.next!r} follows a named number without a name", f"write {_form(word)}")
            if name not in names:
                what = f"{word} has no {name!r}" if name and name not in given else f"{word} is given too much"
                raise self.fault(what, f"write {_form(word)}")
            given[name] = self.value(word, name, str(parameters[name].annotation))
            if self.take(")"):
                break
            if not self.take(","):
                what = (
                    "a ')' is missing at the end" if self.next is None else f"{self.next!r} stands in place of , or )"
                )
                raise self.fault(what, f"write {_form(word)}")
        if {"first", "at"} <= given.keys():
            raise self.fault(f"{word} has first= or at=, not both", f"write {_form(word)}")
        return given

    def value(self, word: str, name: str, annotation: str) -> Any:
        what, fits = _KINDS[annotation]
        value = tuple(self.numbers()) if self.take("[") else self.literal(self.next)
        if value is ... or not fits(value):
            raise self.fault(f"{name} of {word} is {what}", f"write {_form(word)}")
        return value

    def numbers(self) -> list[Any]:
        found: list[Any] = []
        while not self.take("]"):
            if found:
                self.need(",")
            found.append(self.literal(self.next))
            if type(found[-1]) is not int:
                raise self.fault("in brackets stand whole numbers, with commas between them")
        return found

    def literal(self, token: str | None) -> Any:
        """A number, none, true or false; an ellipsis for anything else."""
        self.at += 1
        known = {"none": None, "true": True, "false": False}
        if token is not None and re.fullmatch("[0-9]{1,9}", token):
            return int(token)
        return known.get(token, ...) if token is not None else ...
