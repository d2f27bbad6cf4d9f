"""Who takes part in a benchmark and who is left out, and that what is written can be read."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import jsonschema
import pytest
import torch
from benchmarks._contest import Rules, contest, error_of
from benchmarks._contestant import DTYPES, Contestant
from benchmarks._machine import Limits
from benchmarks._record import Case, Rates, Record
from benchmarks._sata import sata_attention, tuples
from benchmarks._table import lines
from benchmarks._tasks import LONG, OURS, SHORT, TASKS, expected, inputs, ours
from benchmarks._work import Shape
from scripts import bench_picture

from benchmarks import _contest, linear_attention
from mercer.core.kernels import Taylor
from mercer.core.reference import reference_attention
from mercer.core.structures import Causal

CPU = torch.device("cpu")
RULES = Rules(rounds=3, budget=10.0, longest=100.0, memory=2**30)
SHAPE = Shape(1, 2, 64, 16)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_contest, "CHECKED", 64)


@pytest.mark.parametrize("task", TASKS)
def test_our_ways_agree_with_the_formula(task: str):
    for dtype in DTYPES:
        ways = ours(task, SHAPE, dtype)
        assert ways[0].name == OURS
        assert len({one.plan for one in ways}) == len(ways)
        for one in ways:
            assert error_of(one, task, SHAPE.dim, dtype, CPU) <= _contest.AGREES[dtype], f"{one.name} {dtype}"


@pytest.mark.parametrize("task", TASKS)
def test_the_formula_is_the_specification(task: str):
    q, k, v, _ = inputs(Shape(1, 2, 9, 16), "float32", CPU)
    exact = reference_attention(q, k, v, TASKS[task].kernel(16), structure=Causal())
    torch.testing.assert_close(expected(task, q, k, v), exact)


def test_the_command_names_the_tasks_and_the_shapes_of_the_issue():
    assert tuple(TASKS) == linear_attention.TASKS
    assert [s.length for s in LONG] == [2048, 8192, 32_768, 131_072]
    assert [s.length for s in SHORT] == [256, 1024, 4096]


def test_who_is_left_out_and_why():
    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return v * 2 + 0 * (q + k)

    right = ours("linear", SHAPE, "float32")[0]
    others = [
        Contestant("wrong", wrong),
        Contestant("known", wrong, differs="doubles the values"),
        replace(right, name="half", dtypes=("bfloat16",)),
        replace(right, name="odd", multiple=48),
        replace(right, name="fat", memory=lambda shape, backward: 2.0**30),
    ]
    case = contest("linear", SHAPE, "float32", True, [right, *others], RULES, CPU, lambda _: None)
    rows = {row.name: row for row in case.rows}
    assert [name for name, row in rows.items() if row.seconds] == [OURS, "known"]
    assert len(rows["known"].times) == 3
    assert rows["known"].ratio is not None
    reasons = {"wrong": "off by", "half": "bfloat16 only", "odd": "multiples of 48", "fat": "4.0 GiB"}
    assert all(reason in rows[name].skipped for name, reason in reasons.items())


def test_a_long_call_is_left_out(monkeypatch: pytest.MonkeyPatch):
    """Probed on 32 tokens, 64 of them take 2 or 4 times as long."""
    monkeypatch.setattr(_contest, "PROBED", 32)
    monkeypatch.setattr(_contest, "seconds", lambda run, device: 6.0)
    one = ours("linear", SHAPE, "float32")[0]
    for growth, estimate in ((1, 12.0), (2, 24.0)):
        assert _contest.estimated(replace(one, growth=growth), SHAPE, "float32", False, CPU, 20.0) == estimate
        _, reason = _contest.admit(
            replace(one, growth=growth), "linear", SHAPE, "float32", False, replace(RULES, longest=20.0), CPU
        )
        assert bool(reason) == (estimate > 20)


def test_probing_grows_while_it_is_cheap(monkeypatch: pytest.MonkeyPatch):
    """A second for every 512 tokens: with 4 s allowed it is tried on up to 1,024 tokens, with 1 s up to 256."""
    tried: list[int] = []

    def call(one: Contestant, given: tuple[torch.Tensor, ...], backward: bool) -> Callable[[], object]:
        tried.append(given[0].shape[2])
        return lambda: None

    monkeypatch.setattr(_contest, "call", call)
    monkeypatch.setattr(_contest, "seconds", lambda run, device: tried[-1] / 512)
    one = Contestant("one", lambda q, k, v: v)
    for longest, lengths in ((4.0, [64, 256, 1024]), (1.0, [64, 256])):
        tried.clear()
        assert _contest.estimated(one, replace(SHAPE, length=5120), "float32", False, CPU, longest) == 10.0
        assert tried == lengths


def test_the_picture_shows_every_contestant(tmp_path: Path):
    (tmp_path / "r.json").write_text(record().model_dump_json())
    bench_picture.main([str(tmp_path / "r.json"), "--out", str(tmp_path / "p.svg")], show=lambda _: None)
    picture = (tmp_path / "p.svg").read_text()
    root = ET.fromstring(picture)
    words = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {row.name for row in record().cases[0].rows} <= words
    assert {"float32, forward", "float32, forward and backward", "64"} <= words
    with pytest.raises(SystemExit, match="no task 'taylor9'"):
        bench_picture.main([str(tmp_path / "r.json"), "--task", "taylor9"])


def record() -> Record:
    cases = [
        contest("linear", SHAPE, "float32", backward, ours("linear", SHAPE, "float32"), RULES, CPU, lambda _: None)
        for backward in (False, True)
    ]
    limits = Limits({"float32": {"8 x 8 x 8": 1e9}}, 1e9, 2e9)
    return Record(
        environment={"threads": 1}, packages={}, missing={"fla": "No module named 'fla'"}, rounds=3,
        limits=Rates.of(limits), cases=[case.limited(limits) for case in cases],
    )  # fmt: skip


def test_a_record_survives_its_file(tmp_path: Path):
    written = record()
    (tmp_path / "r.json").write_text(written.model_dump_json())
    read = Record.model_validate_json((tmp_path / "r.json").read_text())
    assert read == written
    jsonschema.validate(written.model_dump(mode="json"), Record.model_json_schema())
    case: Case = read.cases[0]
    row = case.rows[0]
    assert row.seconds is not None
    assert math.isclose(case.limit_seconds, max(case.flops / 1e9, case.bytes / 2e9))
    assert row.times_limit == pytest.approx(row.seconds.median / case.limit_seconds)
    told = "\n".join(lines(read))
    assert "fla does not take part: No module named 'fla'" in told
    assert f"{1e3 * row.seconds.median:.4g}" in told


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_symmetry_aware_features_are_the_taylor_polynomial(order: int):
    q, k, v, _ = inputs(Shape(1, 2, 11, 4), "float32", CPU)
    q, k, v = q.double(), k.double(), v.double()
    kernel = Taylor(order, signed=True)
    exact = reference_attention(q, k, v, kernel, structure=Causal())
    torch.testing.assert_close(sata_attention(q, k, v, order, chunk=4), exact)
    assert sum(len(tuples(4, n)[1]) for n in range(order + 1)) == kernel.feature_dim(4)
