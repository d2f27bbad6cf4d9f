"""What the order costs that is proposed: the state the library would make, or why it makes none."""

from __future__ import annotations

import pytest
import torch

from mercer import approximation_error
from mercer.approximation import NeededFeatures, NeededOrder, StateCost, gaussian_inputs
from mercer.core.kernels import Exp, Kernel, Taylor
from mercer.core.mixed import Mixed
from mercer.core.random_features import PositiveRandomFeatures
from mercer.core.state import MixedState
from mercer.core.structures import Causal, Structure, Window
from mercer.errors import Unsupported
from mercer.ops import attention, plan


def cost(
    kernel: Kernel, inputs: tuple[torch.Tensor, ...], structure: Structure, target: float
) -> tuple[StateCost, str]:
    found = approximation_error(*inputs, kernel, structure=structure, target=target, rows=8)  # type: ignore[arg-type]
    assert isinstance(found.needed, NeededOrder | NeededFeatures)
    assert found.needed.cost is not None
    assert found.as_dict()["needed"]["cost"]["bytes"] == found.needed.cost.bytes
    return found.needed.cost, str(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", [Taylor(2), PositiveRandomFeatures(32), Mixed(Exp(), Taylor(2), 4)])
def test_the_state_has_that_many_bytes(kernel: Kernel, dtype: torch.dtype) -> None:
    q, k, v = gaussian_inputs(40, 6, 0.2, batch=2, heads=4, value_dim=5, dtype=dtype)
    inputs = (q, k[:, :2], v[:, :2])  # two query heads to each of two key heads
    found, words = cost(kernel, inputs, Causal(), 0.3)
    needed = kernel
    if isinstance(kernel, PositiveRandomFeatures):
        needed = PositiveRandomFeatures(found.features)
    else:
        order = next(p for p in range(9) if Taylor(p).feature_dim(6) == found.features)
        needed = Taylor(order) if isinstance(kernel, Taylor) else Mixed(Exp(), Taylor(order), 4)
    _, state = attention(*inputs, kernel=needed, structure=Causal(), path="features", return_state=True)
    sums = state.far if isinstance(state, MixedState) else state
    size = sum(t.nbytes for t in (sums.features, sums.mass) if t is not None)
    assert found.bytes == size
    assert found.by_pairs is None
    assert f"{found.features:,} features" in words
    assert ", a state of " in words


def test_a_state_beyond_the_limit_leaves_the_pairs() -> None:
    inputs = gaussian_inputs(64, 16, 1.0, heads=4)
    found, words = cost(Taylor(2), inputs, Causal(), 1e-3)
    assert found.bytes > found.limit == 2**30
    assert found.by_pairs is not None
    assert "GiB, limit 1 GiB): by pairs only" in words
    assert "features, no state of this fits (" in words
    order = next(p for p in range(20) if Taylor(p).feature_dim(16) == found.features)
    with pytest.raises(Unsupported, match="limit 1 GiB"):
        plan(*inputs, kernel=Taylor(order), structure=Causal(), path="features")


def test_a_structure_without_states_leaves_the_pairs() -> None:
    found, words = cost(Taylor(2), gaussian_inputs(32, 8, 0.3), Window(9, 0), 0.1)
    assert found.bytes < found.limit
    assert found.by_pairs is not None
    assert "cannot forget what leaves a window" in found.by_pairs
    assert "features, by pairs only; " in words
