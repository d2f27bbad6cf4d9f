"""The table of docs/normalizers.md says what the normalisers say, and its configuration is one."""

import json
import re
from pathlib import Path

import pytest

from mercer.core.denominators import Clamped, Detached, Length, SigmoidGate
from mercer.core.kernels import Exp
from mercer.core.names import NORMALIZERS, attention_name, parse_attention
from mercer.core.normalizers import L2, RMS, Identity, Normalizer, Standardize, Sum
from mercer.models.config import ModelConfig

PAGE = Path(__file__).parents[2] / "docs" / "normalizers.md"
MADE: dict[str, Normalizer] = {
    "Sum": Sum(),
    "Detached": Detached(),
    "Clamped": Clamped(1),
    "L2": L2(),
    "RMS": RMS(),
    "Standardize": Standardize(),
    "Length": Length(),
    "SigmoidGate": SigmoidGate(),
    "Identity": Identity(),
}


def rows() -> dict[str, list[str]]:
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]
    return {c[0].strip("`").partition("(")[0]: c[2:] for c in cells if len(c) == 6}


@pytest.mark.parametrize("name", MADE)
def test_a_row(name: str):
    needs, invariant, kernels, word = rows()[name]
    made = MADE[name]
    if name == "SigmoidGate":
        assert (needs, invariant, kernels) == ("what `inner` does", "as `inner`", "as `inner`; alone any")
        assert SigmoidGate(inner=Sum()).needs_denominator
        assert not made.needs_denominator
    else:
        assert (needs == "d", needs == "t") == (made.needs_denominator, made.needs_count)
        assert (invariant == "yes") == made.scale_invariant
        assert (kernels == "any") == (not made.needs_denominator or made.takes_any_sign)
    plain = attention_name(Exp(), made)
    assert plain == ("softmax" if name == "Sum" else f"exp-{word.strip('`')}")
    assert type(parse_attention(f"exp-{word.strip('`')}")[1]) is type(made)


def test_every_normaliser_with_a_name_has_a_row():
    assert rows().keys() == MADE.keys()
    assert {type(made) for made in MADE.values()} == set(NORMALIZERS.values())


def test_the_configuration_has_recency():
    (block,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert ModelConfig(vocab_size=256, **json.loads(block)["model"]).recency
