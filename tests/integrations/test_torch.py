"""`mercer.integrations.torch` against torch: the same arguments mean the same."""

import inspect

import pytest
import torch
from torch.nn import functional

from mercer import L2, Causal, Elu, Exp, InvalidArgument, Padding, Taylor, Unsupported, attention
from mercer.integrations.torch import scaled_dot_product_attention


def test_the_arguments_are_torchs():
    """torch's function is a builtin without a signature: its documentation has one."""
    documented = functional.scaled_dot_product_attention.__doc__.partition("(")[2].partition(") ->")[0]
    theirs = [part.partition("=")[0].strip() for part in documented.split(",")]
    ours = inspect.signature(scaled_dot_product_attention).parameters
    assert list(ours)[: len(theirs)] == theirs
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in list(ours)[len(theirs) :])


def test_a_causal_mask_is_aligned_at_the_first_tokens():
    """torch#103082: with as many queries as keys there is no difference, otherwise torch's rule holds here."""
    query, key = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 5, 1)
    value = torch.arange(5.0).view(1, 1, 5, 1)
    out = scaled_dot_product_attention(query, key, value, is_causal=True)
    assert out.flatten().tolist() == [0.0, 0.5]
    out = scaled_dot_product_attention(torch.zeros(1, 1, 5, 1), key[:, :, :2], value[:, :, 1:3], is_causal=True)
    assert out.flatten().tolist() == [1.0, 1.5, 1.5, 1.5, 1.5]


@pytest.mark.parametrize("kernel", [Taylor(4), Elu()])
@pytest.mark.parametrize("normalizer", [None, L2()])
def test_other_kernels(kernel, normalizer):
    query, key, value = (torch.randn(2, 3, 9, 4, dtype=torch.float64) for _ in range(3))
    ours = scaled_dot_product_attention(query, key, value, is_causal=True, kernel=kernel, normalizer=normalizer)
    expected = attention(query, key, value, kernel=kernel, normalizer=normalizer, structure=Causal())
    assert torch.equal(ours, expected)
    real = torch.arange(9) < torch.tensor([[9], [5]])
    ours = scaled_dot_product_attention(query, key, value, real[:, None, None], kernel=kernel, normalizer=normalizer)
    expected = attention(query, key, value, kernel=kernel, normalizer=normalizer, structure=Padding(real))
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("heads", [8, 4])
def test_shared_key_heads_are_not_copied(heads, monkeypatch):
    from mercer.integrations import torch as module

    seen = []
    monkeypatch.setattr(module, "attention", lambda q, k, v, **o: seen.append(k.shape) or attention(q, k, v, **o))
    query, key = torch.randn(2, heads, 5, 4), torch.randn(2, 2, 5, 4)
    scaled_dot_product_attention(query, key, key, enable_gqa=True)
    assert seen == [(2, 2, 5, 4)]


class TestRefusals:
    q = torch.zeros(2, 3, 4, 5)

    def test_dropout(self):
        with pytest.raises(Unsupported, match=r"dropout_p=0\.1.*pass 0\.0"):
            scaled_dot_product_attention(self.q, self.q, self.q, dropout_p=0.1)

    def test_a_mask_beside_is_causal(self):
        with pytest.raises(InvalidArgument, match="not both"):
            scaled_dot_product_attention(self.q, self.q, self.q, torch.ones(4, 4, dtype=torch.bool), is_causal=True)

    @pytest.mark.parametrize("shape", [(3, 4), (7, 3, 4, 4), (1, 1, 1, 4, 4)])
    def test_a_mask_that_does_not_fit(self, shape):
        with pytest.raises(InvalidArgument, match="must broadcast to"):
            scaled_dot_product_attention(self.q, self.q, self.q, torch.ones(shape, dtype=torch.bool))

    def test_a_mask_of_integers(self):
        with pytest.raises(InvalidArgument, match="boolean, or floating-point"):
            scaled_dot_product_attention(self.q, self.q, self.q, torch.ones(4, 4, dtype=torch.int64))

    def test_a_mask_that_is_no_tensor(self):
        with pytest.raises(InvalidArgument, match="must be a tensor or None"):
            scaled_dot_product_attention(self.q, self.q, self.q, [[True]])

    def test_heads_that_do_not_broadcast(self):
        with pytest.raises(InvalidArgument, match="enable_gqa=True shares"):
            scaled_dot_product_attention(torch.zeros(2, 6, 4, 5), self.q, self.q)

    def test_groups_that_do_not_divide(self):
        with pytest.raises(InvalidArgument, match="a divisor of the query heads"):
            scaled_dot_product_attention(torch.zeros(2, 4, 4, 5), self.q, self.q, enable_gqa=True)

    @pytest.mark.parametrize(
        "wrong", [torch.zeros(4), "q", torch.nested.nested_tensor([torch.zeros(2, 5)], layout=torch.jagged)]
    )
    def test_what_is_no_query(self, wrong):
        with pytest.raises(InvalidArgument, match="query must be a tensor of two dimensions"):
            scaled_dot_product_attention(wrong, self.q, self.q)

    def test_signed_kernels(self):
        with pytest.raises(Unsupported, match="takes negative values"):
            scaled_dot_product_attention(self.q, self.q, self.q, kernel=Taylor(3))


def test_the_import_needs_no_more_than_torch():
    import subprocess
    import sys

    code = "import mercer.integrations.torch, sys; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_exp_is_the_default():
    q = torch.randn(1, 2, 5, 4)
    assert torch.equal(scaled_dot_product_attention(q, q, q), attention(q, q, q, kernel=Exp()))
