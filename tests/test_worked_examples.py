"""The worked examples of pages and docstrings give what they show."""

import doctest
import importlib
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.peers
@pytest.mark.parametrize("page", ["approximation.md", "kernels.md", "memory.md", "regression.md"])
def test_page(page):
    results = doctest.testfile(str(DOCS / page), module_relative=False)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize(
    "module",
    [
        "mercer.approximation.estimate",
        "mercer.memory.associative",
        "mercer.memory.measure",
        "mercer.regression.estimator",
        "mercer.regression.function",
    ],
)
def test_docstrings(module):
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted > 0
    assert results.failed == 0
