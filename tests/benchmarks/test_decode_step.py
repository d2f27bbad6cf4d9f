"""The benchmark of decoding steps: that it times every way, and refuses a step that is wrong."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks._process import CHILD

from benchmarks import decode_step

WAYS = {"copy", "step (torch)"}


def test_it_times_every_kernel_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv(CHILD, "1")
    path = tmp_path / "steps.json"
    decode_step.main(["--quick", "--json", str(path), "--threads", str(torch.get_num_threads())])
    record = json.loads(path.read_text())
    named = {case["case"]: case for case in record["cases"]}
    model = "DecoderLM elu-sum, 1 x 128"
    assert set(named) == {*decode_step.NAMES, "softmax, 256 cached", model}
    assert set(named[model]["us"]) == {"step"}
    for name in decode_step.NAMES:
        case = named[name]
        assert set(case["us"]) - {"step (numba)"} == WAYS
        assert all(0 < spread["low"] <= spread["median"] <= spread["high"] for spread in case["us"].values())
    assert named["taylor2"]["state_bytes"] == 4 * 8 * 64 * (64 * 65 // 2 + 64 + 1)
    assert set(named["softmax, 256 cached"]["us"]) == {"SDPA, no append", "softmax step"}
    printed = capsys.readouterr().out
    assert "% of the copy's rate" in printed
    assert all(name in printed for name in named)


def test_a_wrong_step_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    numba = pytest.importorskip("numba")
    assert numba
    from mercer.backends import step
    from mercer.forms import features

    def off(*args, **options):
        out, *rest = step.recurrent_step(*args, **options)
        return out + 0.01, *rest

    monkeypatch.setattr(features, "recurrent_step", off)
    with pytest.raises(SystemExit, match="differs from torch's form"):
        decode_step.feature_case("taylor2", 1, 3)
