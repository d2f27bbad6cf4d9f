"""The benchmark of sparse attention: what it counts, that it times all, and that it refuses who is wrong."""

import json
import sys
from pathlib import Path

import pytest
import torch
from benchmarks._process import CHILD
from benchmarks._sparse_rivals import Rival, tasks

from benchmarks import _sparse_rivals, sparse_attention
from mercer.core.picture import weights


@pytest.mark.parametrize("name", sparse_attention.LINE)
def test_pairs_are_those_of_the_picture(name: str):
    structure = sparse_attention.pattern(name)
    assert sparse_attention.pairs(structure, 512) == weights(structure, 512).share[0, 0].sum()


def test_operations_are_two_products_forward_and_seven_with_backward():
    assert sparse_attention.operations(10, backward=False) == 2 * (2 * 10 * 64) * 8
    assert sparse_attention.operations(10, backward=True) == 7 * (2 * 10 * 64) * 8


@pytest.mark.parametrize("name", sparse_attention.RIVALS)
def test_the_formula_is_the_structure(name: str):
    task = tasks()[name]
    at = torch.arange(512)
    found = weights(task.structure, 512)
    log = task.log_weights(at.unsqueeze(1), at.unsqueeze(0), 512)
    assert torch.equal(log > -torch.inf, found.share[0, 0] > 0)
    if found.log_weight is not None:
        torch.testing.assert_close(found.log_weight[0, 0], log)


def test_the_line_is_timed_and_weighed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    if sys.platform != "linux":
        pytest.skip("peak memory is read from /proc")
    monkeypatch.setenv(CHILD, "1")
    path = tmp_path / "line.json"
    sparse_attention.main(["--part", "line", "--pattern", "blocks", "--length", "2048", "--quick", "--json", str(path)])
    (case,) = json.loads(path.read_text())["cases"]
    assert case["pairs"] == 8 * 256 * 257 // 2 + 7 * 256 * 256
    for way in ("forward", "with backward"):
        assert 0 < case["seconds"][way]["low"] <= case["seconds"][way]["median"]
        rate = sparse_attention.operations(case["pairs"], way == "with backward") / case["seconds"][way]["median"]
        assert case["gflops"][way] == pytest.approx(rate / 1e9)
    assert case["peak_bytes"] >= 4 * 2048 * 8 * 64 * 3  # the gradients alone
    assert "bytes a token" in capsys.readouterr().out


@pytest.mark.peers
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("window", {"transformers Longformer", "local-attention"}),
        ("blocks", {"local-attention"}),
        ("bigbird", {"transformers BigBird"}),
    ],
)
def test_everyone_agrees_and_is_timed(name: str, theirs: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("transformers")
    pytest.importorskip("local_attention")
    monkeypatch.setenv(CHILD, "1")
    path = tmp_path / "rivals.json"
    sparse_attention.main(
        ["--part", "rivals", "--pattern", name, "--length", "512", "--quick", "--budget", "0", "--json", str(path)]
    )
    (case,) = json.loads(path.read_text())["cases"]
    assert not case["refused"]
    for spreads in case["seconds"].values():
        assert set(spreads) == {"ours", "torch SDPA, dense mask", *theirs}


def test_a_wrong_answer_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    def off(*_: object) -> list[Rival]:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

        return [Rival("without a mask", run)]

    monkeypatch.setattr(_sparse_rivals, "rivals", off)
    case = sparse_attention.rival_case("blocks", 512, sparse_attention.parse(["--quick"]))
    assert "off by" in case["refused"]["without a mask"]
    assert not case["seconds"]["forward"]


def test_lengths_that_a_rival_cannot_take_are_said():
    with pytest.raises(SystemExit, match="multiples of 512, not 700"):
        sparse_attention.rival_case("window", 700, sparse_attention.parse(["--quick"]))
