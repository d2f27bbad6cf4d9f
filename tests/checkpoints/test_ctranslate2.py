"""Whisper in CTranslate2's format against transformers' own model, whose weights went into it."""

import pytest
import torch
from tests.checkpoints.ctranslate2_files import write_whisper
from tests.checkpoints.measure import BOUND, error
from tests.checkpoints.zoo import DECODERS, SEQ2SEQ, frames, make, tokens

from mercer import checkpoints
from mercer.errors import InvalidArgument, StorageError, Unsupported

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return make(*SEQ2SEQ["whisper"], tmp_path_factory.mktemp("hub"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_file_gives_the_model_that_was_written(theirs, tmp_path, dtype):
    write_whisper(theirs, tmp_path / "model", dtype)
    opened = checkpoints.open_checkpoint(tmp_path / "model")
    assert opened.family == "whisper"
    assert opened.ignored == {"decoder/alignment_layer": -1, "suppress_ids": [1, 2]}
    assert {parameter.dtype for parameter in opened.model.parameters()} == {dtype}
    assert opened.model.config.start_token == 5
    rounded = checkpoints.load(tmp_path / "model", dtype="float32")
    source, ids = frames(), tokens(length=19)

    def answer(model):
        return model(input_features=source, decoder_input_ids=ids).logits

    with torch.no_grad():
        wanted = answer(theirs)
        assert error(rounded(source, ids), wanted) < (BOUND if dtype == torch.float32 else 0.05)
    if dtype == torch.float32:
        checkpoints.save(rounded, tmp_path / "hub", extra={"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2})
        with torch.no_grad():
            assert error(answer(type(theirs).from_pretrained(tmp_path / "hub")), wanted) < BOUND


def test_attention_is_swapped(theirs, tmp_path):
    write_whisper(theirs, tmp_path / "model")
    plain = checkpoints.load(tmp_path / "model")
    source, ids = frames(), tokens(length=7)
    swapped = checkpoints.load(tmp_path / "model", attention="elu-sum")
    assert torch.equal(swapped(source, ids), plain.with_attention("elu-sum")(source, ids))


def test_a_list_of_lines_names_the_tokens_too(theirs, tmp_path):
    write_whisper(theirs, tmp_path / "model")
    (tmp_path / "model" / "vocabulary.json").unlink()
    lines = [f"t{i}" for i in range(95)]
    (tmp_path / "model" / "vocabulary.txt").write_text("\n".join(["<|startoftranscript|>", *lines, ""]))
    assert checkpoints.load(tmp_path / "model").config.start_token == 0
    (tmp_path / "model" / "vocabulary.txt").write_text("\n".join(lines))
    with pytest.raises(InvalidArgument, match=r"vocabulary.txt must hold 96 tokens"):
        checkpoints.load(tmp_path / "model")
    (tmp_path / "model" / "vocabulary.txt").unlink()
    with pytest.raises(StorageError, match=r"neither vocabulary\.json nor"):
        checkpoints.load(tmp_path / "model")


_BIAS = "decoder/layer_0/attention/linear_1/bias"
_WEIGHT = "encoder/layer_1/ffn/linear_0/weight"


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({"version": 7}, InvalidArgument, "is of version 7 of the format; read is 6"),
        (
            {"kind": "TransformerSpec"},
            Unsupported,
            "is a TransformerSpec of revision 3; of CTranslate2",
        ),
        ({"revision": 2}, Unsupported, "is a WhisperSpec of revision 2"),
        ({"aliases": {"decoder/projection/weight": "x"}}, InvalidArgument, "says that decoder/projection/weight is x"),
        ({"aliases": {_BIAS: "decoder/embeddings/weight"}}, InvalidArgument, f"two tensors of the name {_BIAS}"),
        ({"changes": {_BIAS: torch.ones(64)}}, InvalidArgument, "the keys of an attention have biases"),
        ({"changes": {_BIAS: None}}, InvalidArgument, f"lacks {_BIAS}"),
        ({"changes": {_WEIGHT: torch.ones(64, 31)}}, InvalidArgument, r"linear_0/weight has shape \[64, 31\]"),
        (
            {"changes": {_WEIGHT: torch.ones(64, 32).to(torch.int8)}},
            Unsupported,
            f"quantised weights, {_WEIGHT} of int8",
        ),
        ({"changes": {"decoder/more": torch.ones(3)}}, InvalidArgument, "has the unknown decoder/more"),
        ({"changes": {"decoder/twist": torch.tensor(1.0)}}, InvalidArgument, "not known, decoder/twist = 1.0"),
        ({"changes": {"decoder/alibi": torch.tensor(1.0)}}, Unsupported, "decoder/alibi is 1.0, and only 0 can"),
        ({"changes": {"decoder/activation": torch.tensor(0)[None][0].int()}}, Unsupported, "decoder/activation is 0"),
        ({"changes": {"decoder/num_heads": None}}, InvalidArgument, "lacks decoder/num_heads"),
        ({"changes": {"encoder/conv1/weight": torch.ones(3)}}, InvalidArgument, "lacks encoder/conv1/weight of 3"),
    ],
)
def test_what_does_not_fit(theirs, tmp_path, options, kind, sentence):
    write_whisper(theirs, tmp_path / "model", **options)
    with pytest.raises(kind, match=sentence):
        checkpoints.load(tmp_path / "model")


def test_scores_that_are_another_matrix(theirs, tmp_path):
    other = {"decoder/projection/weight": torch.ones(96, 32)}
    write_whisper(theirs, tmp_path / "model", changes=other, aliases={})
    with pytest.raises(InvalidArgument, match="projection/weight differs from decoder/embeddings/weight"):
        checkpoints.load(tmp_path / "model")


def test_damaged_files(theirs, tmp_path):
    write_whisper(theirs, tmp_path / "model")
    path = tmp_path / "model" / "model.bin"
    data = path.read_bytes()
    for cut in (23, 27, 60, 1000, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(StorageError, match=r"model.bin: the file is cut off"):
            checkpoints.load(tmp_path / "model")
    path.write_bytes(data + b"\0\0")
    with pytest.raises(InvalidArgument, match="goes on after its end, by 2 bytes"):
        checkpoints.load(tmp_path / "model")
    at = data.index(b"decoder/activation\0") + len(b"decoder/activation\0")
    for place, value, sentence in (
        (at, 9, "decoder/activation has 9 dimensions"),
        (at + 1, 6, "decoder/activation is of the unknown type 6"),
        (at + 2, 5, r"decoder/activation has 5 bytes, and \[\] of int8 are 1"),
    ):
        path.write_bytes(data[:place] + bytes([value]) + data[place + 1 :])
        with pytest.raises(InvalidArgument, match=sentence):
            checkpoints.load(tmp_path / "model")
    path.write_bytes(data[: at - 1] + b"n" + data[at:])
    with pytest.raises(StorageError, match="a name in it does not end where it should"):
        checkpoints.load(tmp_path / "model")


def test_another_model_bin_is_no_concern(tmp_path):
    make(*DECODERS["gpt2"], tmp_path)
    (tmp_path / "model.bin").write_bytes(b"PK\x03\x04 of another program")
    assert checkpoints.open_checkpoint(tmp_path).family == "gpt2"
