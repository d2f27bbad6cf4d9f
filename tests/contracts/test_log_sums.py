"""The log-sum-exp of rows: in every form, path and backend, with its gradient."""

import pytest
import torch
from tests.tolerance import assert_close

from mercer import (
    L2,
    Causal,
    Clamped,
    Documents,
    Elu,
    Exp,
    Length,
    Padding,
    PositiveRandomFeatures,
    Strided,
    Sum,
    Taylor,
    Unsupported,
    Window,
    attention,
    plan,
)

KERNELS = [Exp(), Taylor(2), Elu(), PositiveRandomFeatures(16)]
WAYS = [
    ("dense", "pairs"),
    ("chunked", "pairs"),
    ("recurrent", "pairs"),
    ("chunked", "features"),
    ("recurrent", "features"),
]


def inputs(length=21, dim=16, dtype=torch.float64, queries=None):
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, queries or length), (2, length), (2, length))
    return [torch.randn(2, h, n, dim, generator=generator, dtype=dtype, requires_grad=True) for h, n in sizes]


def literal(query, key, kernel, hidden):
    """log sum_j K(q_i, k_j), from numerators of values that are 1."""
    ones = torch.ones_like(key[..., :1])
    return attention(query, key, ones, kernel=kernel, normalizer=Length(), structure=hidden, form="dense")


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("normalizer", [Sum(), L2(), Clamped()], ids=str)
@pytest.mark.parametrize(("form", "path"), WAYS)
def test_every_way_gives_the_logarithm_of_the_sum(kernel, normalizer, form, path):
    query, key, value = inputs()
    if path == "features" and isinstance(kernel, Exp):
        pytest.skip("Exp has no finite features")
    seen = torch.arange(1, 22, dtype=torch.float64)
    expected = literal(query, key, kernel, Causal()).squeeze(-1).log() + seen.log()
    out, lse = attention(
        query,
        key,
        value,
        kernel=kernel,
        normalizer=normalizer,
        structure=Causal(),
        form=form,
        path=path,
        return_lse=True,
    )
    plain = attention(query, key, value, kernel=kernel, normalizer=normalizer, structure=Causal(), form=form, path=path)
    assert_close(out, plain, 21 * 16)
    assert_close(lse, expected, 21 * 16 * 16)
    weights = torch.randn(lse.shape, generator=torch.Generator().manual_seed(1), dtype=lse.dtype)
    got, want = (torch.autograd.grad((x * weights).sum(), (query, key), retain_graph=True) for x in (lse, expected))
    for actual, exact in zip(got, want, strict=True):
        assert_close(actual, exact, 21 * 16 * 16)


@pytest.mark.parametrize("structure", [Causal(), Window(5, 0), Strided(4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backends_give_the_same(structure, dtype):
    query, key, value = (x.detach().to(dtype) for x in inputs(40))
    exact = (query.double() @ key.double().repeat_interleave(2, 1).mT) / 4
    ones = attention(
        *(torch.zeros(1, 1, 40, 1, dtype=torch.float64),) * 2,
        torch.eye(40, dtype=torch.float64).view(1, 1, 40, 40),
        structure=structure,
        form="dense",
    )
    expected = exact.masked_fill(ones == 0, -torch.inf).logsumexp(-1)
    for backend in ("torch", "numba") if not isinstance(structure, Strided) else ("torch",):
        _, lse = attention(query, key, value, structure=structure, form="chunked", backend=backend, return_lse=True)
        assert lse.dtype == torch.float32
        assert_close(lse, expected, 40 * 16, dtype=torch.float32)


def test_rows_that_see_nothing_have_no_sum():
    query, key, value = inputs()
    valid = torch.ones(2, 21, dtype=torch.bool)
    valid[0, :5] = False
    for form in ("dense", "chunked"):
        _, lse = attention(query, key, value, structure=Causal() & Padding(mask=valid), form=form, return_lse=True)
        assert bool((lse[0, :, :5] == -torch.inf).all())
        assert bool(torch.isfinite(lse[0, :, 5:]).all())
        grads = torch.autograd.grad(lse[torch.isfinite(lse)].sum(), (query, key))
        assert all(bool(torch.isfinite(g).all()) for g in grads)


def test_parts_of_the_keys_merge_by_their_sums():
    query, key, value = inputs()
    whole, total = attention(query, key, value, return_lse=True)
    parts = [attention(query, key[:, :, a:b], value[:, :, a:b], return_lse=True) for a, b in ((0, 8), (8, 21))]
    joined = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out * (lse - joined).exp().unsqueeze(-1) for out, lse in parts)
    assert_close(merged, whole, 21 * 16)
    assert_close(joined, total, 21 * 16)


def test_documents_and_states_have_them_too():
    query, key, value = inputs()
    bounds = torch.tensor([0, 6, 6, 21])
    _, lse = attention(query, key, value, structure=Causal() & Documents(bounds), form="chunked", return_lse=True)
    for start, stop in ((0, 6), (6, 21)):
        part = [x[:, :, start:stop] for x in (query, key, value)]
        assert_close(lse[:, :, start:stop], attention(*part, structure=Causal(), return_lse=True)[1], 21 * 16)
    _, state = attention(*(x[:, :, :9] for x in (query, key, value)), structure=Causal(), return_state=True)
    rest = [x[:, :, 9:] for x in (query, key, value)]
    _, state, later = attention(*rest, structure=Causal(), state=state, return_state=True, return_lse=True)
    assert_close(later, attention(query, key, value, structure=Causal(), return_lse=True)[1][:, :, 9:], 21 * 16)


def test_signed_kernels_are_refused_and_sdpa_is_not_planned():
    query, key, value = inputs()
    with pytest.raises(Unsupported, match="logarithm"):
        attention(query, key, value, kernel=Taylor(3), normalizer=L2(), return_lse=True)
    large = torch.empty(1, 8, 2048, 64, device="meta", dtype=torch.float32)
    assert plan(large, large, large, return_lse=True).backend != "sdpa"
    with pytest.raises(Unsupported, match="sdpa"):
        plan(large, large, large, return_lse=True, form="chunked", backend="sdpa")


# Taylor 2 is 0.5 at least; sums of the others may be as small as they like, and then rounding is all there is of them.
@pytest.mark.parametrize("kernel", [Taylor(2), Elu()], ids=str)
@pytest.mark.parametrize("normalizer", [Sum(), L2()], ids=str)
@pytest.mark.parametrize(("form", "length"), [("chunked", 300), ("recurrent", 7)])
def test_fused_kernels_of_features_give_the_sum_beside_the_rows(kernel, normalizer, form, length):
    pytest.importorskip("numba")
    query, key, value = (x.detach().float() for x in inputs(length))
    given = {"kernel": kernel, "normalizer": normalizer, "structure": Causal(), "return_lse": True}
    out, lse = attention(query, key, value, form=form, path="features", backend="numba", **given)
    wide = [x.double() for x in (query, key, value)]
    exact, sums = attention(*wide, form="dense", **given)
    assert_close(out, exact.float(), length * 16)
    assert_close(lse, sums.float(), length * 16)
