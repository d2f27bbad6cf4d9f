"""What is random in ``Mixed`` is drawn, and its far part is the dial."""

from __future__ import annotations

import json

import pytest
import torch

from mercer import approximation_error
from mercer.approximation import ApproximationError, NeededFeatures, NeededOrder, gaussian_inputs
from mercer.core.kernels import Elu, Exp, Kernel, Taylor
from mercer.core.learned_maps import Hedgehog
from mercer.core.mixed import Mixed
from mercer.core.random_features import PositiveRandomFeatures
from mercer.core.structures import Causal
from mercer.ops import attention

INPUTS = gaussian_inputs(48, 8, 0.7, heads=2, seed=1, dtype=torch.float64)


def measured(kernel: Kernel, inputs: tuple[torch.Tensor, ...] = INPUTS, **options: object) -> ApproximationError:
    return approximation_error(*inputs, kernel, structure=Causal(), rows=None, **options)  # type: ignore[arg-type]


def error(kernel: Kernel) -> float:
    out, exact = (attention(*INPUTS, kernel=part, structure=Causal()) for part in (kernel, Exp()))
    return float((out - exact).norm() / exact.norm())


@pytest.mark.parametrize("bound", [False, True])
def test_the_far_part_is_drawn_anew(bound: bool) -> None:
    far = PositiveRandomFeatures(32, seed=3)
    far = far.bind(8, 2, 2) if bound else far
    found = measured(Mixed(Exp(), far, 8), draws=3)
    draws = [far, far.redraw(), far.redraw().redraw()]
    assert found.draws == 3
    assert found.by_draw == pytest.approx([error(Mixed(Exp(), part, 8)) for part in draws], rel=1e-6)
    assert found.error.value == pytest.approx(sum(found.by_draw) / 3)
    assert found.error.over == "draws"
    assert found.error.low is not None
    assert found.spread is None
    assert "3 draws" in str(found)
    assert "the variance of a kernel value is not looked up: it is random for some pairs only" in str(found)
    assert len(measured(Mixed(Exp(), far, 8)).by_draw) == 8


def test_the_near_part_and_log_ratio_are_drawn_and_kept() -> None:
    ratio = torch.tensor([0.5, -0.5], dtype=torch.float64)
    near = PositiveRandomFeatures(16)
    found = measured(Mixed(near, Elu(), 8, ratio), draws=2)
    draws = [Mixed(part, Elu(), 8, ratio) for part in (near, near.redraw())]
    assert found.by_draw == pytest.approx([error(kernel) for kernel in draws], rel=1e-6)
    both = measured(Mixed(near, PositiveRandomFeatures(16, seed=1), 8), draws=2)
    assert both.by_draw[1] == pytest.approx(
        error(Mixed(near.redraw(), PositiveRandomFeatures(16, seed=1).redraw(), 8)), rel=1e-6
    )


def test_nothing_random_draws_nothing() -> None:
    for kernel in (Mixed(Exp(), Taylor(2), 8), Mixed(Hedgehog().bind(8, 2, 2), Elu(), 8)):
        found = measured(kernel)
        assert (found.draws, found.by_draw) == (None, ())
        assert "variance" not in str(found)


def test_the_far_order_is_the_dial() -> None:
    found = measured(Mixed(Exp(), Taylor(2), 8), target=0.01).needed
    assert isinstance(found, NeededOrder)
    assert found.order is not None
    assert found.even_only
    assert error(Mixed(Exp(), Taylor(found.order), 8)) == pytest.approx(found.error)
    assert found.error <= 0.01 < error(Mixed(Exp(), Taylor(found.order - 2), 8))
    assert not measured(Mixed(Exp(), Taylor(2, signed=True), 8), target=0.5).needed.even_only  # type: ignore[union-attr]
    assert measured(Mixed(Taylor(3, signed=True), Taylor(2), 8), target=0.5).needed.even_only  # type: ignore[union-attr]


def test_a_random_near_part_beside_a_far_order_is_averaged() -> None:
    near = PositiveRandomFeatures(64)
    found = measured(Mixed(near, Taylor(2), 2), target=0.7, draws=2).needed
    assert isinstance(found, NeededOrder)
    assert found.order is not None
    values = [error(Mixed(part, Taylor(found.order), 2)) for part in (near, near.redraw())]
    assert found.error == pytest.approx(sum(values) / 2, rel=1e-6)


def test_the_far_count_is_the_dial() -> None:
    inputs = gaussian_inputs(96, 8, 0.1, seed=1)
    kernel = Mixed(Exp(), PositiveRandomFeatures(64), 8)
    law = measured(kernel, inputs, target=0.02).needed
    assert isinstance(law, NeededFeatures)
    assert law.holds
    assert law.count is not None
    assert law.count > law.counts[-1]
    assert law.checked == pytest.approx(0.02, rel=0.3)
    again = measured(Mixed(Exp(), PositiveRandomFeatures(law.count), 8), inputs)
    assert again.error.value == pytest.approx(law.checked)
    json.dumps(measured(kernel, inputs, target=0.02).as_dict(), allow_nan=False)
