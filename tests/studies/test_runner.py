"""The run that all studies share, with a study that counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mercer.errors import Interrupted
from mercer.studies.folder import StudyFolder
from mercer.studies.progress import StudyProgress
from mercer.studies.runner import Study, check_counts


class Squares(Study[int, int]):
    """Parts 1 to 4 of that much work, whose results are their squares; 3 has none, and ``stop`` is interrupted."""

    def __init__(self, out: Path, stop: int | None = None) -> None:
        super().__init__("quick", out, "cpu", True)
        self.folder = StudyFolder(out, {"study": "squares"}, "squares")
        self.stop = stop
        self.measured: list[tuple[int, str, float]] = []
        self.pages: list[list[int]] = []

    def parts(self) -> list[int]:
        return [1, 2, 3, 4]

    def work(self, part: int) -> float:
        return float(part)

    def kept_at(self, part: int) -> tuple[Path, type[int]]:
        return self.out / f"points-{part}.json", int

    def opening(self) -> str:
        return f"{self.done:g} of 10"

    def measure(self, part: int, place: str, progress: StudyProgress) -> int | None:
        if part == self.stop:
            raise KeyboardInterrupt
        assert progress.total == 10
        self.measured.append((part, place, self.done))
        return None if part == 3 else part * part

    def write(self) -> Path:
        self.pages.append(list(self.results))
        return self.out / "page.html"


def test_each_part_is_measured_once_and_a_page_follows_each(tmp_path: Path) -> None:
    study = Squares(tmp_path)
    assert study.run() == tmp_path / "page.html"
    assert study.measured == [(1, "1/4", 0), (2, "2/4", 1), (3, "3/4", 3), (4, "4/4", 3)]
    assert study.pages == [[], [1], [1, 4], [1, 4, 16]]
    assert study.done == 7
    again = Squares(tmp_path)
    again.run()
    assert again.measured == [(3, "3/4", 7)]
    assert again.results == [1, 4, 16]


def test_a_stop_keeps_what_is_finished_and_the_time_worked(tmp_path: Path) -> None:
    with pytest.raises(Interrupted, match="run the same command again to continue in"):
        Squares(tmp_path, stop=2).run()
    assert json.loads((tmp_path / "work.json").read_text())["seconds"] > 0
    (tmp_path / "points-4.json").write_text("160")  # what is kept is read, not measured
    study = Squares(tmp_path)
    study.run()
    assert study.results == [1, 4, 160]
    assert study.measured == [(2, "2/4", 5), (3, "3/4", 7)]


def test_steps_that_fit_are_settled_once(tmp_path: Path) -> None:
    study = Squares(tmp_path)

    def never() -> dict[str, float]:
        raise AssertionError

    assert study.settle_steps(7, 100, 60.0, never, runs=2, evaluations=3) == 7
    assert study.settle_steps(None, 100, None, never, runs=2, evaluations=3) == 100
    # half a second for a step of both, two runs: somewhat less than 600 steps fit, less three for evaluations
    steps = study.settle_steps(None, 1000, 600.0, lambda: {"a": 0.25, "b": 0.25}, runs=2, evaluations=3)
    assert 500 < steps <= 597
    assert study.settle_steps(None, 1000, 600.0, never, runs=2, evaluations=3) == steps
    assert study.calibration == {"a": 0.25, "b": 0.25}


@pytest.mark.parametrize(
    "wrong", [{"seeds": 0}, {"steps": -1}, {"learning_rate": 0.0}, {"learning_rate": float("nan")}]
)
def test_numbers_out_of_range_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} is "):
        check_counts(**wrong)  # pyright: ignore[reportArgumentType]
