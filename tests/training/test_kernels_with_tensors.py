"""Runs of models whose kernels carry tensors: an interrupted one ends with the digits of one that was not."""

import signal

import pytest
import torch
from safetensors.torch import load_file
from tests.training.tiny import RECIPE, write_text

from mercer.errors import Interrupted
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.training import checkpoint
from mercer.training.data import Corpus
from mercer.training.loop import fit

ATTENTIONS = ["favor8-sum", "hedgehog-sum", "exp@4:mlp5-gate", "rfa8-layernorm"]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_an_interrupted_run_ends_where_an_undisturbed_one_does(tmp_path):
    config = ModelConfig(vocab_size=256, dim=16, layers=4, heads=2, attention=ATTENTIONS, gain="head", recency=True)
    corpus = Corpus.build([write_text(tmp_path / "text")], tmp_path / "cache")
    recipe = RECIPE.model_copy(update={"steps": 10, "checkpoint_every": 4, "eval_every": 5})

    def stop(progress):
        if progress.phase == "step" and progress.step == 6:
            signal.raise_signal(signal.SIGTERM)

    def build():
        torch.manual_seed(len(list(tmp_path.iterdir())))  # whatever the process drew before
        return DecoderLM(config)

    fit(build, {"kind": "whole"}, recipe, corpus, tmp_path / "whole")
    with pytest.raises(Interrupted, match="SIGTERM"):
        fit(build, {"kind": "whole"}, recipe, corpus, tmp_path / "parts", stop)
    fit(build, {"kind": "whole"}, recipe, corpus, tmp_path / "parts")
    one, two = (load_file(checkpoint.find(tmp_path / n) / "model.safetensors") for n in ("whole", "parts"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    start = DecoderLM(config).state_dict()
    moved = {name for name, tensor in start.items() if not torch.equal(tensor, one[name])}
    fixed = {name for name in one if name.rpartition(".")[2] in ("directions", "drawn")}
    assert len(fixed) == 4
    assert moved == one.keys() - fixed
