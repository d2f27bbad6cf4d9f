"""The associative memory against its formula, and its state as a value."""

from itertools import pairwise

import pytest
import torch

from mercer import L2, AssociativeMemory, CacheState, FeatureState, Identity, InvalidArgument, State, Unsupported
from mercer.core.feature_maps import ExpFeatures
from mercer.core.kernels import Elu, Exp, Gaussian, Power, Taylor
from mercer.core.random_features import PositiveRandomFeatures
from mercer.core.reference import kernel_value

KERNELS = [Exp(), Gaussian(), Taylor(2), Elu(), Power(2), PositiveRandomFeatures(16), ExpFeatures()]


def pairs(count=12, dim=5, value_dim=3):
    return torch.randn(count, dim, dtype=torch.float64), torch.randn(count, value_dim, dtype=torch.float64)


def memory(kernel, **options):
    return AssociativeMemory(kernel, 5, 3, dtype=torch.float64, **options)


def by_hand(kernel, queries, keys, values, scale, weight=None):
    table = kernel_value(kernel, queries.unsqueeze(1), keys, scale)
    table = table if weight is None else table * weight
    return table @ values / table.sum(1, keepdim=True)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_recall_is_the_formula_however_pairs_were_stored(kernel, scale):
    keys, values = pairs()
    queries = torch.randn(4, 5, dtype=torch.float64)
    expected = by_hand(kernel, queries, keys, values, kernel.default_scale(5) if scale is None else scale)
    for cuts in ([0, 12], [0, 1, 1, 7, 12]):
        store = memory(kernel, scale=scale)
        for start, stop in pairwise(cuts):
            assert store.store(keys[start:stop], values[start:stop]) is store
        torch.testing.assert_close(store.recall(queries), expected, rtol=1e-10, atol=1e-12)
        assert len(store) == 12


def test_power_one_is_the_linear_associator():
    keys, values = pairs()
    store = memory(Power(1), normalizer=Identity(), scale=1.0).store(keys, values)
    torch.testing.assert_close(store.recall(keys), keys @ (keys.T @ values))
    torch.testing.assert_close(store.state.features[0, 0], keys.T @ values)
    # Orthonormal keys: exact recall.
    eye = torch.eye(5, dtype=torch.float64)
    exact = memory(Power(1), normalizer=Identity(), scale=1.0).store(eye, values[:5])
    torch.testing.assert_close(exact.recall(eye), values[:5])


@pytest.mark.parametrize("kernel", [Taylor(2), Elu()], ids=str)
def test_decay_weighs_by_age(kernel):
    keys, values = pairs()
    store = memory(kernel, decay=0.8)
    store.store(keys[:5], values[:5]).store(keys[5:], values[5:])
    age = torch.arange(11, -1, -1, dtype=torch.float64)
    expected = by_hand(kernel, keys, keys, values, kernel.default_scale(5), 0.8**age)
    torch.testing.assert_close(store.recall(keys), expected)
    other = memory(kernel, decay=0.8).store(keys[5:], values[5:])
    merged = memory(kernel, decay=0.8).store(keys[:5], values[:5]).merge(other)
    torch.testing.assert_close(merged.recall(keys), expected)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_merge_and_clone_leave_their_sources_alone(kernel):
    keys, values = pairs()
    first, second = memory(kernel).store(keys[:7], values[:7]), memory(kernel).store(keys[7:], values[7:])
    before = first.recall(keys)
    merged, copy = first.merge(second), first.clone()
    copy.store(keys[7:], values[7:])
    whole = memory(kernel).store(keys, values).recall(keys)
    torch.testing.assert_close(merged.recall(keys), whole)
    torch.testing.assert_close(copy.recall(keys), whole)
    assert torch.equal(first.recall(keys), before)
    assert len(first) == 7
    assert len(merged) == 12


def test_a_feature_state_does_not_grow_and_a_cache_does():
    keys, values = pairs()
    finite, exponential = memory(Taylor(2)), memory(Exp())
    empty = finite.nbytes
    for store in (finite, exponential):
        store.store(keys, values)
    assert isinstance(finite.state, FeatureState)
    assert isinstance(exponential.state, CacheState)
    assert finite.nbytes == empty
    assert exponential.nbytes >= 12 * 8 * 8
    assert isinstance(memory(Taylor(2), path="pairs").state, CacheState)


@pytest.mark.parametrize("kernel", [Taylor(2), Exp()], ids=str)
def test_the_state_is_a_snapshot_that_can_be_saved_and_put_back(kernel):
    keys, values = pairs()
    store = memory(kernel).store(keys[:7], values[:7])
    before, snapshot = store.recall(keys), store.state
    store.store(keys[7:], values[7:])
    assert not torch.equal(store.recall(keys), before)
    again = memory(kernel)
    again.state = State.from_tensors(snapshot.tensors())
    assert torch.equal(again.recall(keys), before)
    with pytest.raises(InvalidArgument, match="This memory needs a"):
        memory(Elu() if isinstance(kernel, Exp) else Exp()).state = snapshot
    with pytest.raises(InvalidArgument):  # another size
        AssociativeMemory(kernel, 4, 3, dtype=torch.float64).state = snapshot


def test_an_empty_memory_recalls_zeros():
    for kernel in KERNELS:
        assert memory(kernel).recall(torch.ones(2, 5)).tolist() == [[0.0] * 3] * 2


def test_steps_complete_a_pattern():
    patterns = torch.nn.functional.normalize(torch.randn(20, 32, dtype=torch.float64), dim=-1)
    store = AssociativeMemory(Exp(), 32, 32, scale=30.0, dtype=torch.float64).store(patterns, patterns)
    damaged = patterns.clone()
    damaged[:, 16:] = 0  # half of each pattern is gone
    errors = [(store.recall(damaged, steps=steps) - patterns).norm(dim=-1).max() for steps in (1, 2, 4)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-3


def test_refusals():
    keys, values = pairs()
    for options, said in [
        ({"decay": 0.0}, "decay must be"),
        ({"decay": 1.5}, "decay must be"),
        ({"path": "dense"}, "path must be"),
    ]:
        with pytest.raises(InvalidArgument, match=said):
            memory(Taylor(2), **options)
    with pytest.raises(Unsupported, match="does not decay"):
        memory(Exp(), decay=0.9)
    with pytest.raises(Unsupported, match="takes negative values"):
        memory(Power(1))
    with pytest.raises(Unsupported, match="GiB"):
        AssociativeMemory(Taylor(8), 64, 64)
    with pytest.raises(InvalidArgument, match="12 keys and 11 values"):
        memory(Exp()).store(keys, values[1:])
    with pytest.raises(InvalidArgument, match=r"keys must be \[n, 5\]"):
        memory(Exp()).store(keys[:, 1:], values)
    with pytest.raises(InvalidArgument, match="steps must be 1"):
        memory(Exp()).recall(keys, steps=2)
    with pytest.raises(InvalidArgument, match="Cannot merge memories of scale"):
        memory(Exp(), scale=1.0).merge(memory(Exp(), scale=2.0))
    with pytest.raises(InvalidArgument, match="1 or more"):
        AssociativeMemory(Exp(), 0, 3)
    L2()  # an equal normaliser of another instance does not keep memories apart
    memory(Power(1), normalizer=L2()).merge(memory(Power(1), normalizer=L2()))
