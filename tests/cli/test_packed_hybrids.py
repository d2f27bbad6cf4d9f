"""`mercer generate` and `mercer score` with packed weights, on decoders whose layers share a transformer block."""

import json

import pytest
import torch
from tests.cli.test_refusals import mercer
from tests.models.hub_tokenizers import byte_level, write_folder

from mercer import checkpoints
from mercer.models.shared_hybrid import SharedHybridLM
from mercer.models.shared_hybrid_config import SharedHybridConfig

pytestmark = pytest.mark.peers
KINDS = {
    "zamba": {"mixer": "mamba", "mixers": {"mamba": {"heads": 2, "state": 4}}},
    "zamba2": {"mixers": {"mamba2": {"state": 8, "head_dim": 16, "step_least": 0.001}}, "feedforward_rank": 4},
}


@pytest.mark.parametrize("family", KINDS)
def test_packed_weights_write_and_score_the_same(family, tmp_path):
    pytest.importorskip("numba")
    config = SharedHybridConfig(
        vocab_size=byte_level().get_vocab_size(), dim=32, heads=4, layers=3, shared_at=(0, 2), max_length=400,
        feedforward="geglu", position="none", attention_scale=8**-0.5, init_std=0.2, **KINDS[family],
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = SharedHybridLM(config)
    checkpoints.save(model, tmp_path / "model", family=family)
    folder = write_folder(tmp_path / "model", "byte-level")
    file = tmp_path / "a.txt"
    file.write_text("the cat sat on the mat. " * 3)
    common = ["generate", "-m", folder, "the cat", "-n", 12, "--temperature", 0, "-q"]
    plain, same, packed = (mercer(*common, *flags) for flags in ([], ["--weights", "as_is"], ["--weights", "int8"]))
    assert packed.exit_code == 0, packed.output
    assert same.stdout == plain.stdout
    assert packed.stdout.startswith("the cat")
    assert len(packed.stdout) > len("the cat\n")
    losses = [
        json.loads(mercer("score", "-m", folder, file, "--json", *flags).stdout)["loss"]
        for flags in ([], ["--weights", "as_is"], ["--weights", "int8"])
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    assert losses[2] == pytest.approx(losses[0], abs=0.1)
    assert losses[2] != pytest.approx(losses[0], abs=1e-5)
