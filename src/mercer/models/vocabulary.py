"""What a model's token numbers mean: bytes, or byte-level BPE trained with `tokenizers`.

Both represent every text, and both know how many bytes a token stands for, so that losses can be compared in bits per
byte whatever the vocabulary. Neither has special tokens: the tokens of a text are its bytes, cut in pieces.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mercer.errors import InvalidArgument

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
        """Bytes -> [n] tokens of `dtype`.

        Raises:
            UnicodeDecodeError: the data is not UTF-8 and the vocabulary needs text (`BPE`).
        """

    @abstractmethod
    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for."""

    def decode(self, tokens: Iterable[int]) -> bytes:
        """Tokens -> the bytes they stand for."""
        return b"".join(self.token_bytes(int(token)) for token in tokens)

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """Tokens -> pieces of text as soon as they are whole.

        A character whose bytes are spread over several tokens comes out once, with its last byte; bytes that are not
        UTF-8 come out as U+FFFD. The pieces joined equal ``decode(tokens).decode("utf-8", "replace")``.
        """
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in tokens:
            if piece := decoder.decode(self.token_bytes(int(token))):
                yield piece
        if piece := decoder.decode(b"", final=True):
            yield piece

    def save(self, folder: Path) -> None:  # noqa: B027  (a byte vocabulary has nothing to save)
        """Write ``tokenizer.json`` into the folder where the vocabulary has one (`BPE`)."""


class Bytes(Vocabulary):
    """The 256 byte values. Any file can be read with it, and nothing needs to be saved."""

    size = 256
    byte_lengths = np.ones(256, dtype=np.int64)

    def encode(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, dtype=np.uint8)

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
        values = {character: value for value, character in _byte_characters().items()}
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
        return np.array(self.tokenizer.encode(data.decode("utf-8")).ids, dtype=self.dtype)

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
        alphabet = list(_byte_characters().values())
        trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)


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


def _byte_characters() -> dict[int, str]:
    """The printable character by which byte-level BPE files write each byte: itself where Latin-1 prints it, else the
    next unused one from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [value for value in range(256) if value not in printable]
    return {value: chr(value) for value in printable} | {value: chr(256 + i) for i, value in enumerate(others)}
