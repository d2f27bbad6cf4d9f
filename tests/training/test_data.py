"""Token files, their cache, and batches."""

import json

import numpy as np
import pytest
import torch
from tests.training.tiny import write_text

from mercer.errors import InvalidArgument
from mercer.training import corpus as corpus_module
from mercer.training import data
from mercer.training.corpus import TextFile
from mercer.training.data import Corpus, batch, windows


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def test_bytes_corpus_has_every_byte_of_each_side(text, tmp_path):
    corpus = Corpus.build([text], tmp_path, held_out=0.34)
    held = corpus.info["split"]["held_out"]
    assert len(held) == 1
    kept = sorted({"a.txt", "b.txt", "c.txt"} - set(held))
    assert bytes(corpus.train) == b"".join((text / name).read_bytes() for name in kept)
    assert bytes(corpus.held_out) == (text / held[0]).read_bytes()
    assert isinstance(corpus.train, np.memmap)
    assert corpus.info["train"] == {"bytes": len(corpus.train), "tokens": len(corpus.train), "files": 2}
    assert not list(tmp_path.rglob("*.partial"))


def test_bpe_corpus_decodes_to_the_same_bytes(text, tmp_path):
    plain = Corpus.build([text], tmp_path)
    corpus = Corpus.build([text], tmp_path, vocabulary="bpe:300")
    assert corpus.vocabulary.size == 300
    assert corpus.info["sha256"] == plain.info["sha256"]
    assert corpus.folder != plain.folder
    assert (corpus.folder / "tokenizer.json").exists()
    for side in ("train", "held_out"):
        assert corpus.vocabulary.decode(getattr(corpus, side)) == bytes(getattr(plain, side))
        assert corpus.info[side]["bytes"] == len(getattr(plain, side))


def test_large_files_are_cut_at_lines_and_lose_nothing(text, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_PIECE", 100)
    corpus = Corpus.build([text / "a.txt"], tmp_path, vocabulary="bpe:300", held_out=0.2)
    whole = corpus.vocabulary.decode(corpus.train) + corpus.vocabulary.decode(corpus.held_out)
    assert whole == (text / "a.txt").read_bytes()


def test_the_cache_is_used_when_the_text_is_the_same_and_not_when_it_changed(tmp_path, monkeypatch):
    text, cache = write_text(tmp_path / "text"), tmp_path / "cache"
    first = Corpus.build([text], cache)
    monkeypatch.setattr(data, "_write", None)  # any attempt to prepare again fails
    again = Corpus.build([text], cache)
    assert again.folder == first.folder
    monkeypatch.undo()
    (text / "a.txt").write_text("other\n" * 100)
    other = Corpus.build([text], cache)
    assert other.info["sha256"] != first.info["sha256"]
    assert other.folder != first.folder


def test_one_file_is_cut_at_a_character(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("日" * 100, encoding="utf-8")
    corpus = Corpus.build([path], tmp_path / "cache", held_out=0.5)
    assert corpus.info["split"]["by"] == "tail"
    assert bytes(corpus.train).decode() + bytes(corpus.held_out).decode() == "日" * 100
    assert len(corpus.held_out) == 150


def test_held_out_text_of_ones_own(text, tmp_path):
    corpus = Corpus.build([text / "a.txt"], tmp_path, held_out_text=[text / "b.txt"])
    assert bytes(corpus.held_out) == (text / "b.txt").read_bytes()
    assert corpus.info["split"] == {"by": "given", "share": None, "held_out": ["b.txt"]}
    with pytest.raises(InvalidArgument, match=r"a.txt is both training and held-out text"):
        Corpus.build([text], tmp_path, held_out_text=[text / "a.txt"])


def test_text_files_with_names_of_ones_own(text, tmp_path):
    named = Corpus.build([TextFile("x", text / "a.txt"), TextFile("y", text / "b.txt")], tmp_path)
    assert named.info["files"] == 2
    assert set(named.info["split"]["held_out"]) <= {"x", "y"}


def test_bytes_take_what_bpe_refuses_by_name(tmp_path):
    path = tmp_path / "raw.bin"
    path.write_bytes(bytes(range(256)) * 4)
    assert len(Corpus.build([path], tmp_path / "cache").train) == 1024 - 51
    with pytest.raises(InvalidArgument, match=r"raw.bin is not UTF-8 \(byte 0x80\), which a BPE vocabulary needs"):
        Corpus.build([path], tmp_path / "cache", vocabulary="bpe:300")
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("vocabulary", ["bpe", "bpe:256", "bpe:x", "words", ""])
def test_unknown_vocabularies(text, tmp_path, vocabulary):
    with pytest.raises(InvalidArgument, match="use 'bytes', or 'bpe:N' with N above 256"):
        Corpus.build([text], tmp_path, vocabulary=vocabulary)


def test_an_unreadable_file_is_one_sentence(text, tmp_path, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(corpus_module.Path, "read_bytes", refuse)
    with pytest.raises(InvalidArgument, match=r"^cannot read .*/[abc].txt: permission denied$"):
        Corpus.build([text], tmp_path)


def test_a_damaged_cache_is_noticed(text, tmp_path):
    corpus = Corpus.build([text], tmp_path)
    info = json.loads((corpus.folder / "corpus.json").read_text())
    info["train"]["tokens"] += 1
    (corpus.folder / "corpus.json").write_text(json.dumps(info))
    with pytest.raises(InvalidArgument, match=r"train.bin has \d+ tokens, not \d+; delete"):
        Corpus.load(corpus.folder)


def test_a_batch_is_a_function_of_seed_and_step():
    tokens = np.arange(1000, dtype=np.uint16)
    rows = batch(tokens, 10, 6, seed=3, step=7)
    assert rows.shape == (6, 11)
    assert rows.dtype == torch.int64
    assert (rows[:, 1:] - rows[:, :-1] == 1).all()
    assert rows.equal(batch(tokens, 10, 6, seed=3, step=7))
    assert not rows.equal(batch(tokens, 10, 6, seed=3, step=8))
    assert not rows.equal(batch(tokens, 10, 6, seed=4, step=7))
    assert rows[:, 0].tolist() == [4, 260, 975, 167, 772, 524]  # for ever: Philox's raw stream does not change


def test_batches_reach_both_ends_and_nothing_beyond():
    tokens = np.arange(13, dtype=np.uint8)
    starts = torch.cat([batch(tokens, 10, 64, seed=0, step=step)[:, 0] for step in range(10)])
    assert set(starts.tolist()) == {0, 1, 2}
    counts = starts.bincount()
    assert counts.min() > 0.8 * len(starts) / 3


def test_windows_are_fixed_apart_and_spread():
    tokens = np.arange(101, dtype=np.uint8)
    assert windows(tokens, 10, 100)[:, 0].tolist() == [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert windows(tokens, 10, 3)[:, 0].tolist() == [0, 30, 60]
    assert windows(tokens, 100, 3).shape == (1, 101)
