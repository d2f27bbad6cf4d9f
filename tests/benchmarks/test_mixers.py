"""The benchmark of mixers' operators: that it times everyone, and nobody who is wrong."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks._mixer_rows import ROWS, Case
from benchmarks._process import CHILD

from benchmarks import mixers


def test_it_times_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv(CHILD, "1")
    path = tmp_path / "mixers.json"
    threads = ["--threads", str(torch.get_num_threads())]
    mixers.main(["--quick", "--length", "33", "--ours", "--direction", "forward", "--json", str(path), *threads])
    record = json.loads(path.read_text())
    assert [case["row"] for case in record["cases"]] == list(ROWS)
    for case in record["cases"]:
        (spread,) = case["ms"].values()
        assert 0 < spread["low"] <= spread["median"] <= spread["high"]
    printed = capsys.readouterr().out
    assert all(f"{name}, B=1 " in printed for name in ROWS)


@pytest.mark.peers
@pytest.mark.parametrize("name", [n for n in ROWS if n != "mamba2"])
def test_all_agree(name: str):
    case = ROWS[name](32)
    given, _ = mixers.contestants(case, 32, alone=False)
    assert len(given) >= 2
    for backward in (False, True):
        found = mixers.measure(name, case, 32, backward, rounds=1, budget=0.1, alone=False)
        assert set(found["ms"]) == set(given)


def test_who_is_wrong_is_not_timed():
    x = torch.randn(1, 1, 4, 2)
    case = Case("tiny", (x,), {"ours": lambda x: 2 * x}, {"theirs": lambda x: 2.01 * x}, (1.0, 1.0))
    with pytest.raises(SystemExit, match="theirs of tiny is off by"):
        mixers.measure("tiny", case, 4, False, rounds=1, budget=0.1, alone=False)


def test_token_by_token_forms_are_left_out_of_long_sequences():
    x = torch.randn(1, 1, 4, 2)
    case = Case("tiny", (x,), {"ours": lambda x: x}, {"loop": lambda x: x}, (1.0, 1.0), frozenset({"loop"}))
    assert list(mixers.contestants(case, 4096, alone=False)[0]) == ["ours", "loop"]
    assert mixers.contestants(case, 4097, alone=False)[1] == {"loop": "token by token"}
