"""T5's buckets of distances, and its bias as a structure."""

import pytest
import torch
from tests.tolerance import assert_close

from mercer.core.structures import Causal, Padding
from mercer.errors import InvalidArgument
from mercer.nn import Attention, T5Bias
from mercer.nn.t5 import t5_buckets
from mercer.ops import attention

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


@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_bias_is_the_weight_of_each_pairs_bucket(bidirectional):
    bias = T5Bias(2, bidirectional=bidirectional, buckets=8, max_distance=12).double()
    torch.nn.init.normal_(bias.weight)
    q, k, v = torch.randn(3, 1, 2, 40, 4, dtype=torch.float64)
    at = torch.arange(40)
    bucket = t5_buckets(at[None] - at[:, None], bidirectional=bidirectional, buckets=8, max_distance=12)
    scores = q @ k.transpose(-1, -2) / 2 + bias.weight[bucket].permute(2, 0, 1)
    if not bidirectional:
        scores = scores.masked_fill(at[None] > at[:, None], -torch.inf)
    expected = scores.softmax(-1) @ v
    cotangent = torch.randn_like(v)
    wanted = torch.autograd.grad(expected, bias.weight, cotangent)[0]
    structure = bias() if bidirectional else Causal() & bias()
    for form in ("dense", "chunked", "recurrent"):
        out = attention(q, k, v, structure=structure, form=form)
        assert_close(out, expected, 40, form)
        assert_close(torch.autograd.grad(out, bias.weight, cotangent, retain_graph=True)[0], wanted, 40, form)


def test_one_bias_serves_layers_padding_and_states():
    bias, layer = T5Bias(4, buckets=8, max_distance=12).double(), Attention(16, 4, kv_heads=2).double()
    torch.nn.init.normal_(bias.weight)
    x = torch.randn(2, 30, 16, dtype=torch.float64)
    whole = layer(x, structure=bias())
    state, outs = None, []
    for part in x.split((17, 1, 1, 11), 1):
        out, state = layer(part, structure=bias(), state=state, return_state=True)
        outs.append(out)
    assert_close(torch.cat(outs, 1), whole, 30)
    padding = torch.ones(2, 30, dtype=torch.bool)
    padding[:, :4] = padding[:, 9] = False
    real = padding[0]
    assert_close(layer(x, padding=padding, structure=bias())[:, real], layer(x[:, real], structure=bias()), 30)
    same = layer(x, structure=bias() & Padding(padding))
    assert_close(same[:, real], layer(x[:, real], structure=bias()), 30)


def test_the_bias_is_saved_as_one_table():
    assert list(T5Bias(4).state_dict()) == ["weight"]
    assert T5Bias(4).weight.shape == (32, 4)
    with pytest.raises(InvalidArgument, match="at least one head"):
        T5Bias(0)
