"""The accelerator benchmark on the CPU: that its contracts see what is wrong, and that it times every kernel."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks._device_contracts import MIXED, compare, every_cell, moved
from benchmarks._device_rivals import SDPA, rival_error, rivals
from benchmarks._device_times import KERNELS, Watch, measure, ways
from benchmarks._machine import Limits
from benchmarks._process import CHILD
from benchmarks._work import Shape
from tests.contracts import cells

from benchmarks import _device_contracts, _device_times, accelerator
from mercer import Causal, Sum
from mercer.core.kernels import Kernel
from mercer.core.log_weights import Alibi
from mercer.core.structures import Both

CPU = torch.device("cpu")
LIMITS = Limits({"float32": {"": 1e12}, "bfloat16": {"": 1e12}}, 1e11, 1e11)


def test_the_first_cells_show_every_pair():
    order, first = every_cell()
    assert len(set(order)) == len(order)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert {(c[a], c[b]) for c in order[:first]} == {(c[a], c[b]) for c in order}
    assert {c[0] for c in order} == set(cells.KERNELS) | set(cells.FEATURE_KERNELS) | set(MIXED)
    assert {c[1] for c in order} == set(cells.NORMALIZERS) | set(cells.OTHER_NORMALIZERS)
    assert {c[2] for c in order} == set(cells.STRUCTURES)


def test_contracts_hold_on_the_cpu():
    verdict = compare(CPU, limit=100.0, most=12)
    assert verdict.cells == 12
    assert not verdict.failures
    assert verdict.calls > 24
    assert 0 < verdict.worst["float32"] <= 1
    assert not verdict.pairs
    assert compare(CPU, limit=-1.0).cells == 0


@pytest.mark.parametrize(
    ("wrong", "said"), [(lambda out: out * 1.1, "output is off by"), (lambda out: out.detach(), "q is off by")]
)
def test_contracts_see_what_is_wrong(
    wrong: Callable[[torch.Tensor], torch.Tensor], said: str, monkeypatch: pytest.MonkeyPatch
):
    real = _device_contracts.attention
    monkeypatch.setattr(_device_contracts, "attention", lambda *qkv, **parts: wrong(real(*qkv, **parts)))
    verdict = compare(CPU, limit=100.0, most=3)
    assert any(said in failure for failure in verdict.failures)
    assert verdict.bad


def test_contracts_tell_what_a_device_cannot_do(monkeypatch: pytest.MonkeyPatch):
    def refuse(*qkv: torch.Tensor, **parts: Any) -> torch.Tensor:
        raise NotImplementedError("no such operator\nhere")

    monkeypatch.setattr(_device_contracts, "attention", refuse)
    verdict = compare(CPU, limit=100.0, most=2)
    assert verdict.calls == 0
    assert all(failure.endswith("NotImplementedError: no such operator") for failure in verdict.failures)


def test_parts_move_and_gradients_come_back():
    slopes = torch.ones(2, requires_grad=True)
    whole = Causal() & Alibi(slopes)
    there = moved(whole, torch.device("meta"))
    assert isinstance(there, Both)
    (part,) = (p for p in there.parts if isinstance(p, Alibi))
    assert part.slopes.device.type == "meta"
    assert part.slopes.grad_fn is not None
    assert slopes.device.type == "cpu"
    bound = KERNELS["hedgehog"].bind(4, 2, 2)
    assert all(t.device.type == "meta" for t in moved(bound, torch.device("meta")).tensors().values())
    assert moved(Sum(), CPU) == Sum()


def test_every_class_of_kernel_is_timed():
    def classes(kernels: dict[str, Kernel]) -> set[type[Kernel]]:
        return {type(kernel) for kernel in kernels.values()}

    assert classes(cells.KERNELS | cells.FEATURE_KERNELS | MIXED) <= classes(KERNELS)
    assert set(_device_times.EXPANDED) <= set(KERNELS)


def test_ways_are_what_the_table_allows():
    shape = Shape(1, 2, 32, 16)
    found = {way[:2] for way, _ in ways("exp", shape, "float32", CPU)}
    assert found == {("dense", "pairs"), ("chunked", "pairs"), ("recurrent", "pairs")}
    found = {way[:2] for way, _ in ways("elu", shape, "bfloat16", CPU)}
    assert found == {(f, p) for f, p in cells.CELLS if (f, p) != ("dense", "features")}


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few kernels, short sequences, and one call instead of batches of them."""
    monkeypatch.setattr(_device_times, "clock", partial(_device_times.clock, batches=1))
    monkeypatch.setattr(_device_times, "KERNELS", {name: KERNELS[name] for name in ("elu", "taylor2")})
    for name in ("WIDE", "NARROW"):
        monkeypatch.setattr(_device_times, name, {"cpu": Shape(1, 2, 32, 4 if name == "WIDE" else 2)})


def test_times_of_everything_but_what_is_wrong(monkeypatch: pytest.MonkeyPatch):
    small(monkeypatch)
    bad = {("Elu", "chunked", "features")}
    times, left = measure(Watch(CPU, LIMITS, 0.5), ("float32",), bad, 100.0, 1, lambda _: None)
    assert left == 0
    timed = {(t.kernel, t.form, t.path, t.dim, t.backward) for t in times}
    assert ("elu", "chunked", "pairs", 4, True) in timed
    assert ("taylor2", "chunked", "features", 2, False) in timed
    assert not any(t[:3] == ("elu", "chunked", "features") for t in timed)
    assert not any(t.form == "recurrent" and t.backward for t in times)
    assert all(t.seconds > 0 and t.product_fraction > 0 and t.copy_fraction > 0 for t in times)
    assert all(t.sdpa == 1 for t in times if t.kernel == SDPA)
    assert measure(Watch(CPU, LIMITS, 0.5), ("float32",), set(), -1.0, 1, lambda _: None)[1] > 10


def test_a_call_that_takes_too_long_runs_on_less(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_device_times, "clock", lambda run, shape, *rest, **more: shape.length / 1000)
    watch, shape = Watch(CPU, LIMITS, each=0.3), Shape(1, 1, 1024, 4)
    fit = {
        p: watch.fit(_device_times.sdpa, shape, ("chunked", p, "torch"), "float32", False)[0]
        for p in ("pairs", "features")
    }
    # 64 ms for 64 tokens: in 0.3 s, twice as many if time grows with the square, and 4 times if it grows with length.
    assert (fit["pairs"].length, fit["features"].length) == (128, 256)


def test_rivals_are_right():
    found, reason = rivals(CPU)
    assert reason
    assert rival_error(SDPA, found[SDPA], "float32", CPU) < 1e-5


@pytest.mark.parametrize("holds", [True, False])
def test_the_command_writes_a_table_and_json(
    holds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    small(monkeypatch)
    monkeypatch.setenv(CHILD, "1")
    monkeypatch.setattr(_device_contracts, "every_cell", lambda: ([("elu", "sum", "causal")], 1))
    if not holds:
        real = _device_contracts.attention
        monkeypatch.setattr(_device_contracts, "attention", lambda *qkv, **parts: real(*qkv, **parts) + 1)
    command = ["--device", "cpu", "--quick", "--dtype", "float32", "--threads", "1", "--json", str(tmp_path / "a.json")]
    if holds:
        accelerator.main(command)
    else:
        with pytest.raises(SystemExit) as end:
            accelerator.main(command)
        assert end.value.code == 1
    told = capsys.readouterr().out
    result = json.loads((tmp_path / "a.json").read_text())
    assert result["kind"] == "mercer.benchmarks.accelerator/1"
    assert result["contracts"]["cells"] == result["contracts"]["of"] == 1
    assert bool(result["contracts"]["failures"]) != holds
    assert ("WRONG elu, sum, causal" in told) != holds
    kernels = {one["kernel"] for one in result["times"]}
    assert kernels == ({SDPA, "elu", "taylor2"} if holds else {SDPA, "taylor2"})
    assert "torch SDPA" in told
