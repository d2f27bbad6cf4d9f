"""A run that is killed, at any moment, continues to the same curve to the last digit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.training.tiny import RECIPE, without_time, write_text

from mercer.training import checkpoint
from mercer.training.metrics import METRICS_FILE, read_metrics

ROOT = Path(__file__).parents[2]


def start(run: Path, text: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.training.worker", str(run), str(text), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, text) -> Path:
    run = tmp_path_factory.mktemp("whole")
    assert finish(start(run, text)) == (0, "")
    return run


def assert_equal_runs(run: Path, other: Path) -> None:
    events, others = without_time(read_metrics(run)), without_time(read_metrics(other))
    assert len(others) == 4 + 9  # evaluations at 0, 20, 40, 60 and a line every 7 steps and at the end
    assert events == others
    last, other_last = checkpoint.find(run), checkpoint.find(other)
    assert last.name == other_last.name == f"step-{RECIPE.steps:08d}"
    for name in ("model.safetensors", "optimizer.safetensors"):
        tensors, other_tensors = load_file(last / name), load_file(other_last / name)
        assert tensors.keys() == other_tensors.keys()
        assert all(tensors[key].equal(other_tensors[key]) for key in tensors)


@pytest.mark.slow
def test_killed_again_and_again_it_ends_at_the_same_digits(tmp_path, text, uninterrupted):
    # In turn: before the first checkpoint, in the second one, in a metrics line, after a rename, while old ones are
    # deleted, between checkpoints.
    for moment in ("step:5", "file:3", "line:20", "rename:1", "prune:1", "step:58"):
        code, errors = finish(start(tmp_path, text, moment))
        assert (code, errors) == (-signal.SIGKILL, ""), moment
    assert finish(start(tmp_path, text)) == (0, "")
    assert_equal_runs(tmp_path, uninterrupted)
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.slow
def test_killed_from_outside(tmp_path, text, uninterrupted):
    process = start(tmp_path, text, "slow:0")
    metrics = tmp_path / METRICS_FILE
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") > 4) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    assert finish(process)[0] == -signal.SIGKILL
    assert 4 < len(read_metrics(tmp_path)) < 13
    assert finish(start(tmp_path, text)) == (0, "")
    assert_equal_runs(tmp_path, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, text, uninterrupted, number):
    process = start(tmp_path, text, "slow:0")
    metrics = tmp_path / METRICS_FILE
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") > 4) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    code, errors = finish(process)
    step = checkpoint.step_of(checkpoint.find(tmp_path))
    assert code == 1
    assert errors.startswith(
        f"Interrupted: stopped by {number.name} after step {step} of 60, which is saved; run the same"
    )
    assert finish(start(tmp_path, text)) == (0, "")
    assert_equal_runs(tmp_path, uninterrupted)


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_stays(tmp_path, text, uninterrupted):
    assert finish(start(tmp_path, text, "step:30"))[0] == -signal.SIGKILL
    before = {p.name: p.read_bytes() for p in checkpoint.find(tmp_path).iterdir()}
    code, errors = finish(start(tmp_path, text, "", "10000"))  # smaller than model.safetensors, larger than the rest
    assert code == 1
    folder = tmp_path / "checkpoints" / "step-00000039"
    assert errors.strip() == (
        f"StorageError: cannot write {folder}: the file would exceed the size limit of this process or file system; "
        "the checkpoint of step 26 is intact"
    )
    last = checkpoint.find(tmp_path)
    assert last.name == "step-00000026"
    assert {p.name: p.read_bytes() for p in last.iterdir()} == before
    assert finish(start(tmp_path, text)) == (0, "")
    assert_equal_runs(tmp_path, uninterrupted)
