"""Measuring a machine: the fit recovers what times were made of, and a hurried measurement gives a usable machine."""

import pytest
import torch

from mercer.advice import measure, measure_machine
from mercer.core.machine import Machine, use_machine
from mercer.core.machine_default import DEFAULT
from mercer.core.work import WAYS, Work
from mercer.errors import InvalidArgument
from mercer.ops import plan

WORKS = [Work(1, 10, 0, 10**4, 100), Work(1, 10**6, 10**5, 10**7, 10**6), Work(1, 10**6, 0, 10**8, 10**6)]


def times(call: float, item: float, rate: float) -> list[float]:
    return [
        call + w.items * item + w.flops / rate + w.entries * DEFAULT.entry + w.bytes / DEFAULT.bandwidth for w in WORKS
    ]


@pytest.mark.parametrize("truth", [(1e-4, 1e-9, 1e11), (1e-4, 0.0, 1e10), (0.0, 1e-8, 1e12)])
def test_the_fit_recovers_what_times_are_made_of(truth: tuple[float, float, float]):
    found = measure.fit(times(*truth), WORKS, DEFAULT, 1e12)
    assert found == pytest.approx(truth, rel=1e-5, abs=1e-12)


def test_a_rate_that_does_not_show_is_the_peak():
    works = [Work(1, n, 0, 0, 0) for n in (1, 10, 100)]
    assert measure.fit([1.1, 2.0, 11.0], works, DEFAULT, 7e10) == pytest.approx((1.0, 0.1, 7e10))


def test_times_that_no_cost_explains_give_none_below_zero():
    call, item, rate = measure.fit([3.0, 2.0, 1.0], WORKS, DEFAULT, 1e12)
    assert (call >= 0, item >= 0, rate > 0) == (True, True, True)


def test_every_way_is_measured_as_itself():
    assert set(measure.TRIALS) == set(WAYS)


@pytest.mark.slow  # compiles the fused kernels where they are not yet
@pytest.mark.timeout(600)  # where nothing is compiled yet, every fused kernel is
def test_a_machine_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "LEAST_REPEATS", 1)
    monkeypatch.setattr(measure, "MOST_REPEATS", 2)
    before = torch.random.get_rng_state()
    found = measure_machine()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (found.device, found.threads) == ("cpu", torch.get_num_threads())
    assert Machine.from_json(found.to_json()) == found
    x = torch.empty(1, 8, 1024, 16, device="meta")
    with use_machine(found):
        assert 0 < plan(x, x, x).seconds < 60


@pytest.mark.parametrize("device", ["nowhere", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device: str):
    with pytest.raises(InvalidArgument, match="device must be one that torch has here"):
        measure_machine(device)
