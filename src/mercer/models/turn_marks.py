"""What stands between the messages of a chat as plain text, so that a message could write it too."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mercer.errors import InvalidArgument

if TYPE_CHECKING:
    from mercer.models.chat import ChatTemplate
    from mercer.models.vocabulary import Vocabulary

LEAST = 3
"""Characters of a mark: what is shorter, such as ``A:``, stands in many a message."""
_WORDS = {"system": "Kolibri", "user": "Albatros", "assistant": "Pelikan"}
"""What the messages of the chat say that marks are looked for in: a word for each role."""
_CHATS = (("system", "user", "assistant", "user"), ("user", "assistant", "user"), ("user",))
"""Chats to look at; the first that a template takes will do."""


def turn_marks(
    template: ChatTemplate, vocabulary: Vocabulary, variables: Mapping[str, Any] | None = None
) -> tuple[str, ...]:
    """The lines that a template writes between one message and the next, or the answer, where no special token stands
    between them: of Llama 2 ``[/INST]`` and ``<</SYS>>``, of a template whose turns are special tokens nothing.

    Special tokens cannot be written by a message that is read as it is spelt (:mod:`mercer.models.literal`); these
    lines can. They are found in a chat of three or four messages that the template writes; where it takes none there
    are no marks.
    """
    named: Any = vocabulary  # those with special tokens have names for them
    special = [name for token in vocabulary.special if (name := named.name(token))]
    found: dict[str, None] = {}
    for text in _between(template, variables or {}):
        if not any(name in text for name in special):
            found |= dict.fromkeys(line for part in text.splitlines() if len(line := part.strip()) >= LEAST)
    return tuple(found)


def _between(template: ChatTemplate, variables: Mapping[str, Any]) -> list[str]:
    """What a template writes behind each message of a chat, up to the next."""
    for roles in _CHATS:
        words = [f"{_WORDS[role]}{i}" for i, role in enumerate(roles)]
        messages = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
        with suppress(InvalidArgument):
            text = template.render(messages, **variables)
            places = [(text.find(word), word) for word in words if word in text]
            starts = [place for place, _ in places[1:]] + [len(text)]
            return [text[place + len(word) : stop] for (place, word), stop in zip(places, starts, strict=True)]
    return []
