"""The package's face: what it offers, and that asking for it costs nothing until it is used."""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import mercer

HEAVY = {
    "torch",
    "numpy",
    "numba",
    "transformers",
    "sklearn",
    "plotly",
    "tokenizers",
    "pydantic",
    "jinja2",
    "tensorboard",
}


def heavy_after(*lines: str) -> set[str]:
    """The heavy packages that a fresh interpreter has imported after these lines."""
    code = "\n".join(["import sys", *lines, "print('\\n'.join({name.partition('.')[0] for name in sys.modules}))"])
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return HEAVY & set(result.stdout.split())


@pytest.mark.parametrize("line", ["import mercer", "import mercer.cli.main", "from mercer import InvalidArgument"])
def test_import_is_light(line: str) -> None:
    assert heavy_after(line) == set()


def test_help_is_light() -> None:
    run = "try:\n    from mercer.cli.main import main; main()\nexcept SystemExit as end:\n    assert end.code == 0"
    assert heavy_after("sys.argv = ['mercer', '--help']", run) == set()


def test_a_model_without_values_is_made_without_torchs_compiler() -> None:
    """Which takes longer to import than torch itself; models that are read from files begin so."""
    code = """
import sys, torch
from mercer.inference.engine import prepare
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
with torch.device("meta"):
    DecoderLM(ModelConfig(vocab_size=9, dim=8, layers=2, heads=2, attention=["softmax", "taylor2-sum"]))
print({"torch._dynamo", "sympy"} & set(sys.modules))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_the_probe_sees_a_heavy_import() -> None:
    assert "torch" in heavy_after("import mercer", "mercer.attention")


@pytest.mark.parametrize("name", mercer.__all__)
def test_every_name_is_found(name: str) -> None:
    assert getattr(mercer, name) is not None
    assert name in dir(mercer)


def test_public_functions_are_not_hidden_by_modules() -> None:
    """A submodule called like a function would take its place as soon as it is imported."""
    assert [name for name in mercer.__all__ if find_spec(f"mercer.{name}")] == []


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(mercer.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (statement.module, alias.name)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert seen == {(home, name) for home, names in mercer._HOMES.items() for name in names}
    assert {name for _, name in seen} | {"__version__"} == set(mercer.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'softmax'"):
        mercer.softmax  # noqa: B018
