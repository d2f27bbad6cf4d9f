"""`mercer generate` past the trained length, and `mercer info` of models whose layers have to keep keys."""

import json

import pytest
import torch
from tests.cli.test_train import SMALL, mercer
from tests.training.tiny import write_text

from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.models.io import save_model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("longer")
    config = root / "config.json"
    config.write_text(json.dumps({"model": {"max_length": 24}}))
    steps = [*SMALL, "--steps", "2", "--eval-every", "2"]
    result = mercer("train", "--text", write_text(root / "text"), "-o", root / "run", "--config", config, *steps, "-q")
    assert result.exit_code == 0, result.output
    return root / "run"


def test_longer_texts_are_refused_with_the_flags_that_help(run):
    result = mercer("generate", run, "-p", "ab", "-n", "24")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "Error: the model has rotary positions for max_length=24 tokens, too few to continue a prompt of 2 by "
        "--max-tokens 24; at most 23 can follow, unless --rope-scaling ... scales its positions or --allow-longer lets "
        "them run on.\n"
    )
    assert mercer("generate", run, "-p", "ab", "-n", "23", "-q").exit_code == 0


@pytest.mark.parametrize(
    "flags",
    [
        ["--allow-longer"],
        ["--rope-scaling", "yarn=2"],
        ["--rope-scaling", "dynamic=1"],
        ["--rope-scaling", '{"rope_type": "linear", "factor": 2.5}'],
    ],
)
def test_longer_texts_with_a_flag(run, flags):
    result = mercer("generate", run, "-p", "ab", "-n", "40", *flags)
    assert result.exit_code == 0, result.output
    assert "40 written" in result.stderr


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ("yarn", "--rope-scaling is 'yarn'; write a type and a factor, as in yarn=4, or a JSON object"),
        ("{", "--rope-scaling is '{'; write a type and a factor"),
        ("stretch=2", "rope_type must be one of default, linear, ntk, dynamic"),
        ("yarn=0.5", "factor must be a number of 1 or more, not 0.5"),
        ("linear=1.5", "too few to continue a prompt of 2 by --max-tokens 40; at most 35 can follow"),
    ],
)
def test_scalings_that_do_not_serve_are_one_sentence(run, scaling, message):
    result = mercer("generate", run, "-p", "ab", "-n", "40", "--rope-scaling", scaling)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@torch.no_grad()
@pytest.mark.parametrize(
    "values", [{"position": "t5"}, {"rope_scaling": {"rope_type": "dynamic", "factor": 1.0}}], ids=str
)
def test_info_tells_that_keys_are_kept(values, tmp_path):
    config = ModelConfig(vocab_size=256, dim=16, layers=1, heads=2, attention="elu-sum", max_length=300, **values)
    model = DecoderLM(config)
    save_model(model, tmp_path)
    result = mercer("info", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    (layer,) = json.loads(result.stdout)["layers"]
    _, (state,) = model(torch.zeros(1, 256, dtype=torch.int64), return_states=True)
    size = state.keys.nbytes + state.values.nbytes
    assert (layer["state"], layer["state_bytes"]["256"]) == ("pairs", size)
