"""Masks and biases that are given pair by pair equal the double loop in every form: outputs, gradients, padding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tolerance import assert_close

from mercer import (
    L2,
    Alibi,
    Bias,
    Causal,
    Documents,
    Elu,
    Exp,
    Full,
    Gaussian,
    Global,
    InvalidArgument,
    Length,
    Mask,
    Mixed,
    Padding,
    PositiveRandomFeatures,
    Sum,
    Taylor,
    Unsupported,
    Window,
    attention,
)
from mercer.core import schedule
from mercer.core.reference import reference_attention
from mercer.forms import tiles as tiles_module

BATCH, HEADS, KEY_HEADS, QUERIES, KEYS, DIM = 2, 4, 2, 8, 11, 3
KINDS = [(Exp(), Sum()), (Taylor(2), Sum()), (Taylor(3), L2()), (Elu(), Length()), (Gaussian(), Sum())]
SHAPES = [(BATCH, 1), (1, HEADS)]


def draw(dtype=torch.float64, queries=QUERIES, keys=KEYS):
    shapes = ((HEADS, queries), (KEY_HEADS, keys), (KEY_HEADS, keys))
    return [torch.randn(BATCH, h, n, DIM, dtype=torch.float64).to(dtype).requires_grad_() for h, n in shapes]


def mask_of(lead, queries=QUERIES, keys=KEYS):
    mask = torch.rand(*lead, queries, keys) < 0.5
    mask[:, :, 3] = False  # a row that sees nothing
    return mask


def bias_of(lead, queries=QUERIES, keys=KEYS):
    bias = torch.randn(*lead, queries, keys, dtype=torch.float64)
    bias[:, :, 5, 2] = bias[:, :, 4] = -torch.inf
    return bias.requires_grad_()


@pytest.fixture(params=[(64, 2048, 64, 512), (3, 5, 3, 5)], ids=["wide", "narrow"], autouse=True)
def tiles(request, monkeypatch):
    """Tiles as they are, and small ones, so that all their edges are met."""
    for module, name, size in zip(
        (tiles_module, tiles_module, schedule, schedule),
        ("ROWS", "COLUMNS", "ROWS", "CHUNK"),
        request.param,
        strict=True,
    ):
        monkeypatch.setattr(module, name, size)
    schedule._schedule.cache_clear()
    yield
    schedule._schedule.cache_clear()


def compare(given, tensors, structure, kernel, normalizer, form, backend="torch"):
    """Outputs and gradients of a form against the double loop."""
    options = {"kernel": kernel, "normalizer": normalizer, "structure": structure}
    ours = attention(*given, **options, form=form, path="pairs", backend=backend)
    expected = reference_attention(*given, **options)
    terms = KEYS * DIM
    assert_close(ours, expected, terms, form)
    direction = torch.randn(expected.shape, dtype=torch.float64)
    found = torch.autograd.grad((ours * direction).sum(), tensors)
    right = torch.autograd.grad((expected * direction).sum(), tensors)
    for ours, theirs in zip(found, right, strict=True):
        finite = torch.isfinite(theirs)  # the loop has NaN where it multiplies exp(-inf) by what comes back
        assert torch.isfinite(ours).all()
        assert_close(ours.masked_fill(~finite, 0), theirs.masked_fill(~finite, 0), 8 * terms, f"gradient, {form}")


@pytest.mark.parametrize("form", ["dense", "chunked", "recurrent"])
@pytest.mark.parametrize("lead", SHAPES, ids=str)
@pytest.mark.parametrize(("kernel", "normalizer"), KINDS, ids=str)
def test_every_form_equals_the_double_loop(kernel, normalizer, lead, form):
    tensors = draw()
    bias = bias_of(lead)
    compare(tensors, tensors, Mask(mask_of(lead)), kernel, normalizer, form)
    compare(tensors, [*tensors, bias], Bias(bias), kernel, normalizer, form)
    compare(tensors, [*tensors, bias], Mask(mask_of((1, 1))) & Bias(bias), kernel, normalizer, form)


COMPANY = {
    "causal": Causal(),
    "window": Window(4, 2),
    "alibi": Causal() & Alibi(torch.tensor([0.5, 0.25, 0.1, 0.0])),
    "pattern": Window(2, 2) | Global((0, 7)),
}
HOLES = torch.ones(BATCH, KEYS, dtype=torch.bool)
HOLES[0, :2] = HOLES[0, 6] = HOLES[1, 8:] = False


@pytest.mark.parametrize("form", ["dense", "chunked"])
@pytest.mark.parametrize("padding", [None, HOLES], ids=["all there", "padded"])
@pytest.mark.parametrize("company", COMPANY)
@pytest.mark.parametrize(("kernel", "normalizer"), KINDS[:2] + KINDS[3:4], ids=str)
def test_beside_other_structures(kernel, normalizer, company, padding, form):
    tensors = draw(queries=KEYS)
    bias = bias_of((1, HEADS), KEYS)
    structure = COMPANY[company] & Mask(mask_of((BATCH, 1), KEYS)) & Bias(bias)
    structure = structure if padding is None else structure & Padding(padding)
    compare(tensors, [*tensors, bias], structure, kernel, normalizer, form)


def test_padding_alone():
    """Nothing orders the tokens, so that queries are tokens of their own."""
    tensors = draw()
    compare(tensors, tensors, Mask(mask_of((1, 1))) & Padding(HOLES), Exp(), Sum(), "chunked")


@settings(max_examples=40, suppress_health_check=[])
@given(st.integers(0, 2**31), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 40), st.integers(1, 40))
def test_narrow_dtypes(seed, dtype, queries, keys):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(2, 2, n, DIM, generator=generator).to(dtype) for n in (queries, keys, keys))
    bias = torch.randn(1, 2, queries, keys, generator=generator).to(dtype)
    mask = torch.rand(2, 1, queries, keys, generator=generator) < 0.6
    structure = Mask(mask) & Bias(bias)
    exact = Mask(mask) & Bias(bias.double())
    expected = reference_attention(query.double(), key.double(), value.double(), structure=exact)
    for form, backend in (("dense", "torch"), ("chunked", "torch"), ("chunked", "sdpa")):
        ours = attention(query, key, value, structure=structure, form=form, backend=backend)
        assert_close(ours, expected, keys * DIM, f"{form}, {backend}")


def test_random_features_under_a_mask():
    query, key, value = (x.detach() for x in draw())
    options = {"kernel": PositiveRandomFeatures(64), "structure": Mask(mask_of((1, 1)))}
    ours = attention(query, key, value, form="chunked", **options)
    assert_close(ours, attention(query, key, value, form="dense", **options), KEYS * 64)


def test_a_bias_is_left_as_it_is():
    """A tile of it is a view of the caller's tensor, and tiles are worked on in place."""
    query, key, value = (x.detach() for x in draw())
    bias = torch.randn(BATCH, HEADS, QUERIES, KEYS, dtype=torch.float64)
    before = bias.clone()
    for kernel in (Exp(), Taylor(2)):
        for form in ("dense", "chunked"):
            attention(query, key, value, kernel=kernel, structure=Bias(bias), form=form)
    assert torch.equal(bias, before)


class TestRefusals:
    q, k = torch.zeros(BATCH, HEADS, QUERIES, DIM), torch.zeros(BATCH, KEY_HEADS, KEYS, DIM)
    mask = Mask(torch.ones(1, 1, QUERIES, KEYS, dtype=torch.bool))

    @pytest.mark.parametrize(("part", "wrong"), [(Mask, torch.zeros(1, 1, 2, 2)), (Bias, torch.ones(1, 1, 2, 2) > 0)])
    def test_the_dtype_of_the_other(self, part, wrong):
        with pytest.raises(InvalidArgument, match="tensor must be"):
            part(wrong)

    @pytest.mark.parametrize("wrong", [torch.ones(2, 2) > 0, [[True]]])
    def test_no_tensor_of_four_dimensions(self, wrong):
        with pytest.raises(InvalidArgument, match="tensor must be"):
            Mask(wrong)

    @pytest.mark.parametrize("shape", [(3, 1, QUERIES, KEYS), (1, KEY_HEADS, QUERIES, KEYS), (1, 1, 1, KEYS)])
    def test_shapes(self, shape):
        with pytest.raises(InvalidArgument, match="batch and heads also 1"):
            attention(self.q, self.k, self.k, structure=Bias(torch.zeros(shape)))

    def test_two_of_a_kind(self):
        with pytest.raises(Unsupported, match="Two Mask"):
            attention(self.q, self.k, self.k, structure=self.mask & self.mask)

    def test_states(self):
        with pytest.raises(Unsupported, match="nothing of the tokens in a state"):
            attention(self.q, self.k, self.k, structure=Full() & self.mask, return_state=True)

    def test_features(self):
        with pytest.raises(Unsupported, match="differs from pair to pair"):
            attention(self.q, self.k, self.k, kernel=Taylor(2), structure=self.mask, path="features")

    def test_two_kernels_in_a_row(self):
        with pytest.raises(Unsupported, match="is not computed under Mask"):
            attention(self.q, self.k, self.k, kernel=Mixed(Exp(), Taylor(2), 4), structure=Causal() & self.mask)

    def test_documents(self):
        structure = Documents(torch.tensor([0, KEYS])) & self.mask
        with pytest.raises(Unsupported, match="Mask together with Documents"):
            attention(self.q, self.k, self.k, structure=structure)

    def test_second_derivatives(self):
        tensors = draw()
        bias = torch.zeros(1, 1, QUERIES, KEYS, dtype=torch.float64, requires_grad=True)
        out = attention(*tensors, structure=Bias(bias), form="chunked")
        with pytest.raises(Unsupported, match="Second derivatives"):
            torch.autograd.grad(out.square().sum(), bias, create_graph=True)
