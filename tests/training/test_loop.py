"""The loop: what it computes, what it records, what it refuses."""

import json
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.training.tiny import RECIPE, Tiny, without_time, write_text

from mercer.errors import Interrupted, InvalidArgument, NonFinite, StorageError, Unsupported
from mercer.training import checkpoint
from mercer.training.data import Corpus, batch, windows
from mercer.training.loop import fit
from mercer.training.metrics import METRICS_FILE, read_metrics
from mercer.training.optim import decays, learning_rate

DESCRIPTION = {"kind": "tiny"}
FULL = Path("/dev/full")  # every write fails with "no space left"


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
    folder = tmp_path_factory.mktemp("whole")
    return fit(Tiny, DESCRIPTION, RECIPE, corpus, folder)


def recipe(**changes):
    return RECIPE.model_copy(update=changes)


def test_it_learns_and_the_result_is_what_was_recorded(whole):
    events = read_metrics(whole.folder)
    assert whole.metrics == events
    assert [(e["event"], e["step"]) for e in events[:6]] == [
        ("eval", 0), ("train", 7), ("train", 14), ("eval", 20), ("train", 21), ("train", 28),
    ]  # fmt: skip
    assert events[0]["loss"] > whole.held_out_loss + 1
    assert events[-1]["loss"] == whole.held_out_loss
    assert whole.bits_per_byte == pytest.approx(whole.held_out_loss / 0.6931471805599453)
    assert events[-2]["event"] == "train"
    assert events[-2]["loss"] == whole.loss
    assert events[-2]["tokens"] == 60 * 4 * 24
    assert whole.parameters == 256 * 16 + 32 * 16 + 16 + 2 * 16
    assert all(e["time"]["tokens_per_second"] > 0 for e in events if e["event"] == "train")


def test_it_is_adamw_as_written_by_hand(corpus, tmp_path):
    config = recipe(steps=5, log_every=1, eval_every=5, clip=0.5, accumulate=2)
    result = fit(Tiny, DESCRIPTION, config, corpus, tmp_path)
    model = Tiny().double()
    moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in model.named_parameters()}
    losses, norms = [], []
    for step in range(5):
        rows = batch(corpus.train, config.length, config.batch, config.seed, step)
        model.zero_grad()
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
        factor, rate = min(1.0, 0.5 / norm), learning_rate(step, config)
        with torch.no_grad():
            for name, p in model.named_parameters():
                g, (m, v) = p.grad * factor, moments[name]
                m.mul_(0.9).add_(g, alpha=0.1)
                v.mul_(0.95).add_(g * g, alpha=0.05)
                if decays(name, p):
                    p.mul_(1 - rate * config.weight_decay)
                p -= rate * (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8)
        losses.append(loss.item())
        norms.append(norm)
    lines = [event for event in result.metrics if event["event"] == "train"]
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-5)
    assert [line["gradient_norm"] for line in lines] == pytest.approx(norms, rel=1e-4)
    assert max(norms) > 0.5  # so clipping was at work
    rows = windows(corpus.held_out, config.length, config.eval_windows)
    expected = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).item()
    assert result.held_out_loss == pytest.approx(expected, rel=1e-5)


def test_accumulation_sees_the_same_data(corpus, tmp_path, whole):
    split = fit(Tiny, DESCRIPTION, recipe(accumulate=4), corpus, tmp_path)
    assert split.held_out_loss == pytest.approx(whole.held_out_loss, rel=1e-4)


def test_bfloat16_keeps_float32_parameters_and_nearly_the_same_loss(corpus, tmp_path, whole):
    result = fit(Tiny, DESCRIPTION, recipe(dtype="bfloat16"), corpus, tmp_path)
    assert result.held_out_loss != whole.held_out_loss
    assert result.held_out_loss == pytest.approx(whole.held_out_loss, rel=0.01)
    from safetensors.torch import load_file

    for name in ("model", "optimizer"):
        tensors = load_file(checkpoint.find(tmp_path) / f"{name}.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_another_seed_is_another_curve(corpus, tmp_path, whole):
    assert fit(Tiny, DESCRIPTION, recipe(seed=1), corpus, tmp_path).loss != whole.loss


def test_bits_per_byte_of_bpe_count_bytes(tmp_path, whole):
    text = write_text(tmp_path / "text")
    corpus = Corpus.build([text], tmp_path / "cache", vocabulary="bpe:257")

    class Uniform(Tiny):
        def loss(self, tokens, targets):
            return super().loss(tokens % 256, targets % 256) * 0 + torch.tensor(257.0).log()

    result = fit(Uniform, DESCRIPTION, recipe(steps=1, warmup=0), corpus, tmp_path / "run")
    rows = windows(corpus.held_out, RECIPE.length, RECIPE.eval_windows)
    per_token = len(corpus.vocabulary.decode(rows[:, 1:].flatten().tolist())) / rows[:, 1:].numel()
    assert per_token > 1
    assert result.bits_per_byte == pytest.approx(8.00562454 / per_token)


def test_checkpoints_keep_the_last_ones_and_the_best(whole, corpus, tmp_path):
    assert [p.name for p in checkpoint.folders(whole.folder)] == ["step-00000052", "step-00000060"]
    result = fit(Tiny, DESCRIPTION, recipe(keep=1, checkpoint_every=20), corpus, tmp_path / "falling")
    assert [checkpoint.step_of(p) for p in checkpoint.folders(result.folder)] == [60]
    wild = recipe(keep=1, checkpoint_every=20, warmup=0, floor=1.0, learning_rate=1.0, clip=None)
    result = fit(Tiny, DESCRIPTION, wild, corpus, tmp_path / "wild")
    losses = {event["step"]: event["loss"] for event in result.metrics if event["event"] == "eval" and event["step"]}
    best = min(losses, key=losses.get)
    assert checkpoint.step_of(checkpoint.find(result.folder, "best")) == best
    assert {checkpoint.step_of(p) for p in checkpoint.folders(result.folder)} == {best, 60}
    assert checkpoint.find(result.folder, "60") == checkpoint.find(result.folder)
    with pytest.raises(InvalidArgument, match=r"has no checkpoint '33'; there are last, best, "):
        checkpoint.find(result.folder, "33")


def test_a_finished_run_returns_its_result_at_once(whole, corpus):
    calls = []
    again = fit(Tiny, DESCRIPTION, RECIPE, corpus, whole.folder, calls.append)
    assert [progress.phase for progress in calls] == ["start"]
    assert again.metrics == whole.metrics
    assert again.held_out_loss == whole.held_out_loss


@pytest.mark.parametrize(
    ("description", "changes", "message"),
    [
        (
            {"kind": "other"},
            {},
            "begun with model.kind = 'tiny', now it is 'other'; give the old value",
        ),
        (DESCRIPTION, {"learning_rate": 0.02}, "begun with train.learning_rate = 0.01, now it is 0.02"),
        (DESCRIPTION, {"steps": 61}, "begun with train.steps = 60, now it is 61"),
    ],
)
def test_another_run_in_the_same_folder_is_refused(whole, corpus, description, changes, message):
    before = (whole.folder / METRICS_FILE).read_bytes()
    with pytest.raises(InvalidArgument, match=message):
        fit(Tiny, description, recipe(**changes), corpus, whole.folder)
    assert (whole.folder / METRICS_FILE).read_bytes() == before


def test_another_text_in_the_same_folder_is_refused(whole, tmp_path):
    (tmp_path / "other.txt").write_text("other words\n" * 200)
    other = Corpus.build([tmp_path / "other.txt"], tmp_path / "cache")
    with pytest.raises(
        InvalidArgument, match="begun with another text, or the text has changed since; give the old text"
    ):
        fit(Tiny, DESCRIPTION, RECIPE, other, whole.folder)


def test_restart_begins_anew(corpus, tmp_path):
    fit(Tiny, DESCRIPTION, recipe(steps=8), corpus, tmp_path)
    (tmp_path / "mine.txt").write_text("kept")
    result = fit(Tiny, DESCRIPTION, recipe(steps=9), corpus, tmp_path, restart=True)
    assert result.steps == 9
    assert [checkpoint.step_of(p) for p in checkpoint.folders(tmp_path)] == [9]
    assert (tmp_path / "mine.txt").exists()


def test_what_cannot_move_a_digit_may_change(corpus, tmp_path, whole):
    def stop(progress):
        if progress.phase == "step" and progress.step == 30:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match=r"stopped by SIGINT after step 30 of 60, which is saved"):
        fit(Tiny, DESCRIPTION, RECIPE, corpus, tmp_path, stop)
    assert signal.getsignal(signal.SIGINT) is before
    result = fit(Tiny, DESCRIPTION, recipe(checkpoint_every=None, keep=5), corpus, tmp_path)
    assert without_time(result.metrics) == without_time(whole.metrics)


def test_a_thread_count_that_changed_is_noted(whole, corpus):
    path = whole.folder / "run.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"environment": record["environment"] | {"threads": 999}}))
    notes = []
    fit(Tiny, DESCRIPTION, RECIPE, corpus, whole.folder, lambda progress: notes.extend(progress.notes))
    path.write_text(json.dumps(record))
    assert notes == ["the run was begun with threads 999, now it is 1: the last digits may differ"]


class Failing(Tiny):
    """Its loss becomes NaN at the step with the given number of calls in training."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def loss(self, tokens, targets):
        self.calls += self.training
        loss = super().loss(tokens, targets)
        return loss * float("nan") if self.training and self.calls == self.at else loss


def test_a_loss_that_is_not_finite_names_the_step_and_keeps_the_checkpoint(corpus, tmp_path):
    with pytest.raises(NonFinite, match=r"^step 31: the loss is nan .*; the checkpoint of step 26 is kept; try"):
        fit(lambda: Failing(31), DESCRIPTION, RECIPE, corpus, tmp_path)
    assert checkpoint.find(tmp_path).name == "step-00000026"
    assert max(event["step"] for event in read_metrics(tmp_path)) == 28
    with pytest.raises(NonFinite, match=r"^step 3: .*; no checkpoint was due yet; try"):
        fit(lambda: Failing(3), DESCRIPTION, RECIPE, corpus, tmp_path, restart=True)


def test_a_broken_model_never_becomes_a_checkpoint(corpus, tmp_path):
    config = recipe(log_every=60, eval_every=60)  # nothing looks at the losses before the checkpoint of step 13
    with pytest.raises(NonFinite, match=r"^step 12: "):
        fit(lambda: Failing(12), DESCRIPTION, config, corpus, tmp_path)
    assert checkpoint.folders(tmp_path) == []


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has /dev/full")
def test_a_full_disk_while_logging(corpus, tmp_path, monkeypatch):
    from mercer.training import metrics

    write = metrics.Metrics.write

    def full(self, event):
        if event["step"] < 40:
            return write(self, event)
        self._file.close()
        self._file = FULL.open("w")
        return write(self, event)

    monkeypatch.setattr(metrics.Metrics, "write", full)
    with pytest.raises(StorageError, match=r"metrics.jsonl: the disk is full; the checkpoints are intact"):
        fit(Tiny, DESCRIPTION, RECIPE, corpus, tmp_path)
    assert checkpoint.find(tmp_path).name == "step-00000039"


def test_a_text_shorter_than_a_window(corpus, tmp_path):
    longer = Corpus(**vars(corpus) | {"train": corpus.train.repeat(9)})
    with pytest.raises(InvalidArgument, match=r"held-out text has \d+ tokens, but a window of length=5000 needs 5001"):
        fit(Tiny, DESCRIPTION, recipe(length=5000), longer, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_parameter_without_gradient_is_named(corpus, tmp_path):
    class Spare(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.spare = torch.nn.Parameter(torch.ones(3))

    with pytest.raises(InvalidArgument, match="parameter 'spare' gets no gradient from the loss"):
        fit(Spare, DESCRIPTION, RECIPE, corpus, tmp_path)


def test_frozen_parameters_stay_and_resume(corpus, tmp_path):
    def frozen():
        model = Tiny()
        model.mix.requires_grad_(False)
        return model

    def stop(progress):
        if progress.phase == "step" and progress.step == 8:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted, match="SIGTERM"):
        fit(frozen, DESCRIPTION, RECIPE, corpus, tmp_path, stop)
    fit(frozen, DESCRIPTION, RECIPE, corpus, tmp_path)
    model = Tiny()
    from safetensors.torch import load_file

    weights = load_file(checkpoint.find(tmp_path) / "model.safetensors")
    assert weights["mix.weight"].equal(model.mix.weight)
    assert not weights["embedding.weight"].equal(model.embedding.weight)


def test_two_processes_cannot_share_a_folder(corpus, tmp_path):
    from mercer.training.run import hold

    with hold(tmp_path), pytest.raises(InvalidArgument, match="another process is training in"):
        fit(Tiny, DESCRIPTION, RECIPE, corpus, tmp_path)


def test_an_unknown_device(corpus, tmp_path):
    with pytest.raises(InvalidArgument, match="device 'abacus' is not usable here"):
        fit(Tiny, DESCRIPTION, recipe(device="abacus"), corpus, tmp_path)


def test_progress_tells_rate_and_time_left(corpus, tmp_path):
    seen = []
    fit(Tiny, DESCRIPTION, recipe(steps=20, warmup=2), corpus, tmp_path, seen.append)
    assert [p.phase for p in seen[:3]] == ["start", "eval", "step"]
    assert [p.step for p in seen if p.phase == "step"] == list(range(1, 21))
    assert seen[0].seconds_left is None
    assert all(p.tokens_per_second > 0 and p.seconds_left >= 0 for p in seen if p.step > 1)
    assert seen[-1].phase == "checkpoint"
    assert seen[-1].seconds_left == 0
    assert seen[-1].loss is not None


def test_a_checkpoint_of_another_model_is_refused(whole, tmp_path):
    from mercer.training.optim import make_optimizer

    class Renamed(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.other = self.mix
            del self.mix

    model = Renamed()
    optimizer, _ = make_optimizer(model, RECIPE, torch.device("cpu"))
    with pytest.raises(InvalidArgument, match=r"model.safetensors has an unknown tensor 'mix.bias': it is of another"):
        checkpoint.load(checkpoint.find(whole.folder), model, optimizer)


def test_tensorboard_when_it_is_there(corpus, tmp_path):
    pytest.importorskip("tensorboard")
    fit(Tiny, DESCRIPTION, recipe(steps=14), corpus, tmp_path, tensorboard=True)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    logged = {e.step: e.value for e in events.Scalars("train/loss")}
    expected = {e["step"]: e["loss"] for e in read_metrics(tmp_path) if e["event"] == "train"}
    assert logged == pytest.approx(expected)
    assert "eval/bits_per_byte" in events.Tags()["scalars"]


def test_tensorboard_when_it_is_missing(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(Unsupported, match=r"TensorBoard is not installed; install mercer\[track\]"):
        fit(Tiny, DESCRIPTION, RECIPE, corpus, tmp_path, tensorboard=True)
