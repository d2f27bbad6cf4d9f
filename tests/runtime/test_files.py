"""Writes that are whole or absent."""

import errno
import json

import pytest

from mercer.errors import StorageError
from mercer.runtime.files import new_folder, read_json, storage_error, write_file, write_json


def test_a_folder_appears_whole_and_replaces_the_old_one(tmp_path):
    target = tmp_path / "a" / "b"
    for content in ("one", "two"):
        with new_folder(target) as folder:
            (folder / "file").write_text(content)
            assert not target.exists() or (target / "file").read_text() == "one"
        assert (target / "file").read_text() == content
        assert [p.name for p in target.parent.iterdir()] == ["b"]


@pytest.mark.parametrize("cause", [KeyboardInterrupt(), ValueError("mine")])
def test_a_failing_block_leaves_nothing_and_raises_its_own_error(tmp_path, cause):
    def fail(folder):
        (folder / "file").write_text("half")
        raise cause

    with pytest.raises(type(cause)), new_folder(tmp_path / "x") as folder:
        fail(folder)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_names_the_target_and_what_is_intact(tmp_path):
    with (
        pytest.raises(StorageError, match=r"^cannot write .*/x: the disk is full; step 3 is intact$"),
        new_folder(tmp_path / "x", "step 3 is intact"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_the_number_inside_a_safetensors_error_is_understood(tmp_path):
    error = Exception("Error while serializing: I/O error: No space left on device (os error 28)")
    assert str(storage_error(error, tmp_path)) == f"cannot write {tmp_path}: the disk is full"


def test_a_failed_file_write_keeps_the_old_one(tmp_path, monkeypatch):
    target = tmp_path / "f.json"
    write_json(target, {"a": 1})

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match="the disk is full"):
        write_file(target, "new")
    assert json.loads(target.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["f.json"]


def test_json_that_cannot_be_read_is_one_sentence(tmp_path):
    with pytest.raises(StorageError, match="no such file"):
        read_json(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(StorageError, match=r"cannot read .*bad.json: it is not valid JSON"):
        read_json(tmp_path / "bad.json")


def test_json_refuses_values_that_are_not_numbers(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "x.json", {"loss": float("nan")})
