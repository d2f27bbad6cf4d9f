"""Exact attention by the Numba kernels against its definition in float64: rows, log-sums and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tolerance import assert_close

pytest.importorskip("numba")

import mercer
from mercer.backends import softmax
from mercer.backends.softmax import Sight, softmax_attention
from mercer.errors import InvalidArgument, Unsupported

SINGLE, HALF = torch.float32, torch.bfloat16


def draw(batch, heads, kv_heads, queries, keys, dim, width=None, dtype=SINGLE, size=1.0):
    """Tensors with the strides that projections give."""
    shapes = ((queries, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, width or dim))
    return tuple((size * torch.randn(batch, *s)).to(dtype).transpose(1, 2).requires_grad_() for s in shapes)


def definition(query, key, value, scale, sight):
    q, k, v = (t.double() for t in (query, key, value))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    apart = sight.key_at.unsqueeze(1) - sight.query_at.unsqueeze(2)
    seen = torch.ones_like(apart, dtype=torch.bool)
    if sight.left is not None:
        seen = seen & (apart >= -sight.left)
    if sight.right is not None:
        seen = seen & (apart <= sight.right)
    if sight.key_valid is not None:
        seen = seen & sight.key_valid.unsqueeze(1)
    if sight.query_valid is not None:
        seen = seen & sight.query_valid.unsqueeze(2)
    score = scale * q @ k.transpose(-1, -2)
    if sight.slopes is not None:
        score = score - sight.slopes.double().view(-1, 1, 1) * apart.abs().unsqueeze(1)
    score = score.masked_fill(~seen.unsqueeze(1), -torch.inf)
    log_sum = score.logsumexp(-1)
    return (score - log_sum.masked_fill(log_sum == -torch.inf, 0).unsqueeze(-1)).exp() @ v, log_sum


def compare(inputs, scale, sight, tolerance=None):
    """Rows, log-sums, and gradients of both, also where rows see nothing."""
    out, log_sum = softmax_attention(*inputs, scale, sight)
    expected, exact_sum = definition(*inputs, scale, sight)
    seen = exact_sum > -torch.inf
    assert torch.equal(log_sum > -torch.inf, seen)
    assert not out.masked_select(~seen.unsqueeze(-1)).any()
    up, up_sum = torch.randn_like(out), torch.randn_like(log_sum)
    got = torch.autograd.grad((out, log_sum), inputs, (up, up_sum))
    wanted = torch.autograd.grad((expected, exact_sum), inputs, (up.double(), up_sum.double() * seen))
    assert out.dtype == inputs[0].dtype
    terms, narrow = inputs[1].shape[2], inputs[0].dtype == HALF
    assert_close(torch.where(seen, log_sum, 0), torch.where(seen, exact_sum, 0), terms, "log-sum", SINGLE)
    for name, ours, theirs in zip(("out", "q", "k", "v"), (out, *got), (expected, *wanted), strict=True):
        assert ours.isfinite().all(), name
        if tolerance is None:
            assert_close(ours, theirs, terms, name, roundings=1 if not narrow else 2 if name == "out" else 4)
        else:
            assert (ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max().clamp_min(1), name
    return out


def sights(queries, keys, heads=4, batch=2):
    counts = torch.arange(batch) * (keys // 2)  # the first row sees nothing
    holes = torch.rand(batch, keys) > 0.4
    ranks, first = holes.cumsum(1) - 1, torch.arange(queries).unsqueeze(0)
    return {
        "full": Sight.of(queries, keys),
        "causal": Sight.of(queries, keys, right=0),
        "window": Sight.of(queries, keys, left=20, right=3),
        "ahead": Sight.of(queries, keys, right=5),
        "sliding": Sight.of(queries, keys, left=17, right=0),
        "later keys": Sight.of(queries, keys, right=0, offset=keys // 3),
        "counts": Sight.of(queries, keys, counts=counts),
        "causal, counts": Sight.of(queries, keys, right=0, counts=counts),
        "alibi": Sight.of(queries, keys, slopes=torch.rand(heads)),
        "causal alibi": Sight.of(queries, keys, right=0, slopes=torch.rand(heads)),
        "holes": Sight(first + (ranks[:, -1:] - queries), ranks, 9, 0, torch.rand(batch, queries) > 0.2, holes),
    }


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize("name", list(sights(1, 2)))
def test_every_sight(name, dtype):
    for queries, keys, dim, width in ((40, 40, 16, 16), (37, 70, 48, 24), (70, 33, 16, 32)):
        compare(draw(2, 4, 2, queries, keys, dim, width, dtype), dim**-0.5, sights(queries, keys)[name])


@pytest.mark.parametrize("dtype", [SINGLE, HALF, torch.float16], ids=str)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 130])
def test_every_length_around_tiles_and_blocks(length, dtype):
    compare(draw(2, 2, 2, length, length, 16, dtype=dtype), 0.25, Sight.of(length, length, right=0))


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "width"),
    [(4, 2, 16, 16), (6, 1, 16, 16), (2, 2, 1, 3), (4, 2, 80, 80), (2, 1, 256, 256), (3, 3, 20, 7)],
)
def test_groups_and_head_dimensions(heads, kv_heads, dim, width, dtype):
    compare(draw(2, heads, kv_heads, 37, 37, dim, width, dtype), dim**-0.5, Sight.of(37, 37, right=0))


@settings(max_examples=40)
@given(
    st.integers(1, 150), st.integers(1, 150), st.integers(1, 3), st.integers(1, 3), st.integers(1, 40),
    st.one_of(st.none(), st.integers(0, 160)), st.one_of(st.none(), st.integers(0, 160)), st.integers(-160, 160),
    st.sampled_from([SINGLE, HALF]),
)  # fmt: skip
def test_any_shape(queries, keys, kv_heads, group, dim, left, right, offset, dtype):
    inputs = draw(1, kv_heads * group, kv_heads, queries, keys, dim, dtype=dtype)
    compare(inputs, dim**-0.5, Sight.of(queries, keys, left, right, offset))


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
def test_long_rows_and_split_keys(dtype):
    """Several blocks of keys, several packs of queries, and keys of one head in several runs."""
    inputs = draw(1, 2, 1, 1300, 1300, 16, dtype=dtype)
    compare(inputs, 0.25, Sight.of(1300, 1300, right=0))
    compare(inputs, 0.25, Sight.of(1300, 1300, left=100, right=0))


@pytest.mark.parametrize(("size", "tolerance"), [(0.0, 1e-6), (1e-3, 1e-6), (30.0, 2e-3)])
def test_flat_and_sharp_rows(size, tolerance):
    """Scores up to ten thousand, rounded to float32 at 1e-3: all weight on one key, and no overflow."""
    compare(draw(1, 2, 2, 50, 50, 16, size=size), 1.0, Sight.of(50, 50, right=0), tolerance)


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_a_scale_that_is_not_positive(scale, dtype):
    compare(draw(1, 2, 2, 50, 50, 16, dtype=dtype), scale, Sight.of(50, 50, right=0))


def test_sharp_and_underflowing_rows_of_bfloat16():
    """Weights down to the smallest float32 and below, where products in tiles must not stall or give anything."""
    inputs = draw(1, 2, 2, 70, 70, 16, dtype=HALF, size=8.0)
    compare(inputs, 0.25, Sight.of(70, 70, right=0), 2e-2)


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
def test_the_digits_do_not_depend_on_the_number_of_threads(dtype):
    inputs, before = draw(1, 3, 1, 1100, 1100, 16, dtype=dtype), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out, log_sum = softmax_attention(*inputs, 0.3, Sight.of(1100, 1100, right=0))
            results.append((out, log_sum, *torch.autograd.grad(out.float().square().sum(), inputs)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_bfloat16_is_as_accurate_as_torch():
    """Largest and mean error against float64, of rows and gradients, no worse than torch's fused kernel by a fifth."""
    inputs = draw(2, 4, 4, 300, 300, 64, dtype=HALF)
    expected, _ = definition(*inputs, 0.125, Sight.of(300, 300, right=0))
    up = torch.randn_like(expected).to(HALF)
    wanted = (expected, *torch.autograd.grad(expected, inputs, up.double()))

    def errors(out):
        found = (out, *torch.autograd.grad(out, inputs, up))
        apart = [(a.detach().double() - b.detach()).abs() for a, b in zip(found, wanted, strict=True)]
        return [(float(e.max()), float(e.mean())) for e in apart]

    ours = errors(softmax_attention(*inputs, 0.125, Sight.of(300, 300, right=0))[0])
    theirs = errors(torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True))
    for (most, mean), (their_most, their_mean) in zip(ours, theirs, strict=True):
        assert mean <= 1.2 * their_mean
        assert most <= 1.5 * their_most  # of single numbers, so it scatters


def test_wide_rows_of_narrow_inputs_are_not_rounded():
    inputs = draw(1, 2, 2, 60, 60, 16, dtype=HALF)
    sight = Sight.of(60, 60, right=0)
    wide, _ = softmax_attention(*inputs, 0.25, sight, SINGLE)
    rounded, _ = softmax_attention(*inputs, 0.25, sight)
    assert wide.dtype == SINGLE
    assert torch.equal(wide.to(HALF), rounded)
    up = torch.randn_like(wide)
    got = torch.autograd.grad(wide, inputs, up)
    wanted = torch.autograd.grad(definition(*inputs, 0.25, sight)[0], inputs, up.double())
    for ours, theirs in zip(got, wanted, strict=True):
        assert_close(ours, theirs, 60, roundings=4)


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_what_is_not_finite_shows(which, what, dtype):
    inputs = [t.detach().clone() for t in draw(1, 1, 1, 40, 40, 16, dtype=dtype)]
    inputs[which][0, 0, 37, 3] = what
    out, _ = softmax_attention(*inputs, 0.25, Sight.of(40, 40, right=0))
    expected, _ = definition(*inputs, 0.25, Sight.of(40, 40, right=0))
    assert (out.isfinite() <= expected.isfinite())[:, :, 37:].all()
    assert out[0, 0, :32].isfinite().all()  # rows whose tile of keys, 16 or 32 of them, ends before it


def test_scores_of_minus_infinity_only_are_not_an_empty_row():
    inputs = [torch.ones(1, 1, 4, 16) for _ in range(3)]
    inputs[0][0, 0, 2, 5] = -torch.inf
    out, log_sum = softmax_attention(*inputs, 1.0, Sight.of(4, 4, right=0))
    assert out[0, 0, 2].isnan().all()
    assert log_sum[0, 0, 2].isnan()
    assert out[0, 0, [0, 1, 3]].isfinite().all()


def test_contiguous_inputs_and_outer_slices_give_the_same():
    wide = torch.randn(2, 20, 3, 3, 16)
    q, k, v = (wide[:, :, i].transpose(1, 2) for i in range(3))
    sight = Sight.of(20, 20, right=0)
    out, _ = softmax_attention(q, k, v, 0.2, sight)
    assert torch.equal(out, softmax_attention(q.contiguous(), k.contiguous(), v.contiguous(), 0.2, sight)[0])
    every_second = torch.randn(1, 1, 20, 32)[..., ::2]
    assert torch.equal(
        softmax_attention(every_second, every_second, every_second, 0.2, sight)[0],
        softmax_attention(*[every_second.contiguous()] * 3, 0.2, sight)[0],
    )


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
def test_parts_of_the_keys_join_to_the_whole(dtype):
    """Log-sums merge what two calls found of different keys, and each then gives its part of the gradients."""
    q, k, v = (t.detach() for t in draw(1, 2, 2, 48, 48, 16, dtype=dtype))
    up, whole = torch.randn_like(q), Sight.of(48, 48, right=0)
    out, log_sum = softmax.forward(q, k, v, 0.25, whole, SINGLE)
    grads = softmax.backward(q, k, v, out, log_sum, up, None, 0.25, whole)
    halves = (k[:, :, :20], v[:, :, :20], Sight.of(48, 20, right=0, offset=0)), (
        k[:, :, 20:], v[:, :, 20:], Sight.of(48, 28, right=0, offset=-20),
    )  # fmt: skip
    found = [softmax.forward(q, *half[:2], 0.25, half[2], SINGLE) for half in halves]
    total = torch.logaddexp(found[0][1], found[1][1])
    assert_close(total, log_sum, 48)
    joined = sum((o * (s - total).exp().unsqueeze(-1) for o, s in found), torch.zeros(()))
    assert_close(joined, out, 48, "out", dtype, 2)
    parts = [softmax.backward(q, *half[:2], out, log_sum, up, None, 0.25, half[2]) for half in halves]
    assert_close(parts[0][0].float() + parts[1][0].float(), grads[0].float(), 48, "q", dtype, 4)
    for i, name in ((1, "k"), (2, "v")):
        assert_close(torch.cat([p[i] for p in parts], 2), grads[i], 48, name, roundings=4)


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 4, 4), (2, 0, 5), (2, 5, 0)])
def test_no_tokens(batch, queries, keys):
    inputs = draw(batch, 4, 2, queries, keys, 16)
    out, log_sum = softmax_attention(*inputs, 0.25, Sight.of(queries, keys))
    assert out.shape == (batch, 4, queries, 16)
    assert not out.any()
    assert (log_sum == -torch.inf).all()
    for x, g in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert g.shape == x.shape
        assert not g.any()


def test_second_derivatives_are_refused():
    inputs = draw(1, 1, 1, 8, 8, 16)
    out, _ = softmax_attention(*inputs, 0.25, Sight.of(8, 8))
    with pytest.raises(Unsupported, match="Second derivatives"):
        torch.autograd.grad(out.sum(), inputs, create_graph=True)


def test_bad_arguments_are_named():
    q, k, v = (t.detach() for t in draw(2, 4, 2, 8, 9, 16))
    sight = Sight.of(8, 9)
    for given_, pattern in (
        ((q[0], k, v, sight), r"must be \[B, H, L, D\]"),
        ((q[:, :3], k, v, sight), "Hk divides Hq"),
        ((q, k, v[:, :, :8], sight), "D and Dv are 1 or more"),
        ((q, k, v, Sight.of(9, 9)), r"query_at must be \[1 or 2, 8\], not \[1, 9\]"),
        ((q, k, v, Sight.of(8, 9, left=-1)), "left and right must be 0 or more"),
        ((q, k, v, Sight.of(8, 9, slopes=torch.ones(3))), r"slopes must be \[4\]"),
    ):
        with pytest.raises(InvalidArgument, match=pattern):
            softmax_attention(*given_[:3], 0.25, given_[3])
    with pytest.raises(Unsupported, match="float32 on the CPU"):
        softmax_attention(q.double(), k.double(), v.double(), 0.25, sight)


def call(length=400, dim=16, dtype=SINGLE):
    return draw(2, 4, 2, length, length, dim, dtype=dtype)


@pytest.mark.parametrize("normalizer", [mercer.Sum(), mercer.L2(), mercer.RMS()])
@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_attention_chooses_the_kernels_and_agrees_with_the_dense_form(normalizer, dtype):
    inputs = call(dtype=dtype)
    arguments = {"normalizer": normalizer, "structure": mercer.Causal()}
    assert mercer.plan(*inputs, form="chunked", **arguments).backend == "numba"
    out, dense = (mercer.attention(*inputs, form=form, **arguments) for form in ("chunked", "dense"))
    upstream = torch.randn_like(out)
    got, wanted = (torch.autograd.grad(y, inputs, upstream) for y in (out, dense))
    unit = 1e-5 if dtype == SINGLE else 4 * torch.finfo(dtype).eps
    for a, b in zip((out, *got), (dense, *wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=unit * max(1.0, b.abs().max().item()))


def test_the_plan_says_what_multiplies_bfloat16(monkeypatch):
    from mercer.backends import softmax_vectors

    options = {"structure": mercer.Causal(), "form": "chunked"}
    for there, words in ((True, "products in bfloat16"), (False, "products in float32: no AVX512-BF16 here")):
        monkeypatch.setattr(softmax_vectors, "NARROW", there)
        assert words in mercer.plan(*call(dtype=HALF), **options).reason
        assert softmax.narrow(HALF, HALF) is there
    assert "products" not in mercer.plan(*call(), **options).reason
    assert not softmax.narrow(HALF, SINGLE)


def test_without_tiles_bfloat16_is_multiplied_in_pairs(monkeypatch):
    """On a processor with AMX the tests of bfloat16 above are of tiles; on any other these say what they say."""
    from mercer.backends import softmax_vectors

    monkeypatch.setattr(softmax_vectors, "TILES", False)
    assert not softmax.tiled()
    for name in ("causal", "holes", "causal alibi"):
        compare(draw(2, 4, 2, 37, 70, 48, 24, HALF), 48**-0.5, sights(37, 70)[name])
    compare(draw(1, 2, 1, 300, 300, 64, dtype=HALF), 0.125, Sight.of(300, 300, right=0))


def test_tile_registers_are_left_as_they_were():
    """torch's products in bfloat16 keep their own shapes of them between calls in one thread."""
    left, right = torch.randn(64, 96).to(HALF), torch.randn(96, 48).to(HALF)
    inputs = [t.detach() for t in draw(1, 2, 2, 70, 70, 16, dtype=HALF)]
    before = left @ right
    for _ in range(3):
        softmax_attention(*inputs, 0.25, Sight.of(70, 70, right=0))
        assert torch.equal(left @ right, before)
    assert_close(before, left.double() @ right.double(), 96, dtype=HALF)


def test_without_the_instruction_bfloat16_is_widened(monkeypatch):
    """The float32 code computes the same from bfloat16 inputs, and rounds once."""
    from mercer.backends import softmax_vectors

    monkeypatch.setattr(softmax_vectors, "NARROW", False)
    inputs = draw(1, 2, 1, 70, 70, 24, dtype=HALF)
    sight = Sight.of(70, 70, right=0)
    compare(inputs, 0.2, sight)
    wide, _ = softmax_attention(*inputs, 0.2, sight, SINGLE)
    exact, _ = definition(*inputs, 0.2, sight)
    assert (wide - exact).abs().max() < 1e-5  # weights are not rounded


def test_what_the_kernels_do_not_take_goes_elsewhere():
    def backend(inputs=None, structure=None, kernel=None):
        inputs = call() if inputs is None else inputs
        structure = mercer.Causal() if structure is None else structure
        return mercer.plan(*inputs, form="chunked", path="pairs", kernel=kernel, structure=structure).backend

    slopes = torch.ones(4)
    for structure in (
        mercer.Causal(),
        mercer.Full(),
        mercer.Window(5, 3),
        mercer.Causal() & mercer.Alibi(slopes),
        mercer.Causal() & mercer.Padding(lengths=torch.tensor([400, 7])),
        mercer.Causal() & mercer.Documents(torch.tensor([0, 100, 400])),
    ):
        assert backend(structure=structure) == "numba"
    assert backend(call(dim=24)) == "numba"
    assert backend(call(length=64)) != "numba"  # too little work
    assert backend(call(dim=257)) != "numba"
    assert backend(call(dtype=torch.float64)) != "numba"
    assert backend(structure=mercer.Causal() & mercer.Alibi(slopes.requires_grad_())) == "torch"
    assert backend(structure=mercer.Causal() & mercer.Decay(torch.full((4,), 0.9))) == "torch"
    assert backend(kernel=mercer.Elu()) == "torch"
