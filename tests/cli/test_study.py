"""`mercer study` and `mercer report`: every option arrives, and what is printed is the page."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.studies import examples
from typer.testing import CliRunner

from mercer.cli.main import app
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.models.io import save_model
from mercer.studies import approximation, cost, orders, positions, recall
from mercer.studies.records import write_record
from mercer.training.integrity import seal

COMMON = {"attentions": ("exp-l2", "elu-sum"), "device": "cpu", "quiet": True}
SHARED = ["--budget", "full", "-a", "exp-l2", "--attention", "elu-sum", "--device", "cpu", "-q", "-o", "there"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def run(budget: str, out: Path, **options: Any) -> Path:
        found.append({"budget": budget, "out": out} | options)
        return Path("page.html")

    for study in (orders, recall, cost, approximation, positions):
        monkeypatch.setattr(study, "run", run)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # the command would set it for the whole process
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/mercer", "study", "orders", "--text", "two words.txt"])
    return found


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (
            ["orders", "--text", "a", "--text", "b", "--seeds", "2", "--steps", "7", "--lr", "0.1"],
            {"text": ["a", "b"], "seeds": 2, "steps": 7, "learning_rate": 0.1, "layers": None},
        ),
        (
            ["recall", "--seeds", "2", "--steps", "7", "--layers", "8", "--pattern", "7*gla,softmax", "-p", "gla"],
            {"seeds": 2, "steps": 7, "layers": 8, "attentions": (*COMMON["attentions"], "7*gla,softmax", "gla")},
        ),
        (["cost"], {}),
        (
            ["approximation", "--text", "a", "--steps", "7", "--target", "0.05"],
            {"text": ["a"], "steps": 7, "target": 0.05, "model": None},
        ),
    ],
)
def test_every_option_arrives(calls: list[dict[str, Any]], words: list[str], more: dict[str, Any]) -> None:
    done = CliRunner().invoke(app, ["study", *words, *SHARED])
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == "page.html"
    (call,) = calls
    call["attentions"] = tuple(call["attentions"])
    command = "mercer study orders --text 'two words.txt'"
    assert call == {"budget": "full", "out": Path("there"), "command": command} | COMMON | more


def test_every_option_of_positions_arrives(calls: list[dict[str, Any]]) -> None:
    words = [
        "--budget",
        "full",
        "-p",
        "alibi",
        "--position",
        "rotary+yarn",
        "--text",
        "a",
        "--seeds",
        "2",
        "--steps",
        "7",
    ]
    done = CliRunner().invoke(
        app, ["study", "positions", *words, "--lr", "0.1", "--device", "cpu", "-q", "-o", "there"]
    )
    assert done.exit_code == 0, done.output
    (call,) = calls
    assert call == {
        "budget": "full", "out": Path("there"), "text": ["a"], "positions": ["alibi", "rotary+yarn"], "seeds": 2,
        "steps": 7, "learning_rate": 0.1, "device": "cpu", "quiet": True, "command": call["command"],
    }  # fmt: skip


def test_the_folder_has_the_names_of_study_and_budget(calls: list[dict[str, Any]]) -> None:
    for words in (["orders"], ["recall", "--budget", "standard"], ["cost"], ["approximation"], ["positions"]):
        CliRunner().invoke(app, ["study", *words])
    assert [str(call["out"]) for call in calls] == [
        "runs/orders-quick",
        "runs/recall-standard",
        "runs/cost-quick",
        "runs/approximation-quick",
        "runs/positions-quick",
    ]


def test_a_wrong_option_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    for study in ("orders", "recall", "cost", "approximation", "positions"):
        done = CliRunner().invoke(app, ["study", study, "--budget", "tiny", "-o", str(tmp_path / study)])
        assert done.exit_code == 2
        assert done.stderr.splitlines() == ["Error: budget 'tiny' is unknown; use quick, standard, full."]
    assert list(tmp_path.iterdir()) == []


def test_a_number_out_of_range_is_named_as_its_flag(tmp_path: Path) -> None:
    for study, flag, value in (
        ("orders", "--steps", "0"),
        ("recall", "--seeds", "-1"),
        ("orders", "--lr", "nan"),
        ("approximation", "--target", "1.0"),
        ("approximation", "--steps", "0"),
        ("positions", "--seeds", "0"),
        ("positions", "--lr", "0.0"),
    ):
        done = CliRunner().invoke(app, ["study", study, flag, value, "-o", str(tmp_path / study)])
        assert done.exit_code == 2
        name = "--learning-rate" if flag == "--lr" else flag
        assert done.stderr.startswith(f"Error: {name} is {value}; it must be ")
    (tmp_path / "line.txt").write_text("x" * 300)
    done = CliRunner().invoke(app, ["study", "orders", "--text", str(tmp_path / "line.txt"), "-o", str(tmp_path / "o")])
    assert done.stderr.startswith("Error: the held-out text is too short: a window of length=256 needs 257 tokens")
    (tmp_path / "line.txt").unlink()
    assert list(tmp_path.iterdir()) == []


def test_a_report_is_rendered_again(tmp_path: Path) -> None:
    path = write_record(examples.recall(), tmp_path)
    done = CliRunner().invoke(app, ["report", str(path)])
    assert done.stdout.strip() == str(tmp_path / "recall.html")
    other = tmp_path / "other.html"
    assert CliRunner().invoke(app, ["report", str(path), "-o", str(other)]).exit_code == 0
    assert other.read_bytes() == (tmp_path / "recall.html").read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: no such file or directory."),
        (
            b"{}",
            (
                "is not the JSON of a mercer study: its key 'study' must be orders, recall, cost, approximation or "
                "positions."
            ),
        ),
        (b"[", "is not the JSON of a mercer study: it is not valid JSON."),
        (b"\xff\xfe", "is not the JSON of a mercer study: it is not text."),
        (b'{"study": "cost"}', "is not the JSON of a mercer study: finished is missing."),
        ("folder", "cannot be read: is a directory."),
    ],
)
def test_a_report_of_something_else_is_refused(tmp_path: Path, content: bytes | str | None, message: str) -> None:
    path = tmp_path / "some.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        path.mkdir()
    done = CliRunner().invoke(app, ["report", str(path)])
    assert (done.exit_code, done.stderr) == (2, f"Error: {path} {message}\n")


def test_a_stop_of_the_study_of_cost_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mercer.cli", "study", "cost", "-a", "softmax", "-o", str(tmp_path / "cost")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("12 lengths and phases, 5 repeats each")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == (
        f"Interrupted: what was finished is kept; run the same command again to continue in {tmp_path / 'cost'}."
    )
    assert "Traceback" not in errors


def test_a_model_is_found_in_its_run_and_a_missing_one_is_one_sentence(
    calls: list[dict[str, Any]], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    save_model(DecoderLM(ModelConfig(vocab_size=8, dim=8, layers=1, heads=2)), checkpoint)
    for name in ("optimizer.safetensors", "trainer.json"):  # a checkpoint of training has them, and none is read here
        (checkpoint / name).write_text("{}")
    seal(checkpoint)
    for folder in (tmp_path / "run", checkpoint):
        done = CliRunner().invoke(app, ["study", "approximation", "--model", str(folder)])
        assert done.exit_code == 0, done.output
    assert [call["model"] for call in calls] == [checkpoint, checkpoint]
    done = CliRunner().invoke(app, ["study", "approximation", "--model", str(tmp_path / "nothing")])
    assert (done.exit_code, done.stderr) == (2, f"Error: there is no folder {tmp_path / 'nothing'}.\n")
    (checkpoint / "model.safetensors").write_bytes(b"damaged")
    done = CliRunner().invoke(app, ["study", "approximation", "--model", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert "is damaged" in done.stderr
