import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mercer.errors import InvalidArgument, StorageError
from mercer.models import io
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM

CONFIG = ModelConfig(
    vocab_size=20, dim=16, layers=2, heads=2, attention=["exp-l2", "softmax"], gain="channel", tie_embeddings=False
)


def rewrite(folder, change):
    """Save the tensors again after a change, without the configuration that came with them."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path):
    io.save_model(DecoderLM(CONFIG), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", ["rotary", "learned", "alibi"])
def test_a_model_comes_back_as_it_was(tmp_path, dtype, position):
    model = DecoderLM(CONFIG.model_copy(update={"position": position})).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    io.save_model(model, tmp_path)
    again = io.load_model(tmp_path)
    tokens = torch.randint(0, 20, (2, 5))
    assert again.config == model.config
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert {p.dtype for p in again.parameters()} == {dtype}
    assert all(p.requires_grad for p in again.parameters())
    assert torch.equal(again(tokens), model(tokens))


def test_structures_come_back(tmp_path):
    config = ModelConfig(vocab_size=20, dim=16, layers=2, heads=2, structure=["window(3) | global", "strided(2)"])
    model = DecoderLM(config)
    io.save_model(model, tmp_path)
    again, tokens = io.load_model(tmp_path), torch.randint(0, 20, (2, 11))
    assert again.config.structures == ("window(3) | global", "strided(2)")
    assert torch.equal(again(tokens), model(tokens))
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"structure": "causal"}))
    with pytest.raises(InvalidArgument, match="not the configuration that"):
        io.load_model(tmp_path)


def test_saving_again_replaces_the_model_and_leaves_other_files(folder):
    (folder / "notes.txt").write_text("mine")
    smaller = ModelConfig(vocab_size=9, dim=16, layers=1, heads=2)
    io.save_model(DecoderLM(smaller), folder)
    assert io.load_model(folder).config == smaller
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", "notes.txt"]


def test_a_tied_matrix_is_stored_once_and_stays_tied(tmp_path):
    model = DecoderLM(ModelConfig(vocab_size=20, dim=16, layers=1, heads=2))
    io.save_model(model, tmp_path)
    assert sum(t.numel() for t in load_file(tmp_path / "model.safetensors").values()) == model.parameter_count
    again = io.load_model(tmp_path)
    assert again.head_weight is again.embedding.weight


def test_a_failed_write_leaves_the_old_model(folder, monkeypatch):
    before = (folder / "model.safetensors").read_bytes()

    def full_disk(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(io, "save_file", full_disk)
    with pytest.raises(StorageError, match="the disk is full"):
        io.save_model(DecoderLM(CONFIG), folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    io.load_model(folder)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop("norm.weight"), "lacks norm.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "has the unknown extra"),
        (lambda t: t.update({"norm.weight": torch.zeros(17)}), r"norm.weight has shape \[17\] .* asks for \[16\]"),
    ],
)
def test_tensors_must_be_exactly_those_of_the_model(folder, change, sentence):
    rewrite(folder, change)
    with pytest.raises(InvalidArgument, match=sentence):
        io.load_model(folder)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"wings": 2}, "'wings' is unknown"),
        ({"layers": 3}, "is not the configuration"),
        ({"attention": "softmax"}, "L2, RMS or layernorm"),
        ({"rope_base": 500.0}, "is not the configuration"),  # no shape would have told
    ],
)
def test_the_configuration_must_be_the_one_of_the_weights(folder, change, sentence):
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(InvalidArgument, match=sentence):
        io.load_model(folder)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("config.json", b"{", "not valid JSON"),
        ("config.json", None, "config.json: no such file"),
        ("model.safetensors", None, "model.safetensors: no such file"),
        ("model.safetensors", b"\x10\x00\x00\x00\x00\x00\x00\x00{}", "cannot read"),
    ],
)
def test_missing_and_damaged_files_are_named(folder, name, content, sentence):
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(StorageError, match=sentence):
        io.load_model(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(InvalidArgument, match="JSON object"):
        io.load_model(folder)
