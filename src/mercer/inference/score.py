"""How likely a text is under a model: perplexity by token, bits by byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mercer.errors import InvalidArgument, NonFinite
from mercer.inference.reading import PIECE, CausalModel, Reading, whole

if TYPE_CHECKING:
    from mercer.models.vocabulary import Vocabulary

LOGITS_AT_ONCE = 2**24  # numbers: 64 MiB in float32


@dataclass(frozen=True, eq=False)
class Score:
    """How well a model foresaw a text.

    Attributes:
        nats: [n] float64, -log p of each token that was scored, in order: all of the text, or all but the first where
            no special token stands before it.
        bytes: of the text that these tokens stand for, as it was given.
        context: tokens of a window, at most.
        stride: tokens that a window scores after the first.
        windows: how many were read.
    """

    nats: Tensor
    bytes: int
    context: int
    stride: int
    windows: int

    @property
    def tokens(self) -> int:
        return len(self.nats)

    @property
    def loss(self) -> float:
        """Nats a token."""
        return float(self.nats.mean())

    @property
    def perplexity(self) -> float:
        """exp(loss): among how many equally likely tokens a choice would be as hard."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Bits of all tokens over the bytes of the text, which compares models of different vocabularies."""
        return float(self.nats.sum()) / math.log(2) / self.bytes

    def to_dict(self) -> dict[str, Any]:
        """The numbers for JSON, without those of each token."""
        return {
            "tokens": self.tokens,
            "bytes": self.bytes,
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "context": self.context,
            "stride": self.stride,
            "windows": self.windows,
        }


def score(
    model: CausalModel,
    vocabulary: Vocabulary,
    data: bytes,
    *,
    context: int | None = None,
    stride: int | None = None,
    piece: int = 2 * PIECE,
    progress: Callable[[int, int], None] | None = None,
) -> Score:
    """Score a text of any length.

    Its tokens are those of ``vocabulary.encode``, after the special tokens that a text begins with, if any, which are
    not scored. A text longer than ``context`` is read in windows that each begin with those special tokens: the first
    scores all of its tokens, each later one only its last ``stride``, so that every token is scored once, and with at
    least context - stride tokens before it, unless the text has fewer. Whatever the length of a window, it is read in
    pieces that go on from the states of those before, which changes nothing but the memory that it takes.

    Args:
        model: see `CausalModel`.
        vocabulary: its vocabulary.
        data: the text.
        context: tokens of a window, the special ones included. None: the whole text if the model is ``endless``, as one
            of mixers is, so that every token is scored given all before it; else as many as the model reaches or was
            trained for, and the whole text if it says neither.
        stride: from 1 to context - 1 (less, if several special tokens begin a text). None: half of context.
        piece: tokens read at once, without a state if a window has no more (default 2,048); a model that no state can
            continue reads each window at once.
        progress: called with the tokens scored and those to be scored, after every piece.

    Raises:
        InvalidArgument: there is nothing to score, a number is out of range, or the model does not reach the context.
        NonFinite: the model's logits are not finite.
        UnicodeDecodeError: the text is not UTF-8, and the vocabulary needs that.
    """
    tokens, beginning = vocabulary.encode(data).tolist(), list(vocabulary.beginning)
    if len(tokens) + len(beginning) < 2 or not tokens:
        raise InvalidArgument("the text has no token that follows another, so there is nothing to score")
    least = 1 + max(len(beginning), 1)
    if stride is not None and context is None and getattr(model, "endless", False):
        raise InvalidArgument(
            f"stride={stride} is of windows, and this model reads the whole text as one sequence: give context=... too"
        )
    if context is None:
        text, longest = len(beginning) + len(tokens), default_context(model)
        context = text if longest is None else min(longest, text)
    if not whole(context) or context < least:
        raise InvalidArgument(f"context={context} must be a whole number, and at least {least}")
    most = context - max(len(beginning), 1)
    stride = max(context // 2, 1) if stride is None else stride
    if not whole(stride) or not 1 <= stride <= most:
        raise InvalidArgument(f"stride={stride} must be a whole number from 1 to {most}, with context={context}")
    if not whole(piece) or piece < 1:
        raise InvalidArgument(f"piece={piece} must be a whole number, and at least 1")
    reach = getattr(model, "reach", None)
    if reach is not None and context - 1 > reach:
        raise InvalidArgument(f"context={context} is beyond what the model reaches; at most {reach + 1} can be scored")
    nats: list[Tensor] = []
    scored = 0 if beginning else 1
    total, windows = len(tokens) - scored, 0
    for start, first, end in _windows(len(tokens), scored, context - len(beginning), stride):
        windows += 1
        row = [*beginning, *tokens[start:end]]
        for part in _window(model, row, len(beginning) + first - start, piece):
            nats.append(part)
            scored += len(part)
            if progress is not None:
                progress(scored - (len(tokens) - total), total)
    skipped = 0 if beginning else len(vocabulary.decode(tokens[:1]))
    return Score(torch.cat(nats), len(data) - skipped, context, stride, windows)


def default_context(model: CausalModel) -> int | None:
    """Tokens of a window of `score` if nothing is said: as many as the model reaches or was trained for. None: the
    whole text, as for a model that is ``endless`` or says neither.
    """
    if getattr(model, "endless", False):
        return None
    return getattr(model, "reach", None) or getattr(model.config, "max_length", None)


def _windows(length: int, first: int, room: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(start, first scored, end) of each window over so many tokens."""
    end = min(room, length)
    yield 0, first, end
    while end < length:
        first, end = end, min(end + stride, length)
        yield max(end - room, 0), first, end


def _window(model: CausalModel, row: list[int], first: int, piece: int) -> Iterator[Tensor]:
    """-log p of the tokens of a row from place ``first`` on, in pieces."""
    at_once = min(piece, max(LOGITS_AT_ONCE // model.config.vocab_size, 1))
    place = first
    for logits in _logits(model, row[:-1], first - 1, piece, at_once):
        targets = torch.tensor(row[place : place + len(logits)], device=logits.device)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        part = torch.nn.functional.cross_entropy(wide, targets, reduction="none").double().cpu()
        if not bool(part.isfinite().all()):
            raise NonFinite("the model's logits are not finite; its parameters or its dtype are at fault")
        yield part
        place += len(logits)


def _at_once(model: CausalModel, row: Tensor, first: int, at_once: int) -> Iterator[Tensor]:
    with torch.inference_mode():
        if not (hasattr(model, "hidden") and hasattr(model, "score")):
            yield from model(row)[0, first:].split(at_once)
            return
        hidden = model.hidden(row)[0, first:]
    for part in hidden.split(at_once):
        with torch.inference_mode():
            yield model.score(part)


def _logits(model: CausalModel, row: list[int], first: int, piece: int, at_once: int) -> Iterator[Tensor]:
    """Logits [t, V] after the tokens of a row from place ``first`` on."""
    reading = Reading(model)
    if len(row) <= piece or getattr(model.config, "refuses_states", None) is not None:
        # At once, so that no layer makes a state, which may take more than the rest where features are many.
        yield from _at_once(model, torch.tensor([row], device=reading.device), first, at_once)
        return
    if first:
        reading.read([row[:first]], piece)
    for logits in reading.logits([row[first:]], at_once):
        yield logits[0]
