"""What a model has read: rows of tokens, and the states they left, from which reading goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from mercer.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from mercer.core.state import State

PIECE = 1024
"""Tokens of a row that are read at once: with fewer, products are slower."""


class CausalModel(Protocol):
    """A module from tokens to logits, such as `DecoderLM`.

    ``model(tokens, padding=None, states=None, return_states=True)`` gives logits [B, T, V] and a state for each layer;
    padding is bool [B, T], True for real tokens, in any place. ``model.config.vocab_size`` is V, and
    ``model.config.refuses_states``, if there is one, says why no state can continue it. A model with ``reach``
    refuses longer sequences, one whose ``endless`` is True takes a text of any length as one sequence, in states of
    bounded size, and one with ``hidden`` (the same call) and ``score`` (from its result to logits) is asked for the
    logits that are wanted alone.
    """

    config: Any

    def __call__(self, tokens: Tensor, **options: Any) -> Any: ...
    def parameters(self) -> Iterator[Tensor]: ...


class Reading:
    """A batch of rows that a model reads, from nothing on.

    Rows of unequal length are padded in front, and what stands at padding changes nothing, so that each row is read as
    it would be alone.

    Attributes:
        model: what reads.
        tokens: of each row, all that was read.
        states: what they left, one a layer; None before anything is read. Keeping them, or a `copy`, is all that going
            back takes.
    """

    def __init__(self, model: CausalModel, batch: int = 1) -> None:
        self.model = model
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.states: list[State] | None = None

    @property
    def device(self) -> torch.device:
        return next(iter(self.model.parameters())).device

    def read(self, rows: Sequence[Sequence[int]], piece: int = PIECE) -> Tensor:
        """Read on: at least one token for each row. Returns logits [B, V] for the token after each row's last.

        piece: tokens of a row read at once.
        """
        logits = None
        for tokens, padding, last in self._pieces(rows, piece):
            logits = self._call(tokens, padding, -1 if last else None)
        assert logits is not None
        return logits[:, -1]

    def logits(self, rows: Sequence[Sequence[int]], piece: int = PIECE) -> Iterator[Tensor]:
        """Read on, piece by piece: yields logits [B, t, V] after each token of a piece. Rows stand at the right, and
        logits at the padding before them mean nothing.
        """
        for tokens, padding, _ in self._pieces(rows, piece):
            logits = self._call(tokens, padding, 0)
            assert logits is not None
            yield logits

    def _pieces(self, rows: Sequence[Sequence[int]], piece: int) -> Iterator[tuple[Tensor, Tensor | None, bool]]:
        """Tokens [B, t], which of them are real, and whether they are the last."""
        longest = max(map(len, rows))
        before = [longest - len(row) for row in rows]
        padded = [[0] * n + list(row) for n, row in zip(before, rows, strict=True)]
        tokens = torch.tensor(padded, dtype=torch.int64, device=self.device)
        padding = None
        if any(before):
            first = torch.tensor(before, device=self.device).unsqueeze(1)
            padding = torch.arange(longest, device=self.device) >= first
        for start in range(0, longest, piece):
            stop = min(start + piece, longest)
            yield tokens[:, start:stop], None if padding is None else padding[:, start:stop], stop == longest
            for have, n, row in zip(self.tokens, before, rows, strict=True):
                have.extend(row[max(start - n, 0) : max(stop - n, 0)])

    def _call(self, tokens: Tensor, padding: Tensor | None, keep: int | None) -> Tensor | None:
        """Read tokens; returns the logits from place ``keep`` on, or of no place for None."""
        model: Any = self.model
        options = {"padding": padding, "states": self.states, "return_states": True}
        with torch.inference_mode():  # entered for each piece: the caller's code runs between them
            if hasattr(model, "hidden") and hasattr(model, "score"):
                hidden, self.states = model.hidden(tokens, **options)
                return None if keep is None else model.score(hidden[:, keep:])
            logits, self.states = model(tokens, **options)
            return None if keep is None else logits[:, keep:]

    def select(self, rows: Sequence[int]) -> Reading:
        """The reading of these rows, in this order; this one stays as it is."""
        chosen = Reading(self.model, 0)
        chosen.tokens = [list(self.tokens[row]) for row in rows]
        if self.states is not None:
            index = torch.tensor(list(rows), device=self.device)
            with torch.inference_mode():
                chosen.states = [state.select(index) for state in self.states]
        return chosen

    def copy(self) -> Reading:
        """The same reading, to go on from more than once. States are values, so this copies no more than the tokens."""
        twin = Reading(self.model, 0)
        twin.tokens, twin.states = [list(row) for row in self.tokens], self.states
        return twin

    def check(self, rows: Sequence[Sequence[int]], more: int) -> None:
        """Refuse what cannot be read.

        Args:
            rows: what is to be read next.
            more: how many tokens shall be chosen after that; the last of them is not read.

        Raises:
            InvalidArgument: a token is outside the vocabulary, or the model's positions do not reach that far.
            Unsupported: a layer's structure depends on the length of the text, so that no state can continue it.
        """
        refusal = getattr(self.model.config, "refuses_states", None)
        if refusal is not None:
            raise Unsupported(refusal)
        size = self.model.config.vocab_size
        for i, (have, row) in enumerate(zip(self.tokens, rows, strict=True)):
            what = "prompt" if len(rows) == 1 else f"prompt {i}"
            if min(row) < 0 or max(row) >= size:
                the = "the prompt" if len(rows) == 1 else what
                raise InvalidArgument(f"{the} has tokens outside 0..{size - 1}, the model's vocabulary")
            self._check_room(len(have) + len(row), more, f"a {what}" if len(rows) == 1 else what)

    def _check_room(self, length: int, more: int, what: str) -> None:
        longest = getattr(self.model, "reach", None)
        if longest is None or not more or length + more - 1 <= longest:
            return
        kind = self.model.config.position
        limit = f"max_length={longest}" if longest == self.model.config.max_length else str(longest)
        fix = {
            "rotary": ", unless rope_scaling=... scales its positions or allow_longer=True lets them run on",
            "sinusoidal": ", unless allow_longer=True lets them run on",
        }.get(kind, "")
        room = longest - length + 1
        can = f"at most {room} can follow" if room > 0 else f"give at most {longest} tokens"
        raise InvalidArgument(
            f"the model has {kind} positions for {limit} tokens, too few to continue {what} of {length} by "
            f"max_tokens={more}; {can}{fix}"
        )


def whole(value: object) -> bool:
    """Whether a value is a whole number, which True and 1.0 are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def rows_of(prompts: Sequence[Sequence[int] | Tensor]) -> list[list[int]]:
    """Prompts as lists of whole numbers.

    Raises:
        InvalidArgument: there is none, one is empty, or one is not of whole numbers in one dimension.
    """
    if not len(prompts):
        raise InvalidArgument("there is no prompt; give at least one")
    return [_row(prompt, "the prompt" if len(prompts) == 1 else f"prompt {i}") for i, prompt in enumerate(prompts)]


def _row(prompt: Sequence[int] | Tensor, what: str) -> list[int]:
    try:
        tokens = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(f"{what} must be whole numbers in one dimension ({error})") from error
    if tokens.ndim != 1 or not len(tokens):
        raise InvalidArgument(f"{what} has shape {list(tokens.shape)}; give at least one token in one dimension")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise InvalidArgument(f"{what} has dtype {tokens.dtype}; tokens are whole numbers")
    return tokens.tolist()
