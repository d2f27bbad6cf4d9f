from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from mercer.core.kernels import Taylor
from mercer.errors import Interrupted, InvalidArgument, NonFinite
from mercer.memory import capacity
from mercer.studies import recall
from mercer.studies.mqar import Recall
from mercer.studies.recall_memory import half_point, predicted_recall, state_bytes
from mercer.studies.recall_summary import conclude
from mercer.studies.recall_trial import RecallRun
from mercer.studies.records import RecallRecord, read_record
from mercer.studies.records.common import Interval
from mercer.studies.records.recall import RecallSummary, RecallTask

SMALL = recall.Plan(
    ("softmax", "softmax,elu-sum"), (1, 2), 16, 4, (16,), 2, (3e-3, 1e-2), steps=6, seeds=1, batch=4, held_out=70
)


@pytest.fixture
def shrunk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setitem(recall.BUDGETS, "standard", SMALL)
    return tmp_path


def study(root: Path, **options: Any) -> RecallRecord:
    page = recall.run("standard", root / options.pop("out", "study"), device="cpu", quiet=True, **options)
    assert page.read_text().startswith("<!doctype html>")
    record = read_record(page.with_suffix(".json"))
    assert isinstance(record, RecallRecord)
    return record


def test_every_attention_rate_and_number_of_pairs_is_there(shrunk: Path) -> None:
    record = study(shrunk)
    assert record.finished
    assert [(t.attention, t.learning_rate) for t in record.trials] == [
        (a, r) for a in SMALL.attentions for r in SMALL.rates
    ]
    assert all([r.pairs for r in t.results] == [1, 2] and t.steps == 6 for t in record.trials)
    for summary in record.summaries:
        of_rate = {
            t.learning_rate: r.accuracy
            for t in record.trials if t.attention == summary.attention
            for r in t.results if r.pairs == summary.pairs
        }  # fmt: skip
        assert summary.accuracy is not None
        assert summary.accuracy.mean == max(of_rate.values()) == of_rate[summary.learning_rate or 0.0]
    assert [c.feature_dim for c in record.capacities] == [None, 8]
    assert record.findings


def test_stopped_in_the_middle_it_continues_to_the_same_numbers(shrunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = RecallRun.step
    calls = 0

    def step(self: RecallRun, number: int) -> float:
        nonlocal calls
        calls += 1
        if calls == 9:  # in the second run
            os.kill(os.getpid(), 2)
        return real(self, number)

    monkeypatch.setattr(RecallRun, "step", step)
    with pytest.raises(Interrupted, match="stopped by SIGINT after step 3 of 6"):
        study(shrunk)
    calls = 100
    stopped = study(shrunk)
    assert calls == 100 + 4 * 6 - 9
    whole = study(shrunk, out="whole")
    exclude = {"seconds"}
    assert [t.model_dump(exclude=exclude) for t in stopped.trials] == [
        t.model_dump(exclude=exclude) for t in whole.trials
    ]


def test_a_diverged_run_is_reported(shrunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: RecallRun, number: int) -> float:
        raise NonFinite("step 1: the loss is nan")

    monkeypatch.setattr(RecallRun, "step", step)
    record = study(shrunk, attentions=["softmax"])
    assert all(t.status == "diverged" and t.reason == "step 1: the loss is nan" for t in record.trials)
    assert all(s.accuracy is None for s in record.summaries)


def test_the_task_can_be_learned(shrunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pair of eight keys: a model that attends can answer, one that guesses is right once in eight."""
    plan = recall.Plan(("softmax",), (1,), 16, 4, (32,), 4, (1e-2,), steps=150, seeds=1, batch=32, held_out=128)
    monkeypatch.setitem(recall.BUDGETS, "standard", plan)
    (summary,) = study(shrunk).summaries
    assert summary.accuracy is not None
    assert summary.accuracy.mean > 0.9


def test_wrong_options_are_refused(shrunk: Path) -> None:
    for options, message in (
        ({"attentions": ["softplus"]}, "Unknown attention"),
        ({"attentions": ["softmax,elu-sum,softmax"]}, "names 3 layers; the models of this study have 2"),
        ({"seeds": 0}, "seeds is 0"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            study(shrunk, **options)
    study(shrunk)
    with pytest.raises(InvalidArgument, match="begun with steps"):
        study(shrunk, steps=3)


def test_the_prediction_is_what_a_measured_memory_does() -> None:
    # one head, so that mercer.memory measures the same thing; the sharpest scale is the best for this kernel
    found = capacity(Taylor(1), 24, scale=4 * 24**-0.5, trials=10, threshold=0.5, limit=256)
    assert len(found.curve) > 8
    for point in found.curve:
        assert predicted_recall("taylor1-l2", 1, 24, point.pairs) == pytest.approx(point.accuracy, abs=0.15)


def test_state_bytes_are_those_of_real_states() -> None:
    from mercer.core.names import parse_attention
    from mercer.core.structures import Causal
    from mercer.ops import attention

    for name in ("softmax", "elu-sum", "taylor2-l2"):
        kernel, normalizer = parse_attention(name)
        x = torch.randn(1, 2, 12, 4)
        _, state = attention(x, x, x, kernel=kernel, normalizer=normalizer, structure=Causal(), return_state=True)
        # a state also has its counter and its kernel's name, which no plan counts
        assert 0 <= 2 * state.nbytes - state_bytes([name, name], 2, 4, 12) < 128


def test_the_half_point_is_interpolated() -> None:
    assert half_point([4, 16], [0.75, 0.25]) == pytest.approx(8)
    assert half_point([2, 4, 8], [1.0, 0.5, 0.1]) == pytest.approx(4)
    assert half_point([2, 4], [1.0, 0.9]) is None
    assert half_point([2, 4], [0.4, 0.1]) is None


def summaries(found: dict[str, tuple[float, float]], pairs: int = 16) -> list[RecallSummary]:
    return [
        RecallSummary(
            attention=name, dim=64, pairs=pairs, accuracy=Interval(mean=accuracy, count=1), learning_rate=1e-3,
            state_bytes=100 if name == "softmax" else 10, predicted=predicted,
        )
        for name, (predicted, accuracy) in found.items()
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("found", "verdicts"),
    [
        ({"softmax": (1.0, 1.0), "taylor2-l2": (0.9, 0.98), "elu-sum": (0.3, 0.35)},
         ("supported", "supported", "supported", "supported")),
        ({"softmax": (1.0, 0.5), "taylor2-l2": (0.9, 0.1), "elu-sum": (0.3, 0.4)},
         ("refuted", "refuted", "undecided", "refuted")),
        ({"softmax": (1.0, 1.0), "taylor2-l2": (0.9, 0.1), "taylor1-l2": (0.5, 0.3)},
         ("supported", "undecided", "refuted", "refuted")),
        ({"softmax": (0.3, 1.0), "taylor2-l2": (0.9, 0.1)}, ("supported", "refuted", "refuted", "refuted")),
    ],
)  # fmt: skip
def test_the_conclusions_can_fall_either_way(found: dict[str, tuple[float, float]], verdicts: tuple[str, ...]) -> None:
    task = RecallTask(vocabulary=64, pairs=[16], length_per_pair=4, power=0.01, heldout_sequences=1)
    assert tuple(finding.verdict for finding in conclude(summaries(found), task)) == verdicts


@pytest.mark.parametrize(
    ("mixed", "plain", "verdict"),
    [
        ((0.99, 0.96, 1.02), (0.09, 0.08, 0.10), "supported"),
        ((0.44, -0.11, 0.99), (0.31, -0.63, 1.24), "undecided"),  # the means alone would speak for it
        ((0.10, 0.09, 0.11), (0.09, 0.08, 0.10), "refuted"),
    ],
)
def test_what_softmax_buys_is_told_by_the_intervals_over_seeds(mixed, plain, verdict) -> None:
    task = RecallTask(vocabulary=64, pairs=[16], length_per_pair=4, power=0.01, heldout_sequences=1)
    cells = [
        RecallSummary(
            attention=name, dim=64, pairs=16, learning_rate=1e-3, state_bytes=10, predicted=None,
            accuracy=Interval(mean=mean, low=low, high=high, count=3, over="seeds", confidence=0.95),
        )
        for name, (mean, low, high) in (("3*gla,softmax", mixed), ("gla", plain))
    ]  # fmt: skip
    (finding,) = (f for f in conclude(cells, task) if "buy GLA" in f.question)
    assert finding.verdict == verdict
    assert "by the intervals over seeds" in finding.text


def test_tasks_take_turns() -> None:
    study_of = recall.BUDGETS["quick"]
    tasks = [Recall(n, study_of.length_per_pair * n, study_of.vocabulary) for n in study_of.pairs]
    assert [t.pairs for t in tasks] == [2, 4, 8, 16]
