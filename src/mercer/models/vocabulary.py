"""What a model's token numbers mean: bytes, or byte-level BPE trained with `tokenizers`.

Both represent every text, and both know how many bytes a token stands for, so that losses can be compared in bits per
byte whatever the vocabulary. Neither has special tokens: the tokens of a text are its bytes, cut in pieces. The
vocabularies of models that others trained are in `mercer.models.tokenizer`.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mercer.errors import InvalidArgument

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from mercer.models.literal import Literal

TOKENIZER_FILE = "tokenizer.json"


class Vocabulary(ABC):
    """A numbering of pieces of bytes: ``decode(encode(data)) == data``."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of tokens."""

    @property
    def dtype(self) -> type[np.unsignedinteger]:
        """The smallest unsigned integer that holds every token."""
        return np.uint8 if self.size <= 2**8 else np.uint16 if self.size <= 2**16 else np.uint32

    @property
    @abstractmethod
    def byte_lengths(self) -> np.ndarray:
        """[size] int64: how many bytes each token stands for."""

    @abstractmethod
    def encode(self, data: bytes) -> np.ndarray:
        """Bytes -> [n] tokens of `dtype`; ``torch.tensor(vocabulary.encode(data))[None]`` is a batch that models take.

        Raises:
            InvalidArgument: the text is not given as bytes.
            UnicodeDecodeError: the data is not UTF-8 and the vocabulary needs text (`BPE`).
        """

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for."""

    @property
    def special(self) -> frozenset[int]:
        """Tokens that stand for no text, such as the beginning of a text or the end of a turn."""
        return frozenset()

    @property
    def ends(self) -> frozenset[int]:
        """Tokens with which a model says that it is done."""
        return frozenset()

    @property
    def beginning(self) -> tuple[int, ...]:
        """Special tokens that a text begins with."""
        return ()

    def prompt(self, data: bytes, *, added: bool = True) -> list[int]:
        """The tokens of a text that a model is to continue: those of `encode`, where names of special tokens written in
        the text become those tokens, within the special tokens that a text of this vocabulary begins and ends with.

        added: False leaves the latter out, for text that has them already, as that of a chat template.

        Raises:
            InvalidArgument: the text is not given as bytes.
        """
        return self.encode(data).tolist()

    def literal(self) -> Literal | None:
        """What reads the texts of a chat as they are spelt; None: no text spells a special token."""
        return None

    @property
    def opening_spaces(self) -> int:
        """How many spaces, at most, are dropped from where a text begins (Llama 2 puts one before every text)."""
        return 0

    def first_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for as the first of a text."""
        return self.token_bytes(token)

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Tokens -> the bytes they stand for."""
        text = TextStream(self)
        return b"".join(text.bytes_of(int(token)) for token in tokens)

    def stream(self, tokens: Iterable[int], *, after: Sequence[int] = ()) -> Iterator[str]:
        """Tokens -> pieces of text as soon as they are whole.

        A character whose bytes are spread over several tokens comes out once, with its last byte; bytes that are not
        UTF-8 come out as U+FFFD. The pieces joined equal ``decode(tokens).decode("utf-8", "replace")``.

        after: tokens that stand before, whose text is not wanted: what is dropped where a text begins then stays.
        """
        text = TextStream(self, after)
        for token in tokens:
            if piece := text.push(int(token)):
                yield piece
        if piece := text.close():
            yield piece

    def save(self, folder: Path) -> None:  # noqa: B027  (a byte vocabulary has nothing to save)
        """Write ``tokenizer.json`` into the folder where the vocabulary has one (`BPE`)."""


class TextStream:
    """The text of tokens that come one at a time, as `Vocabulary.stream` gives it."""

    def __init__(self, vocabulary: Vocabulary, after: Iterable[int] = ()) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._begun, self._drop = False, vocabulary.opening_spaces
        for token in after:
            self.bytes_of(int(token))
            if self._begun and not self._drop:
                break

    def push(self, token: int) -> str:
        """The characters that this token completes."""
        return self._utf8.decode(self.bytes_of(token))

    def close(self) -> str:
        """What is left of a character that was never completed."""
        return self._utf8.decode(b"", final=True)

    def bytes_of(self, token: int) -> bytes:
        """The bytes that the next token adds to the text, which need not be whole characters."""
        if token in self._vocabulary.special:
            return b""
        piece = self._vocabulary.token_bytes(token) if self._begun else self._vocabulary.first_bytes(token)
        self._begun = True
        while self._drop and piece:
            if piece[:1] != b" ":
                self._drop = 0
            else:
                piece, self._drop = piece[1:], self._drop - 1
        return piece


class Bytes(Vocabulary):
    """The 256 byte values. Any file can be read with it, and nothing needs to be saved."""

    size = 256
    byte_lengths = np.ones(256, dtype=np.int64)

    def encode(self, data: bytes) -> np.ndarray:
        return np.frombuffer(as_bytes(data), dtype=np.uint8).copy()  # which torch may write to

    def token_bytes(self, token: int) -> bytes:
        return bytes((token,))


class BPE(Vocabulary):
    """Byte-level byte-pair encoding: the 256 bytes and learned concatenations of them (Sennrich et al. 2016; the
    byte-level form of Radford et al. 2019).

    Args:
        tokenizer: a `tokenizers.Tokenizer` with a byte-level pre-tokenizer and no normalizer.

    Raises:
        InvalidArgument: a token is not made of the byte alphabet, so its bytes are unknown.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        values = {character: value for value, character in byte_characters().items()}
        pieces = [b""] * tokenizer.get_vocab_size()
        for piece, token in tokenizer.get_vocab().items():
            try:
                pieces[token] = bytes(values[character] for character in piece)
            except KeyError:
                raise InvalidArgument(
                    f"token {token} of the tokenizer, {piece!r}, is not made of bytes; "
                    "use a byte-level BPE without special tokens"
                ) from None
        self._pieces = pieces
        self._lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)

    @property
    def size(self) -> int:
        return len(self._pieces)

    @property
    def byte_lengths(self) -> np.ndarray:
        return self._lengths

    def encode(self, data: bytes) -> np.ndarray:
        return np.array(self.tokenizer.encode(as_bytes(data).decode("utf-8")).ids, dtype=self.dtype)

    def token_bytes(self, token: int) -> bytes:
        return self._pieces[token]

    def save(self, folder: Path) -> None:
        (folder / TOKENIZER_FILE).write_text(self.tokenizer.to_str(pretty=True), encoding="utf-8")

    @classmethod
    def train(cls, texts: Iterable[str], size: int) -> BPE:
        """Learn a vocabulary of at most ``size`` tokens (at least 257); small texts may not have that many pairs.

        Pieces follow GPT-2's split of text into words, numbers, punctuation and spaces; a pair seen once is not merged.
        """
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        if size <= 256:
            raise InvalidArgument(
                f"a BPE vocabulary has the 256 bytes and at least one merge: size {size} is too small"
            )
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = list(byte_characters().values())
        trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)


def as_bytes(data: object) -> bytes | bytearray:
    """A text as it has to be given.

    Raises:
        InvalidArgument: it is no bytes.
    """
    if isinstance(data, bytes | bytearray):
        return data
    if isinstance(data, memoryview):
        return bytes(data)
    how = "write text.encode()" if isinstance(data, str) else "the messages of a chat go through its ChatTemplate"
    raise InvalidArgument(f"a text is given to a vocabulary as bytes, not as {type(data).__name__}: {how}")


def load_vocabulary(folder: Path, size: int) -> Vocabulary:
    """The vocabulary of a run or a checkpoint: `BPE` from its ``tokenizer.json``, else the bytes.

    Args:
        folder: where the model is.
        size: the model's vocabulary size, which must agree.

    Raises:
        InvalidArgument: ``tokenizer.json`` is unreadable, of another size, or missing for a model that is not of bytes.
    """
    path = folder / TOKENIZER_FILE
    if not path.exists():
        if size != 256:
            raise InvalidArgument(f"{path} is missing, and a vocabulary of {size} tokens is not the 256 bytes")
        return Bytes()
    from tokenizers import Tokenizer

    try:
        vocabulary = BPE(Tokenizer.from_str(path.read_text(encoding="utf-8")))
    except InvalidArgument:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise InvalidArgument(f"cannot read {path}: {error}") from error
    if vocabulary.size != size:
        raise InvalidArgument(f"{path} has {vocabulary.size} tokens, but the model has {size}")
    return vocabulary


def byte_characters() -> dict[int, str]:
    """The printable character by which byte-level BPE files write each byte: itself where Latin-1 prints it, else the
    next unused one from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [value for value in range(256) if value not in printable]
    return {value: chr(value) for value in printable} | {value: chr(256 + i) for i, value in enumerate(others)}
