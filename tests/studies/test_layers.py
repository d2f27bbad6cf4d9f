"""Patterns of layers by name, in the studies that take them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mercer.errors import InvalidArgument
from mercer.mixers.names import mixer_config, mixer_names
from mercer.models.layer_names import expand
from mercer.studies import recall
from mercer.studies.arms import parse_arm
from mercer.studies.layers import layers_of, parse_pattern
from mercer.studies.recall_memory import mixer_bytes, predicted_recall
from mercer.studies.records import RecallRecord, read_record
from mercer.studies.report.marks import label, mark


def test_a_pattern_is_written_in_one_way():
    assert parse_pattern(" mamba2, mamba2,linear ", 3) == "2*mamba2,elu-sum"
    assert parse_pattern("2*softmax", 2) == "softmax"
    assert parse_pattern("exp-sum") == "softmax"
    assert expand("2*mamba2,softmax") == ("mamba2", "mamba2", "softmax")
    assert layers_of("mamba2,softmax", 5) == ("mamba2", "softmax", "mamba2", "softmax", "mamba2")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mamba2,", "write names separated by commas"),
        ("0*mamba2,softmax", "write names separated by commas"),
        ("2*mamba2,softmax", "names 3 layers; the models of this study have 2; .* or give --layers 3"),
        ("mambo", r"neither a mixer \(did you mean mamba\?\), which are .*mamba2.*, nor an attention. Unknown"),
        ("taylor3-sum", "cannot be computed"),
    ],
)
def test_refusals(text, said):
    with pytest.raises(InvalidArgument, match=said):
        parse_pattern(text, 2)


def test_arms():
    assert parse_arm("mamba2").family == "mixer"
    arm = parse_arm("mamba2,mamba2,mamba2,softmax", 4)
    assert (arm.name, arm.attention, arm.family) == ("3*mamba2,softmax", "3*mamba2,softmax", "pattern")
    with pytest.raises(InvalidArgument, match="a gain is for one attention in all layers"):
        parse_arm("mamba2+gain")


def test_every_mixer_has_a_word_and_a_colour():
    words = {label(name) for name in mixer_names()}
    assert len(words) == len(mixer_names())
    assert all(mark(name).symbol == "hexagon" for name in mixer_names())
    assert label("7*mamba2,softmax") == "7 Mamba-2, then softmax"
    assert mark("7*mamba2,softmax").colour == mark("mamba2").colour
    assert mark("softmax,elu-sum").colour == mark("elu-sum").colour


def test_the_memory_view_says_nothing_of_mixers():
    assert predicted_recall("gla", 2, 8, 4) is None


def test_bytes_of_a_mixer_are_those_of_its_state_after_any_text():
    mixer = mixer_config("gla").build(16, 2, layer=0, layers=1)
    _, state = mixer(torch.randn(1, 9, 16), return_state=True)
    assert mixer_bytes("gla", 2, 8) == state.nbytes > 100


def test_a_study_of_hybrids(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    plan = recall.Plan(("softmax",), (1, 2), 16, 4, (16,), 2, (3e-3,), steps=3, seeds=1, batch=4, held_out=16)
    monkeypatch.setitem(recall.BUDGETS, "standard", plan)
    options: dict[str, Any] = {"attentions": ["gla", "2*gla,softmax", "softmax"], "layers": 3}
    page = recall.run("standard", tmp_path / "study", device="cpu", quiet=True, **options)
    record = read_record(page.with_suffix(".json"))
    assert isinstance(record, RecallRecord)
    assert [t.attention for t in record.trials] == ["gla", "2*gla,softmax", "softmax"]
    assert record.model["layers"] == 3
    assert [s.predicted is None for s in record.summaries] == [True, True, False, False, False, False]
    assert "What does softmax in 1 of 3 layers buy GLA?" in [f.question for f in record.findings]
    state = {s.attention: s.state_bytes for s in record.summaries if s.pairs == 2}
    assert 3 * state["2*gla,softmax"] == pytest.approx(2 * state["gla"] + state["softmax"], abs=200)
    assert "GLA" in page.read_text()
    with pytest.raises(InvalidArgument, match="begun with layers 3, now it is 4"):
        recall.run("standard", tmp_path / "study", device="cpu", quiet=True, attentions=options["attentions"], layers=4)
