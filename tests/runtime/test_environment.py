"""The description of the environment that reports carry."""

import json

import torch

from mercer import __version__
from mercer.runtime.allocator import allocator
from mercer.runtime.environment import cores, environment, memory_bytes, processor


def test_it_is_complete_and_fits_into_json(monkeypatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    facts = json.loads(json.dumps(environment()))
    assert facts["packages"]["mercer"] == __version__
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["variables"]["OMP_WAIT_POLICY"] == "passive"
    assert facts["allocator"]["tuned"] is allocator().tuned
    assert facts["allocator"]["reason"]


def test_the_machine_is_described() -> None:
    assert processor()
    assert cores() >= 1
    memory = memory_bytes()
    assert memory is None or memory > 1 << 28
