"""T5's buckets of distances."""

import pytest
import torch

from mercer.errors import InvalidArgument
from mercer.nn.t5 import t5_buckets

AHEAD = torch.arange(-3000, 3001)


def test_the_buckets_of_one_direction():
    found = t5_buckets(-torch.tensor([0, 1, 15, 16, 18, 19, 31, 127, 128, 5000]), bidirectional=False)
    assert found.tolist() == [0, 1, 15, 16, 16, 17, 21, 31, 31, 31]
    assert t5_buckets(torch.tensor([1, 7, 900]), bidirectional=False).tolist() == [0, 0, 0]


def test_the_buckets_of_two_directions():
    ahead = torch.tensor([-128, -64, -16, -8, -7, -1, 0, 1, 7, 8, 16, 64, 128])
    assert t5_buckets(ahead, bidirectional=True).tolist() == [15, 14, 10, 8, 7, 1, 0, 17, 23, 24, 26, 30, 31]


@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (8, 20), (64, 1000)])
def test_buckets_follow_the_formula_in_whole_numbers(buckets, most):
    """The bucket of distance n is e + the largest k with (n / e)^(b - e) >= (most / e)^k."""
    exact = buckets // 2
    rest = buckets - exact
    for n, found in enumerate(
        t5_buckets(-torch.arange(2 * most), bidirectional=False, buckets=buckets, max_distance=most)
    ):
        if n < exact:
            assert found == n
            continue
        k = sum(n**rest * exact**j >= most**j * exact**rest for j in range(1, rest))
        assert found == exact + k, n


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bidirectional": True, "buckets": 31}, "even number"),
        ({"bidirectional": True, "buckets": 2}, "at least 2 buckets"),
        ({"bidirectional": False, "buckets": 1}, "at least 2 buckets"),
        ({"bidirectional": False, "buckets": 32, "max_distance": 16}, "above 16"),
    ],
)
def test_bad_buckets_are_refused(values, message):
    with pytest.raises(InvalidArgument, match=message):
        t5_buckets(AHEAD, **values)


@pytest.mark.peers
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets", [4, 12, 32, 60])
@pytest.mark.parametrize("most", [32, 100, 128, 2000])
def test_buckets_are_those_of_transformers(bidirectional, buckets, most):
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    expected = modeling.T5Attention._relative_position_bucket(AHEAD, bidirectional, buckets, most)
    assert torch.equal(t5_buckets(AHEAD, bidirectional=bidirectional, buckets=buckets, max_distance=most), expected)
