"""Tokens and bytes, both ways."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mercer.errors import InvalidArgument
from mercer.models.vocabulary import BPE, Bytes, load_vocabulary

TEXT = ["the cat sat on the mat, the dog on the log\n" * 5, "café naïve 日本語 日本 \U0001f600\n" * 4]


@pytest.fixture(scope="module")
def bpe() -> BPE:
    return BPE.train(TEXT, 280)


@given(st.binary(max_size=40))
def test_bytes_round_trip_anything(data):
    tokens = Bytes().encode(data)
    assert tokens.dtype == np.uint8
    assert Bytes().decode(tokens) == data


@settings(deadline=None)
@given(st.text(max_size=40))
def test_bpe_round_trips_text_it_never_saw_and_counts_its_bytes(bpe, text):
    data = text.encode("utf-8")
    tokens = bpe.encode(data)
    assert bpe.decode(tokens) == data
    assert bpe.byte_lengths[tokens].sum() == len(data)


def test_bpe_learns_pairs_and_reaches_its_size(bpe):
    assert bpe.size == 280
    assert bpe.dtype is np.uint16
    data = TEXT[0].encode()
    assert len(bpe.encode(data)) < len(data) / 2
    assert "the" in {bpe.token_bytes(i).decode("latin-1").strip() for i in range(bpe.size)}


def test_bpe_is_the_same_every_time(bpe):
    assert BPE.train(TEXT, 280).tokenizer.to_str() == bpe.tokenizer.to_str()


def test_bpe_needs_text_and_a_size(bpe):
    with pytest.raises(UnicodeDecodeError):
        bpe.encode(b"\xff\xfe")
    with pytest.raises(InvalidArgument, match="size 256 is too small"):
        BPE.train(TEXT, 256)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_streaming_never_breaks_a_character(cut):
    data = "aé日\U0001f600z".encode()
    pieces = list(Bytes().stream(data))
    assert pieces == ["a", "é", "日", "\U0001f600", "z"]
    assert "".join(Bytes().stream(data[:-cut])) == data[:-cut].decode("utf-8", "replace")


@given(st.binary(max_size=30))
def test_streaming_equals_decoding_at_once(data):
    assert "".join(Bytes().stream(data)) == data.decode("utf-8", "replace")


def test_save_and_load(bpe, tmp_path):
    bpe.save(tmp_path)
    loaded = load_vocabulary(tmp_path, 280)
    assert isinstance(loaded, BPE)
    data = "the café 日本".encode()
    assert loaded.encode(data).tolist() == bpe.encode(data).tolist()
    with pytest.raises(InvalidArgument, match=r"has 280 tokens, but the model has 512"):
        load_vocabulary(tmp_path, 512)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidArgument, match=r"cannot read .*tokenizer.json"):
        load_vocabulary(tmp_path, 280)


def test_no_tokenizer_means_bytes_only_where_the_size_says_so(tmp_path):
    assert isinstance(load_vocabulary(tmp_path, 256), Bytes)
    with pytest.raises(InvalidArgument, match=r"tokenizer.json is missing, and a vocabulary of 512"):
        load_vocabulary(tmp_path, 512)


def test_a_tokenizer_with_special_tokens_is_refused(bpe):
    from tokenizers import Tokenizer

    other = Tokenizer.from_str(bpe.tokenizer.to_str())
    other.add_special_tokens(["<| end |>"])
    with pytest.raises(InvalidArgument, match=r"token 280 of the tokenizer, '<\| end \|>'"):
        BPE(other)
