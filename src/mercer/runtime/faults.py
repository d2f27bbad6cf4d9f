"""What is wrong with a configuration, in plain words."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

FEW = 14
"""Keys that are listed where none is spelt like the one that was given."""
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "string": "text",
    "bool": "true or false",
    "tuple": "a list",
    "list": "a list",
    "dict": "a mapping of names",
    "mapping": "a mapping of names",
    "model": "a mapping of names",
}
"""What a value must be, by the first word of pydantic's type of an error such as `int_parsing`."""
_LIMITS = {
    "greater_than_equal": ("ge", "{} or more"),
    "greater_than": ("gt", "above {}"),
    "less_than_equal": ("le", "{} or less"),
    "less_than": ("lt", "below {}"),
}


def faults(error: ValidationError, keys: Collection[str]) -> str:
    """All that pydantic found, joined by semicolons: "steps must be 1 or more, not 0". keys: what may be given."""
    found: dict[str, list[ErrorDetails]] = {}  # by key; of a union there is one for each of its members
    for fault in error.errors():
        where = [part for part in fault["loc"] if not _is_member(part)]
        found.setdefault(".".join(map(str, where)), []).append(fault)
    inside = [where for where in found if any(other.startswith(f"{where}.") for other in found)]
    return "; ".join(_said(where, those, keys) for where, those in found.items() if where not in inside)


def _is_member(part: int | str) -> bool:
    """Whether a part of a place names a member of a union or a key itself, not what is found there."""
    return isinstance(part, str) and (part in ("str", "bool", "int", "float", "[key]") or part.endswith("]"))


def _said(where: str, those: list[ErrorDetails], keys: Collection[str]) -> str:
    first = those[0]
    if first["type"] == "extra_forbidden":
        close = get_close_matches(where, keys, 1, 0.7)
        there = f"; there are {', '.join(keys)}" if keys and len(keys) <= FEW else ""
        return f"{where!r} is unknown" + (f" (did you mean {close[0]}?)" if close else there)
    if first["type"] == "missing":
        return f"{where} must be given"
    if first["type"] == "value_error":
        own = first["msg"].removeprefix("Value error, ")
        return f"{where}: {own}" if where else own  # empty: of several fields
    wanted = list(dict.fromkeys(map(_wanted, those)))
    either = ", or " if any(" or " in one for one in wanted) else " or "
    value = repr(first["input"])
    return f"{where} must be {either.join(wanted)}, not {value if len(value) <= 80 else value[:77] + '...'}"


def _wanted(fault: ErrorDetails) -> str:
    """What a value must be."""
    kind, context = fault["type"], fault.get("ctx", {})
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        return words.format(_plain(context[name]))
    if kind == "literal_error":
        return str(context["expected"])
    return _KINDS.get(kind.partition("_")[0], fault["msg"].removeprefix("Input should be "))


def _plain(number: Any) -> str:
    return str(int(number)) if float(number).is_integer() else str(number)
