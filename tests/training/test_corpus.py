"""Finding files, splitting them and the fingerprint."""

import os

import pytest

from mercer.errors import InvalidArgument
from mercer.training.corpus import (
    TextFile,
    find_files,
    fingerprint,
    python_library_files,
    python_library_text,
    search,
    split_files,
)


@pytest.fixture
def tree(tmp_path):
    for name in ("b.txt", "a.py", "sub/c.txt", "sub/deep/d.txt", ".hidden/e.txt", "sub/.f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def names(files):
    return [file.name for file in files]


def test_files_folders_and_globs(tree):
    assert names(find_files([tree])) == ["a.py", "b.txt", "sub/c.txt", "sub/deep/d.txt"]
    assert names(find_files([tree / "b.txt"])) == ["b.txt"]
    assert names(find_files([f"{tree}/**/*.txt"])) == ["b.txt", "sub/c.txt", "sub/deep/d.txt"]
    assert names(find_files([f"{tree}/su?/*.txt"])) == ["sub/c.txt"]


def test_each_file_once_and_hidden_ones_when_named(tree):
    assert names(find_files([tree / "b.txt", tree, f"{tree}/*.txt"])) == [
        "a.py",
        "b.txt",
        "sub/c.txt",
        "sub/deep/d.txt",
    ]
    assert names(find_files([tree / "sub" / ".f.txt"])) == [".f.txt"]


def test_a_relative_glob_and_a_name_with_brackets(tree, monkeypatch):
    monkeypatch.chdir(tree)
    (tree / "[x].txt").write_text("brackets")
    assert names(find_files(["*.txt"])) == ["[x].txt", "b.txt"]
    assert names(find_files(["[x].txt"])) == ["[x].txt"]


@pytest.mark.parametrize("marks", [("run.json", "lock"), ("begun.json",), ("corpus.json", "train.bin")])
def test_what_was_learned_is_not_learned_from(tree, marks):
    for name in (*marks, "deep/more.txt"):
        (tree / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / "out" / name).write_text("x")
    files, skipped = search([tree, f"{tree}/**/*.txt"])
    assert names(files) == ["a.py", "b.txt", "sub/c.txt", "sub/deep/d.txt"]
    assert skipped == [tree / "out"]
    assert names(find_files([tree / "out" / "deep" / "more.txt"])) == ["more.txt"]  # asked for by name
    with pytest.raises(InvalidArgument, match="has no files"):
        find_files([tree / "out"])


def test_a_folder_that_will_be_written_to_is_not_read(tree):
    files, skipped = search([tree], [tree / "sub" / "deep"])
    assert names(files) == ["a.py", "b.txt", "sub/c.txt"]
    assert skipped == [tree / "sub" / "deep"]
    for given in (tree, f"{tree}/*.txt"):
        with pytest.raises(InvalidArgument, match="cannot hold both the text and what is learned from it"):
            search([given], [tree])


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ((), "the corpus is empty"),
        (("none.txt",), "there is no file or folder none.txt"),
        (("*.none",), r"no file matches \*.none"),
        (("empty",), "the folder empty has no files"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, monkeypatch, paths, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgument, match=message):
        find_files(paths)


def many(folder, sizes):
    folder.mkdir(exist_ok=True)
    files = []
    for number, size in enumerate(sizes):
        path = folder / f"{number}.txt"
        path.write_bytes(b"x" * size)
        files.append(TextFile(path.name, path))
    return files


def test_the_split_is_by_file_near_the_share_and_does_not_depend_on_order_or_place(tmp_path):
    files = many(tmp_path / "one", [100] * 200)
    split = split_files(files, 0.1)
    assert split.by == "file"
    assert len(split.held_out) == 20
    assert set(split.train) | set(split.held_out) == set(files)
    moved = many(tmp_path / "two", [100] * 200)
    assert names(split_files(moved[::-1], 0.1).held_out) == names(split.held_out)[::-1]


def test_a_new_file_moves_few_others(tmp_path):
    before = set(names(split_files(many(tmp_path, [100] * 200), 0.1).held_out))
    after = set(names(split_files(many(tmp_path, [100] * 201), 0.1).held_out))
    assert len(before - after) <= 1


def test_two_files_the_smaller_is_held_out_and_one_file_is_cut(tmp_path):
    files = many(tmp_path, [1000, 900])
    split = split_files(files, 0.05)
    assert (names(split.train), names(split.held_out)) == (["0.txt"], ["1.txt"])
    assert split_files(files[:1], 0.05).by == "tail"


def test_files_without_bytes_do_not_count(tmp_path):
    files = many(tmp_path, [0, 500, 0])
    assert split_files(files, 0.05).by == "tail"
    with pytest.raises(InvalidArgument, match=r"the corpus is empty: .*0.txt"):
        split_files([files[0], files[2]], 0.05)


@pytest.mark.parametrize("share", [0, 1, -0.1, float("nan")])
def test_a_share_is_between_0_and_1(tmp_path, share):
    with pytest.raises(InvalidArgument, match="it lies between 0 and 1"):
        split_files(many(tmp_path, [5, 5]), share)


def test_the_fingerprint_sees_names_contents_and_boundaries():
    base = fingerprint([("a", b"x"), ("b", b"yz")])
    assert base == fingerprint(iter([("a", b"x"), ("b", b"yz")]))
    others = ([("a", b"xy"), ("b", b"z")], [("b", b"x"), ("a", b"yz")], [("a", b"x")], [("a", b"x"), ("c", b"yz")])
    assert base not in {fingerprint(other) for other in others}


def test_the_python_library_is_there_without_packages_and_tests():
    files = python_library_text()
    assert files == sorted(files)
    assert 5e6 < sum(file.stat().st_size for file in files) < 2e7
    parts = {part for file in files for part in file.parts}
    assert "asyncio" in parts
    assert not parts & {"site-packages", "__pycache__"}
    named = names(python_library_files())
    assert "asyncio/tasks.py" in named
    assert not any(name.startswith(("test/", "/")) for name in named)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_file_is_named(tmp_path):
    from mercer.training.corpus import read

    path = tmp_path / "secret.txt"
    path.write_text("x")
    path.chmod(0)
    with pytest.raises(InvalidArgument, match=r"cannot read .*secret.txt: permission denied"):
        read(TextFile("secret.txt", path))
