from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.studies import small

from mercer.errors import Interrupted, InvalidArgument, NonFinite
from mercer.studies import orders
from mercer.studies.arms import parse_arms
from mercer.studies.records import OrdersRecord, read_record
from mercer.studies.report.marks import label


@pytest.fixture
def shrunk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(orders, "MODEL", small.MODEL)
    monkeypatch.setattr(orders, "TRAINING", small.TRAINING)
    small.make_text(tmp_path / "text")
    return tmp_path


def study(root: Path, **options: Any) -> OrdersRecord:
    options = {"text": [root / "text"], "attentions": small.ATTENTIONS, "steps": small.STEPS, "quiet": True} | options
    page = orders.run(options.pop("budget", "standard"), root / options.pop("out", "study"), device="cpu", **options)
    assert page.name == "orders.html"
    assert page.read_text().startswith("<!doctype html>")
    record = read_record(page.with_suffix(".json"))
    assert isinstance(record, OrdersRecord)
    return record


def without_times(record: OrdersRecord) -> list[dict[str, Any]]:
    return [trial.model_dump(exclude={"seconds", "tokens_per_second"}) for trial in record.trials]


def test_every_arm_trains_alike_and_is_summarised(shrunk: Path) -> None:
    record = study(shrunk, seeds=2)
    assert record.finished
    assert [(t.seed, t.arm) for t in record.trials] == [(s, a) for s in (0, 1) for a in small.ATTENTIONS]
    assert {t.steps for t in record.trials} == {small.STEPS}
    for trial in record.trials:
        assert trial.loss is not None
        assert trial.loss < trial.heldout_curve[0].loss  # it learned something
        assert trial.heldout_curve[-1].loss == trial.loss
        assert math.fsum(trial.heldout_blocks) / len(trial.heldout_blocks) == pytest.approx(trial.loss, abs=1e-4)
        assert trial.bits_per_byte == pytest.approx(trial.loss / math.log(2))
    gaps = {s.arm: s.gap for s in record.summaries}
    assert gaps["softmax"] is None
    gap = gaps["exp-l2"]
    assert gap is not None
    losses = {(t.arm, t.seed): t.loss or 0.0 for t in record.trials}
    expected = [losses["exp-l2", s] - losses["softmax", s] for s in (0, 1)]
    assert (gap.mean, gap.count, gap.over) == (pytest.approx(sum(expected) / 2), 2, "seeds")
    assert record.corpus.sha256 == json.loads(next(shrunk.glob("study/text/*/corpus.json")).read_text())["sha256"]
    assert record.findings


def test_without_softmax_the_first_model_is_what_others_are_compared_with(shrunk: Path) -> None:
    names = ["elu-sum,exp-l2", "exp-l2", "elu-sum"]
    record = study(shrunk, seeds=1, attentions=names, layers=2)
    assert record.reference == "elu-sum,exp-l2"
    gaps = {s.arm: s.gap for s in record.summaries}
    assert gaps.pop("elu-sum,exp-l2") is None
    finals = {trial.arm: trial.loss or 0.0 for trial in record.trials}
    for name, gap in gaps.items():
        assert gap is not None
        assert gap.mean == pytest.approx(finals[name] - finals["elu-sum,exp-l2"], abs=1e-4)
    page = (shrunk / "study" / "orders.html").read_text()
    reference = label("elu-sum,exp-l2")
    assert "minus reference" in page
    assert f"Distance to {reference}" in page
    assert f"all are compared with the first, {reference}." in page
    assert page.count(">reference<") == 1
    assert "softmax&#39;s" not in page
    with_softmax = study(shrunk, seeds=1, out="other", attentions=["elu-sum", "softmax"])
    assert with_softmax.reference == "softmax"
    assert "compared with the first" not in (shrunk / "other" / "orders.html").read_text()


def test_one_seed_has_intervals_over_blocks(shrunk: Path) -> None:
    record = study(shrunk, seeds=1)
    assert all(s.loss and s.loss.over == "blocks" and s.loss.count == 6 for s in record.summaries)
    assert any("one seed" in finding.text for finding in record.findings)


def test_a_finished_study_is_read_back_and_not_run_again(shrunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = study(shrunk, seeds=1)
    monkeypatch.setattr(orders, "train", None)
    again = study(shrunk, seeds=1)
    assert again.trials == first.trials
    assert again.provenance.started == first.provenance.started
    assert again.provenance.seconds > first.provenance.seconds


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"attentions": ["softmax", "taylor3-sum"]}, "taylor3-sum' cannot be computed.*or taylor3-signed-sum"),
        ({"attentions": ["exp-l2+gain", "softmax+gain"]}, "a gain is learned after L2, RMS or layernorm only"),
        ({"text": ["nowhere.txt"]}, "there is no file or folder nowhere.txt"),
        ({"text": ["short.txt"]}, "the text is too short to hold out a part of it: short.txt has 3 bytes"),
        ({"text": ["line.txt"]}, "the held-out text is too short: .* 17 tokens and its 1 file has 2;"),
        ({"device": "abacus"}, "device 'abacus' is not usable here; use"),
    ],
)
def test_what_cannot_work_leaves_no_folder(
    shrunk: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(shrunk)
    Path("short.txt").write_text("abc")
    Path("line.txt").write_text(40 * "x")
    options = {"text": [shrunk / "text"], "attentions": small.ATTENTIONS, "steps": 2, "quiet": True, "device": "cpu"}
    with pytest.raises(InvalidArgument, match=message):
        orders.run("standard", shrunk / "some" / "study", **(options | wrong))
    assert not (shrunk / "some").exists()


def test_a_study_that_finished_nothing_can_be_begun_anew(shrunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(orders._Study, "_trial", stop)
        with pytest.raises(Interrupted, match="what was finished is kept; run the same command again to continue in"):
            study(shrunk, seeds=1, steps=3)
    assert json.loads((shrunk / "study" / "begun.json").read_text())["steps"] == 3
    assert {trial.steps for trial in study(shrunk, seeds=1, steps=2).trials} == {2}


def test_another_setting_in_the_same_folder_is_refused(shrunk: Path) -> None:
    study(shrunk, seeds=1, steps=2)
    for change, word in (({"steps": 3}, "steps"), ({"seeds": 2}, "seeds"), ({"attentions": ["softmax"]}, "attentions")):
        with pytest.raises(InvalidArgument, match=f"begun with {word}"):
            study(shrunk, **({"seeds": 1, "steps": 2} | change))
    (shrunk / "text" / "part3.txt").write_text("other words " * 40)
    with pytest.raises(InvalidArgument, match="begun with another text, or the text has changed since"):
        study(shrunk, seeds=1, steps=2)


def test_a_diverged_run_is_reported_and_the_study_goes_on(shrunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = orders.train

    def fails(model: Any, *rest: Any) -> Any:
        if model.attention == "exp-l2":
            raise NonFinite("step 3: the loss is nan")
        return real(model, *rest)

    monkeypatch.setattr(orders, "train", fails)
    record = study(shrunk, seeds=1, steps=4)
    lost = next(t for t in record.trials if t.arm == "exp-l2")
    assert (lost.status, lost.loss, lost.reason) == ("diverged", None, "step 3: the loss is nan")
    assert next(s for s in record.summaries if s.arm == "exp-l2").diverged == 1
    assert any("train at all" in f.question and f.verdict == "refuted" for f in record.findings)
    assert record.finished


def test_quick_measures_first_and_gives_all_arms_the_same_steps(shrunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = orders.Plan(small.ATTENTIONS, steps=500, seeds=1, seconds=60.0)
    monkeypatch.setitem(orders.BUDGETS, "quick", plan)
    monkeypatch.setattr(orders._Study, "_seconds_per_step", lambda self, arm: {"softmax": 0.5}.get(arm.name, 0.25))
    record = study(shrunk, budget="quick", steps=None, attentions=())
    # one second for a step of all three; ten evaluations of 6 windows at a third of the cost of 2 trained sequences
    assert record.calibration == {"softmax": 0.5, "exp-l2": 0.25, "taylor2-l2": 0.25}
    assert {t.steps for t in record.trials} == {49}
    monkeypatch.setattr(orders._Study, "_seconds_per_step", lambda self, arm: 1e9)  # would be 20 steps if asked again
    assert study(shrunk, budget="quick", steps=None, attentions=()).training == record.training


def test_the_measurement_of_a_step_is_a_time(shrunk: Path) -> None:
    one = orders._Study("quick", shrunk / "s", [shrunk / "text"], ["softmax"], None, None, 5, None, "cpu", "", True)
    assert 0 < one._seconds_per_step(one.arms[0]) < 10


@pytest.mark.slow
def test_killed_in_the_middle_it_continues_to_the_same_numbers(shrunk: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, small.__file__, str(shrunk)]
    trials = shrunk / "study" / "trials"
    for wanted in ("trials/*/trial.json", "trials/exp-l2-seed0/checkpoints/*"):  # between runs, and within one
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 120
        while not list((shrunk / "study").glob(wanted)) and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (trials / "taylor2-l2-seed1" / "trial.json").exists(), "it was not killed in the middle"
    killed = study(shrunk, seeds=2)
    whole = study(shrunk, seeds=2, out="whole")
    assert without_times(killed) == without_times(whole)
    assert [s.loss for s in killed.summaries] == [s.loss for s in whole.summaries]


def test_arms_by_name() -> None:
    arms = parse_arms(["exp-sum", "taylor3-l2", "exp-l2+gain", "exp-rms+gain=1", "linear", "softmax", "exp-l2+gain=.5"])
    assert [(a.name, a.family, a.normalizer, a.order, a.gain_init) for a in arms] == [
        ("softmax", "softmax", "sum", None, None),
        ("taylor3-l2", "taylor", "l2", 3, None),
        ("exp-l2+gain", "exp", "l2", None, 0.1),
        ("exp-rms+gain=1", "exp", "rms", None, 1.0),
        ("elu-sum", "linear", "sum", None, None),
        ("exp-l2+gain=.5", "exp", "l2", None, 0.5),
    ]
    assert [a.parity for a in arms[:2]] == [None, "odd"]


def test_another_learning_rate_is_another_study(shrunk: Path) -> None:
    record = study(shrunk, seeds=1, steps=3, attentions=["softmax"], learning_rate=0.02)
    assert record.training["learning_rate"] == 0.02
    with pytest.raises(InvalidArgument, match=r"begun with learning rate 0\.02, now it is 0\.003"):
        study(shrunk, seeds=1, steps=3, attentions=["softmax"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "huge"}, "budget 'huge' is unknown; use quick, standard, full"),
        ({"attentions": ["softplus"]}, "Unknown attention 'softplus'"),
        ({"attentions": ["elu-sum+gain"]}, "a gain is learned after L2, RMS or layernorm only"),
        ({"attentions": ["exp-l2+bias"]}, r"only '\+gain' can follow"),
        ({"attentions": ["exp-l2+gain=-1"]}, r"only '\+gain' can follow"),
        ({"learning_rate": 0.0}, "learning_rate is 0"),
        ({"seeds": 0}, "seeds is 0"),
        ({"steps": 0}, "steps is 0"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(
    shrunk: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        study(shrunk, **options)
    assert not (shrunk / "study").exists()
