"""The Numba kernels against the definition in float64: outputs and gradients."""

import pytest
import torch

pytest.importorskip("numba")

import mercer
from mercer.backends.causal import causal_softmax


def draw(batch, heads, kv_heads, length, dim, dtype=torch.float32, size=1.0):
    """Tensors with the strides that projections give."""
    return tuple(
        (size * torch.randn(batch, length, n, dim)).to(dtype).transpose(1, 2).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )


def definition(query, key, value, scale):
    q, k, v = (t.double() for t in (query, key, value))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return (scale * q @ k.transpose(-1, -2)).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def compare(inputs, scale, tolerance):
    out, expected = causal_softmax(*inputs, scale), definition(*inputs, scale)
    upstream = torch.randn_like(expected)
    got = torch.autograd.grad(out, inputs, upstream.to(out.dtype))
    wanted = torch.autograd.grad(expected, inputs, upstream.to(out.dtype).double())
    for ours, theirs in zip((out, *got), (expected, *wanted), strict=True):
        assert ours.dtype == inputs[0].dtype
        error = (ours.double() - theirs.double()).abs().max() / theirs.abs().max().clamp_min(1)
        assert error < tolerance
    return out


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 33, 130])
def test_every_length_around_rows_and_tiles(length):
    compare(draw(2, 4, 4, length, 16), 0.25, 2e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (6, 1, 16), (2, 2, 32), (4, 2, 64)])
def test_groups_and_head_dimensions(heads, kv_heads, dim):
    compare(draw(2, heads, kv_heads, 37, dim), dim**-0.5, 2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_once(dtype):
    compare(draw(1, 2, 2, 70, 16, dtype), 0.25, torch.finfo(dtype).eps)


@pytest.mark.parametrize(("size", "tolerance"), [(0.0, 1e-6), (1e-3, 1e-6), (30.0, 2e-3)])
def test_flat_and_sharp_rows(size, tolerance):
    """Scores up to ten thousand, rounded to float32 at 1e-3: all weight on one key, and no overflow."""
    compare(draw(1, 2, 2, 50, 16, size=size), 1.0, tolerance)


def test_the_digits_do_not_depend_on_the_number_of_threads():
    inputs, before = draw(2, 3, 3, 40, 16), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out = causal_softmax(*inputs, 0.3)
            results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_is_not_finite_shows(which):
    inputs = [t.detach().clone() for t in draw(1, 1, 1, 20, 16)]
    inputs[which][0, 0, 17, 3] = torch.nan
    out = causal_softmax(*inputs, 0.25)
    assert out[0, 0, 17].isnan().any()
    assert out[0, 0, :16].isfinite().all()  # rows whose tile of keys ends before it


def test_contiguous_inputs_and_outer_slices_give_the_same():
    wide = torch.randn(2, 20, 3, 3, 16)
    q, k, v = (wide[:, :, i].transpose(1, 2) for i in range(3))
    assert torch.equal(
        causal_softmax(q, k, v, 0.2), causal_softmax(q.contiguous(), k.contiguous(), v.contiguous(), 0.2)
    )


@pytest.mark.parametrize("normalizer", [mercer.Sum(), mercer.L2(), mercer.RMS()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_chooses_the_kernels_and_agrees_with_the_dense_form(normalizer, dtype):
    inputs = draw(2, 4, 2, 400, 16, dtype)
    arguments = {"normalizer": normalizer, "structure": mercer.Causal()}
    assert mercer.plan(*inputs, form="chunked", **arguments).backend == "numba"
    out, dense = (mercer.attention(*inputs, form=form, **arguments) for form in ("chunked", "dense"))
    upstream = torch.randn_like(out)
    got, wanted = (torch.autograd.grad(y, inputs, upstream) for y in (out, dense))
    unit = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    for a, b in zip((out, *got), (dense, *wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=unit * max(1.0, b.abs().max().item()))


def test_what_the_kernels_do_not_take_goes_elsewhere():
    def backend(length=400, dim=16, dtype=torch.float32, structure=None, kernel=None):
        inputs = draw(2, 4, 2, length, dim, dtype)
        structure = mercer.Causal() if structure is None else structure
        return mercer.plan(*inputs, form="chunked", path="pairs", kernel=kernel, structure=structure).backend

    assert backend() == "numba"
    assert backend(length=64) != "numba"  # too little work
    assert backend(dim=24) != "numba"
    assert backend(dim=256) != "numba"
    assert backend(dtype=torch.float64) != "numba"
    assert backend(structure=mercer.Full()) != "numba"
    assert backend(structure=mercer.Causal() & mercer.Window.last(9)) != "numba"
    assert backend(kernel=mercer.Elu()) == "torch"
