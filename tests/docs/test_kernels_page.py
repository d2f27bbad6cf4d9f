"""The table of docs/kernels.md says what the kernels say: default scales, numbers of features, and signs."""

import math
import re
from pathlib import Path

import pytest

from mercer.core.feature_maps import Dpfp, ExpFeatures
from mercer.core.kernels import Cosine, Elu, Exp, Gaussian, Kernel, Power, Relu, Taylor
from mercer.core.learned_maps import Hedgehog, MlpFeatures
from mercer.core.names import KERNELS
from mercer.core.random_features import PositiveRandomFeatures, TrigonometricRandomFeatures

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
D = 6
ROWS: dict[str, list[Kernel]] = {
    "`Exp()`": [Exp()],
    "`Gaussian()`": [Gaussian()],
    "`Taylor(p)`": [Taylor(4)],
    "`Power(p)`, symmetric power": [Power(4)],
    "`Elu()`, `Relu()`": [Elu(), Relu()],
    "`Cosine()`": [Cosine()],
    "`PositiveRandomFeatures(F)`": [PositiveRandomFeatures(12), PositiveRandomFeatures(12, hyperbolic=True)],
    "`TrigonometricRandomFeatures(F)`": [TrigonometricRandomFeatures(12)],
    "`Dpfp(nu)`": [Dpfp(3)],
    "`ExpFeatures()`": [ExpFeatures()],
    "`Hedgehog()`": [Hedgehog()],
    "`MlpFeatures(F, hidden)`": [MlpFeatures(12, hidden=5)],
    "`MlpFeatures(F)`": [MlpFeatures(12)],
}
COUNTS = {
    "none: a cache": None,
    "C(D+p, p)": math.comb(D + 4, 4),
    "C(D+p-1, p)": math.comb(D + 3, 4),
    "D": D,
    "F": 12,
    "2 D nu": 2 * D * 3,
    "D, or 2 D with `negation=True`": D,
    "2 D, or 2 `width`": 2 * D,
}


def rows() -> dict[str, list[str]]:
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]
    return {c[0]: c[1:] for c in cells}


@pytest.mark.parametrize("name", ROWS)
def test_a_row(name: str):
    _, scale, features, sign = rows()[name]
    for kernel in ROWS[name]:
        assert kernel.default_scale(D) == {"1": 1, "D^(-1/2)": D**-0.5}[scale]
        assert kernel.feature_dim(D) == COUNTS[features]
        assert kernel.positive == (sign != "signed")
    if "or 2" in features:
        assert ExpFeatures(negation=True).feature_dim(D) == 2 * D
        assert Hedgehog(width=4).feature_dim(D) == 8


def test_every_kernel_with_a_name_has_a_row():
    mixed = "`Mixed(near, far, window)`"  # of two of the others: it has no scale and sign of its own
    assert rows().keys() == ROWS.keys() | {mixed}
    assert {type(k) for kernels in ROWS.values() for k in kernels} == set(KERNELS.values())
