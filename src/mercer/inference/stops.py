"""Texts at which writing ends, found as text comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from mercer.errors import InvalidArgument


class Stops:
    """Lets text through up to the first of several stop strings, wherever the pieces are cut.

    Of stop strings that overlap the one that is whole first counts, and of those that end together the longest.
    Text that may yet turn out to begin one is held back.

    Raises:
        InvalidArgument: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            given = stops if isinstance(stops, str) else list(stops)
            raise InvalidArgument(f"stop is {given!r}; it is a list of texts, each of at least one character")
        self._stops, self._held = tuple(stops), ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop string has come; nothing may be pushed after it has."""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        held = max((self._begun(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def close(self) -> str:
        """The text that was held back, when no more comes."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _begun(text: str, stop: str) -> int:
        """How much of the stop string stands at the end of the text."""
        longest = min(len(stop) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
