"""docs/support.md says what the support table says."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("support_docs", ROOT / "scripts" / "support_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "support.md").read_text() == module.text(), "run python scripts/support_docs.py"
