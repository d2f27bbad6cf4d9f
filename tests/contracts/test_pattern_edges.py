"""Patterns where their parts meet: queries that stand before the first key, unions that ask a function of one's own."""

import pytest
import torch
from tests.tolerance import assert_close

from mercer import (
    BigBird,
    Blocks,
    Causal,
    Columns,
    Documents,
    Exp,
    Full,
    Global,
    InvalidArgument,
    Length,
    Longformer,
    Padding,
    PrefixLM,
    RandomBlocks,
    Sum,
    Visible,
    Window,
    attention,
)
from mercer.core.reference import reference_attention
from mercer.forms import tiles

BATCH, HEADS, KEY_HEADS, DIM = 2, 4, 2, 4


def inputs(queries, keys, batch=BATCH):
    sizes = ((HEADS, queries), (KEY_HEADS, keys), (KEY_HEADS, keys))
    return [torch.randn(batch, h, n, DIM, dtype=torch.float64) for h, n in sizes]


def compare(structure, queries, keys, normalizer=None):
    tensors = inputs(queries, keys)
    expected = reference_attention(*tensors, Exp(), normalizer or Sum(), structure)
    for form in ("dense", "chunked"):
        out = attention(*tensors, normalizer=normalizer, structure=structure, form=form)
        assert_close(out, expected, keys * DIM, form)


MARKS = torch.tensor([[False, True, False, False, True], [False, False, False, True, False]])
BEFORE = {
    "marked": Global(mask=MARKS, seen=False),
    "marked in a window": Longformer(2, mask=MARKS),
    "marked once": Global(mask=MARKS) & Window(2, 2),
}


@pytest.mark.parametrize("queries", [6, 8, 29])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", BEFORE)
def test_queries_before_the_first_key_are_none_of_the_marked_ones(name, padded, queries):
    """Rows mark 2 and 1 tokens: what fills the shorter list of positions stood for the query at -1."""
    valid = torch.ones(BATCH, 5, dtype=torch.bool)
    valid[1, 0] = valid[0, 4] = False
    compare(BEFORE[name] & Padding(valid) if padded else BEFORE[name], queries, 5)


DRAWN = {
    "random": RandomBlocks(2, 1, seed=1),
    "random by head": RandomBlocks(1, 2, heads=HEADS) & Window(9, 9),
    "random causal": RandomBlocks(2, 2, causal=True) | Window(0, 0),
    "bigbird": BigBird(1, random=1),
    "bigbird causal": BigBird(1, random=1, causal=True),
    "bigbird of the hub": BigBird(1, hf_compat=True),
}


@pytest.mark.parametrize("queries", [10, 12, 39])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", DRAWN)
def test_queries_before_the_first_key_stand_in_no_block_that_is_drawn_for(name, padded, queries):
    """They were shown what the first block is shown, in tiles that of the last one, or broke off the call."""
    valid = torch.ones(BATCH, 9, dtype=torch.bool)
    valid[1, :3] = valid[0, 8] = False
    compare(DRAWN[name] & Padding(valid) if padded else DRAWN[name], queries, 9)


@pytest.mark.parametrize("padded", [False, True])
def test_counts_of_a_union_with_a_function_of_heads(padded):
    """The keys of every head were counted as those of the first."""
    asked = Visible(lambda row, head, query, key: (key + row + head) % 2 == 0)
    valid = torch.ones(BATCH, 17, dtype=torch.bool)
    valid[0, :5] = valid[1, 9:11] = False
    for structure in (asked | Columns(8, 3), (asked & Causal()) | Global((2,))):
        compare(structure & Padding(valid) if padded else structure, 17, 17, Length())


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("normalizer", [Sum(), Length()], ids=str)
@pytest.mark.parametrize("workspace", [1, 2**20])
def test_a_function_of_heads_where_heads_do_not_fit_one_slab(workspace, normalizer, padded, monkeypatch):
    """A tile's mask is made for all heads: beside some of them it broke off the call."""
    monkeypatch.setattr(tiles, "WORKSPACE", workspace)
    asked = Visible(lambda row, head, query, key: (key <= query) & ((query - key) % (head + 1) == 0))
    valid = torch.ones(BATCH, 21, dtype=torch.bool)
    valid[0, :5] = valid[1, 9:11] = False
    structure = asked & Padding(valid) if padded else asked
    tensors = [x.requires_grad_() for x in inputs(21, 21)]
    expected = reference_attention(*tensors, Exp(), normalizer, structure)
    out = attention(*tensors, normalizer=normalizer, structure=structure, form="chunked")
    assert_close(out, expected, 21 * DIM)
    cotangent = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, tensors, cotangent)
    for got, want in zip(torch.autograd.grad(out, tensors, cotangent), wanted, strict=True):
        assert_close(got, want, 21 * DIM)


@pytest.mark.parametrize(
    "everything",
    [Window(None, None), Causal() | Full(), Blocks(3) | Window(None, None), Full() | (Causal() & Blocks(2))],
    ids=str,
)
@pytest.mark.parametrize("queries", [9, 4, 12])
def test_what_shows_every_pair_orders_nothing(everything, queries):
    """Queries are then tokens of their own, whichever keys are padding: as under Full."""
    valid = torch.ones(BATCH, 9, dtype=torch.bool)
    valid[0, :4] = valid[1, 7:] = False
    tensors = inputs(queries, 9)
    plain = reference_attention(*tensors, structure=Full() & Padding(valid))
    assert_close(reference_attention(*tensors, structure=everything & Padding(valid)), plain, 9 * DIM)
    for form in ("dense", "chunked"):
        assert_close(attention(*tensors, structure=everything & Padding(valid), form=form), plain, 9 * DIM, form)


@pytest.mark.parametrize("beside", [BigBird(2, random=1), Window(0, 0)], ids=str)
def test_a_function_of_positions_serves_documents_that_run_side_by_side(beside):
    """Their positions differ as the rows of a batch do, which was taken for an answer that depends on the row."""
    packed = Documents(torch.tensor([0, 6, 6, 13, 20]))
    asked = Visible(lambda row, head, query, key: (query * 7 + key * 3) % 5 < 2)
    compare((asked | beside) & packed, 20, 20)
    tensors = inputs(20, 20)
    for form in ("dense", "chunked"):
        told = Visible(lambda row, head, query, key: key <= query + row)
        with pytest.raises(InvalidArgument, match="must not depend on the batch row"):
            attention(*tensors, structure=(told | beside) & packed, form=form)
    causal = (asked | Window(0, 0)) & Causal() & packed
    expected = reference_attention(*tensors, structure=causal)
    for form in ("dense", "chunked", "recurrent"):
        out, _ = attention(*tensors, structure=causal, form=form, return_state=True)
        assert_close(out, expected, 20 * DIM, form)


def test_windows_that_reach_past_all_numbers_are_refused():
    """A position and 2^63 - 1 overflow: the window hid every key."""
    for name in ("left", "right"):
        with pytest.raises(InvalidArgument, match=f"{name}=9223372036854775807 is farther than any key: say None"):
            Window(**{"left": 0, "right": 0, name: 2**63 - 1})
    with pytest.raises(InvalidArgument, match="say None"):
        Window(2**61, 0, dilation=3)
    compare(Window(1, 2**62), 9, 9)
    compare(Window(2**62, 1) & Padding(torch.arange(9).expand(BATCH, -1) > 1), 9, 9)
    compare(Window(2**61, 0, dilation=2) | Global((3,)), 9, 9)


def test_prefixes_of_rows_may_be_of_any_length_and_of_no_rows():
    """The longest was written out position by position; without rows there is none."""
    tensors = inputs(9, 9)
    far, near = (PrefixLM(torch.tensor([n, 2])) for n in (10**12, 9))
    for form in ("dense", "chunked"):
        out = attention(*tensors, structure=far, form=form)
        assert_close(out, attention(*tensors, structure=near, form="dense"), 9 * DIM, form)
        none = attention(*inputs(9, 9, batch=0), structure=PrefixLM(torch.zeros(0, dtype=torch.int64)), form=form)
        assert none.shape == (0, HEADS, 9, DIM)
