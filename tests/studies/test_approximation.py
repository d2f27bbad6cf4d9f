from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.studies.small import make_text

from mercer.approximation import approximation_error, gaussian_inputs
from mercer.core.log_weights import Alibi
from mercer.errors import Interrupted, InvalidArgument, NonFinite, StorageError, Unsupported
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.models.io import save_model
from mercer.models.vocabulary import Bytes
from mercer.studies import approximation
from mercer.studies.approximation_arms import parse_arm
from mercer.studies.approximation_inputs import model_inputs, text_windows
from mercer.studies.approximation_measure import Sizes
from mercer.studies.records import ApproximationRecord, read_record

NAMES = (
    "taylor1-signed-sum", "taylor2-sum", "taylor4-sum", "favor32-sum", "favor64-sum", "favor128-sum",
    "favor32-sum+independent", "elu-sum",
)  # fmt: skip
SMALL = approximation.Plan(NAMES, (8,), (0.1, 1.0), Sizes(length=32, heads=2, rows=8, draws=3, windows=2), steps=4)


@pytest.fixture
def shrunk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setitem(approximation.BUDGETS, "standard", SMALL)
    monkeypatch.setattr(approximation, "MODEL", {"dim": 16, "layers": 2, "heads": 2})
    training = {"batch": 2, "length": 16, "learning_rate": 3e-3, "eval_windows": 2, "keep": 1}
    monkeypatch.setattr(approximation, "TRAINING", training)
    make_text(tmp_path / "text")
    return tmp_path


def study(root: Path, **options: Any) -> ApproximationRecord:
    out = root / options.pop("out", "study")
    given = {"text": [root / "text"], "device": "cpu", "quiet": True} | options
    page = approximation.run("standard", out, **given)
    assert page.read_text().startswith("<!doctype html>")
    record = read_record(page.with_suffix(".json"))
    assert isinstance(record, ApproximationRecord)
    return record


def saved_model(root: Path, **settings: Any) -> Path:
    config = {"vocab_size": 256, "dim": 12, "layers": 3, "heads": 2, "max_length": 20, "init_std": 0.5} | settings
    save_model(DecoderLM(ModelConfig(**config)), root / "model")
    return root / "model"


def test_every_arm_is_measured_on_all_inputs(shrunk: Path) -> None:
    record = study(shrunk)
    assert record.finished
    assert [arm.name for arm in record.arms] == list(NAMES)
    assert [at.name for at in record.inputs] == ["random-D8-sd0.1", "random-D8-sd1", "layer0", "layer1"]
    assert {(p.inputs, p.arm) for p in record.points} == {(at.name, n) for at in record.inputs for n in NAMES}
    for at in record.inputs:
        assert (at.heads, at.rows) == (2, 8)
        assert at.score_low < at.score_mean < at.score_high
    assert record.inputs[0].score_deviation == pytest.approx(0.1, rel=0.2)
    assert [(at.batch, at.length, at.layer) for at in record.inputs[2:]] == [(2, 16, 0), (2, 16, 1)]
    for point in record.points:
        assert point.error is not None
        assert point.error.decided
        assert len(point.by_head) == 2
        drawn = "favor" in point.arm
        assert len(point.by_draw) == (3 if drawn else 0)
        assert point.error.over == ("rows and draws" if drawn else "rows")
        assert (point.measured is not None) == (point.theory is not None) == drawn
        assert (point.negative > 0) <= point.arm.startswith("taylor1")
    kinds = {(need.inputs, need.series, need.kind) for need in record.needs}
    assert kinds == {
        (at.name, series, kind)
        for at in record.inputs
        for series, kind in (("taylor-sum", "order"), ("favor-sum", "features"))
    }
    assert record.training["steps"] == 4
    assert record.heldout_loss is not None
    model = next(finding for finding in record.findings if "trained model" in finding.question)
    assert max(at.score_deviation for at in record.inputs[2:]) < 0.5
    assert model.verdict == "undecided"
    assert "after 4 training steps" in model.text


def test_the_numbers_are_those_of_the_function(shrunk: Path) -> None:
    record = study(shrunk, attentions=["taylor2-sum", "favor64-sum+independent", "elu-l2"])
    for at in record.inputs[:2]:
        inputs = gaussian_inputs(32, 8, at.spread or 0, heads=2)
        for arm in record.arms:
            parsed = parse_arm(arm.name)
            found = approximation_error(
                *inputs, parsed.kernel, normalizer=parsed.normalizer, structure=approximation_structure(), rows=8,
                draws=3 if arm.count else None,
            )  # fmt: skip
            point = next(p for p in record.points if (p.inputs, p.arm) == (at.name, arm.name))
            assert point.error is not None
            assert point.error.mean == pytest.approx(found.error.value)
            assert point.error.high == pytest.approx(found.error.high)
            assert point.by_head == pytest.approx([head.value for head in found.by_head])


def test_what_is_random_in_a_mixture_is_drawn_as_often_as_the_rest(shrunk: Path) -> None:
    record = study(shrunk, attentions=["exp@4:favor16-sum", "exp@4:taylor2-sum"])
    for point in record.points:
        drawn = "favor" in point.arm
        assert len(point.by_draw) == (3 if drawn else 0)
        assert point.error is not None
        assert point.error.over == ("rows and draws" if drawn else "rows")
        assert (point.theory, point.measured) == (None, None)


def approximation_structure() -> Any:
    from mercer.core.structures import Causal

    return Causal()


def test_a_given_model_is_measured_as_it_is(shrunk: Path) -> None:
    folder = saved_model(shrunk)
    record = study(shrunk, model=folder, attentions=["taylor2-sum"])
    assert record.finished
    assert [at.name for at in record.inputs[2:]] == ["layer0", "layer1", "layer2"]
    assert (record.model_source, record.training, record.heldout_loss) == ("model", {}, None)
    assert record.inputs[2].length == 16  # the model's 20, or a window of the study
    assert not (shrunk / "study" / "trials").exists()
    with pytest.raises(InvalidArgument, match="begun with model"):
        study(shrunk, model=saved_model(shrunk, seed=1), attentions=["taylor2-sum"])


def test_a_model_gives_what_its_layers_attend_with() -> None:
    model = DecoderLM(ModelConfig(vocab_size=32, dim=16, layers=2, heads=2, position="alibi", attention_scale=0.3))
    tokens = torch.randint(32, (3, 9), generator=torch.Generator().manual_seed(0))
    first, second = model_inputs(model, tokens)
    assert (first.layer, second.layer, first.scale) == (0, 1, 0.3)
    assert any(isinstance(part, Alibi) for part in first.structure.parts)
    query, _, value = first.make()
    assert query.shape == value.shape == (3, 2, 9, 8)
    block: Any = model.blocks[0]
    x = block.attention_norm(model.embedding(tokens))
    for found, expected in zip(first.make(), block.attention.operands(x), strict=True):
        assert torch.equal(found, expected)
    assert not any(layer._forward_pre_hooks for layer in model.modules())


def test_windows_of_text_are_in_the_models_vocabulary() -> None:
    import numpy as np

    text = np.frombuffer("κέρνελ of length".encode() * 8, dtype=np.uint8)
    rows = text_windows(text, Bytes(), 12, 3)
    assert rows.shape == (3, 12)
    assert bytes(rows[0].tolist()) == bytes(text[:12])
    with pytest.raises(InvalidArgument, match="a window of length=500 needs 501 tokens of the model's vocabulary"):
        text_windows(text, Bytes(), 500, 1)


def test_what_was_measured_is_read_back(shrunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = study(shrunk)
    (shrunk / "study" / "points-layer1.json").unlink()
    calls: list[str] = []
    real = approximation.measure

    def measure(inputs: Any, *rest: Any) -> Any:
        calls.append(inputs.name)
        return real(inputs, *rest)

    monkeypatch.setattr(approximation, "measure", measure)
    again = study(shrunk)
    assert calls == ["layer1"]
    assert (again.points, again.needs, again.findings) == (first.points, first.needs, first.findings)
    for options, message in (
        ({"attentions": ["elu-sum"]}, "begun with attentions"),
        ({"target": 0.2}, "begun with target 0.1, now it is 0.2"),
        ({"steps": 3}, "begun with steps"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            study(shrunk, **options)


def test_stopped_in_the_middle_it_continues_to_the_same_numbers(shrunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = approximation.measure

    def stop(inputs: Any, *rest: Any) -> Any:
        if inputs.name == "layer1":
            raise KeyboardInterrupt
        return real(inputs, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(approximation, "measure", stop)
        with pytest.raises(Interrupted, match="run the same command again to continue in"):
            study(shrunk)
    record = read_record(shrunk / "study" / "approximation.json")
    assert isinstance(record, ApproximationRecord)
    assert not record.finished
    stopped, whole = study(shrunk), study(shrunk, out="whole")
    assert stopped.points == whole.points
    assert stopped.heldout_loss == whole.heldout_loss


def test_an_arm_that_leaves_the_range_is_a_gap_and_no_failure(shrunk: Path) -> None:
    record = study(shrunk, attentions=["power400-identity", "taylor200-identity", "favor64-sum", "elu-sum"])
    lost = [point for point in record.points if point.error is None]
    assert {point.arm for point in lost} == {"power400-identity"}
    assert all((point.by_head, point.negative) == ([], None) for point in lost)
    assert record.finished
    with pytest.raises(NonFinite, match="every attention left the range"):
        study(shrunk, attentions=["power400-identity"], out="alone")


def test_the_steps_that_fit_are_fixed_once(shrunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = approximation.Plan(("elu-sum",), (4,), (1.0,), SMALL.sizes, steps=400, seconds=30)
    monkeypatch.setitem(approximation.BUDGETS, "standard", timed)
    monkeypatch.setattr(approximation, "seconds_per_step", lambda _: 1.0)
    assert study(shrunk).training["steps"] == 26  # 30 less four for the evaluations
    monkeypatch.setattr(approximation, "seconds_per_step", lambda _: 0.01)
    assert study(shrunk).training["steps"] == 26


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attentions": ["softplus"]}, "Unknown attention"),
        ({"attentions": ["taylor3-sum"]}, "taylor3-sum' cannot be computed"),
        ({"attentions": ["hedgehog-sum"]}, "has weights to be learned first"),
        ({"attentions": ["exp-gate"]}, "has a gate to be learned first"),
        ({"attentions": ["favor16-sum+odd"]}, r"only \+independent or \+sqrt can follow a name"),
        ({"attentions": ["elu-sum+sqrt"]}, r"\+sqrt is for random features, as in 'favor256-sum\+sqrt'"),
        ({"steps": 0}, "steps is 0"),
        ({"target": 0.0}, "target is 0.0; it must be between 0 and 1"),
        ({"target": float("nan")}, "target is nan"),
        ({"device": "nowhere"}, "device 'nowhere' is not usable here"),
    ],
)
def test_wrong_options_are_refused(shrunk: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        study(shrunk, **options)
    assert not (shrunk / "study").exists()


def test_a_model_that_cannot_be_measured_is_refused(shrunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="nothing"):
        study(shrunk, model=shrunk / "nothing")
    folder = saved_model(shrunk)
    with pytest.raises(InvalidArgument, match="steps is for the model that is trained here"):
        study(shrunk, model=folder, steps=5)
    shutil.rmtree(shrunk / "text")
    (shrunk / "text").mkdir()
    (shrunk / "text" / "short.txt").write_text("x" * 200)
    with pytest.raises(InvalidArgument, match="the held-out text is too short: a window of length=16 needs 17 tokens"):
        study(shrunk, model=folder)
    assert not (shrunk / "study").exists()


def test_gates_over_time_are_refused() -> None:
    from mercer.nn.attention import Attention

    model = DecoderLM(ModelConfig(vocab_size=8, dim=8, layers=1, heads=2, attention="elu-sum"))
    block: Any = model.blocks[0]
    block.attention = Attention(8, 2, recency=True, kernel=parse_arm("elu-sum").kernel)
    with pytest.raises(Unsupported, match="Layer 0 of the model has recency gates"):
        model_inputs(model, torch.zeros(1, 4, dtype=torch.long))


def test_biases_by_distance_are_refused() -> None:
    model = DecoderLM(ModelConfig(vocab_size=8, dim=8, layers=1, heads=2, position="t5"))
    with pytest.raises(Unsupported, match="T5's biases by distance"):
        model_inputs(model, torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize("settings", [{"structure": ["causal", "strided(4)", "causal"]}, {"window": 5}])
def test_layers_are_measured_under_their_own_structure_or_refused_at_once(
    shrunk: Path, settings: dict[str, Any]
) -> None:
    folder = saved_model(shrunk, **settings)
    with pytest.raises(Unsupported, match=r"Layer [01] of the model sees .*, under which exp@3:taylor2-sum cannot be"):
        study(shrunk, model=folder, attentions=["taylor2-sum", "exp@3:taylor2-sum"])
    assert not (shrunk / "study").exists()
    record = study(shrunk, model=folder, attentions=["taylor2-sum"])
    plain = study(shrunk, model=saved_model(shrunk), attentions=["taylor2-sum"], out="plain")
    sparse, whole = ([p.error for p in found.points if p.inputs == "layer1"] for found in (record, plain))
    assert sparse != whole
