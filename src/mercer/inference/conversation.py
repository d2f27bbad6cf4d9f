"""A chat with a model that remembers: of each turn only what is new is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mercer.errors import InvalidArgument
from mercer.inference.generate import Finish, stream
from mercer.inference.reading import PIECE, CausalModel, Reading
from mercer.inference.sampler import Sampling
from mercer.inference.stops import Stops
from mercer.models.turn_marks import turn_marks

if TYPE_CHECKING:
    from mercer.models.chat import ChatTemplate
    from mercer.models.vocabulary import Vocabulary

MARKS = 4


@dataclass
class Turn:
    """What one answer took.

    Attributes:
        text: what the model wrote.
        tokens: of the chat when the model began to answer.
        read: how many of them had to be read.
        written: tokens of the answer.
        finish: why it ended, as in `Piece`; None if it was broken off.
    """

    text: str = ""
    tokens: int = 0
    read: int = 0
    written: int = 0
    finish: Finish | None = None


class Conversation:
    """Messages, and a model that has read them.

    At each turn the whole chat is written by its template and cut into tokens, as if it were new; then the model goes
    on from the longest of the states that it kept whose tokens begin this chat, and reads the rest. So an answer is
    always that of a model that has read the chat as it stands, and where the template writes an earlier turn otherwise
    than before (without its thoughts, or without spaces at its ends), or where an answer is cut into other tokens than
    those that were drawn, what follows from there on is read again.

    Args:
        model: see `CausalModel`.
        vocabulary: its vocabulary.
        template: how its chats are written.
        system: the content of a first message of the role system; None: no such message.
        sampling: default `Sampling()`.
        seed: the draws of turn i are those of seed + i.
        max_tokens: of an answer, at most.
        stop: texts at which an answer ends.
        variables: further variables of the template.
        literal: read messages as they are spelt, as `ChatTemplate.tokens` does, and refuse those of the user and the
            system that have what the template writes between messages as plain text (`turn_marks`), as Llama 2's
            ``[/INST]`` is, since nothing could tell the one from the other. False lets names of special tokens in
            messages become those tokens, and such marks end turns.
        prefill: tokens read at once.

    Raises:
        InvalidArgument: options that do not fit, or a system message that has such a mark.
    """

    def __init__(
        self,
        model: CausalModel,
        vocabulary: Vocabulary,
        template: ChatTemplate,
        *,
        system: str | None = None,
        sampling: Sampling | None = None,
        seed: int = 0,
        max_tokens: int = 1024,
        stop: Sequence[str] = (),
        variables: dict[str, Any] | None = None,
        literal: bool = True,
        prefill: int = PIECE,
    ) -> None:
        self._model, self._vocabulary, self._template = model, vocabulary, template
        Stops(stop)  # says what is wrong with them
        if given := sorted(
            {"self", "vocabulary", "literal", "messages", "add_generation_prompt"} & (variables or {}).keys()
        ):
            raise InvalidArgument(f"the chat itself says {given[0]} to its template, so it is no variable to be given")
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._sampling, self._stop, self._prefill = sampling, tuple(stop), prefill
        self._literal = literal
        self._marks_of_turns = turn_marks(template, vocabulary, variables) if literal else ()
        if system is not None:
            self._refuse_marks(system, "system message")
        self._seed, self._max_tokens, self._variables = seed, max_tokens, variables or {}
        self.reset()

    def reset(self) -> None:
        """Begin anew, with the system message alone."""
        self.messages: list[dict[str, str]] = list(self._first)
        self.turn = Turn()
        self._turns = 0
        self._marks: list[Reading] = []

    def answer(self, content: str) -> Iterator[str]:
        """Send a message of the user; yields the answer in pieces of whole characters.

        Then ``messages`` has both, and ``turn`` says what they took. Broken off (by closing the iterator or by an
        exception), what was written until then is the answer. Nothing is sent if the first piece is an error.

        Raises:
            InvalidArgument: the template refuses the chat, it is longer than the model's positions, or the message has
                a mark that would end its turn.
        """
        self._refuse_marks(content, "message")
        messages = [*self.messages, {"role": "user", "content": content}]
        tokens = self._template.tokens(
            self._vocabulary, messages, literal=self._literal, add_generation_prompt=True, **self._variables
        )
        if not tokens:
            raise InvalidArgument("the chat template writes nothing for this chat")
        room = self._room(len(tokens))
        reading = self._go_back(tokens)
        new = tokens[len(reading.tokens[0]) :]
        turn = Turn(tokens=len(tokens), read=len(new))
        reading.check([new], 0)
        if new[:-1]:
            reading.read([new[:-1]], self._prefill)
        self._keep(reading.copy())  # before the answer, should it be written otherwise in the next turn
        pieces = stream(
            self._model,
            [new[-1:]],
            min(self._max_tokens, room),
            sampling=self._sampling,
            seed=self._seed + self._turns,
            vocabulary=self._vocabulary,
            stop=self._stop,
            reading=reading,
        )
        self.turn, self._turns = turn, self._turns + 1
        try:
            for piece in pieces:
                turn.text += piece.text
                turn.written += 1
                turn.finish = piece.finish
                if piece.text:
                    yield piece.text
        except GeneratorExit:  # between two tokens
            self._keep(reading)
            raise
        else:
            self._keep(reading)
        finally:  # an interrupt may have come while the model read, so that its states are of no known tokens
            self.messages = [*messages, {"role": "assistant", "content": turn.text}]

    def _refuse_marks(self, content: str, what: str) -> None:
        for mark in self._marks_of_turns:
            if mark in content:
                raise InvalidArgument(
                    f"the {what} has {mark!r}, which this chat template writes between messages as plain text, so that "
                    "the model would take what follows for another turn; leave it out, or give literal=False"
                )

    def _room(self, length: int) -> int:
        """How many tokens the model's positions leave for an answer."""
        reach = getattr(self._model, "reach", None)
        if reach is None:
            return self._max_tokens
        if length > reach:
            raise InvalidArgument(
                f"the chat has {length} tokens, and the model's positions end at {reach}; begin a new one"
            )
        return reach - length + 1

    def _go_back(self, tokens: list[int]) -> Reading:
        """The longest reading of a beginning of these tokens that leaves at least the last to read."""
        fitting = [
            mark for mark in self._marks if len(mark.tokens[0]) < len(tokens) and _begins(tokens, mark.tokens[0])
        ]
        longest = max(fitting, key=lambda mark: len(mark.tokens[0]), default=None)
        return Reading(self._model) if longest is None else longest.copy()

    def _keep(self, reading: Reading) -> None:
        self._marks = [*self._marks, reading][-MARKS:]


def _begins(tokens: list[int], first: list[int]) -> bool:
    return tokens[: len(first)] == first
