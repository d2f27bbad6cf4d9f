"""`mercer.integrations.torch` against torch: the same arguments mean the same."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tolerance import assert_close
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


@st.composite
def calls(draw):
    """Arguments of a call: leading dimensions that broadcast, lengths that differ, a mask of some kind."""
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    queries, keys = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    dim, value_dim = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    grouped = draw(st.booleans())
    if grouped:
        rest = draw(st.sampled_from([(), (2,), (2, 3)]))
        key_heads = draw(st.integers(1, 2))
        lead = [(*rest, key_heads * draw(st.integers(1, 3))), (*rest, key_heads), (*rest, key_heads)]
    else:
        lead = draw(
            st.sampled_from(
                [[(), (), ()], [(2,)] * 3, [(2, 3)] * 3, [(2, 3), (1, 3), (2, 1)], [(2, 1, 3), (4, 3), (1,)]]
            )
        )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    query, key, value = (
        torch.randn(*own, length, size, generator=generator, dtype=torch.float64).to(dtype)
        for own, length, size in zip(lead, (queries, keys, keys), (dim, dim, value_dim), strict=True)
    )
    options = {"scale": draw(st.sampled_from([None, 1.0, 0.3])), "enable_gqa": grouped}
    heads = lead[0] if grouped else torch.broadcast_shapes(*lead)
    kind = draw(st.sampled_from(["none", "causal", "boolean", "added"]))
    if kind == "causal":
        options["is_causal"] = True
    elif kind != "none":
        own = draw(st.sampled_from([(), heads, (1,) * len(heads), heads[-1:]]))
        shape = (*own, draw(st.sampled_from([1, queries])), draw(st.sampled_from([1, keys])))
        shown = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.3, 0.7, 1.0]))
        options["attn_mask"] = shown
        if kind == "added":
            numbers = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            options["attn_mask"] = numbers.masked_fill(~shown, -torch.inf)
    return query, key, value, options


def gradients(function, query, key, value, options, seed):
    """The output and the gradients of all that is not boolean, for one direction of the output."""
    given = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        mask = mask.detach().clone().requires_grad_()
        options = options | {"attn_mask": mask}
        given.append(mask)
    out = function(*given[:3], **options)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = torch.autograd.grad((out * direction.to(out.dtype)).sum(), given)
    return out, found


@settings(max_examples=150)
@given(calls())
def test_it_computes_what_torch_computes(call):
    query, key, value, options = call
    out, found = gradients(scaled_dot_product_attention, query, key, value, options, 0)
    wide = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in options.items()}
    exact, expected = gradients(
        functional.scaled_dot_product_attention, query.double(), key.double(), value.double(), wide, 0
    )
    terms = key.shape[-2] + query.shape[-1]
    assert out.dtype == query.dtype
    # torch gives NaN to rows that see nothing, or zeros: here they are zero.
    seen = torch.ones((), dtype=torch.bool)
    if "attn_mask" in options:
        mask = options["attn_mask"]
        seen = (mask if mask.dtype == torch.bool else mask > -torch.inf).any(-1, keepdim=True)
    seen = seen.expand(*out.shape[:-1], 1) if seen.dim() else seen
    assert_close(out, torch.where(seen, exact, 0.0), terms, "output")
    for name, ours, theirs in zip(("query", "key", "value", "mask"), found, expected, strict=False):
        assert torch.isfinite(ours).all(), name
        if torch.isfinite(theirs).all():
            assert_close(
                ours, theirs, terms * max(query.shape[-2], key.shape[-2]) * 4, f"gradient of {name}", query.dtype
            )


def test_a_causal_mask_is_aligned_at_the_first_tokens():
    """torch#103082: with as many queries as keys there is no difference, otherwise torch's rule holds here."""
    query, key = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 5, 1)
    value = torch.arange(5.0).view(1, 1, 5, 1)
    out = scaled_dot_product_attention(query, key, value, is_causal=True)
    assert out.flatten().tolist() == [0.0, 0.5]
    out = scaled_dot_product_attention(torch.zeros(1, 1, 5, 1), key[:, :, :2], value[:, :, 1:3], is_causal=True)
    assert out.flatten().tolist() == [1.0, 1.5, 1.5, 1.5, 1.5]


def test_rows_that_see_nothing_are_zero_with_finite_gradients():
    query, key, value = (torch.randn(2, 3, 4, 5, requires_grad=True) for _ in range(3))
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    for given_mask in (mask, torch.zeros(4, 4).masked_fill(~mask, -torch.inf)):
        out = scaled_dot_product_attention(query, key, value, given_mask)
        assert (out[:, :, 1] == 0).all()
        found = torch.autograd.grad(out.square().sum(), (query, key, value))
        assert all(torch.isfinite(x).all() for x in found)
        assert (found[0][:, :, 1] == 0).all()


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
