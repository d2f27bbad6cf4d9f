"""Sparse patterns in the fused kernels equal the specification in float64: rows, log-sums, gradients, states."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contracts.test_patterns import BY_ROW, DIM, ENDING, HEADS, LENGTH, PATTERNS, holes, inputs, patterns
from tests.tolerance import assert_close

pytest.importorskip("numba")

from mercer import (
    L2,
    RMS,
    Alibi,
    Causal,
    Documents,
    Exp,
    Global,
    Padding,
    Sum,
    Visible,
    Window,
    attention,
)
from mercer.backends import sparse_softmax
from mercer.core import schedule
from mercer.core.reference import reference_attention

SINGLE, HALF = torch.float32, torch.bfloat16
FUSED = {"form": "chunked", "backend": "numba"}


@pytest.fixture(params=[(256, 1024), (20, 24)], ids=["wide", "narrow"])
def tiles(request, monkeypatch):
    """Tiles as they are, and small ones, so that all their edges are met."""
    monkeypatch.setattr(sparse_softmax, "ROWS", request.param[0])
    monkeypatch.setattr(schedule, "CHUNK", request.param[1])
    schedule._schedule.cache_clear()
    yield
    schedule._schedule.cache_clear()


def rounded(dtype, queries=LENGTH):
    """Leaves of a dtype, and the same numbers in float64."""
    single = [x.to(dtype).requires_grad_() for x in inputs(queries)]
    return single, [x.detach().double().requires_grad_() for x in single]


def upstream(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@cache
def literal(name, padded, queries, dtype):
    """What the double loop gives: rows and gradients."""
    _, exact = rounded(dtype, queries)
    structure = PATTERNS[name] & Padding(mask=holes()) if padded else PATTERNS[name]
    expected = reference_attention(*exact, Exp(), Sum(), structure)
    return expected, torch.autograd.grad(expected, exact, upstream(expected.shape))


def compare(out, leaves, expected, wanted, terms=LENGTH * DIM):
    """Rows, and gradients for the same upstream."""
    narrow = out.dtype == HALF
    got = torch.autograd.grad(out, leaves, upstream(out.shape).to(out.dtype))
    assert_close(out, expected, terms, "out", roundings=2 if narrow else 1)
    for name, ours, theirs in zip("qkv", got, wanted, strict=True):
        assert_close(ours, theirs, terms, f"gradient of {name}", roundings=6 if narrow else 1)


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize(("queries", "padded"), [(LENGTH, False), (LENGTH, True), (9, False), (9, True)])
@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_equals_the_double_loop(name, queries, padded, dtype, tiles):
    leaves, _ = rounded(dtype, queries)
    structure = PATTERNS[name] & Padding(mask=holes()) if padded else PATTERNS[name]
    compare(attention(*leaves, structure=structure, **FUSED), leaves, *literal(name, padded, queries, dtype))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("normalizer", [L2(), RMS()], ids=str)
def test_other_normalizers_and_log_sums_with_their_gradients(name, normalizer, tiles):
    found = {}
    for form, options in (("fused", FUSED), ("dense", {"form": "dense"})):
        leaves = rounded(SINGLE)[form == "dense"]
        structure = PATTERNS[name] & Padding(mask=holes())
        out, lse = attention(*leaves, normalizer=normalizer, structure=structure, return_lse=True, **options)
        seen = lse > -torch.inf
        loss = (out * upstream(out.shape)).sum() + (lse.masked_fill(~seen, 0) * upstream(lse.shape)).sum()
        found[form] = (out, lse.masked_fill(~seen, 0), seen.double(), *torch.autograd.grad(loss, leaves))
    for ours, exact in zip(found["fused"], found["dense"], strict=True):
        assert_close(ours, exact, LENGTH * DIM, dtype=SINGLE)


@pytest.mark.parametrize("name", [name for name in PATTERNS if name not in BY_ROW])
def test_documents_are_sequences_of_their_own(name):
    (query, key, value), exact = rounded(SINGLE)
    out = attention(
        query, key, value, structure=PATTERNS[name] & Documents(torch.tensor([0, 4, 4, 5, LENGTH])), **FUSED
    )
    for start, stop in ((0, 4), (4, 5), (5, LENGTH)):
        alone = attention(*(x[:, :, start:stop] for x in exact), structure=PATTERNS[name], form="dense")
        assert_close(out[:, :, start:stop], alone, LENGTH * DIM)


@pytest.mark.parametrize("name", [name for name in PATTERNS if name not in ENDING])
@pytest.mark.parametrize("padded", [False, True])
def test_a_cache_continues_what_is_causal(name, padded, tiles):
    (query, key, value), exact = rounded(SINGLE)
    valid = holes() if padded else torch.ones(holes().shape, dtype=torch.bool)
    structure = PATTERNS[name] & Causal()
    whole = attention(*exact, structure=structure & Padding(mask=valid), form="dense")
    state, outs = None, []
    for start, stop in ((0, 9), (9, 10), (10, 18), (18, LENGTH)):
        part = [x[:, :, start:stop] for x in (query, key, value)]
        masked = structure & Padding(mask=valid[:, start:stop])
        out, state = attention(*part, structure=masked, state=state, return_state=True, **FUSED)
        outs.append(out)
    assert_close(torch.cat(outs, 2), whole, LENGTH * DIM)


@pytest.mark.parametrize("name", PATTERNS)
def test_slopes_of_distances_join_patterns(name, tiles):
    leaves, exact = rounded(SINGLE)
    slopes = torch.rand(HEADS)
    out = attention(*leaves, structure=PATTERNS[name] & Alibi(slopes) & Padding(mask=holes()), **FUSED)
    structure = PATTERNS[name] & Alibi(slopes.double()) & Padding(mask=holes())
    expected = attention(*exact, structure=structure, form="dense")
    compare(out, leaves, expected, torch.autograd.grad(expected, exact, upstream(expected.shape)))


def drawn(batch, key_heads, group, queries, keys, dim, width, dtype):
    shapes = (queries, key_heads * group, dim), (keys, key_heads, dim), (keys, key_heads, width)
    single = [torch.randn(batch, *s).to(dtype).transpose(1, 2).requires_grad_() for s in shapes]
    return single, [x.detach().double().requires_grad_() for x in single]


@settings(max_examples=60)
@given(
    patterns, st.integers(1, 150), st.integers(0, 40), st.booleans(), st.randoms(use_true_random=False),
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 20), st.sampled_from([SINGLE, HALF]),
    st.sampled_from([16, 64, 256]),
)  # fmt: skip
def test_any_composition_equals_the_dense_form(
    pattern, keys, missing, padded, random, key_heads, group, dim, dtype, rows
):
    leaves, exact = drawn(2, key_heads, group, max(1, keys - missing), keys, dim, 2 * dim + 1, dtype)
    if padded:
        pattern = pattern & Padding(mask=torch.tensor([[random.random() > 0.3 for _ in range(keys)] for _ in range(2)]))
    expected = attention(*exact, structure=pattern, form="dense")
    before, sparse_softmax.ROWS = sparse_softmax.ROWS, rows
    try:
        out = attention(*leaves, structure=pattern, **FUSED)
    finally:
        sparse_softmax.ROWS = before
    compare(out, leaves, expected, torch.autograd.grad(expected, exact, upstream(expected.shape)), keys * dim)


@pytest.mark.parametrize("length", [1, 3])
def test_passes_that_show_nothing(length):
    """A pass behind one without tiles went on from rows that nobody had written; no tile at all was an error."""
    nobody = Global((length,), see=False)
    for structure in (nobody, nobody | Window(None, 0, dilation=2)):
        leaves, exact = drawn(2, 1, 2, length, length, 4, 5, SINGLE)
        expected = attention(*exact, structure=structure, form="dense")
        wanted = torch.autograd.grad(expected, exact, upstream(expected.shape))
        left_over = [torch.full((n,), torch.nan) for n in range(1, 400)]
        del left_over
        compare(attention(*leaves, structure=structure, **FUSED), leaves, expected, wanted, 4 * length)


def test_answers_of_rows_and_heads_are_asked_once_for_each(tiles):
    def function(row, head, query, key):
        asked.append(row.flatten().tolist())
        return (key <= query + 3 * row) & ((query + key + head) % 3 != 0)

    asked: list[list[int]] = []
    leaves, exact = rounded(SINGLE)
    expected = attention(*exact, structure=Visible(function), form="dense")
    compare(
        attention(*leaves, structure=Visible(function), **FUSED), leaves, expected,
        torch.autograd.grad(expected, exact, upstream(expected.shape)),
    )  # fmt: skip
    asked.clear()
    structure = Visible(function)
    first = attention(*leaves, structure=structure, **FUSED)
    between = len(asked)
    assert torch.equal(attention(*leaves, structure=structure, **FUSED), first)
    assert len(asked) == between
