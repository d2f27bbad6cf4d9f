import numpy as np
import pytest
import torch

from mercer.errors import InvalidArgument
from mercer.studies.mqar import NO_LABEL, Recall

SIZES = [(1, 4, 4), (4, 64, 64), (8, 32, 40), (31, 128, 64), (16, 256, 8192)]


@pytest.mark.parametrize(("pairs", "length", "vocabulary"), SIZES)
def test_keys_values_and_labels_are_where_they_should_be(pairs: int, length: int, vocabulary: int) -> None:
    task = Recall(pairs, length, vocabulary)
    batch = task.batch(16, seed=3, step=7)
    assert batch.tokens.shape == batch.targets.shape == (16, length)
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        keys, values = tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert all(1 <= key < vocabulary // 2 for key in keys)
        assert all(vocabulary // 2 <= value < vocabulary for value in values)
        assert len(set(keys)) == len(set(values)) == pairs
        asked = [at for at, label in enumerate(targets) if label != NO_LABEL]
        assert len(asked) == pairs
        assert all(at >= 2 * pairs and at % 2 == 0 for at in asked)
        assert sorted(tokens[at] for at in asked) == sorted(keys)  # every key once
        answers = dict(zip(keys, values, strict=True))
        assert all(targets[at] == answers[tokens[at]] for at in asked)
        assert all(tokens[at] == 0 for at in range(2 * pairs, length) if at not in asked)


def test_batches_depend_on_seed_step_and_stream_alone() -> None:
    task = Recall(4, 32, 64)
    first = task.batch(8, seed=1, step=2)
    assert torch.equal(first.tokens, task.batch(8, seed=1, step=2).tokens)
    others = [task.batch(8, 1, 3), task.batch(8, 2, 2), task.batch(8, 1, 2, held_out=True)]
    assert all(not torch.equal(first.tokens, other.tokens) for other in others)


def test_gaps_follow_the_power_law() -> None:
    task = Recall(1, 42, 64, power=0.5)  # 20 places
    batch = task.batch(20_000, seed=0, step=0)
    gaps = ((batch.targets != NO_LABEL).int().argmax(1) - 2) // 2
    counts = np.bincount(gaps.numpy(), minlength=task.gaps)
    expected = 20_000 * (np.arange(1, 21) ** -0.5) / (np.arange(1, 21) ** -0.5).sum()
    # chi-square with 19 degrees of freedom: 43.8 is its 0.1 % point, and the seed is fixed
    assert ((counts - expected) ** 2 / expected).sum() < 43.8


def test_every_key_and_value_is_as_likely_as_any_other() -> None:
    task = Recall(2, 8, 12)  # keys 1..5, values 6..11
    tokens = task.batch(30_000, seed=0, step=0).tokens
    for column, low, kinds in ((0, 1, 5), (1, 6, 6), (2, 1, 5), (3, 6, 6)):
        counts = np.bincount(tokens[:, column].numpy() - low, minlength=kinds)
        assert len(counts) == kinds
        assert abs(counts / 30_000 - 1 / kinds).max() < 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 64, 7), "vocabulary is 7"),
        ((0, 64, 64), "pairs is 0"),
        ((17, 64, 64), "between 1 and 16"),
        ((40, 640, 64), "between 1 and 31"),
        ((4, 64, 64, 0.0), "power is 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Recall(*arguments)  # type: ignore[arg-type]
