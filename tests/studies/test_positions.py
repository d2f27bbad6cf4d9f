from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.studies import small

from mercer.errors import Interrupted, InvalidArgument, NonFinite
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.nn.rope_scaling import DynamicNTK
from mercer.studies import positions
from mercer.studies.position_arms import parse_position_arm
from mercer.studies.positions_measure import losses, reading
from mercer.studies.records import PositionsRecord, read_record

NAMES = ("learned", "rotary", "rotary+yarn", "rotary+window", "alibi")
WITH_RESTART = (*NAMES, "learned+restart", "rotary+restart", "alibi+restart")
TRAINED, EVALUATED, BUCKET = 16, 64, 4


@pytest.fixture
def shrunk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name, value in small.POSITIONS.items():
        monkeypatch.setattr(positions, name, value)
    small.make_text(tmp_path / "text")
    return tmp_path


def study(root: Path, **options: Any) -> PositionsRecord:
    options = {"text": [root / "text"], "positions": NAMES, "steps": small.STEPS, "quiet": True} | options
    page = positions.run(options.pop("budget", "standard"), root / options.pop("out", "study"), device="cpu", **options)
    assert page.name == "positions.html"
    assert page.read_text().startswith("<!doctype html>")
    record = read_record(page.with_suffix(".json"))
    assert isinstance(record, PositionsRecord)
    return record


def numbers(record: PositionsRecord) -> list[Any]:
    runs = [run.model_dump(exclude={"seconds", "tokens_per_second"}) for run in record.runs]
    return [runs, [m.model_dump(exclude={"seconds"}) for m in record.measurements], record.summaries, record.findings]


def test_every_scheme_trains_alike_and_every_arm_reads_the_same_windows(shrunk: Path) -> None:
    record = study(shrunk, seeds=2)
    assert record.finished
    assert [arm.name for arm in record.arms] == list(WITH_RESTART)
    assert [(r.seed, r.position) for r in record.runs] == [
        (s, p) for s in (0, 1) for p in ("learned", "rotary", "alibi")
    ]
    for run in record.runs:
        assert run.loss is not None
        assert run.loss < run.heldout_curve[0].loss  # it learned something
        assert run.steps == small.STEPS
    assert {(m.arm, m.seed) for m in record.measurements} == {(a, s) for s in (0, 1) for a in WITH_RESTART}
    for m in record.measurements:
        assert [len(row) for row in m.losses] == [4 if m.arm == "learned" else 16] * small.POSITIONS["BLOCKS"]
    assert (record.trained_length, record.evaluated_length, record.bucket) == (TRAINED, EVALUATED, BUCKET)
    assert {s.arm for s in record.summaries} == set(WITH_RESTART)
    assert all(s.inside.over == "seeds" and s.inside.count == 2 for s in record.summaries)
    assert record.corpus.sha256 == json.loads(next(shrunk.glob("study/text/*/corpus.json")).read_text())["sha256"]
    assert record.findings


def test_a_finished_study_is_read_back_and_not_run_again(shrunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = study(shrunk, seeds=1, positions=["alibi"])
    monkeypatch.setattr(positions, "train", None)
    monkeypatch.setattr(positions, "losses", None)
    again = study(shrunk, seeds=1, positions=["alibi"])
    assert numbers(again) == numbers(first)
    assert again.provenance.started == first.provenance.started


def test_stopped_between_two_ways_to_read_it_goes_on_with_the_next(
    shrunk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, read = positions.losses, []

    def stops(model: Any, rows: Any, arm: Any, **sizes: int) -> Any:
        if arm.name == "rotary+yarn":
            raise KeyboardInterrupt
        read.append(arm.name)
        return real(model, rows, arm, **sizes)

    options: dict[str, Any] = {"seeds": 1, "steps": 4, "positions": ["rotary", "rotary+yarn"]}
    with monkeypatch.context() as patch:
        patch.setattr(positions, "losses", stops)
        with pytest.raises(Interrupted, match="what was finished is kept; run the same command again to continue in"):
            study(shrunk, **options)
        assert read == ["rotary"]
    unfinished = read_record(shrunk / "study" / "positions.json")
    assert isinstance(unfinished, PositionsRecord)
    assert not unfinished.finished
    monkeypatch.setattr(positions, "train", None)
    assert numbers(study(shrunk, **options))[1:] == numbers(unstopped(shrunk, monkeypatch, options))[1:]


def unstopped(root: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> PositionsRecord:
    monkeypatch.undo()
    for name, value in small.POSITIONS.items():
        monkeypatch.setattr(positions, name, value)
    return study(root, out="whole", **options)


@pytest.mark.slow
def test_killed_in_the_middle_it_continues_to_the_same_numbers(shrunk: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, small.__file__, str(shrunk), "positions"]
    for wanted in ("trials/rotary-seed0/checkpoints/*", "trials/*/losses-*.json"):  # within a run, and after one
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 120
        while not list((shrunk / "study").glob(wanted)) and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (shrunk / "study" / "trials" / "alibi-seed1" / "trial.json").exists(), "it was not killed in the middle"
    options: dict[str, Any] = {"positions": small.SCHEMES, "seeds": 2}
    assert numbers(study(shrunk, **options)) == numbers(study(shrunk, out="whole", **options))


def test_a_diverged_run_is_reported_and_the_study_goes_on(shrunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = positions.train

    def fails(model: Any, *rest: Any) -> Any:
        if model.position == "rotary":
            raise NonFinite("step 3: the loss is nan")
        return real(model, *rest)

    monkeypatch.setattr(positions, "train", fails)
    record = study(shrunk, seeds=1, steps=4)
    lost = next(run for run in record.runs if run.position == "rotary")
    assert (lost.status, lost.loss, lost.reason) == ("diverged", None, "step 3: the loss is nan")
    assert {s.arm for s in record.summaries} == {"learned", "alibi", "learned+restart", "alibi+restart"}
    assert any("train at all" in f.question and f.verdict == "refuted" for f in record.findings)
    assert record.finished


def test_a_loss_that_is_not_finite_is_reported_and_the_study_goes_on(
    shrunk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = positions.losses

    def fails(model: Any, rows: Any, arm: Any, **sizes: int) -> Any:
        if arm.name == "alibi":
            model.embedding.weight.fill_(float("inf"))
        return real(model, rows, arm, **sizes)

    monkeypatch.setattr(positions, "losses", torch.no_grad()(fails))
    record = study(shrunk, seeds=1, steps=4, positions=["alibi", "none"])
    assert {s.arm for s in record.summaries} == {"none", "alibi+restart", "none+restart"}
    assert any("With seed 0 it cannot: the held-out loss of alibi is not finite" in f.text for f in record.findings)
    assert record.finished


def test_another_setting_in_the_same_folder_is_refused(shrunk: Path) -> None:
    study(shrunk, seeds=1, steps=2, positions=["alibi"])
    changes = {"steps": 3, "seeds": 2, "positions": ["none"], "learning_rate": 0.01}
    for name, value in changes.items():
        with pytest.raises(InvalidArgument, match=f"begun with {name.replace('_', ' ')}"):
            study(shrunk, **({"seeds": 1, "steps": 2, "positions": ["alibi"]} | {name: value}))


def test_quick_measures_first_and_gives_all_schemes_the_same_steps(
    shrunk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(positions.BUDGETS, "quick", positions.Plan(steps=500, seeds=1, seconds=60.0))
    monkeypatch.setattr(positions._Study, "_seconds_per_step", lambda self, name: {"alibi": 0.75}.get(name, 0.25))
    options: dict[str, Any] = {"budget": "quick", "steps": None, "positions": ["alibi", "none"]}
    record = study(shrunk, **options)
    assert record.calibration == {"alibi": 0.75, "none": 0.25}
    # one second for a step of both; ten evaluations of 6 windows of 16 and the reading of 8 windows, once of 64 tokens
    # and once of 16 x 16, at a third of the cost of 2 trained sequences of 16
    measuring = 10 * 6 / 2 / 3 + 8 * (64 + 16 * 16) / 32 / 3
    assert {run.steps for run in record.runs} == {int(60 - measuring - 0.01)}
    monkeypatch.setattr(positions._Study, "_seconds_per_step", lambda self, name: 1e9)  # would be 20 steps if asked
    assert study(shrunk, **options).training == record.training


def test_the_measurement_of_a_step_is_a_time(shrunk: Path) -> None:
    one = positions._Study("quick", shrunk / "s", [shrunk / "text"], ["alibi"], None, 5, None, "cpu", "", True)
    assert 0 < one._seconds_per_step("alibi") < 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "huge"}, "budget 'huge' is unknown; use quick, standard, full"),
        ({"positions": ["rotori"]}, "positions 'rotori' are unknown; use none"),
        ({"positions": ["alibi+yarn"]}, r"use rotary\+yarn"),
        ({"learning_rate": 0.0}, "learning_rate is 0"),
        ({"seeds": 0}, "seeds is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"text": ["nowhere.txt"]}, "there is no file or folder nowhere.txt"),
        ({"text": ["line.txt"]}, "the held-out text is too short: a window of length=80 needs 81 tokens"),
        ({"device": "abacus"}, "device 'abacus' is not usable here; use"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(
    shrunk: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(shrunk)
    Path("line.txt").write_text(400 * "x")
    given = {"text": [shrunk / "text"], "positions": NAMES, "steps": 2, "quiet": True, "device": "cpu"} | options
    with pytest.raises(InvalidArgument, match=message):
        positions.run(given.pop("budget", "standard"), shrunk / "some" / "study", **given)
    assert not (shrunk / "some").exists()


def model_of(position: str, reading_name: str = "") -> tuple[DecoderLM, Any]:
    """A model with large random weights, so that every context counts, and the arm that reads with it."""
    arm = parse_position_arm(position + reading_name, EVALUATED / TRAINED)
    config = ModelConfig(
        vocab_size=13, dim=16, layers=2, heads=2, position=position, max_length=TRAINED, init_std=0.5, seed=1
    )  # fmt: skip
    return DecoderLM(reading(config, arm, BUCKET)), arm


def rows_of(count: int) -> torch.Tensor:
    return torch.randint(13, (count, TRAINED + EVALUATED + 1), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def one_by_one(model: DecoderLM, row: torch.Tensor, first: int, at: int) -> float:
    """Nats of the token after place ``at`` of a row, given those from ``first`` on."""
    scores = model(row[None, first : at + 1])[0, -1].double().log_softmax(-1)
    return -scores[row[at + 1]].item()


@pytest.mark.parametrize(
    "name", ["none", "sinusoidal", "rotary", "rotary+yarn", "rotary+ntk", "rotary+linear", "alibi", "t5"]
)
def test_a_bucket_is_the_mean_of_what_each_token_loses_given_all_before_it(name: str) -> None:
    model, arm = model_of(name.partition("+")[0], name.removeprefix(name.partition("+")[0]))
    rows = rows_of(3)
    found = losses(model, rows, arm, trained=TRAINED, bucket=BUCKET, blocks=3)
    assert [len(row) for row in found] == [16] * 3
    for window, bucket in ((0, 0), (1, 3), (2, 4), (1, 15)):
        places = range(TRAINED + bucket * BUCKET, TRAINED + (bucket + 1) * BUCKET)
        expected = [one_by_one(model, rows[window], TRAINED, place) for place in places]
        assert found[window][bucket] == pytest.approx(sum(expected) / BUCKET, abs=2e-4)


def test_dynamic_scaling_is_that_of_the_text_so_far() -> None:
    model, arm = model_of("rotary", "+dynamic")
    assert model.config.scaling == DynamicNTK(factor=1.0, trained=TRAINED, per_token=True, every=BUCKET)
    rows = rows_of(2)
    found = losses(model, rows, arm, trained=TRAINED, bucket=BUCKET, blocks=2)
    for bucket in (1, 4, 15):
        end = TRAINED + (bucket + 1) * BUCKET
        expected = [one_by_one(model, rows[1], TRAINED, place) for place in range(end - BUCKET, end)]
        assert found[1][bucket] == pytest.approx(sum(expected) / BUCKET, abs=2e-4)
    plain, plainly = model_of("rotary")
    assert losses(plain, rows, plainly, trained=TRAINED, bucket=BUCKET, blocks=2)[0][:4] == pytest.approx(found[0][:4])


@pytest.mark.parametrize("position", ["learned", "rotary", "none"])
def test_starting_over_sees_one_trained_length_and_no_more(position: str) -> None:
    model, arm = model_of(position, "+restart")
    rows = rows_of(2)
    found = losses(model, rows, arm, trained=TRAINED, bucket=BUCKET, blocks=2)
    for window, bucket in ((0, 0), (1, 3), (0, 15)):
        first = (bucket + 1) * BUCKET
        places = range(TRAINED + bucket * BUCKET, TRAINED + (bucket + 1) * BUCKET)
        expected = [one_by_one(model, rows[window], first, place) for place in places]
        assert places[-1] - first + 1 == TRAINED
        assert found[window][bucket] == pytest.approx(sum(expected) / BUCKET, abs=2e-4)


def test_starting_over_is_reading_on_at_the_end_of_the_trained_length() -> None:
    last = TRAINED // BUCKET - 1
    found = []
    for name in ("", "+restart"):
        model, arm = model_of("rotary", name)
        found.append(losses(model, rows_of(4), arm, trained=TRAINED, bucket=BUCKET, blocks=4))
    plain, restart = found
    assert [row[last] for row in plain] == pytest.approx([row[last] for row in restart], abs=1e-4)
    assert [row[last + 1] for row in plain] != pytest.approx([row[last + 1] for row in restart], abs=1e-2)


def test_a_window_sees_the_trained_length_only() -> None:
    model, arm = model_of("rotary", "+window")
    assert model.config.window == TRAINED
    rows = rows_of(1)
    far = rows.clone()
    far[:, TRAINED : TRAINED + 4] = (far[:, TRAINED : TRAINED + 4] + 1) % 13
    before, after = (losses(model, r, arm, trained=TRAINED, bucket=BUCKET, blocks=1)[0] for r in (rows, far))
    assert before[4] != after[4]
    assert before[9:] == after[9:]  # two layers see 2 x 15 tokens back: from place 4 to 33, and 34 is in bucket 8


def test_a_learned_table_is_read_to_its_end() -> None:
    model, arm = model_of("learned")
    assert arm.bounded
    found = losses(model, rows_of(4), arm, trained=TRAINED, bucket=BUCKET, blocks=2)
    assert [len(row) for row in found] == [4, 4]
    assert model.training
