"""The Python blocks of README and of these pages run, top to bottom."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/architecture.md",
        "docs/advise.md",
        "docs/checkpoints.md",
        "docs/distributed.md",
        "docs/engine.md",
        "docs/generation.md",
        "docs/mixers.md",
        "docs/normalizers.md",
        "docs/positions.md",
        "docs/states.md",
        "docs/structures.md",
    ],
)
def test_the_code_of_a_page_runs(page: str):
    run_blocks(page)


@pytest.mark.peers
def test_the_code_of_a_page_about_transformers_runs():
    pytest.importorskip("transformers")
    run_blocks("docs/integrations.md")


def run_blocks(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert blocks, f"{page} shows no code"
    exec(compile("\n".join(blocks), page, "exec"), {"__name__": page})  # noqa: S102 - the pages are our own
