"""Names on the hub, from its local cache: no network."""

import shutil

import pytest
import torch

from mercer import checkpoints
from mercer.checkpoints.hub import find_folder
from mercer.errors import InvalidArgument, StorageError
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM

CONFIG = ModelConfig(vocab_size=20, dim=16, layers=1, heads=2, hidden=24, max_length=32)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with one model, owner/tiny, as the hub's client lays it out."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="the extra hub is not installed")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "models--owner--tiny"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0" * 40)
    checkpoints.save(DecoderLM(CONFIG), model / "snapshots" / ("0" * 40), family="llama")
    return tmp_path


def test_a_name_is_looked_up_in_the_cache(cache):
    model = checkpoints.load("owner/tiny")
    assert torch.equal(model.embedding.weight, DecoderLM(CONFIG).embedding.weight)


def test_a_folder_of_that_name_comes_first(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(find_folder("owner/tiny"), tmp_path / "owner" / "tiny")
    assert str(find_folder("owner/tiny")) == "owner/tiny"


def test_the_same_weights_in_other_layouts_are_not_fetched(cache, monkeypatch):
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: asked.update(options) or cache)
    find_folder("mistralai/Some-7B")
    there = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    there += ["chat_template.jinja", "additional_chat_templates/tools.jinja", "1_Pooling/config.json"]
    more = [
        "consolidated.safetensors",
        "consolidated-00001-of-00002.safetensors",
        "consolidated.safetensors.index.json",
    ]
    more += ["original/params.json", "original/consolidated.00.pth", "pytorch_model.bin", "README.md"]
    patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects([*there, *more], **patterns)) == there


def test_the_same_weights_in_other_layouts_are_not_read(cache):
    folder = find_folder("owner/tiny")
    (folder / "consolidated.safetensors").write_bytes(b"not even a safetensors")
    (folder / "consolidated.safetensors.index.json").write_text("{}")
    assert torch.equal(checkpoints.load(folder).embedding.weight, DecoderLM(CONFIG).embedding.weight)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InvalidArgument, match=r"consolidated\.safetensors, whose tensors have the names of Mis"):
        checkpoints.load(folder)


@pytest.mark.parametrize("name", ["owner/none", "owner/tiny@other"])
def test_what_the_hub_does_not_have_is_said(cache, name):
    with pytest.raises(
        StorageError, match=f"there is no folder {name}, and the hub, which may be out of reach, gave no such model"
    ):
        find_folder(name)


@pytest.mark.parametrize("name", ["none", "/none/there", "a/b/c", "../tiny", "owner/"])
def test_what_is_no_name_is_a_path(name):
    with pytest.raises(InvalidArgument, match="there is no folder or file"):
        find_folder(name)
