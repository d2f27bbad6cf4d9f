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
    caches = {f"softmax, 256 cached, {dtype}": size for dtype, size in (("float32", 4), ("bfloat16", 2))}
    assert set(named) == {*decode_step.NAMES, *caches, model}
    assert set(named[model]["us"]) == {"step"}
    for name in decode_step.NAMES:
        case = named[name]
        assert set(case["us"]) - {"step (numba)"} == WAYS
        assert all(0 < spread["low"] <= spread["median"] <= spread["high"] for spread in case["us"].values())
    assert named["taylor2"]["state_bytes"] == 4 * 8 * 64 * (64 * 65 // 2 + 64 + 1)
    for name, size in caches.items():
        assert set(named[name]["us"]) - {"decode kernel"} == {"read", "SDPA, no append", "softmax step"}
        assert named[name]["state_bytes"] == 2 * size * 8 * 64 * 256
    printed = capsys.readouterr().out
    assert "% of the copy's rate" in printed
    assert "times reading it once" in printed
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


def test_one_part_and_queries_that_share_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(CHILD, "1")
    path = tmp_path / "steps.json"
    decode_step.main(
        ["--quick", "--only", "caches", "--cache", "40", "--dtype", "float16", "--group", "2", "--json", str(path)]
    )
    (case,) = json.loads(path.read_text())["cases"]
    assert case["case"] == "softmax, 40 cached, float16, 2 queries a head"


def test_a_wrong_step_over_a_cache_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("numba")
    from mercer.backends import decode
    from mercer.forms import few

    def off(*args, **options):
        out, log_sum = decode.decode(*args, **options)
        return out + 0.1, log_sum

    monkeypatch.setattr(few, "decode_checked", off)
    with pytest.raises(SystemExit, match="differs from torch's form"):
        decode_step.cache_case(256, 1, 3)
