"""docs/parity.md has every model that the tests compare, and nothing above their bound."""

import re

import pytest
from scripts.parity_docs import FAMILIES, GROUPS, PAGE, page
from tests.checkpoints import test_decision, test_vision
from tests.checkpoints.measure import BOUND
from tests.checkpoints.zoo import DECODERS, ENCODERS, SEQ2SEQ

MODELS = dict(zip(GROUPS, (DECODERS, ENCODERS, SEQ2SEQ, test_vision.MODELS, test_decision.MODELS), strict=True))


@pytest.mark.parametrize("group", GROUPS)
def test_every_model_has_a_row(group):
    part = PAGE.read_text(encoding="utf-8").partition(f"## {GROUPS[group]}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in part.splitlines() if line.startswith("| ")]
    assert sorted(rows[1:]) == sorted(FAMILIES.get(group, "") + name for name in MODELS[group])


def test_no_number_is_above_the_bound():
    numbers = [float(found) for found in re.findall(r"\d\.\de[+-]\d\d", PAGE.read_text(encoding="utf-8"))]
    assert len(numbers) >= 4 * sum(map(len, MODELS.values()))
    assert max(numbers) < BOUND


def test_rows_are_made_of_what_was_measured():
    found = {group: {} for group in GROUPS} | {"test_decoders": {"llama": {"logits": 1e-7, "left": 2.5e-6}}}
    assert "| llama | 1.0e-07 |  |  | 2.5e-06 |  |  |  |" in page(found)
