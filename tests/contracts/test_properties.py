"""Properties over random shapes, dtypes, paddings, windows and split points."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contracts import cells
from tests.tolerance import assert_close

from mercer.core.kernels import Elu, Exp, Gaussian, Kernel, Relu, Taylor
from mercer.core.log_weights import Alibi, Decay
from mercer.core.merged import merge
from mercer.core.normalizers import L2, RMS, Normalizer, Sum
from mercer.core.reference import reference_attention
from mercer.core.structures import Causal, Full, Padding, Structure, Window
from mercer.core.support import unsupported
from mercer.forms import scan, tiles
from mercer.ops import attention, plan

kernels = st.sampled_from([Exp(), Gaussian(), Taylor(2), Taylor(4), Elu(), Relu()])
normalizers = st.sampled_from([Sum(), L2(), RMS()])
dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


@st.composite
def shapes(draw: st.DrawFn, equal: bool = False) -> cells.Shape:
    key_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    keys = draw(st.integers(1, 12))
    queries = keys if equal else draw(st.integers(1, 12))
    batch, dim, value_dim = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return cells.Shape(batch, key_heads * groups, key_heads, queries, keys, dim, value_dim)


@st.composite
def structures(draw: st.DrawFn, shape: cells.Shape, causal: bool = False) -> cells.Laid:
    """Any composition of the parts that can be cut into ranges of tokens."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def uniform(*size: int) -> torch.Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64)

    left = draw(st.none() | st.integers(0, shape.keys))
    right = 0 if causal else draw(st.sampled_from([None, 0, 0, 1, 3]))
    slopes = uniform(shape.heads) if draw(st.booleans()) else None
    heads = draw(st.sampled_from(sorted({1, shape.key_heads, shape.heads})))
    rates = uniform(shape.batch, heads, shape.keys) * 0.6 + 0.3 if right == 0 and draw(st.booleans()) else None
    mask = uniform(shape.batch, shape.keys) > draw(st.sampled_from([0.2, 0.6])) if draw(st.booleans()) else None

    def make(a: int, b: int) -> Structure:
        out: Structure = Full() if left is None and right is None else Window(left, right)
        if slopes is not None:
            out = out & Alibi(slopes)
        if rates is not None:
            out = out & Decay(rates[..., a:b])
        return out if mask is None else out & Padding(mask[:, a:b])

    return cells.Laid(make)


@pytest.fixture(autouse=True, scope="module")
def _small_tiles():
    with pytest.MonkeyPatch.context() as patch:
        cells.small_tiles(patch, rows=3, columns=4, chunk=3, workspace=100)
        yield


@settings(max_examples=40)
@given(st.data())
def test_every_form_is_the_specification(data: st.DataObject):
    shape = data.draw(shapes())
    kernel, norm, dtype = data.draw(kernels), data.draw(normalizers), data.draw(dtypes)
    structure = data.draw(structures(shape)).whole(shape)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    tensors = cells.inputs(shape, generator, dtype, kernel, positive=True)
    exact = tensors.double()
    expected = reference_attention(*exact.qkv, kernel, norm, structure)
    wanted = cells.gradients(expected, exact.cotangent, list(exact.qkv))
    for form, path in cells.CELLS:
        if unsupported(kernel, norm, merge(structure), form, path) is not None:
            continue
        out = attention(*tensors.qkv, kernel=kernel, normalizer=norm, structure=structure, form=form, path=path)
        assert_close(out, expected, shape.keys, f"{form} {path}")
        for name, g, w in zip("qkv", cells.gradients(out, tensors.cotangent, list(tensors.qkv)), wanted, strict=True):
            assert_close(g, w, shape.keys * shape.heads, f"{form} {path}: gradient of {name}")


@settings(max_examples=40)
@given(st.data())
def test_any_cuts_continue(data: st.DataObject):
    """A causal sequence cut anywhere, into any number of parts, forms mixed, is the sequence."""
    shape = data.draw(shapes(equal=True))
    kernel, norm = data.draw(kernels), data.draw(normalizers)
    laid = data.draw(structures(shape, causal=True))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    tensors = cells.inputs(shape, generator, positive=True)
    whole = attention(*tensors.qkv, kernel=kernel, normalizer=norm, structure=laid.whole(shape), form="dense")
    paths = [
        p
        for p in ("pairs", "features")
        if unsupported(kernel, norm, merge(laid.whole(shape)), "chunked", p, None, True) is None
    ]
    path = data.draw(st.sampled_from(paths))
    cuts = sorted(data.draw(st.lists(st.integers(0, shape.keys), max_size=5)))
    state, outs = None, []
    for a, b in zip([0, *cuts], [*cuts, shape.keys], strict=True):
        form = data.draw(st.sampled_from(["chunked", "recurrent"] + ["dense"] * (path == "pairs")))
        q, k, v = (x[:, :, a:b] for x in tensors.qkv)
        out, state = attention(
            q,
            k,
            v,
            kernel=kernel,
            normalizer=norm,
            structure=laid.make(a, b),
            state=state,
            return_state=True,
            form=form,
            path=path,
        )
        outs.append(out)
    assert_close(torch.cat(outs, 2), whole, shape.keys)


@settings(max_examples=40)
@given(st.data())
def test_auto_is_a_cell_that_exists(data: st.DataObject):
    """The plan names a supported cell, and running it so gives the same as auto."""
    shape = data.draw(shapes())
    kernel: Kernel = data.draw(kernels)
    norm: Normalizer = data.draw(normalizers)
    structure = data.draw(structures(shape)).whole(shape)
    tensors = cells.inputs(shape, torch.Generator().manual_seed(1), positive=True)
    options = {"kernel": kernel, "normalizer": norm, "structure": structure}
    chosen = plan(*tensors.qkv, **options)
    assert unsupported(kernel, norm, merge(structure), chosen.form, chosen.path) is None
    assert plan(*(x.to("meta") for x in tensors.qkv), **options) == chosen
    out = attention(*tensors.qkv, **options)
    assert torch.equal(out, attention(*tensors.qkv, **options, form=chosen.form, path=chosen.path))


@settings(max_examples=30)
@given(st.data())
def test_batch_rows_do_not_touch_each_other(data: st.DataObject):
    """A row alone, in any form, gives what it gives in a batch."""
    shape = data.draw(shapes(equal=True))
    kernel = data.draw(kernels)
    tensors = cells.inputs(shape, torch.Generator().manual_seed(data.draw(st.integers(0, 999))), positive=True)
    row = data.draw(st.integers(0, shape.batch - 1))
    for form, path in cells.CELLS:
        if unsupported(kernel, Sum(), merge(Causal()), form, path) is None:
            out = attention(*tensors.qkv, kernel=kernel, structure=Causal(), form=form, path=path)
            alone = attention(
                *(x[row : row + 1] for x in tensors.qkv), kernel=kernel, structure=Causal(), form=form, path=path
            )
            assert_close(out[row : row + 1], alone, shape.keys, f"{form} {path}")


def test_the_small_tiles_are_in_force():
    """Without them these properties would hold inside one tile only."""
    assert tiles.ROWS == scan.FEATURE_CHUNK == 3
