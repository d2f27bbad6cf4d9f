"""GGUF files against transformers' own models, whose weights went into them."""

import struct

import numpy as np
import pytest
import torch
from tests.checkpoints.gguf_files import KINDS, rounded, write_llama
from tests.checkpoints.measure import BOUND, error
from tests.checkpoints.zoo import make, tokens

from mercer import checkpoints
from mercer.checkpoints.gguf_file import GGUF
from mercer.errors import InvalidArgument, StorageError, Unsupported

pytestmark = pytest.mark.peers
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.fixture
def theirs(tmp_path):
    return make("LlamaForCausalLM", SHAPE, tmp_path / "hub")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_gives_the_model_that_was_written(theirs, tmp_path, kind):
    rounded(theirs, kind)  # rows of queries are only put in another order by the format, so each rounds alike
    write_llama(theirs, tmp_path / "model.gguf", kind)
    ours = checkpoints.load(tmp_path / "model.gguf")
    stored = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    assert ours.embedding.weight.dtype == stored
    ids = tokens()
    with torch.no_grad():
        assert error(ours.float()(ids), theirs(ids).logits) < BOUND


def test_the_order_of_channels_matters(theirs, tmp_path, monkeypatch):
    write_llama(theirs, tmp_path / "model.gguf")
    monkeypatch.setattr("mercer.checkpoints.mapping.Neighbours.read", lambda self, stored: stored)
    ours, ids = checkpoints.load(tmp_path / "model.gguf"), tokens()
    with torch.no_grad():
        wanted = theirs(ids).logits
        assert error(ours(ids)[:, :1], wanted[:, :1]) < BOUND, "the first position turns nothing"
        assert error(ours(ids), wanted) > 0.01


def test_metadata_of_every_type(tmp_path):
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "file.gguf", "llama")
    wanted = {"flag": True, "whole": 7, "real": 0.5, "text": "höhe", "reals": [0.5, 0.25], "texts": ["a", "b c"]}
    writer.add_bool("flag", True)
    writer.add_uint32("whole", 7)
    writer.add_float32("real", 0.5)
    writer.add_string("text", "höhe")
    writer.add_array("reals", [0.5, 0.25])
    writer.add_array("texts", ["a", "b c"])
    writer.add_int64("low", -3)
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUF(tmp_path / "file.gguf")
    assert wanted.items() <= file.metadata.items()
    assert file.metadata["low"] == -3
    assert file.shape("t") == (2, 3)
    assert file.read("t").tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("more", "kind", "sentence"),
    [
        ({"llama.twist": 3}, InvalidArgument, "keys that are not known, twist = 3"),
        ({"llama.expert_count": 8}, Unsupported, "has experts"),
        ({"llama.rope.scaling.type": "longrope"}, Unsupported, "its rotary rates are a table"),
        ({"llama.attention.value_length": 3}, Unsupported, "values have another number of channels"),
    ],
)
def test_what_cannot_be_computed_is_refused(theirs, tmp_path, more, kind, sentence):
    write_llama(theirs, tmp_path / "model.gguf", more=more)
    with pytest.raises(kind, match=sentence):
        checkpoints.load(tmp_path / "model.gguf")


def test_files_that_are_none(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGML" + bytes(60))
    with pytest.raises(InvalidArgument, match="is no GGUF file"):
        checkpoints.load(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(InvalidArgument, match="is GGUF of version 1"):
        checkpoints.load(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40))
    with pytest.raises(StorageError, match="the file is cut off"):
        checkpoints.load(path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_files_that_are_cut_off(theirs, tmp_path, share):
    path = tmp_path / "model.gguf"
    write_llama(theirs, path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises((StorageError, InvalidArgument), match=r"cut off|no architecture|lacks"):
        checkpoints.load(path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda writer: writer.add_head_count(0), "heads must be 1 or more"),
        (lambda writer: writer.add_head_count(2), "lacks "),
    ],
)
def test_shapes_without_heads_or_rows(tmp_path, change, sentence):
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "file.gguf", "llama")
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_context_length(8)
    writer.add_layer_norm_rms_eps(1e-5)
    change(writer)
    writer.add_tensor("token_embd.weight", np.zeros((), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InvalidArgument, match=sentence):
        checkpoints.load(tmp_path / "file.gguf")
