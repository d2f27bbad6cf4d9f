"""The plain torch loops of flash-linear-attention, by file: its package imports Triton, which is not here."""

from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any


def naive(operator: str, name: str) -> Callable[..., Any]:
    """A function of `fla/ops/<operator>/naive.py`."""
    package = find_spec("fla")
    assert package is not None
    assert package.submodule_search_locations is not None
    path = Path(next(iter(package.submodule_search_locations))) / "ops" / operator / "naive.py"
    spec = spec_from_file_location(f"fla_naive_{operator}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)
