"""Files of a run that are damaged or gone: what is whole is used, what is not is named."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.training.tiny import RECIPE, Tiny, without_time, write_text

from mercer.errors import InvalidArgument, StorageError
from mercer.training import checkpoint
from mercer.training.data import Corpus
from mercer.training.integrity import seal, verify
from mercer.training.loop import fit
from mercer.training.metrics import METRICS_FILE, read_metrics
from mercer.training.optim import make_optimizer

DESCRIPTION = {"kind": "tiny"}
RECIPE = RECIPE.model_copy(update={"steps": 12, "log_every": 3, "eval_every": 4, "checkpoint_every": 5})
LAST = "checkpoints/step-00000012"  # the one before is of step 10


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus.build([write_text(tmp_path_factory.mktemp("text"))], tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    return fit(Tiny, DESCRIPTION, RECIPE, corpus, tmp_path_factory.mktemp("whole"))


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole.folder, tmp_path / "run")


def flip(path):
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a bit of the weights": (lambda last: flip(last / "model.safetensors"), "model.safetensors has changed"),
    "a bit of the moments": (lambda last: flip(last / "optimizer.safetensors"), "optimizer.safetensors has changed"),
    "a bit of the losses": (lambda last: flip(last / "trainer.json"), "trainer.json has changed"),
    "empty weights": (lambda last: (last / "model.safetensors").write_bytes(b""), "model.safetensors has changed"),
    "no moments": (lambda last: (last / "optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
    "no trainer.json": (lambda last: (last / "trainer.json").unlink(), "trainer.json is missing"),
    "no checksums": (lambda last: (last / "sha256.json").unlink(), "sha256.json is missing"),
    "other checksums": (lambda last: (last / "sha256.json").write_text("{}"), "sha256.json does not list"),
    "torn checksums": (lambda last: (last / "sha256.json").write_bytes(b'{"\xff'), "it is not valid JSON"),
    "an empty folder": (lambda last: [path.unlink() for path in last.iterdir()], "sha256.json is missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_leads_to_the_same_curve(whole, run, corpus, kind):
    damage, sentence = DAMAGE[kind]
    damage(run / LAST)
    told = []
    result = fit(Tiny, DESCRIPTION, RECIPE, corpus, run, lambda progress: told.extend(progress.notes))
    assert len(told) == 1
    assert told[0].startswith("the checkpoint of step 12 is damaged (")
    assert sentence in told[0]
    assert told[0].endswith("and now called step-00000012.damaged: the run continues from step 10")
    assert result.notes == tuple(told)
    assert without_time(result.metrics) == without_time(whole.metrics)
    assert (result.loss, result.held_out_loss) == (whole.loss, whole.held_out_loss)
    for name in ("model", "optimizer"):
        again, first = (load_file(folder / LAST / f"{name}.safetensors") for folder in (run, whole.folder))
        assert all(again[key].equal(first[key]) for key in first)


def test_without_a_whole_checkpoint_one_sentence_says_what_to_do(run, corpus):
    for folder in checkpoint.folders(run):
        flip(folder / "model.safetensors")
    with pytest.raises(
        StorageError, match=r"no checkpoint of .* is whole \(.*step-00000012 is damaged: .*\); put back"
    ):
        fit(Tiny, DESCRIPTION, RECIPE, corpus, run)
    assert len(checkpoint.folders(run)) == 2  # nothing was renamed
    shutil.rmtree(run / "checkpoints")  # as the sentence says
    assert fit(Tiny, DESCRIPTION, RECIPE, corpus, run).steps == 12


def test_a_damaged_older_checkpoint_is_nobodys_best_and_in_nobodys_way(run, corpus):
    (run / "checkpoints" / "step-00000010" / "trainer.json").write_text("{}")
    assert checkpoint.find(run, "best").name == "step-00000012"
    (run / "checkpoints" / "step-00000010" / "trainer.json").write_bytes(b"\xff")
    assert checkpoint.find(run, "best").name == "step-00000012"
    checkpoint._prune(run, 1)
    assert [folder.name for folder in checkpoint.folders(run)] == ["step-00000012"]


def test_other_folders_beside_the_checkpoints_are_left_alone(run, corpus):
    others = ["step-foo", "step-", "step-7", "step-0000000x", "step-000000099", "step-00000099.damaged"]
    for name in others:
        (run / "checkpoints" / name).mkdir()
    assert [checkpoint.step_of(folder) for folder in checkpoint.folders(run)] == [10, 12]
    assert fit(Tiny, DESCRIPTION, RECIPE, corpus, run).notes == ()
    assert all((run / "checkpoints" / name).exists() for name in others)
    (run / "checkpoints" / "step-100000000").mkdir()  # in the order of steps, not of names
    assert [checkpoint.step_of(folder) for folder in checkpoint.folders(run)] == [10, 12, 100_000_000]


@pytest.mark.parametrize("damage", ["missing", "torn", "empty"])
def test_a_lost_run_json_comes_back_from_a_checkpoint_and_still_guards_the_run(run, corpus, damage):
    path = run / "run.json"
    before = json.loads(path.read_text())
    path.unlink() if damage == "missing" else path.write_text('{"model"' if damage == "torn" else "{}")
    other = RECIPE.model_copy(update={"learning_rate": 0.02})
    with pytest.raises(InvalidArgument, match=r"begun with train.learning_rate = 0.01, now it is 0.02"):
        fit(Tiny, DESCRIPTION, other, corpus, run)
    fault = {"missing": "is missing", "torn": "cannot be read", "empty": "is damaged"}[damage]
    notes = fit(Tiny, DESCRIPTION, RECIPE, corpus, run).notes
    assert notes == (f"run.json {fault}; it was written anew from the checkpoint of step 12",)
    assert json.loads(path.read_text()) == before


def test_a_lost_run_json_that_no_checkpoint_can_replace(run, corpus):
    (run / "run.json").unlink()
    for folder in checkpoint.folders(run):
        flip(folder / "model.safetensors")
    with pytest.raises(
        StorageError, match=r"run.json is missing and no whole checkpoint says how .*; put it back, name"
    ):
        fit(Tiny, DESCRIPTION, RECIPE, corpus, run)
    assert fit(Tiny, DESCRIPTION, RECIPE, corpus, run, restart=True).notes == ()


def test_checkpoints_of_another_run_are_refused(run, corpus, tmp_path):
    other = RECIPE.model_copy(update={"learning_rate": 0.02})
    there = fit(Tiny, DESCRIPTION, other, corpus, tmp_path / "other").folder
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(there / "checkpoints", run / "checkpoints")
    with pytest.raises(InvalidArgument, match=r"begun with train.learning_rate = 0.02, now it is 0.01"):
        fit(Tiny, DESCRIPTION, RECIPE, corpus, run)


@pytest.mark.parametrize(
    ("file", "name", "change", "message"),
    [
        (
            "model",
            "gain",
            lambda t: t[:1].clone(),
            r"'gain' is float32 \[1, 16\], but the model's is float32 \[2, 16\]",
        ),
        ("model", "gain", lambda t: t.double(), r"'gain' is float64 \[2, 16\], but the model's is float32 \[2, 16\]"),
        ("optimizer", "first_moment.gain", lambda t: t[:1].clone(), r"'first_moment.gain' is float32 \[1, 16\], but"),
    ],
)
def test_a_tensor_of_another_shape_is_refused_and_nothing_is_changed(run, file, name, change, message):
    path = run / LAST / f"{file}.safetensors"
    tensors = load_file(path)
    save_file(tensors | {name: change(tensors[name])}, path)
    (run / LAST / "sha256.json").unlink()
    seal(run / LAST)
    model = Tiny()
    optimizer, _ = make_optimizer(model, RECIPE, torch.device("cpu"))
    with pytest.raises(InvalidArgument, match=message):
        checkpoint.load(run / LAST, model, optimizer)
    assert all(p.equal(q) for p, q in zip(model.parameters(), Tiny().parameters(), strict=True))
    assert not optimizer.state


def test_a_finished_run_without_its_metrics_still_has_its_result(whole, run, corpus):
    (run / METRICS_FILE).unlink()
    result = fit(Tiny, DESCRIPTION, RECIPE, corpus, run)
    figures = ("steps", "loss", "held_out_loss", "bits_per_byte", "parameters")
    assert [getattr(result, name) for name in figures] == [getattr(whole, name) for name in figures]
    assert result.metrics == []
    (note,) = result.notes
    assert note == (
        "metrics.jsonl lacks 8 of the 8 events up to step 12, the first of them eval at step 0: "
        "the curve has a hole there, which training does not fill"
    )


def test_lost_lines_are_noted_and_lines_after_the_checkpoint_are_not_missed(run, corpus):
    path = run / METRICS_FILE
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:1] + lines[2:]))
    (note,) = fit(Tiny, DESCRIPTION, RECIPE, corpus, run).notes
    assert note.startswith("metrics.jsonl lacks 1 of the 8 events up to step 12, the first of them train at step 3:")
    path.write_text("".join(line for line in lines if json.loads(line)["step"] <= 10))
    shutil.rmtree(run / LAST)
    assert fit(Tiny, DESCRIPTION, RECIPE, corpus, run).notes == ()


@pytest.mark.parametrize(
    "line",
    [
        b"garbage",
        b"\xff\xfe",
        b"",
        b"[1]",
        b'{"event": "train", "loss": 1.0}',
        b'{"event": "train", "step": "1", "loss": 1.0}',
        b'{"event": "train", "step": 1, "loss": NaN}',
        b'{"event": "train", "step": 1, "loss": 1.0, "gradient_norm": Infinity}',
        b'{"event": "eval", "step": 1, "loss": 1.0}',
        b'{"event": "tea", "step": 1, "loss": 1.0}',
    ],
)
def test_a_line_that_is_no_event_is_named_and_can_be_deleted(run, corpus, line):
    path = run / METRICS_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + line + b"\n" + b"".join(lines[2:]))
    message = r"metrics.jsonl: line 2 is damaged; delete that line to go on without it"
    with pytest.raises(StorageError, match=message):
        read_metrics(run)
    with pytest.raises(StorageError, match=message):
        fit(Tiny, DESCRIPTION, RECIPE, corpus, run)
    path.write_bytes(lines[0] + b"".join(lines[2:]))
    assert len(fit(Tiny, DESCRIPTION, RECIPE, corpus, run).metrics) == 7


def test_a_whole_checkpoint_passes(whole):
    for folder in checkpoint.folders(whole.folder):
        verify(folder)
