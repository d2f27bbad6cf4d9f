"""What reading a checkpoint takes at its peak, in a process of its own."""

import subprocess
import sys

import pytest

from mercer import checkpoints
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")

# Most of the weights are put together from pieces: queries, keys and values, gates; or transposed, for GPT-2.
SHAPE = {"vocab_size": 4096, "dim": 512, "layers": 12, "heads": 8, "tie_embeddings": True, "max_length": 128}
MODELS = {
    "llama": ModelConfig(**SHAPE, hidden=2048),
    "gpt2": ModelConfig(**SHAPE, feedforward="gelu_tanh", norm="layer", position="learned", bias=True),
}
PROGRAM = """
import sys, torch
from mercer import checkpoints
import mercer.checkpoints.reading

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))

def reset():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")

def load(folder):
    model = checkpoints.load(folder, dtype=sys.argv[3] if len(sys.argv) > 3 else None)
    return model, sum(float(p.detach().sum()) for p in model.parameters())  # every page is read

load(sys.argv[1])  # the code that is loaded on the way counts before
reset()
before = peak()
model, _ = load(sys.argv[2])
print((peak() - before) / sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_reading_takes_little_more_than_the_weights(family, dtype, tmp_path):
    config = MODELS[family]
    checkpoints.save(DecoderLM(config.model_copy(update={"layers": 1})), tmp_path / "small", family=family)
    checkpoints.save(DecoderLM(config), tmp_path / "large", family=family)
    command = [sys.executable, "-c", PROGRAM, tmp_path / "small", tmp_path / "large", *([dtype] if dtype else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 0.5 < float(done.stdout) < 1.2
