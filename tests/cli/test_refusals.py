"""What the commands say about damaged files and about prompts that a model cannot continue."""

import shutil

import pytest
import torch
from tests.training.tiny import write_text
from typer.testing import CliRunner, Result

from mercer.cli.main import app

SMALL = ["--dim", "16", "--layers", "1", "--heads", "2", "--length", "24", "--batch", "4", "--steps", "4"]
SMALL += ["--log-every", "2", "--eval-every", "2", "--checkpoint-every", "2", "--position", "learned"]
runner = CliRunner()


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def mercer(*arguments: object) -> Result:
    return runner.invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("run")
    assert mercer("train", "--text", text, "--out", folder, *SMALL, "-q").exit_code == 0
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """With a bit flipped in the weights of its last checkpoint."""
    folder = shutil.copytree(trained, tmp_path / "run")
    weights = folder / "checkpoints" / "step-00000004" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    return folder


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_a_run_whose_last_checkpoint_is_damaged_goes_on_and_says_so(run, text, quiet):
    result = mercer("train", "--text", text, "--out", run, *SMALL, *quiet)
    assert result.exit_code == 0, result.output
    notes = [line for line in result.stderr.splitlines() if line.startswith("Note: ")]
    (note,) = notes
    assert note == (
        "Note: the checkpoint of step 4 is damaged (model.safetensors has changed since it was written) and now called "
        "step-00000004.damaged: the run continues from step 2."
    )
    assert not quiet or len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", [["generate", "-p", "a"], ["info"]])
def test_a_damaged_checkpoint_is_not_read(run, command):
    result = mercer(command[0], run, *command[1:])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.endswith(
        "step-00000004 is damaged: model.safetensors has changed since it was written; there is also --checkpoint 2.\n"
    )
    assert mercer(command[0], run / "checkpoints" / "step-00000004", *command[1:]).exit_code == 2
    assert mercer(command[0], run, *command[1:], "--checkpoint", "2").exit_code == 0


def test_a_length_beyond_the_learned_positions_is_refused_before_the_prompt_is_printed(trained):
    result = mercer("generate", trained, "-p", "a", "-n", "1025")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "Error: the model has learned positions for max_length=1024 tokens, too few to continue a prompt of 1 by "
        "--max-tokens 1025; at most 1024 can follow.\n"
    )
