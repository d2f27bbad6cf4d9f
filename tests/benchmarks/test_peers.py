"""The peers of the benchmarks give the answers that they are held to, and one that is missing is said to be."""

import builtins
import importlib.util

import pytest
import torch
from benchmarks._contest import AGREES, error_of
from benchmarks._peers import PEERS, _naive, peers
from benchmarks._tasks import TASKS
from benchmarks._work import Shape

from benchmarks import _contest, _device_rivals, _fast_transformers

# distutils and torch.jit are used while these packages are imported; it is their import that warns, not ours.
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("task", TASKS)
def test_peers_agree_or_say_in_what_they_differ(task: str, dtype: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_contest, "CHECKED", 256)
    found, missing = peers(task, 16)
    assert set(missing) <= {"fast-transformers"}, "of the extra peers none may be missing"
    assert len(found) >= 2 or task == "softmax"
    for one in found:
        if dtype not in one.dtypes:
            continue
        error = error_of(one, task, 16, dtype, CPU)
        if one.difference("float32"):
            assert error > AGREES["float32"], f"{one.name} says it differs, but does not"
        else:
            assert error <= AGREES[dtype], f"{one.name}: {error:.1e}"
        assert one.memory(Shape(1, 8, 2048, 16), True) >= one.memory(Shape(1, 8, 2048, 16), False) >= 0


def test_what_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch):
    real, find = builtins.__import__, importlib.util.find_spec

    def refuse(name: str, *rest: object, **more: object) -> object:
        if name.partition(".")[0] in ("performer_pytorch", "x_transformers", "linear_attention_transformer"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(importlib, "import_module", refuse)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fla" else find(name))
    monkeypatch.setattr(_fast_transformers, "COMPILED", _fast_transformers.ROOT / "nowhere.so")
    from benchmarks._peers import _module

    _module.cache_clear()
    missing: dict[str, str] = {}
    for task in TASKS:
        missing |= peers(task, 16)[1]
    assert set(missing) == set(PEERS) - {"torch", "sata"}
    assert "python -m benchmarks._fast_transformers" in missing["fast-transformers"]
    assert "fla" in missing["fla"]


def test_fla_is_called_as_it_wants_to_be():
    """Its Triton forms need a GPU; the naive recurrent one has the same arguments and layout."""
    run = _device_rivals._fla(_naive("linear_attn", "naive_recurrent_linear_attn"))
    assert _device_rivals.rival_error("fla", run, "float32", CPU) < 1e-5


@pytest.mark.skipif(not _fast_transformers.COMPILED.exists(), reason="built by python -m benchmarks._fast_transformers")
def test_loading_a_peer_leaves_subnormal_numbers():
    _fast_transformers.causal_product()
    smallest = torch.tensor([torch.finfo(torch.float64).smallest_normal], dtype=torch.float64)
    assert float(smallest / 4) > 0
