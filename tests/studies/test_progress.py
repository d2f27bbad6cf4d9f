import pytest

from mercer.studies import progress
from mercer.studies.progress import StudyProgress


def test_lines_where_no_bar_can_move(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with StudyProgress(100) as study:
        study.say("Begins.")
        assert study.seconds_left is None
        now = 20.0
        study.update(10, "softmax: step 10")
        now = 22.0
        study.update(11, "softmax: step 11")  # too soon for another line
        now = 40.0
        study.update(20, "softmax: step 20")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "Begins.",
        " 10 %  softmax: step 10, 3 min 0 s left for the study",
        " 20 %  softmax: step 20, 2 min 40 s left for the study",
    ]


def test_what_a_former_call_did_does_not_count_for_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    study = StudyProgress(100, done=40, quiet=True)
    study.found_done(10)  # the part that begins had a checkpoint at 10
    now = 10.0
    study.update(55, "")
    assert study.seconds_left == pytest.approx(90.0)  # five units in ten seconds, 45 to go


def test_quiet_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with StudyProgress(2, quiet=True) as study:
        study.say("Begins.")
        study.update(1, "half")
    assert capsys.readouterr() == ("", "")
