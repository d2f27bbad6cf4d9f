"""The example and the benchmark run under torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run(*arguments: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    return answer.stdout


@pytest.mark.parametrize("attention", ["exp-sum", "taylor2-l2"])
def test_the_example(attention: str):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    said = run(*torchrun, "examples/ring_attention.py", "--attention", attention, "--length", "301", "--dim", "8")
    assert " exchange (" in said
    errors = re.findall(r"differs from one process by (\S+) of", said)
    assert len(errors) == 4
    assert all(float(error) < 1e-4 for error in errors)
    assert re.search(r"process 0 sent .* bytes of (keys|state)", said)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_benchmark():
    said = run("-m", "benchmarks.ring", "--quick", "--processes", "2", "--limit", "4")
    rows = [line for line in said.splitlines() if line.startswith(("softmax, ring", "elu, ", "taylor2 "))]
    assert len(rows) == 6
    assert all(" yes " in row for row in rows[:4])
