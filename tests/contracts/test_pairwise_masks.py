"""Masks and biases over all pairs in torch's fused attention: outputs, gradients, padding, and what the plan takes."""

import pytest
import torch
from tests.contracts.test_pairwise import (
    BATCH,
    HEADS,
    HOLES,
    KEYS,
    QUERIES,
    bias_of,
    compare,
    draw,
    mask_of,
)
from tests.tolerance import assert_close

from mercer import L2, Alibi, Bias, Causal, Exp, Full, Global, Mask, Padding, Sum, Unsupported, Window, attention, plan
from mercer.backends import sdpa
from mercer.planning import BACKENDS


@pytest.mark.parametrize("padding", [None, HOLES, HOLES[:1].expand(BATCH, -1)], ids=["all there", "padded", "alike"])
@pytest.mark.parametrize("band", [Full(), Causal()], ids=str)
@pytest.mark.parametrize(
    ("lead", "together", "normalizer"),
    [((BATCH, 1), 1, Sum()), ((1, HEADS), 2**26, L2()), ((1, 1), 2**26, Sum())],
    ids=["row by row", "of all rows", "one"],
)
def test_they_are_the_double_loop(lead, together, normalizer, band, padding, monkeypatch):
    monkeypatch.setattr(sdpa, "MASK_BYTES", together)
    queries = QUERIES if padding is None else KEYS
    tensors, bias = draw(queries=queries), bias_of(lead, queries)
    structure = band if padding is None else band & Padding(padding)
    mask = Mask(mask_of((1, HEADS), queries))
    for part, wanted in ((mask, tensors), (mask & Bias(bias), [*tensors, bias])):
        compare(tensors, wanted, structure & part, Exp(), normalizer, "chunked", "sdpa")


def test_rows_of_one_padding_share_a_mask(monkeypatch):
    shapes, inner = [], sdpa._mask
    monkeypatch.setattr(sdpa, "_mask", lambda *given: shapes.append((found := inner(*given))[0].shape) or found)
    query, key, value = (x.detach() for x in draw())
    for padding in (HOLES[:1].expand(BATCH, -1), HOLES):
        structure = Bias(bias_of((1, HEADS)).detach()) & Padding(padding)
        attention(query, key, value, structure=structure, form="chunked", backend="sdpa")
    assert shapes == [(1, HEADS, QUERIES, KEYS), (BATCH, HEADS, QUERIES, KEYS)]


@pytest.mark.parametrize("causal", [False, True])
def test_a_whole_block_of_hidden_keys_stays_finite(causal):
    """torch's kernels go through the keys in blocks of hundreds."""
    query, key, value = torch.randn(3, 1, 2, 1200, 4)
    real = torch.arange(1200).expand(1, -1) >= 900
    structure = Bias(torch.randn(1, 2, 1200, 1200)) & Padding(real)
    structure = Causal() & structure if causal else structure
    ours = attention(query, key, value, structure=structure, form="chunked", backend="sdpa")
    wide = (x.double() for x in (query, key, value))
    assert_close(ours, attention(*wide, structure=structure, form="dense"), 1200 * 4)


@pytest.mark.parametrize("size", [128, 256, 512])
@pytest.mark.parametrize("part", [Mask, Bias])
def test_the_plan_takes_them_to_torch(part, size):
    query, bias = torch.zeros(1, 4, size, 32), torch.zeros(1, 4, size, size)
    few = [Causal()] if size == 128 else []  # of longer ones tiles leave half of the pairs out
    for structure in (Full(), Padding(torch.ones(1, size, dtype=torch.bool)), *few):
        pairwise = part(bias == 0) if part is Mask else part(bias)
        chosen = plan(query, query, query, structure=structure & pairwise)
        assert (chosen.form, chosen.backend) == ("chunked", "sdpa")
        assert "torch's fused attention" in chosen.reason
    learned = Bias(bias.clone().requires_grad_())  # for whose gradient torch has no fused kernel
    assert plan(query, query, query, structure=learned).backend == "torch"
    assert plan(query, query, query, structure=learned, backend="sdpa").backend == "sdpa"
    with torch.no_grad():
        assert plan(query, query, query, structure=learned).backend == "sdpa"


def test_what_no_fused_kernel_takes():
    query, key, value = (torch.zeros(1, 4, 512, 64) for _ in range(3))
    slopes = Alibi(torch.ones(4))
    for part in (Mask(torch.ones(1, 1, 512, 512, dtype=torch.bool)), Bias(torch.zeros(1, 1, 512, 512))):
        for structure in (Window(64, 0), Causal() & slopes, Window(2, 2) | Global((0,))):
            assert plan(query, key, value, structure=structure & part, form="chunked").backend == "torch"
            for backend in set(BACKENDS) - {"torch"}:
                with pytest.raises(Unsupported, match="does not compute"):
                    plan(query, key, value, structure=structure & part, backend=backend)
        for backend in ("numba", "flex"):
            with pytest.raises(Unsupported, match="does not compute"):
                plan(query, key, value, structure=part, backend=backend)
