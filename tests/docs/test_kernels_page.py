"""The table of docs/kernels.md says what the kernels say: default scales, numbers of features, and signs."""

import contextlib
import math
import re
from pathlib import Path

import pytest

from mercer.core.feature_maps import Dpfp, ExpFeatures
from mercer.core.kernels import Cosine, Elu, Exp, Gaussian, Kernel, Power, Relu, Taylor
from mercer.core.learned_maps import Hedgehog, MlpFeatures
from mercer.core.mixed import Mixed
from mercer.core.names import ALIASES, KERNELS, attention_name, parse_attention
from mercer.core.normalizers import L2
from mercer.core.random_features import PositiveRandomFeatures, TrigonometricRandomFeatures
from mercer.core.soft_cap import SoftCap
from mercer.errors import InvalidArgument

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
D = 6
ROWS: dict[str, list[Kernel]] = {
    "`Exp()`": [Exp()],
    "`Gaussian()`": [Gaussian()],
    "`SoftCap(cap)`": [SoftCap(50)],
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
    return {c[0]: c[1:] for c in cells() if len(c) == 5}


def cells() -> list[list[str]]:
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]


def names() -> list[tuple[str, str]]:
    """Each name of the table of names, and the kernel that stands beside it."""
    found: list[tuple[str, str]] = []
    for words, kernels in (c for c in cells() if len(c) == 2):
        left = re.findall(r"`([^`]*)`", words)
        found += zip(left, re.findall(r"`([^`]*)`", kernels)[: len(left)], strict=True)
    return found


@pytest.mark.parametrize(("name", "kernel"), names())
def test_a_name_is_the_kernel_beside_it(name: str, kernel: str):
    written = eval(re.sub(r"\bN\b", "6", kernel), {k.__name__: k for k in (*KERNELS.values(), Mixed)})  # noqa: S307 - the page is our own
    name = name.replace("N", "6")
    assert parse_attention(f"{name}-l2")[0] == written
    assert attention_name(written, L2()) == f"{name}-l2"


def test_every_name_is_on_the_page():
    shown = {re.sub(r"N?(-signed)?", "", name) for name, _ in names()}
    assert shown == set(KERNELS) | {"exp@:taylor2"}
    signed = {re.sub(r"N?-signed", "", name) for name, _ in names() if name.endswith("-signed")}
    assert signed == {word for word in KERNELS if _parses(f"{word}6-signed-sum", f"{word}-signed-sum")}
    for alias, meaning in ALIASES.items():
        assert f"`{alias}` is `{meaning}`" in PAGE.read_text()


def _parses(*names: str) -> bool:
    found = False
    for name in names:
        with contextlib.suppress(InvalidArgument):
            parse_attention(name)
            found = True
    return found


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
