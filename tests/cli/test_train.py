"""`mercer train`, `mercer generate` and `mercer info`, from text to text."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.training.tiny import without_time, write_text
from typer.testing import CliRunner, Result

from mercer.cli.main import app
from mercer.core.state import State
from mercer.inference.generate import Piece
from mercer.models.io import load_model
from mercer.training.metrics import METRICS_FILE, read_metrics

ROOT = Path(__file__).parents[2]
SMALL = ["--dim", "16", "--layers", "2", "--heads", "2", "--length", "24", "--batch", "4", "--lr", "0.01"]
SMALL += ["--steps", "30", "--log-every", "5", "--eval-every", "15"]
runner = CliRunner()


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def mercer(*arguments: object, **keywords) -> Result:
    return runner.invoke(app, [str(argument) for argument in arguments], **keywords)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def run(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("runs") / "mixed"
    result = mercer("train", "--text", text, "-o", folder, *SMALL, "--attention", "elu-sum,softmax", "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["steps"] == 30
    assert values["held_out_loss"] == read_metrics(folder)[-1]["loss"]
    return folder


def test_progress_goes_to_standard_error_and_the_result_to_standard_output(tmp_path, text):
    result = mercer("train", "--text", text / "a.txt", text / "b.txt", "--out", tmp_path, *SMALL)
    assert result.exit_code == 0, result.output
    assert "30 steps" in result.stdout
    assert "bits a byte" in result.stdout
    lines = result.stderr.splitlines()
    assert [line.split()[0] for line in lines] == ["0/30", "15/30", "30/30"]
    assert "tokens/s" in lines[-1]
    assert json.loads((tmp_path / "run.json").read_text())["corpus"]["files"] == 2
    again = mercer("train", "--text", text / "a.txt", text / "b.txt", "--out", tmp_path, *SMALL, "--quiet")
    assert again.stderr == ""
    assert again.stdout.split("parameters")[0] == result.stdout.split("parameters")[0]


def test_a_config_file_with_flags_before_it(tmp_path, text):
    config = tmp_path / "config.json"
    model = {"dim": 16, "layers": 1, "heads": 2, "attention": ["taylor2-l2"], "gain": "head", "gain_init": 0.2}
    recipe = {"steps": 5, "batch": 4, "length": 24, "clip": None, "dtype": "bfloat16"}
    plan = {"text": [str(text)], "vocabulary": "bpe:300", "held_out": 0.4, "model": model, "train": recipe}
    config.write_text(json.dumps(plan))
    result = mercer("train", "--config", config, "--out", tmp_path / "run", "--steps", 6, "--seed", 7, "-j", 1)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["train"] | recipe | {"steps": 6, "seed": 7} == record["train"]
    assert record["model"] | model | {"vocab_size": 300, "seed": 7} == record["model"]
    assert record["corpus"]["split"]["share"] == 0.4
    assert (tmp_path / "run" / "checkpoints" / "step-00000006" / "tokenizer.json").exists()
    result = mercer("generate", tmp_path / "run", "-p", "1000 squared is", "-n", 12, "-q")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("1000 squared is")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "none.txt"], "there is no file or folder none.txt"),
        ([], "name the text to learn from: --text with files, folders or globs"),
        (["--text", "TEXT", "--dim", "33"], "dim 33 is not a multiple of 8 heads; set head_dim"),
        (["--text", "TEXT", "--attention", "softmaxx"], "softmaxx"),
        (["--text", "TEXT", "--steps", "0"], "steps must be 1 or more"),
        (["--text", "TEXT", "--vocabulary", "words"], "vocabulary 'words' is unknown"),
        (["--text", "TEXT", "--held-out", "2"], "the held-out share is 2.0; it lies between 0 and 1"),
        (["--text", "TEXT", "--threads", "0"], "--threads is 0; at least 1 is needed"),
        (["--text", "TEXT", "--held-out", "0"], "the held-out share is 0.0; it lies between 0 and 1"),
        (["--text", "TEXT", "--length", "9999"], "text is too short: a window of --length 9999 needs 10000 tokens"),
        (["--text", "TEXT", "--attention", "taylor3-sum"], "use taylor3-l2, taylor3-rms, an even order such as"),
        (["--text", "TEXT", "--attention", "softmax," * 4 + "elu-sum"], "attention has 5 names for 4 layers"),
        (["--text", "TEXT", "--attention-scale", "nan"], "attention_scale must be a finite number"),
        (["--text", "TEXT", "--device", "abacus"], "device 'abacus' is not usable here; use 'auto'"),
        (["--text", "TEXT", "--seed", "-1"], "seed must be 0 or more"),
        (["--text", "TEXT", "--config", "none.json"], "none.json: no such file"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(tmp_path, text, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = mercer("train", "-o", tmp_path / "run", *(str(text) if a == "TEXT" else a for a in arguments))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "must hold a JSON object with any of the keys text,"),
        ('{"mode": {}}', "has the unknown key 'mode'; known are text,"),
        ('{"model": []}', "model must be a JSON object"),
        ('{"text": "a"}', "text must be a JSON array"),
        ('{"text": [3]}', "text and held_out_text are arrays of strings"),
        ('{"held_out": "a lot"}', "held_out must be a JSON number"),
        ('{"vocabulary": 256}', "vocabulary must be a JSON string"),
        ('{"model": {"width": 3}}', "model configuration: 'width' is unknown"),
        ("{", "it is not valid JSON"),
    ],
)
def test_a_bad_config_file(tmp_path, text, content, message):
    (tmp_path / "c.json").write_text(content)
    result = mercer("train", "-o", tmp_path / "run", "--config", tmp_path / "c.json", "--held-out-text", text, text)
    assert result.exit_code == 2
    assert message in result.stderr


def test_without_a_folder(text):
    result = mercer("train", "--text", text)
    assert (result.exit_code, result.stderr) == (2, "Error: name the run's folder with --out.\n")


def test_another_recipe_in_the_same_folder_and_restart(tmp_path, text):
    common = ["train", "--text", text, "--out", tmp_path, *SMALL, "-q"]
    assert mercer(*common).exit_code == 0
    refused = mercer(*common, "--lr", "0.02")
    assert refused.exit_code == 2
    assert "begun with --learning-rate = 0.01, now it is 0.02; " in refused.stderr
    assert refused.stderr.endswith("or give --restart.\n")
    assert "begun with --attention = 'softmax', now it is 'exp-l2'" in mercer(*common, "--attention", "exp-l2").stderr
    assert "begun with --length = 24, now it is 12" in mercer(*common, "--length", "12").stderr
    other = mercer(*common, "--held-out", "0.3")
    assert (other.exit_code, "begun with another split of the text; " in other.stderr) == (2, True)
    assert mercer(*common, "--lr", "0.02", "--restart").exit_code == 0


def test_a_run_that_diverged_before_its_first_checkpoint_settles_nothing(tmp_path, text):
    common = ["train", "--text", text, "--out", tmp_path, *SMALL, "-q"]
    lost = mercer(*common, "--lr", "1e30")
    assert (lost.exit_code, "no checkpoint was due yet" in lost.stderr) == (2, True)
    again = mercer(*common, "--dim", "32", "--json")
    assert again.exit_code == 0, again.stderr
    assert json.loads((tmp_path / "run.json").read_text())["model"]["dim"] == 32


def test_a_run_inside_its_text_does_not_learn_from_itself(tmp_path):
    folder = write_text(tmp_path / "text")
    common = ["train", "--text", folder, "--out", folder / "runs" / "one", *SMALL]
    first = mercer(*common)
    assert first.exit_code == 0, first.stderr
    again = mercer(*common)
    assert again.exit_code == 0, again.stderr
    assert f"Note: {folder / 'runs' / 'one'} is left out of the text: " in again.stderr
    assert json.loads((folder / "runs" / "one" / "run.json").read_text())["corpus"]["files"] == 3
    (folder / "a.txt").write_text("something else " * 40)
    assert "holds a run begun with another text, or the text has changed since; " in mercer(*common).stderr


def test_generate_is_reproducible_and_greedy_is_the_likeliest(run):
    def write(*options):
        result = mercer("generate", run, "-p", "12 squared", "-n", 20, *options)
        assert result.exit_code == 0, result.output
        return result

    assert write().stdout == write().stdout
    assert write("--seed", 1).stdout != write("--seed", 2).stdout
    assert "10 tokens read, 20 written" in write().stderr
    greedy = write("--temperature", 0, "--no-echo", "-q")
    assert greedy.stderr == ""
    model = load_model(max((run / "checkpoints").iterdir()))
    tokens = list(b"12 squared")
    for _ in range(20):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert greedy.stdout == bytes(tokens[10:]).decode("utf-8", "replace") + "\n"


def test_generate_reads_standard_input(run):
    given = mercer("generate", run, "-p", "-", "-n", 3, "-q", input="café")
    assert given.stdout == mercer("generate", run, "-p", "café", "-n", 3, "-q").stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-p", ""], "the prompt is empty"),
        (["-p", "x", "--temperature", "-1"], "--temperature is -1.0"),
        (["-p", "x", "--checkpoint", "7"], "has no checkpoint '7'; there are last, best, 30"),
        (["-p", "x", "--device", "abacus"], "device 'abacus' is not usable here; use 'auto'"),
        (["-p", "x", "-n", "-3"], "--max-tokens is -3; it is at least 0."),
        (["-p", "x", "--seed", "-1"], "--seed is -1; it is at least 0"),
        (["-p", "x", "--top-k", "0"], "--top-k is 0; it is a whole number from 1."),
        (["-p", "x", "--top-p", "2"], "--top-p is 2.0; it is above 0 and at most 1."),
    ],
)
def test_generate_refuses_in_one_sentence(run, options, message):
    result = mercer("generate", run, *options)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_one_checkpoint_is_not_asked_for_another(run):
    for command in (["generate", "-p", "x"], ["info"]):
        result = mercer(command[0], run / "checkpoints" / "step-00000030", *command[1:], "--checkpoint", "30")
        assert result.exit_code == 2
        assert "is itself a checkpoint or model; name the run's folder to use --checkpoint." in result.stderr


def test_generate_stopped_says_how_far_it_came(run, monkeypatch):
    def stop(*_, **__):
        yield from (Piece(0, ord(text), text) for text in "ab")
        raise KeyboardInterrupt

    monkeypatch.setattr("mercer.inference.generate.stream", stop)
    result = mercer("generate", run, "-p", "x", "-n", 9)
    assert (result.exit_code, result.stdout) == (130, "xab\n")
    assert result.stderr == "Interrupted: 2 of 9 tokens were written.\n"


def test_folders_without_a_model(tmp_path):
    (tmp_path / "file").write_text("x")
    for command in (["generate", "-p", "x"], ["info"]):
        assert (
            "file is a file; name the folder of a run" in mercer(*command[:1], tmp_path / "file", *command[1:]).stderr
        )
    assert "there is no folder" in mercer("generate", tmp_path / "none", "-p", "x").stderr
    assert "has no checkpoint; train first" in mercer("info", tmp_path).stderr


def state_bytes(states: list[State]) -> list[int]:
    """Without the bookkeeping (lengths, decays, names), which no plan counts."""
    big = ("keys", "values", "features", "mass")
    return [sum(t.nbytes for name, t in state.tensors().items() if name in big) for state in states]


def test_info_tells_the_state_as_it_is(run):
    result = mercer("info", run, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert [layer["attention"] for layer in facts["layers"]] == ["elu-sum", "softmax"]
    assert [layer["state"] for layer in facts["layers"]] == ["features", "pairs"]
    model = load_model(max((run / "checkpoints").iterdir()))
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        _, states = model(torch.zeros(1, 256, dtype=torch.int64), return_states=True)
    assert [layer["state_bytes"]["256"] for layer in facts["layers"]] == state_bytes(states)
    assert facts["state_bytes"]["1024"] == state_bytes(states)[0] + 4 * state_bytes(states)[1]
    assert facts["last_eval"] == read_metrics(run)[-1]
    assert facts["checkpoints"] == [30]


def test_info_for_people_and_for_one_checkpoint(run):
    printed = mercer("info", run).stdout
    for part in (
        "1 elu-sum features",
        "2 softmax cache 32.8 kB 131 kB",
        "bits a byte",
        "30 of 30 steps",
        "attention elu-sum, softmax",
    ):
        assert part in " ".join(printed.replace("│", " ").split())
    (line,) = (line for line in printed.splitlines() if line.startswith("text: "))  # piped: whole, whatever its length
    assert "sha256 " in line
    assert "held out" in line
    assert printed.endswith("bits a byte\n")
    assert "checkpoints:" not in mercer("info", run / "checkpoints" / "step-00000030").stdout


def start(run: Path, text: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "mercer.cli", "train", "--text", str(text), "--out", str(run), *SMALL]
    command += ["--steps", "100", "--checkpoint-every", "20", "--dtype", "bfloat16"]
    command += ["--attention", "taylor2-l2,softmax"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    _, errors = process.communicate(timeout=120)
    return process.returncode, errors


@pytest.mark.slow
def test_the_command_killed_and_interrupted_ends_at_the_same_digits(tmp_path, text):
    whole, run = tmp_path / "whole", tmp_path / "killed"
    code, errors = finish(start(whole, text))
    assert code == 0, errors
    for lines, number, expected in ((6, signal.SIGKILL, -signal.SIGKILL), (14, signal.SIGINT, 130)):
        process = start(run, text)
        deadline = time.monotonic() + 60
        metrics = run / METRICS_FILE
        while not (metrics.exists() and metrics.read_text().count("\n") > lines) and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(number)
        code, errors = finish(process)
        assert code == expected, errors
        assert len(read_metrics(run)) < len(read_metrics(whole))
    assert "of 100, which is saved; run the same command again to continue in" in errors
    assert finish(start(run, text))[0] == 0
    assert without_time(read_metrics(run)) == without_time(read_metrics(whole))
    for name in ("model.safetensors", "optimizer.safetensors"):
        there, here = (folder / "checkpoints" / "step-00000100" / name for folder in (whole, run))
        assert there.read_bytes() == here.read_bytes()


def test_a_structure_by_name_from_training_to_text(tmp_path, text):
    out = tmp_path / "run"
    options = ["--structure", "window(6, dilation=2)|global( first=2 ),strided(4)", "--attention", "exp-l2"]
    result = mercer("train", "--text", text, "-o", out, *SMALL, *options)
    assert result.exit_code == 0, result.output
    assert "cannot write" not in result.stderr
    sparse = ["window(6, dilation=2) | global(first=2)", "strided(4)"]
    assert json.loads((out / "run.json").read_text())["model"]["structure"] == sparse
    again = mercer("train", "--text", text, "-o", out, *SMALL, *options)  # finished: nothing is left to do
    assert again.exit_code == 0, again.output
    other = mercer("train", "--text", text, "-o", out, *SMALL, "--structure", "causal", "--attention", "exp-l2")
    assert other.exit_code == 2
    assert "--structure = " in other.stderr
    for command in (["info", out], ["info", out, "--json"]):
        shown = mercer(*command)
        assert shown.exit_code == 0, shown.output
        assert all(name in shown.stdout for name in sparse)
    facts = json.loads(mercer("info", out, "--json").stdout)
    keys_and_values = 2 * 8 * 2 * 4  # two heads of 8 channels in float32
    assert [layer["structure"] for layer in facts["layers"]] == sparse
    assert [layer["state_bytes"]["1024"] for layer in facts["layers"]] == 2 * [1024 * keys_and_values]
    written = mercer("generate", out, "-p", "the ", "-n", 40, "--temperature", 0, "-q")
    assert written.exit_code == 0, written.output
    model = load_model(max((out / "checkpoints").iterdir())).eval()
    tokens = list(written.stdout.encode())[:-1]
    with torch.no_grad():
        logits = model(torch.tensor([tokens]))[0]
    assert logits.argmax(-1)[3:-1].tolist() == tokens[4:]


def test_a_model_that_cannot_write_is_trained_with_a_note(tmp_path, text):
    out = tmp_path / "run"
    result = mercer("train", "--text", text, "-o", out, *SMALL, "--structure", "bigbird(4)")
    assert result.exit_code == 0, result.output
    assert "Note: the structure 'bigbird(4)' of layer 1 depends on the length" in result.stderr
    refused = mercer("generate", out, "-p", "the ")
    assert refused.exit_code == 2
    assert not refused.stdout
    assert "no state can continue it and the model cannot write a text; structures such as bigbird" in refused.stderr
    shown = mercer("info", out)
    assert shown.exit_code == 0, shown.output
    assert "none" in shown.stdout
    assert "bigbird(4)" in shown.stdout
    assert json.loads(mercer("info", out, "--json").stdout)["state_bytes"] is None


def test_an_unknown_structure_is_refused_before_the_text_is_read(tmp_path, text):
    result = mercer("train", "--text", text, "-o", tmp_path / "run", *SMALL, "--structure", "sparse(3)")
    assert result.exit_code == 2
    assert "'sparse' is unknown; write causal, window(width, dilation=1)" in result.stderr
    assert not (tmp_path / "run").exists()
