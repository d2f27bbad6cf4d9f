from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from mercer.advice import advise
from mercer.core.machine_default import DEFAULT
from mercer.errors import Interrupted, InvalidArgument
from mercer.studies import cost
from mercer.studies.cost_measure import Shape, Way, machine_rates, planned, planned_seconds, prepare, seconds
from mercer.studies.cost_summary import best_curve, conclude, crossing, crossings
from mercer.studies.records import CostRecord, read_record
from mercer.studies.records.cost import CostPoint, Where

SMALL = cost.Plan(("softmax", "elu-sum"), (8, 16, 32), repeats=2, head_dim=4, slowest=5.0, heads=2, decode_steps=2)
SHAPE = Shape(1, 2, 4, torch.float32, torch.device("cpu"))


@pytest.fixture
def shrunk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setitem(cost.BUDGETS, "standard", SMALL)
    monkeypatch.setattr("mercer.studies.cost_measure.LEAST_SECONDS", 1e-4)
    monkeypatch.setattr(cost, "measure_machine", lambda _device: DEFAULT)
    return tmp_path


def study(root: Path, **options: Any) -> CostRecord:
    page = cost.run("standard", root / options.pop("out", "study"), quiet=True, **({"device": "cpu"} | options))
    assert page.read_text().startswith("<!doctype html>")
    record = read_record(page.with_suffix(".json"))
    assert isinstance(record, CostRecord)
    return record


def test_every_way_is_timed_at_every_length(shrunk: Path) -> None:
    record = study(shrunk)
    assert record.finished
    ways = {(p.attention, p.form, p.path, p.phase) for p in record.points}
    assert {
        ("softmax", "dense", "pairs", "prefill"), ("softmax", "chunked", "pairs", "prefill"),
        ("elu-sum", "chunked", "features", "prefill"), ("elu-sum", "recurrent", "features", "prefill"),
        ("elu-sum", "recurrent", "features", "decode"),
    } <= ways  # fmt: skip
    assert all(path == "pairs" for name, _, path, _ in ways if name == "softmax")
    assert len(record.points) == len(ways) * 3
    for point in record.points:
        assert point.status == "measured"
        assert point.seconds_per_token is not None
        assert point.low is not None
        assert point.high is not None
        assert 0 < point.low <= point.seconds_per_token <= point.high
        assert point.planned_seconds_per_token
        assert point.planned_flops
    # A cache of keys and values in float32, and elu's S and z. A state also has its counter and its kernel's name.
    sizes = {(p.attention, p.path, p.length): p.state_bytes for p in record.points if p.phase == "decode"}
    assert 0 <= (sizes["softmax", "pairs", 32] or 0) - 2 * 32 * (4 + 4) * 4 < 64
    assert 0 <= (sizes["elu-sum", "features", 32] or 0) - 2 * 4 * (4 + 1) * 4 < 64
    assert sizes["elu-sum", "features", 8] == sizes["elu-sum", "features", 32]
    assert {(c.quantity, c.phase) for c in record.crossings} == {
        ("time", "prefill"), ("time", "decode"), ("state", "decode")
    }  # fmt: skip
    assert record.findings


def test_what_was_measured_is_read_back(shrunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = study(shrunk)
    (shrunk / "study" / "points-decode-32.json").unlink()
    calls: list[tuple[str, int]] = []
    real = cost._Study._cell

    def cell(self: Any, phase: Any, length: int, *rest: Any) -> list[CostPoint]:
        calls.append((phase, length))
        return real(self, phase, length, *rest)

    monkeypatch.setattr(cost._Study, "_cell", cell)
    again = study(shrunk)
    assert calls == [("decode", 32)]
    assert [p for p in again.points if p.length < 32] == [p for p in first.points if p.length < 32]
    assert again.rates == first.rates
    with pytest.raises(InvalidArgument, match="begun with attentions"):
        study(shrunk, attentions=["softmax"])


def test_a_stop_is_one_sentence_and_before_any_result_nothing_is_settled(
    shrunk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cost._Study, "_cell", stop)
        with pytest.raises(Interrupted, match="run the same command again to continue in"):
            study(shrunk)
    assert (shrunk / "study" / "rates.json").exists()
    assert {p.attention for p in study(shrunk, attentions=["exp-l2"]).points} == {"exp-l2"}


def test_what_would_take_too_long_is_left_out_with_a_reason(shrunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "SCORES_LIMIT", 2 * 16 * 16 * 4)
    monkeypatch.setattr(cost, "BUDGETS", {"standard": SMALL.__class__(**(SMALL.__dict__ | {"slowest": 1e-9}))})
    record = study(shrunk)
    reasons = {(p.form, p.path, p.length): p.reason for p in record.points if p.phase == "prefill" and p.reason}
    assert reasons["dense", "pairs", 32] == "scores of 8 KiB"
    assert "a call, more than 1 ns" in (reasons["chunked", "features", 16] or "")
    assert reasons["chunked", "features", 32] == "a shorter context was already too slow"
    assert record.finished


def test_a_state_beyond_the_limit_is_a_reason_and_no_failure(shrunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = cost.Plan(("taylor6-l2",), (8,), repeats=1, head_dim=64, slowest=5.0, heads=1, decode_steps=1)
    monkeypatch.setitem(cost.BUDGETS, "standard", big)
    record = study(shrunk)
    lost = [p for p in record.points if p.path == "features"]
    assert lost
    assert all(p.status == "skipped" and "features" in (p.reason or "") for p in lost)
    assert record.crossings == []  # nothing to compare with


def test_decoding_continues_the_context() -> None:
    """What is timed is the real thing: the state holds the context when the tokens are written."""
    for way in (Way("softmax", "auto", "pairs", "decode"), Way("taylor2-l2", "recurrent", "features", "decode")):
        task, tokens, state = prepare(way, SHAPE, 12, 3)
        assert tokens == 3
        assert state is not None
        assert 0 <= state - planned(Way(way.attention, "auto", way.path, "decode"), SHAPE, 12).state_bytes < 64
        taken, count = seconds(task, SHAPE.device, 1)
        assert taken > 0
        assert count == 1


def test_the_planned_time_of_a_token_is_that_of_the_model() -> None:
    """A row against the cache grows with the context, a step of a state does not; a context is read by the token."""
    rows = [planned_seconds(Way("softmax", "auto", "pairs", "decode"), SHAPE, n, DEFAULT) for n in (100, 100_000)]
    steps = [
        planned_seconds(Way("elu-sum", "recurrent", "features", "decode"), SHAPE, n, DEFAULT) for n in (100, 100_000)
    ]
    assert rows[0] < rows[1]
    assert steps[0] == steps[1]
    found = advise(dim=4, heads=2, context=100_000, kernels=["elu-sum"])
    assert rows[1] == found.softmax.decode.seconds
    assert steps[1] == found.options[0].decode.seconds
    read = planned_seconds(Way("elu-sum", "chunked", "features", "prefill"), SHAPE, 100_000, DEFAULT)
    assert read == pytest.approx(found.options[0].reading.seconds / 100_000, rel=0.01)


@pytest.mark.parametrize("name", ["hedgehog-sum", "mlp8-sum", "favor8-sum", "exp@4:hedgehog-sum"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_kernels_that_carry_tensors_are_timed_too(name: str, phase: Literal["prefill", "decode"]) -> None:
    way = Way(name, "recurrent" if phase == "decode" else "chunked", "features", phase)
    assert planned_seconds(way, SHAPE, 8, DEFAULT) > 0
    call, steps, state_bytes = prepare(way, SHAPE, 8, 2)
    call()
    assert steps > 0
    assert (state_bytes or 0) > 0 or phase == "prefill"


def test_the_machine_has_rates() -> None:
    rates = machine_rates(SHAPE, size=64, read_bytes=2**16)
    assert rates.flops_per_second > 1e6
    assert rates.bytes_per_second > 1e6


@pytest.mark.parametrize(
    ("challenger", "expected"),
    [
        ({1: 4.0, 2: 4.0, 4: 4.0, 8: 4.0}, Where(kind="at", length=4.0)),
        ({1: 2.0, 2: 4.0, 4: 2.0, 8: 2.0}, Where(kind="at", length=2 * 2**0.5)),
        ({1: 0.5, 2: 0.5, 4: 0.5, 8: 0.5}, Where(kind="always")),
        ({1: 9.0, 2: 9.0, 4: 9.0, 8: 9.0}, Where(kind="never")),
        ({1: 0.5, 2: 9.0, 4: 4.1, 8: 9.0}, Where(kind="never")),
        ({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}, Where(kind="never")),
        ({1: 1.0, 2: 2.0, 4: 4.0, 8: 4.0}, Where(kind="at", length=4.0)),
        ({16: 1.0}, Where(kind="unknown")),
    ],
)
def test_crossings_are_interpolated_for_good(challenger: dict[int, float], expected: Where) -> None:
    found = crossing({n: float(n) for n in (1, 2, 4, 8)}, challenger)
    assert found.kind == expected.kind
    assert found.length == (None if expected.length is None else pytest.approx(expected.length))


def line(attention: str, form: str, seconds: list[float], plan: list[float], state: list[int]) -> list[CostPoint]:
    return [
        CostPoint(
            attention=attention, form=form, path="pairs", phase=phase, length=2**place, seconds_per_token=s,
            low=s, high=s, state_bytes=b, planned_seconds_per_token=p, planned_state_bytes=b,
        )
        for phase in ("prefill", "decode")
        for place, (s, p, b) in enumerate(zip(seconds, plan, state, strict=True))
    ]  # fmt: skip


def test_the_best_form_counts() -> None:
    points = line("a", "dense", [1, 2, 8], [1, 2, 8], [1, 1, 1]) + line("a", "chunked", [2, 2, 2], [1, 1, 1], [1, 1, 1])
    assert best_curve(points, "a", "prefill", lambda p: p.seconds_per_token) == {1: 1, 2: 2, 4: 2}
    slow = [p.model_copy(update={"path": "features", "seconds_per_token": 9.0}) for p in points[:1]]
    assert best_curve(points + slow, "a", "prefill", lambda p: p.seconds_per_token) == {1: 9}


@pytest.mark.parametrize(
    ("times", "plan", "verdicts"),
    [
        ([2.0, 2.0, 2.0], [2.0, 2.0, 2.0], ["supported", "supported", "supported", "supported"]),
        ([9.0, 9.0, 9.0], [9.0, 9.0, 9.0], ["refuted", "refuted", "supported", "supported"]),
        ([2.0, 2.0, 2.0], [9.0, 9.0, 9.0], ["supported", "supported", "supported", "refuted"]),
    ],
)
def test_the_conclusions_can_fall_either_way(times: list[float], plan: list[float], verdicts: list[str]) -> None:
    points = line("softmax", "chunked", [1, 2, 4], [1, 2, 4], [10, 20, 40]) + line(
        "elu-sum", "chunked", times, plan, [15] * 3
    )
    assert [finding.verdict for finding in conclude(points, crossings(points))] == verdicts


def test_wrong_options_are_refused(shrunk: Path) -> None:
    with pytest.raises(InvalidArgument, match="Unknown attention"):
        study(shrunk, attentions=["softplus"])
    with pytest.raises(InvalidArgument, match="taylor3-sum' cannot be computed"):
        study(shrunk, attentions=["taylor3-sum"])
    with pytest.raises(InvalidArgument, match="device 'nowhere' is not usable here"):
        study(shrunk, device="nowhere")
    assert not (shrunk / "study").exists()
