"""softmax attention against torch's scaled_dot_product_attention and softmax, forward and backward."""

import math

import pytest
import torch
from tests.tolerance import assert_close
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mercer.core.kernels import Exp
from mercer.core.log_weights import Alibi
from mercer.core.normalizers import L2, Sum
from mercer.core.structures import Causal, Documents, Full, Padding, Structure, Window
from mercer.nn.positions import alibi_slopes
from mercer.ops import attention

BATCH, HEADS, KEY_HEADS, LENGTH, DIM = 2, 6, 2, 37, 8
FORMS = ["auto", "dense", "chunked", "recurrent"]


def tensors(
    dtype: torch.dtype = torch.float64, queries: int = LENGTH, keys: int = LENGTH, value_dim: int = DIM
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    sizes = ((BATCH, HEADS, queries, DIM), (BATCH, KEY_HEADS, keys, DIM), (BATCH, KEY_HEADS, keys, value_dim))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in sizes]


def both(structure: Structure, mask: Tensor | None, form: str, given: list[Tensor], scale: float | None = None) -> None:
    """Compare with torch's operator, given the same as a mask of booleans or log-weights."""
    out = attention(*given, structure=structure, scale=scale, form=form)
    expected = scaled_dot_product_attention(*given, attn_mask=mask, scale=scale, enable_gqa=True)
    assert_close(out, expected, given[1].shape[2])
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    wanted, got = (torch.autograd.grad(o, given, cotangent) for o in (expected, out))
    for name, g, w in zip("qkv", got, wanted, strict=True):
        # Under float32 the operator itself errs as much as we do.
        assert_close(g, w, 2 * given[1].shape[2], f"gradient of {name}")


def distance(queries: int, keys: int) -> Tensor:
    """How far a key stands before a query; bottom-right aligned."""
    return torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)[None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [None, 1.0, 0.1])
@pytest.mark.parametrize("form", FORMS)
def test_full_and_causal(form: str, scale: float | None, dtype: torch.dtype):
    both(Full(), None, form, tensors(dtype), scale)
    both(Causal(), distance(LENGTH, LENGTH) >= 0, form, tensors(dtype), scale)


@pytest.mark.parametrize("form", FORMS)
def test_unequal_lengths_and_dimensions(form: str):
    given = tensors(queries=11, keys=29, value_dim=5)
    both(Full(), None, form, given)
    both(Causal(), distance(11, 29) >= 0, form, given)


@pytest.mark.parametrize("form", FORMS)
def test_masks(form: str):
    apart = distance(LENGTH, LENGTH)
    if form != "recurrent":
        both(Window(5, 3), (apart <= 5) & (apart >= -3), form, tensors())
    both(Window.last(4), (apart < 4) & (apart >= 0), form, tensors())
    lengths = torch.tensor([30, 9])
    keys = (torch.arange(LENGTH) < lengths[:, None])[:, None, None]
    both(Padding(lengths=lengths), keys.expand(BATCH, 1, LENGTH, LENGTH), form, tensors())
    place = torch.bucketize(torch.arange(LENGTH), torch.tensor([10, 11, 30]), right=True)
    packed = place[:, None] == place[None]
    both(Documents(torch.tensor([0, 10, 11, 30, LENGTH])), packed, form, tensors())
    both(Causal() & Documents(torch.tensor([0, 10, 11, 30, LENGTH])), packed & (apart >= 0), form, tensors())


@pytest.mark.parametrize("form", FORMS)
def test_alibi_is_a_bias(form: str):
    slopes = alibi_slopes(HEADS).double()
    bias = -slopes[:, None, None] * distance(LENGTH, LENGTH).abs()
    both(Alibi(slopes), bias.expand(BATCH, -1, -1, -1), form, tensors())
    hidden = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(distance(LENGTH, LENGTH) < 0, -math.inf)
    both(Causal() & Alibi(slopes), (bias + hidden).expand(BATCH, -1, -1, -1), form, tensors())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_against_float64_softmax(form: str, dtype: torch.dtype):
    """Closer to exact softmax than one rounding of the dtype."""
    q, k, v = tensors(dtype)
    keys, values = (x.double().repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k, v))
    score = q.double() @ keys.transpose(-1, -2) / DIM**0.5
    exact = score.masked_fill(distance(LENGTH, LENGTH) < 0, -math.inf).softmax(-1) @ values
    assert_close(attention(q, k, v, structure=Causal(), form=form), exact, LENGTH)


@pytest.mark.parametrize("form", FORMS)
def test_exp_with_l2_is_softmax_of_unit_length(form: str):
    """exp(S) V / |exp(S) V| = softmax(S) V / |softmax(S) V|, also where exp(S) itself leaves the range."""
    for size in (1.0, 40.0):
        q, k, v = tensors()
        out = attention(q * size, k * size, v, normalizer=L2(), structure=Causal(), form=form)
        soft = attention(q * size, k * size, v, kernel=Exp(), normalizer=Sum(), structure=Causal(), form="dense")
        assert_close(out, soft / soft.norm(dim=-1, keepdim=True), LENGTH)
