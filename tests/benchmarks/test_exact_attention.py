"""The benchmark of exact attention: that it times every case, counts pairs, and refuses a wrong answer."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks._process import CHILD

from benchmarks import exact_attention


def test_it_times_every_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv(CHILD, "1")
    path = tmp_path / "times.json"
    exact_attention.main(["--quick", "--dim", "16", "--json", str(path), "--threads", str(torch.get_num_threads())])
    record = json.loads(path.read_text())
    cases = record["cases"]
    assert [c["case"] for c in cases] == [name for name in exact_attention.CASES for _ in range(4)]
    for case in cases:
        assert set(case["ms"]) == set(case["errors"]) == {"mercer", "torch SDPA"}
        assert all(0 < spread["low"] <= spread["median"] <= spread["high"] for spread in case["ms"].values())
        assert 0 < case["ratio"]["low"] <= case["ratio"]["median"] <= case["ratio"]["high"]
        work = 14 if case["direction"] == "backward" else 4
        assert case["flops"] == exact_attention.CASES[case["case"]].pairs(256) * 16 * work
        assert case["limit_ms"] == pytest.approx(1e3 * case["flops"] / record["rates"][case["dtype"]])
    printed = capsys.readouterr().out
    assert "% of the products' limit" in printed
    assert all(name in printed for name in exact_attention.CASES)


@pytest.mark.parametrize("name", list(exact_attention.CASES))
def test_pairs_are_those_that_the_mask_shows(name: str):
    length, case = 40, exact_attention.CASES[name]
    mask = case.mask(length)
    shown = torch.ones(1, 1, length, length).tril() if mask is None else mask
    there = (torch.arange(length) < torch.tensor(case.lengths(length)).unsqueeze(1))[:, None, :, None]
    assert case.pairs(length) == exact_attention.HEADS * int((shown * there).sum())


def test_a_wrong_answer_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    real = exact_attention.contestants

    def wrong(case: exact_attention.Case, length: int):
        found = real(case, length)
        return found | {"mercer": lambda q, k, v: 1.01 * found["mercer"](q, k, v)}

    monkeypatch.setattr(exact_attention, "contestants", wrong)
    with pytest.raises(SystemExit, match=r"causal in float32 is off by .* so nothing is timed"):
        exact_attention.measure_case("causal", 64, 16, "float32", False, 1e9, 3, 1.0)
