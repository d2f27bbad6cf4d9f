"""Memory of mixers against length: that a peak is seen, and what of it is saved, and that nothing too large is run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks._memory import peak_above
from benchmarks._mixer_rows import Case

from benchmarks import _mixer_rows, mixer_memory

linux = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")


@linux
def test_a_peak_is_what_a_call_takes():
    size = 1 << 26

    for _ in range(2):  # the second time as much, though the first has freed it all
        assert size <= peak_above(lambda: torch.ones(size // 4)) < 1.5 * size
    assert peak_above(lambda: None) < size / 8


def test_what_is_saved_is_counted_once_and_without_the_inputs(monkeypatch: pytest.MonkeyPatch):
    def case(length: int) -> Case:
        return Case("", (torch.randn(length),), {"ours": lambda x: (x * x).sin() * (2 * x)}, {}, (1.0, 1.0))

    monkeypatch.setitem(_mixer_rows.ROWS, "tiny", case)
    assert mixer_memory.saved_bytes("tiny", 100) == 4 * 3 * 100  # x x, its sine and 2 x


def test_what_would_be_too_large_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    ran: list[int] = []

    def child(row: str, direction: str, length: int, options: Any) -> dict[str, Any]:
        ran.append(length)
        spread = {"median": float(length), "low": 1.0, "high": 1e9}
        sizes = {
            "peak": 1000 * length,
            "returned": 100 * length,
            "saved_a_token": 200.0,
            "process": 2**28 + (length << 20),
        }
        return {"row": row, "direction": direction, "length": length, "ms": spread} | sizes

    monkeypatch.setattr(mixer_memory, "child", child)
    path = tmp_path / "memory.json"
    lengths = [part for n in (4096, 1024, 2048, 8192) for part in ("--length", str(n))]
    mixer_memory.main(["--row", "gla", "--direction", "backward", "--most", "5", *lengths, "--json", str(path)])
    assert ran == [1024, 2048, 4096]
    printed = capsys.readouterr().out
    assert "8,192  left out: 8.2 GiB expected, 5 allowed" in printed
    assert "of it 100 B/token are what a pass returns, and 200 saved" in printed
    assert [case["length"] for case in json.loads(path.read_text())["cases"]] == ran
    with pytest.raises(SystemExit, match="there is no row 'best'; there are gla, "):
        mixer_memory.main(["--row", "best"])


@linux
def test_a_pass_is_weighed_in_a_process_of_its_own(tmp_path: Path, capsys):
    path = tmp_path / "memory.json"
    arguments = ["--row", "gla", "--direction", "backward", "--length", "4096", "--quick", "--threads", "1"]
    mixer_memory.main([*arguments, "--json", str(path)])
    (case,) = json.loads(path.read_text())["cases"]
    token = 4 * 8 * 64  # bytes of a channel of every head
    assert case["returned"] == 4 * 4096 * token
    assert case["saved_a_token"] >= token / 2
    assert case["returned"] < case["peak"] < 4096 * 64 * token  # the states of all tokens would be 64 times a channel
    assert "gla, backward" in capsys.readouterr().out
