"""The benchmark of crossings: what it reads off between the lengths it times, and that its calls are the real ones."""

from collections.abc import Callable, Mapping

import pytest
import torch

from benchmarks import _clock, crossings


def fake(monkeypatch: pytest.MonkeyPatch, at: float) -> list[int]:
    """Times of softmax that grow with the length and of others that do not, equal at ``at``."""
    lengths: list[int] = []

    def call(name: str, dim: int, phase: str, length: int) -> Callable[[], object]:
        if name == "softmax":
            lengths.append(length)
        return lambda: float(length) if name == "softmax" else at

    def interleave(calls: Mapping[str, Callable[[], float]], *_: object) -> dict[str, list[float]]:
        return {name: [run()] for name, run in calls.items()}

    monkeypatch.setattr(crossings, "call", call)
    monkeypatch.setattr(_clock, "interleave", interleave)
    return lengths


@pytest.mark.parametrize("at", [500.0, 1000.0, 2000.0])
def test_the_crossing_is_read_off(at: float, monkeypatch: pytest.MonkeyPatch):
    lengths = fake(monkeypatch, at)
    assert crossings.measure("elu-sum", 16, "decode", 1000, 3) == pytest.approx(at)
    assert lengths == [400, 630, 1000, 1600, 2500]


def test_beyond_the_lengths_timed_there_is_none(monkeypatch: pytest.MonkeyPatch):
    fake(monkeypatch, 5000.0)
    assert crossings.measure("elu-sum", 16, "decode", 1000, 3) is None


def test_quicker_from_the_first_length_on_is_that_length(monkeypatch: pytest.MonkeyPatch):
    lengths = fake(monkeypatch, 1.0)
    assert crossings.measure("elu-sum", 16, "decode", 1, 3) == 16
    assert lengths == [16, 32, 64, 128, 256, 512]


@pytest.mark.parametrize("phase", ["reading", "decode"])
def test_a_call_computes_what_it_names(phase: str, monkeypatch: pytest.MonkeyPatch):
    import mercer

    seen: list[tuple[int, bool]] = []
    real = mercer.attention

    def attention(query: torch.Tensor, *rest: torch.Tensor, **parts: object) -> object:
        seen.append((query.shape[2], parts.get("state") is not None))
        return real(query, *rest, **parts)

    monkeypatch.setattr(mercer, "attention", attention)
    run = crossings.call("elu-sum", 16, phase, 20)
    run()
    assert seen == ([(20, False)] if phase == "reading" else [(20, False), *[(1, True)] * 8])
