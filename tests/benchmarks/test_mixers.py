"""The benchmark of mixers: that it times everyone, and nobody who is wrong, and what it counts."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks._machine import Limits
from benchmarks._mixer_rows import ROWS, Case
from benchmarks._process import CHILD
from benchmarks._rwkv_rows import PROMPTS, TOKENS
from benchmarks._step_rows import COPY, STEPS

from benchmarks import _rwkv_rows, mixers


@pytest.fixture(scope="module", autouse=True)
def _small():
    """Models of two layers of 64 channels, made once."""
    cached = (_rwkv_rows.whole, _rwkv_rows.packed, _rwkv_rows.theirs)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"DIM": 64, "LAYERS": 2, "HEADS": 1, "VOCABULARY": 64}.items():
            patch.setattr(_rwkv_rows, name, value)
        for one in cached:
            one.cache_clear()
        yield
        for one in cached:
            one.cache_clear()


def test_it_times_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv(CHILD, "1")
    path = tmp_path / "mixers.json"
    threads = ["--threads", str(torch.get_num_threads())]
    sizes = ["--length", "33", "--batch", "2"]
    mixers.main(["--quick", *sizes, "--ours", "--direction", "forward", "--json", str(path), *threads])
    record = json.loads(path.read_text())
    assert [case["row"] for case in record["cases"]] == [*ROWS, *STEPS, *TOKENS]
    for case in record["cases"]:
        beside = {COPY} if case["row"] in STEPS else {"a sum over the matrices"} if case["row"] in TOKENS else set()
        assert set(case["ms"]) == {"ours"} | beside
        for spread in case["ms"].values():
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]
        products = case["flops"] / record["products"][case["dtype"]]
        assert case["limit_ms"] == pytest.approx(1e3 * max(products, case["bytes"] / record["bytes_per_second"]))
    printed = capsys.readouterr().out
    assert all(f"{name}, B=1 " in printed for name in ROWS)
    assert all(f"{name}, B=2, a token" in printed for name in STEPS)


def test_rows_without_a_backward_pass_say_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(CHILD, "1")
    threads = ["--threads", str(torch.get_num_threads())]
    with pytest.raises(SystemExit, match="gla-step: forward only"):
        mixers.main(["--quick", "--row", "gla-step", "--direction", "backward", *threads])


@pytest.mark.peers
@pytest.mark.parametrize("name", [n for n in ROWS if n not in PROMPTS])
def test_all_agree(name: str):
    case = ROWS[name](32)
    given, _ = mixers.contestants(case, 32, alone=False)
    assert len(given) >= 2
    for backward in (False, True):
        found = mixers.measure(name, case, 32, backward, rounds=1, budget=0.1, alone=False)
        assert set(found["ms"]) == set(given)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # the package's own
@pytest.mark.parametrize("name", [*STEPS, *PROMPTS, *TOKENS])
def test_all_agree_forward(name: str):
    case = STEPS[name](3) if name in STEPS else PROMPTS[name](40) if name in PROMPTS else TOKENS[name]()
    found = mixers.measure(name, case, 1, False, rounds=1, budget=0.1, alone=False)
    assert not found["left_out"]
    assert set(found["ms"]) == {*case.ours, *case.peers, *case.beside}
    assert case.peers


def test_a_step_of_a_model_reads_its_matrices_and_its_state():
    """Two layers: 12 squares of 64, and low-rank pairs of 64 by 32, three in the first and four in the second."""
    inside, head = 2 * 12 * 64 * 64 + 7 * 2 * 64 * 32, 64 * 64
    state = 2 * (64 * 64 + 2 * 64)  # S and the last token of both halves of a layer
    case = TOKENS["rwkv7-model-step"]()
    assert case.flops[0] == 2 * (inside + head) + 2 * 9 * 64 * 64
    assert case.moved == pytest.approx(4 * (inside + head + 2 * state), abs=300)  # counts of tokens besides
    assert TOKENS["rwkv7-model-bf16-step"]().moved < case.moved
    text = PROMPTS["rwkv7-model"](10)
    assert text.flops[0] == 2 * (10 * inside + head) + 10 * 2 * 9 * 64 * 64
    assert text.moved == 4 * (inside + head)


def test_what_is_read_and_written():
    x, y = torch.randn(8), torch.randn(2)
    case = Case("tiny", (x, y), {"ours": lambda x, y: 2 * x}, {}, (1e6, 2e6))
    assert mixers.moved(case, False) == 4 * (8 + 2 + 8)
    assert mixers.moved(case, True) == 4 * (3 * (8 + 2) + 2 * 8)
    limits = Limits({"float32": {"": 1e9}}, 1e6, 2e6)
    assert mixers.limit_ms({"flops": 5e6, "bytes": 4e3, "dtype": "float32"}, limits) == pytest.approx(5)
    assert mixers.limit_ms({"flops": 5e6, "bytes": 4e4, "dtype": "float32"}, limits) == pytest.approx(20)
    step = STEPS["gla-step"](4)
    state, token = 4 * 8 * 64 * 64, 4 * 8 * 64
    assert mixers.moved(step, False) == 4 * (2 * state + 5 * token)


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
