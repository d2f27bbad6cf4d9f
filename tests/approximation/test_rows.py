"""The rows that errors are measured at are those of the attention itself, whatever the structure."""

import pytest
import torch
from tests.tolerance import assert_close

from mercer.approximation.rows import Rows
from mercer.core.denominators import Length, SigmoidGate
from mercer.core.feature_maps import ExpFeatures
from mercer.core.kernels import Elu, Exp, Gaussian, Power, Relu, Taylor
from mercer.core.log_weights import Alibi, Decay
from mercer.core.merged import merge
from mercer.core.mixed import Mixed
from mercer.core.normalizers import L2, Identity, Sum
from mercer.core.random_features import PositiveRandomFeatures, TrigonometricRandomFeatures
from mercer.core.structures import Causal, Documents, Full, Padding, Window
from mercer.ops import attention

LENGTH = 23
GENERATOR = torch.Generator().manual_seed(5)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


KERNELS = {
    "exp": Exp(),
    "gaussian": Gaussian(),
    "taylor": Taylor(4),
    "signed": Taylor(3, signed=True),
    "power": Power(2),
    "elu": Elu(),
    "relu": Relu(),
    "exp features": ExpFeatures(negation=True),
    "positive": PositiveRandomFeatures(16, seed=3),
    "mixed": Mixed(Exp(), Taylor(2), 3, torch.tensor([0.5, 0.0, -1.0, 2.0])),
    "mixed random": Mixed(Taylor(2), PositiveRandomFeatures(16), 5),
    "trigonometric": TrigonometricRandomFeatures(16, signed=True),
}
MASK = torch.ones(2, LENGTH, dtype=torch.bool)
MASK[0, [0, 1, 7]] = False
MASK[1, 15:] = False
STRUCTURES = {
    "full": Full(),
    "causal": Causal(),
    "window": Window(4, 2),
    "padding": Causal() & Padding(MASK),
    "unordered padding": Padding(MASK),
    "documents": Causal() & Documents(torch.tensor([0, 5, 5, 16, LENGTH])),
    "alibi": Causal() & Alibi(torch.tensor([0.5, 0.25, 0.1, 0.0])),
    "two-sided alibi": Alibi(torch.tensor([0.5, 0.25, 0.1, 0.0])),
    "decay": Causal() & Decay(torch.rand(2, 2, LENGTH, generator=GENERATOR) * 0.5 + 0.5),
    "gated padding": Causal() & Padding(MASK) & Decay(torch.tensor([0.9, 0.5, 0.8, 1.0])),
}


CELLS = [
    (kernel, structure)
    for kernel, part in KERNELS.items()
    for structure, laid in STRUCTURES.items()
    if not isinstance(part, Mixed) or merge(laid).right == 0  # which it needs
]


@pytest.mark.parametrize(("kernel", "structure"), CELLS)
def test_sampled_rows_are_those_of_the_attention(kernel: str, structure: str) -> None:
    q, k, v = random(2, 4, LENGTH, 4), random(2, 2, LENGTH, 4), random(2, 2, LENGTH, 3)
    index = torch.tensor([0, 3, 4, 11, 15, LENGTH - 1])
    rows = Rows(q, k, v, merge(STRUCTURES[structure]), index)
    part = KERNELS[kernel]
    for normalizer in (Sum(), L2(), Length(), Identity(), SigmoidGate(random(2, 4, LENGTH))):
        whole = attention(q, k, v, kernel=part, normalizer=normalizer, structure=STRUCTURES[structure])
        block = slice(1, 5)
        found = rows.outputs(normalizer, *rows.weights(part, None, block), block)
        seen = rows.seen[:, None, block, None]
        assert_close(found.where(seen, 0), whole[:, :, index[block]], LENGTH, f"{normalizer}")


def test_rows_that_see_nothing_are_named() -> None:
    q = k = v = random(2, 2, LENGTH, 4)
    rows = Rows(q, k, v, merge(STRUCTURES["padding"]), torch.arange(LENGTH))
    assert torch.equal(rows.seen, MASK)


def test_more_queries_than_keys() -> None:
    q, k, v = random(1, 2, 9, 4), random(1, 2, 6, 4), random(1, 2, 6, 3)
    rows = Rows(q, k, v, merge(Causal()), torch.arange(9))
    found = rows.outputs(Sum(), *rows.weights(Taylor(2), 0.5, slice(0, 9)), slice(0, 9))
    assert rows.seen[0].tolist() == [False] * 3 + [True] * 6
    assert_close(found, attention(q, k, v, kernel=Taylor(2), structure=Causal(), scale=0.5), 9)


def test_blocks_cover_all_rows_and_bound_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mercer.approximation.rows._WEIGHTS", 2 * 2 * LENGTH * 5)
    monkeypatch.setattr("mercer.approximation.rows._KEYS", 7)
    q = k = v = random(2, 2, LENGTH, 4)
    rows = Rows(q, k, v, merge(Causal()), torch.arange(LENGTH))
    blocks = list(rows.blocks())
    assert [b.stop - b.start for b in blocks] == [5, 5, 5, 5, 3]
    kernel = PositiveRandomFeatures(8)
    out = torch.cat([rows.outputs(Sum(), *rows.weights(kernel, 0.5, b), b) for b in blocks], 2)
    assert_close(out, attention(q, k, v, kernel=kernel, structure=Causal(), scale=0.5), LENGTH)
