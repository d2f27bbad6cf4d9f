"""`mercer advise`: a table, JSON, numbers of a machine from a file, and what it says of wrong ones."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mercer.cli.main import app
from mercer.core.machine_default import DEFAULT

SIZES = ("--dim", 16, "--heads", 4, "--context", 2048)
runner = CliRunner()


def mercer(*arguments: object) -> Result:
    return runner.invoke(app, ["advise", *map(str, arguments)])


def test_a_table():
    result = mercer(*SIZES, "-a", "elu-l2", "-a", "taylor2-sum")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("4 heads of 16, 2,048 tokens, batch 1, float32")
    assert [line.split()[0] for line in lines[3:7:2]] == ["elu-l2", "taylor2-sum"]
    assert result.stderr == ""


def test_json_of_what_was_asked():
    result = mercer(
        *SIZES, "--kv-heads", 2, "--value-dim", 8, "--batch", 3, "--dtype", "bfloat16", "--training", "--json"
    )
    facts = json.loads(result.stdout)
    asked = {name: facts[name] for name in ("heads", "kv_heads", "value_dim", "batch", "dtype", "training")}
    assert asked == {"heads": 4, "kv_heads": 2, "value_dim": 8, "batch": 3, "dtype": "bfloat16", "training": True}
    assert facts["cache_bytes"] == 3 * 2 * 2048 * (16 + 8) * 2


def test_under_a_structure():
    result = mercer(*SIZES, "-a", "elu-l2", "--structure", "window( 64 )")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("4 heads of 16, 2,048 tokens under window(64), batch 1, float32")
    wrong = mercer(*SIZES, "--structure", "window")
    assert wrong.exit_code == 2
    assert "window needs its width; write window(width, dilation=1)" in wrong.stderr


def test_numbers_from_a_file(tmp_path: Path):
    file = tmp_path / "machine.json"
    file.write_text(replace(DEFAULT, name="from a file").to_json())
    assert json.loads(mercer(*SIZES, "--machine", file, "--json").stdout)["machine"] == "from a file"


def test_measured_numbers_are_used_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measured = replace(DEFAULT, name="measured")
    monkeypatch.setattr("mercer.advice.measure_machine", lambda _device: measured)
    file = tmp_path / "machine.json"
    result = mercer(*SIZES, "--measure", "--machine", file, "--json")
    assert json.loads(result.stdout)["machine"] == "measured"
    assert file.read_text() == measured.to_json()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch", 0), "batch must be an integer of 1 or more, not 0."),
        (("--kv-heads", 3), "kv_heads must divide the 4 heads"),
        (("-a", "best"), "Unknown attention 'best'"),
        (("--device", "cuda"), "the numbers in use are of a cpu"),
        (("--machine", "no-such-file.json"), "cannot read no-such-file.json"),
    ],
)
def test_wrong_input_is_one_sentence(arguments: tuple[object, ...], message: str):
    result = mercer(*SIZES, *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_a_file_of_something_else_is_named(tmp_path: Path):
    file = tmp_path / "machine.json"
    file.write_text('{"name": "half a machine"}')
    result = mercer(*SIZES, "--machine", file)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {file}: A machine in JSON is an object of")
