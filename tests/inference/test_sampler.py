"""Choosing a token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mercer.errors import InvalidArgument, NonFinite
from mercer.inference.sampler import Sampling

LOGITS = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]).log()


def kept(**fields):
    return Sampling(**fields).distribution(LOGITS).tolist()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [0.5, 0.25, 0.125, 0.0625, 0.0625]),
        ({"temperature": 0}, [1, 0, 0, 0, 0]),
        ({"temperature": 0.5}, [64 / 86, 16 / 86, 4 / 86, 1 / 86, 1 / 86]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0, 0]),
        ({"top_k": 99}, [0.5, 0.25, 0.125, 0.0625, 0.0625]),
        ({"top_p": 0.5}, [1, 0, 0, 0, 0]),
        ({"top_p": 0.51}, [2 / 3, 1 / 3, 0, 0, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0, 0]),
        ({"top_p": 1.0}, [0.5, 0.25, 0.125, 0.0625, 0.0625]),
        ({"min_p": 0.49}, [2 / 3, 1 / 3, 0, 0, 0]),  # at least 0.49 times as likely as the likeliest
        ({"min_p": 0.51}, [1, 0, 0, 0, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0, 0]),
        ({"min_p": 0.0}, [0.5, 0.25, 0.125, 0.0625, 0.0625]),
        ({"temperature": 2.0, "min_p": 0.6}, [0.5**0.5 / (0.5**0.5 + 0.5), 0.5 / (0.5**0.5 + 0.5), 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.6}, [2 / 3, 1 / 3, 0, 0, 0]),  # top_p counts after top_k: 4/7 is below 0.6
    ],
)
def test_the_distribution(fields, expected):
    assert kept(**fields) == pytest.approx(expected, abs=1e-6)


def test_ties_go_to_the_lower_token():
    assert Sampling(0.0).distribution(torch.zeros(4)).tolist() == [1, 0, 0, 0]
    assert Sampling(top_k=2).distribution(torch.zeros(4)).tolist() == [0.5, 0.5, 0, 0]


def test_ties_at_the_edge_of_many_tokens_go_to_the_lower_ones():
    logits = torch.zeros(1000)
    logits[7], logits[999] = 1.0, 1.0
    kept = Sampling(top_k=5).distribution(logits).nonzero().squeeze(1)
    assert kept.tolist() == [0, 1, 2, 7, 999]
    half = Sampling(top_p=0.5).distribution(torch.zeros(1000)).nonzero().squeeze(1)
    assert half.tolist() == list(range(500))


def test_draws_follow_the_distribution_and_the_seed():
    sampling = Sampling(top_k=3)
    generator = torch.Generator().manual_seed(1)
    draws = [sampling.choose(LOGITS, generator) for _ in range(2000)]
    shares = torch.tensor(draws).bincount(minlength=5) / 2000
    torch.testing.assert_close(shares, sampling.distribution(LOGITS).float(), atol=0.04, rtol=0)
    generator.manual_seed(1)
    assert [sampling.choose(LOGITS, generator) for _ in range(2000)] == draws


def test_extreme_logits_stay_finite():
    logits = torch.tensor([1e4, -1e4, 9.99e3])
    assert Sampling(0.01).distribution(logits).tolist() == [1, 0, 0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-300])
@pytest.mark.parametrize("logits", [[-3.0, 2.0, 1.0, 2.0], [-9.0, -2.0, -4.0, -2.0]])
def test_the_smallest_temperatures_are_greedy_and_split_ties(temperature, logits):
    for cut in ({}, {"top_k": 3}, {"top_p": 0.9}):
        assert Sampling(temperature, **cut).distribution(torch.tensor(logits)).tolist() == [0, 0.5, 0, 0.5]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; it is a finite number of at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0; it is a whole number from 1"),
        ({"top_k": 2.5}, "top_k is 2.5; it is a whole number"),
        ({"top_k": True}, "top_k is True; it is a whole number"),
        ({"top_p": "0.5"}, "top_p is '0.5'; it is a number"),
        ({"temperature": True}, "temperature is True; it is a number"),
        ({"top_p": 0.0}, "top_p is 0.0; it is above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": -0.1}, "min_p is -0.1; it is from 0 to 1, or None"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it is a finite number above 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty is inf"),
    ],
)
def test_values_out_of_range(fields, message):
    with pytest.raises(InvalidArgument, match=message):
        Sampling(**fields)


def test_the_penalty_divides_positive_and_multiplies_negative_logits():
    logits = torch.tensor([2.0, -2.0, 1.5, -1.0])
    seen = torch.tensor([True, True, False, False])
    expected = torch.tensor([1.0, -4.0, 1.5, -1.0], dtype=torch.float64).softmax(0)
    torch.testing.assert_close(Sampling(repetition_penalty=2.0).distribution(logits, seen), expected)
    assert Sampling(0.0, repetition_penalty=2.0).choose(logits, torch.Generator(), seen) == 2
    assert Sampling(0.0).choose(logits, torch.Generator(), seen) == 0


@pytest.mark.peers
@given(
    st.sampled_from([0.2, 0.7, 1.0, 3.0]),
    st.sampled_from([None, 1, 3, 20, 99]),
    st.sampled_from([None, 0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([None, 0.02, 0.3, 1.0]),
    st.sampled_from([0.8, 1.0, 1.3, 2.0]),
    st.sampled_from([40, 700, 9000]),
    st.integers(0, 2**32 - 1),
)
def test_distributions_equal_the_processors_of_transformers(temperature, top_k, top_p, min_p, penalty, size, seed):
    from transformers.generation import logits_process as theirs

    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, size, generator=generator, dtype=torch.float64) * 3
    read = torch.randint(0, size, (1, 12), generator=generator)
    steps = [
        theirs.RepetitionPenaltyLogitsProcessor(penalty),
        theirs.TemperatureLogitsWarper(temperature),
        *([] if top_k is None else [theirs.TopKLogitsWarper(top_k)]),
        *([] if top_p is None else [theirs.TopPLogitsWarper(top_p)]),
        *([] if min_p is None else [theirs.MinPLogitsWarper(min_p)]),
    ]
    scores = logits
    for step in steps:
        scores = step(read, scores)
    seen = torch.zeros(size, dtype=torch.bool).scatter(0, read[0], True)
    ours = Sampling(temperature, top_k, top_p, min_p, penalty).distribution(logits[0], seen)
    torch.testing.assert_close(ours, scores[0].softmax(0))


@given(st.integers(0, 2**32 - 1), st.sampled_from([{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}]))
def test_only_kept_tokens_are_drawn(seed, cut):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(30, generator=generator) * 4
    sampling = Sampling(**cut)
    kept = sampling.distribution(logits) > 0
    assert all(kept[sampling.choose(logits, generator)] for _ in range(20))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite(bad):
    with pytest.raises(NonFinite, match="the model's logits are not finite"):
        Sampling().distribution(torch.tensor([0.0, bad]))
