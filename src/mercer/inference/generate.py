"""Text from a model, one token at a time, through the states that its layers leave behind."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from mercer.errors import InvalidArgument, NonFinite
from mercer.inference.reading import PIECE, CausalModel, Reading, rows_of, whole
from mercer.inference.sampler import Sampling
from mercer.inference.stops import Stops

if TYPE_CHECKING:
    from mercer.models.vocabulary import Vocabulary

Finish = Literal["end", "stop", "length"]


@dataclass(frozen=True)
class Piece:
    """A token, and the text that is certain since it.

    Attributes:
        row: which prompt it continues.
        token: its number.
        text: whole characters that are in the text whatever follows: a character of several tokens comes with its last,
            and what may begin a stop string when it has turned out not to.
        logprob: log of the probability that the model gave it, before penalty, temperature and cuts; None if not asked
            for, and for the first token of a prompt.
        top: the likeliest tokens at its place with their logprobs, the likeliest first; as many as asked for.
        finish: None while the row goes on; "end" if this token ends texts, "stop" if a stop string is complete,
            "length" if it is the last that was asked for.
        prompt: whether it is a token of the prompt.
    """

    row: int
    token: int
    text: str = ""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish: Finish | None = None
    prompt: bool = False


@dataclass
class Completion:
    """What was written after one prompt. ``text`` is what ``pieces`` (without those of the prompt) say, joined."""

    pieces: list[Piece] = field(default_factory=list)

    @property
    def written(self) -> list[Piece]:
        return [piece for piece in self.pieces if not piece.prompt]

    @property
    def tokens(self) -> list[int]:
        return [piece.token for piece in self.written]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.written)

    @property
    def finish(self) -> Finish | None:
        """Why it ended; None if no token was asked for."""
        return self.pieces[-1].finish if self.pieces else None


def generate(
    model: CausalModel,
    prompt: Sequence[int] | Tensor,
    max_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    prefill: int = PIECE,
    ends: Collection[int] = (),
) -> Iterator[int]:
    """Continue a prompt, yielding each token as soon as it is chosen.

    The prompt is read in pieces and every later step reads one token, so that memory beyond the model is the states':
    constant for feature states, a row a token for key/value caches.

    Args:
        model: its forward takes and returns states.
        prompt: [n] tokens, at least one.
        max_tokens: how many to yield, at most; 0 yields none.
        sampling: default `Sampling()`, the model's own distribution.
        seed: of the draws: the same seed, prompt and model give the same tokens.
        prefill: tokens of the prompt read at once.
        ends: tokens after which nothing comes; they are yielded.

    Raises:
        InvalidArgument: the prompt is empty or has tokens outside the vocabulary, a count is out of range, or the
            model's positions do not reach that far.
        Unsupported: a layer's structure depends on the length of the text, so that no state can continue it.
        NonFinite: the model's logits are not finite.
    """
    pieces = stream(model, [prompt], max_tokens, sampling=sampling, seed=seed, prefill=prefill, ends=ends)
    return (piece.token for piece in pieces)


def complete(
    model: CausalModel, prompts: Sequence[Sequence[int] | Tensor], max_tokens: int, **options: object
) -> list[Completion]:
    """All that `stream` yields, by prompt; the options are its."""
    completions = [Completion() for _ in prompts]
    for piece in stream(model, prompts, max_tokens, **options):  # pyright: ignore[reportArgumentType]
        completions[piece.row].pieces.append(piece)
    return completions


def stream(
    model: CausalModel,
    prompts: Sequence[Sequence[int] | Tensor],
    max_tokens: int,
    *,
    sampling: Sampling | None = None,
    seed: int | Sequence[int] = 0,
    vocabulary: Vocabulary | None = None,
    ends: Collection[int] | None = None,
    stop: Sequence[str] = (),
    logprobs: int | None = None,
    echo: bool = False,
    prefill: int = PIECE,
    reading: Reading | None = None,
) -> Iterator[Piece]:
    """Continue prompts of any lengths side by side, yielding each token as soon as it is chosen.

    A row is continued as it would be alone, up to rounding: padding changes nothing, each row has draws of its own, and
    a row that has ended is no longer computed.

    Args:
        model: see `CausalModel`.
        prompts: tokens, at least one in each.
        max_tokens: how many to write after each prompt, at most.
        sampling: default `Sampling()`, the model's own distribution.
        seed: of each row's draws; of one number s, row i gets s + i.
        vocabulary: gives the pieces their text.
        ends: tokens after which a row ends; they have no text. None takes the vocabulary's, and without one there are
            none.
        stop: texts at which a row ends; what stands before one comes out, it and what follows it does not.
        logprobs: how many of the likeliest tokens to tell beside the logprob of the one that was chosen; None: neither.
        echo: yield the tokens of the prompts first, row by row, with their logprobs if asked for.
        prefill: tokens of the prompts read at once.
        reading: what was read before, of as many rows as prompts, which go on from there; it is advanced while it has
            all its rows.

    Raises:
        InvalidArgument: a prompt is empty or has tokens outside the vocabulary, a value is out of range, stop strings
            are given without a vocabulary, or the model's positions do not reach that far. At once, not when the first
            piece is asked for.
        Unsupported: a layer's structure depends on the length of the text, so that no state can continue it.
        NonFinite: the model's logits are not finite.
    """
    rows = rows_of(prompts)
    if not whole(max_tokens) or not whole(prefill) or max_tokens < 0 or prefill < 1:
        raise InvalidArgument(
            f"max_tokens={max_tokens!r} and prefill={prefill!r}: whole numbers of at least 0 and 1 are needed"
        )
    if logprobs is not None and not (whole(logprobs) and 0 <= logprobs <= model.config.vocab_size):
        raise InvalidArgument(
            f"logprobs={logprobs!r}: from 0 to the vocabulary's {model.config.vocab_size} can be told"
        )
    Stops(stop)  # says what is wrong with them
    if stop and vocabulary is None:
        raise InvalidArgument("stop strings need the vocabulary, which gives tokens their text")
    seeds = list(seed) if isinstance(seed, Sequence) else [seed + i if whole(seed) else seed for i in range(len(rows))]
    if wrong := [one for one in seeds if not whole(one) or not -(2**63) <= one < 2**64]:
        raise InvalidArgument(f"seed is {wrong[0]!r}; it is a whole number of 64 bits")
    reading = reading or Reading(model, len(rows))
    if len(seeds) != len(rows) or len(reading.tokens) != len(rows):
        raise InvalidArgument(f"{len(seeds)} seeds and {len(reading.tokens)} rows read for {len(rows)} prompts")
    reading.check(rows, max_tokens)
    ends = frozenset((vocabulary.ends if vocabulary else ()) if ends is None else ends)
    wanted = _Wanted(sampling or Sampling(), vocabulary, tuple(stop), ends, logprobs)
    writers = [_Writer(i, wanted, model, reading.tokens[i], row, seeds[i]) for i, row in enumerate(rows)]
    return _continue(reading, rows, writers, max_tokens, echo, prefill)


@dataclass(frozen=True)
class _Wanted:
    """What is the same for all rows."""

    sampling: Sampling
    vocabulary: Vocabulary | None
    stop: tuple[str, ...]
    ends: frozenset[int]
    logprobs: int | None

    def told(self, logits: Tensor, token: int) -> tuple[float | None, tuple[tuple[int, float], ...]]:
        """The logprob of a token under logits [V], and the likeliest ones."""
        if self.logprobs is None:
            return None, ()
        logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        if not bool(logs.isfinite().all()):
            raise NonFinite("the model's logits are not finite; its parameters or its dtype are at fault")
        values, tokens = logs.topk(self.logprobs)
        return float(logs[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True))


class _Writer:
    """What one row needs besides the batch: its draws, its text, the tokens that it has seen."""

    def __init__(
        self, row: int, wanted: _Wanted, model: CausalModel, before: list[int], prompt: list[int], seed: int
    ) -> None:
        from mercer.models.vocabulary import TextStream

        self.row, self._wanted, self._prompt = row, wanted, prompt
        self._generator = torch.Generator().manual_seed(seed)
        self._stops = Stops(wanted.stop)
        self._text = self._echoed = None
        if wanted.vocabulary is not None:
            self._text = TextStream(wanted.vocabulary, before + prompt)
            self._echoed = TextStream(wanted.vocabulary, before)
        self._seen: Tensor | None = None
        if wanted.sampling.repetition_penalty != 1:
            self._seen = torch.zeros(model.config.vocab_size, dtype=torch.bool)
            self._seen[before + prompt] = True

    def repeat(self, place: int, logits: Tensor | None) -> Piece:
        """The token of the prompt at a place, with what logits [V] before it say of it."""
        token = self._prompt[place]
        logprob, top = (None, ()) if logits is None else self._wanted.told(logits, token)
        text = ""
        if self._echoed is not None:
            text = self._echoed.push(token)
            if place == len(self._prompt) - 1:
                text += self._echoed.close()
        return Piece(self.row, token, text, logprob, top, prompt=True)

    def write(self, logits: Tensor, last: bool) -> Piece:
        """Choose a token by logits [V]; last: no other is wanted after it."""
        with torch.inference_mode():
            token = self._wanted.sampling.choose(logits, self._generator, self._seen)
            logprob, top = self._wanted.told(logits, token)
        if self._seen is not None:
            self._seen[token] = True
        text, finish = "", "length" if last else None
        if token in self._wanted.ends:
            finish = "end"
        elif self._text is not None:
            text = self._text.push(token)
        text, stopped = self._stops.push(text)
        if finish and not stopped and self._text is not None:
            rest, stopped = self._stops.push(self._text.close())
            text += rest if stopped else rest + self._stops.close()
        return Piece(self.row, token, text, logprob, top, "stop" if stopped else finish)


def _continue(
    reading: Reading, rows: list[list[int]], writers: list[_Writer], max_tokens: int, echo: bool, prefill: int
) -> Iterator[Piece]:
    if not max_tokens and not echo:
        return
    if echo:
        logits, told = _echo(reading, rows, writers, prefill)
        yield from told
    else:
        logits = reading.read(rows, prefill)
    for count in range(1, max_tokens + 1):
        pieces = [writer.write(logits[i], count == max_tokens) for i, writer in enumerate(writers)]
        yield from pieces
        going = [i for i, piece in enumerate(pieces) if piece.finish is None]
        if not going:
            return
        if len(going) < len(pieces):
            reading, writers = reading.select(going), [writers[i] for i in going]
        logits = reading.read([[pieces[i].token] for i in going])


def _echo(reading: Reading, rows: list[list[int]], writers: list[_Writer], prefill: int) -> tuple[Tensor, list[Piece]]:
    """Read the prompts; returns the logits [B, V] after them, and their tokens, row by row."""
    told = [[writer.repeat(0, None)] for writer in writers]
    longest, column, logits = max(map(len, rows)), 0, torch.empty(0)
    for logits in reading.logits(rows, prefill):
        for pieces, row, writer, own in zip(told, rows, writers, logits, strict=True):
            first = column - (longest - len(row))  # the place in the row of this piece's first token
            for i in range(max(-first, 0), min(len(own), len(row) - 1 - first)):
                pieces.append(writer.repeat(first + i + 1, own[i]))
        column += logits.shape[1]
    return logits[:, -1], [piece for pieces in told for piece in pieces]
