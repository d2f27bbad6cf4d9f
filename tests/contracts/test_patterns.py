"""Every sparse pattern in every form equals the double loop: outputs, gradients, padding, documents, states."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tolerance import assert_close

from mercer import (
    L2,
    BigBird,
    Blocks,
    Causal,
    Columns,
    Documents,
    Exp,
    Fixed,
    Global,
    InvalidArgument,
    Length,
    Longformer,
    Padding,
    Prefix,
    PrefixLM,
    RandomBlocks,
    Strided,
    Sum,
    Taylor,
    Unsupported,
    Visible,
    Window,
    attention,
    plan,
)
from mercer.core import schedule
from mercer.core.bigbird import EndBlocks
from mercer.core.places import Geometry, Place
from mercer.core.reference import reference_attention

BATCH, HEADS, KEY_HEADS, LENGTH, DIM = 2, 4, 2, 23, 4
MARKS = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
MARKS[0, [3, 15]] = True
MARKS[1, 7] = True

PATTERNS = {
    "dilated": Window(3, 2, dilation=3),
    "every fourth": Window(None, 0, dilation=4),
    "strided": Strided(5),
    "fixed": Fixed(6, 2),
    "blocks": Blocks(7, before=1),
    "columns": Columns(5, 2) & Causal(),
    "global": Window(2, 2) | Global((0, 11, 20)),
    "global causal": (Window(2, 2) | Global((4, 5))) & Causal(),
    "only seen": Window(2, 2) | Global((1, 9), see=False),
    "longformer": Longformer(6, mask=MARKS),
    "bigbird": BigBird(4, random=1, seed=1),
    "bigbird by head": BigBird(3, random=2, heads=HEADS),
    "bigbird of the hub": BigBird(4, random=3, hf_compat=True),
    "bigbird causal": BigBird(2, random=2, heads=HEADS, causal=True),
    "random": RandomBlocks(3, 2) & Causal(),
    "random causal": RandomBlocks(3, 2, seed=4, causal=True),
    "prefix": PrefixLM(9),
    "prefix by row": PrefixLM(torch.tensor([3, 14])),
    "function": Visible(lambda row, head, query, key: (query * 7 + key * 3) % 5 < 2),
    "function of heads": Visible(lambda row, head, query, key: (key <= query) & ((query + key + head) % 3 != 0)),
    "function of rows": Visible(lambda row, head, query, key: key <= query + row),
    "mixture": (Blocks(8) | Window(None, 0, dilation=3) | Global((2,), see=False)) & Window(14, 5),
}
BY_ROW = ("longformer", "prefix by row", "function of rows")
ENDING = ("longformer", "bigbird", "bigbird by head", "bigbird of the hub", "random")


def close(actual, expected):
    assert_close(actual, expected, LENGTH * DIM)


@pytest.fixture(params=[(64, 512), (5, 7)], ids=["wide", "narrow"])
def tiles(request, monkeypatch):
    """Tiles as they are, and small ones, so that all their edges are met."""
    rows, chunk = request.param
    monkeypatch.setattr(schedule, "ROWS", rows)
    monkeypatch.setattr(schedule, "CHUNK", chunk)
    schedule._schedule.cache_clear()
    yield
    schedule._schedule.cache_clear()


def inputs(queries=LENGTH, dtype=torch.float64, batch=BATCH, keys=LENGTH, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((HEADS, queries), (KEY_HEADS, keys), (KEY_HEADS, keys))
    return [torch.randn(batch, h, n, DIM, generator=generator, dtype=dtype) for h, n in sizes]


def holes():
    valid = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(3)) > 0.3
    valid[1, :4] = False
    return valid


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("queries", [LENGTH, 9])
def test_every_form_equals_the_double_loop(name, queries, tiles):
    query, key, value = inputs(queries)
    expected = reference_attention(query, key, value, Exp(), Sum(), PATTERNS[name])
    for form in ("dense", "chunked"):
        close(attention(query, key, value, structure=PATTERNS[name], form=form), expected)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize(("kernel", "normalizer"), [(Taylor(2), L2()), (Exp(), Length())], ids=str)
def test_other_kernels_and_counts_under_padding(name, kernel, normalizer, tiles):
    query, key, value = inputs()
    structure = PATTERNS[name] & Padding(mask=holes())
    expected = reference_attention(query, key, value, kernel, normalizer, structure)
    for form in ("dense", "chunked"):
        out = attention(query, key, value, kernel=kernel, normalizer=normalizer, structure=structure, form=form)
        close(out, expected)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("kernel", [Exp(), Taylor(2)], ids=str)
def test_gradients_equal_those_of_the_dense_form(name, kernel, tiles):
    found = {}
    for form in ("dense", "chunked"):
        leaves = [x.requires_grad_() for x in inputs()]
        structure = PATTERNS[name] & Padding(mask=holes())
        out = attention(*leaves, kernel=kernel, structure=structure, form=form)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=out.dtype)
        found[form] = torch.autograd.grad((out * weights).sum(), leaves)
    for chunked, dense in zip(found["chunked"], found["dense"], strict=True):
        close(chunked, dense)


@pytest.mark.parametrize("name", [name for name in PATTERNS if name not in BY_ROW])
def test_documents_are_sequences_of_their_own(name):
    query, key, value = inputs(LENGTH)
    bounds = [0, 4, 4, 5, LENGTH]
    out = attention(query, key, value, structure=PATTERNS[name] & Documents(torch.tensor(bounds)), form="chunked")
    dense = attention(query, key, value, structure=PATTERNS[name] & Documents(torch.tensor(bounds)), form="dense")
    for start, stop in ((0, 4), (4, 5), (5, LENGTH)):
        alone = attention(*(x[:, :, start:stop] for x in (query, key, value)), structure=PATTERNS[name], form="dense")
        close(out[:, :, start:stop], alone)
        close(dense[:, :, start:stop], alone)


@pytest.mark.parametrize("name", BY_ROW)
def test_patterns_of_rows_are_refused_in_documents(name):
    with pytest.raises((Unsupported, InvalidArgument), match="Documents"):
        attention(*inputs(), structure=PATTERNS[name] & Documents(torch.tensor([0, 9, LENGTH])), form="chunked")


def test_prefixes_that_are_alike_by_chance_are_refused_in_documents_too():
    with pytest.raises(Unsupported, match="with Documents: give a pattern that is the same in all rows"):
        attention(*inputs(), structure=PrefixLM(torch.tensor([5, 5])) & Documents(torch.tensor([0, 9, LENGTH])))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("form", ["dense", "chunked"])
def test_patterns_of_rows_are_for_so_many_rows(rows, form):
    query, key, value = inputs(batch=rows)
    lengths = (
        PrefixLM(torch.tensor([3, 14])),
        PrefixLM(torch.tensor([5, 5])),
        Window(2) | Prefix(torch.tensor([5, 5])),
    )
    for pattern in (Longformer(6, mask=MARKS), Window(2) | Global(mask=MARKS), *lengths):
        with pytest.raises(InvalidArgument, match=f"given for 2 batch rows, but this call has {rows}"):
            attention(query, key, value, structure=pattern, form=form)


@pytest.mark.parametrize("name", [name for name in PATTERNS if name not in ENDING])
@pytest.mark.parametrize("padded", [False, True])
def test_a_cache_continues_what_is_causal(name, padded, tiles):
    query, key, value = inputs()
    valid = holes() if padded else torch.ones(BATCH, LENGTH, dtype=torch.bool)
    structure = PATTERNS[name] & Causal()
    whole = attention(query, key, value, structure=structure & Padding(mask=valid), form="dense")
    state, outs = None, []
    for start, stop in ((0, 9), (9, 10), (10, 18), (18, LENGTH)):
        part = [x[:, :, start:stop] for x in (query, key, value)]
        out, state = attention(
            *part,
            structure=structure & Padding(mask=valid[:, start:stop]),
            state=state,
            return_state=True,
            form="chunked",
        )
        outs.append(out)
    close(torch.cat(outs, 2), whole)


@pytest.mark.parametrize("name", ENDING)
def test_what_depends_on_the_whole_call_has_no_state(name):
    with pytest.raises(Unsupported, match="state"):
        attention(*inputs(), structure=PATTERNS[name], return_state=True)


def test_a_causal_draw_is_the_same_at_any_length_and_among_what_came_before():
    short, long = (RandomBlocks(4, 3, seed=2, heads=2, apart=True, causal=True).table(n) for n in (37, 4000))
    assert (short == long[:, : short.shape[1]]).all()
    for block in range(long.shape[1]):
        for drawn in long[:, block]:
            chosen = drawn[drawn >= 0]
            assert len(set(chosen)) == len(chosen) == min(3, max(block - 2, 0))
            assert all(0 < b < block - 1 for b in chosen)
    assert len({tuple(sorted(row)) for row in long[:, 50:].reshape(-1, 3)}) > 500  # blocks and heads draw apart


@pytest.mark.parametrize("name", PATTERNS)
def test_features_and_mixtures_are_refused(name):
    with pytest.raises(Unsupported, match="pairs"):
        attention(*inputs(), kernel=Taylor(2), structure=PATTERNS[name] & Causal(), path="features")


@pytest.mark.parametrize("stride", [4, 9])
def test_a_schedule_asks_about_the_edges_of_a_stride_alone(stride, monkeypatch):
    """Every visible pair was asked about: at 65,536 tokens that took a minute."""
    length, asked = 4096, 0
    sees = Window.sees

    def counted(self: Window, at: Place) -> torch.Tensor:
        nonlocal asked
        asked += at.query.numel() * at.key.numel()
        return sees(self, at)

    monkeypatch.setattr(Window, "sees", counted)
    monkeypatch.setattr(schedule, "CHUNK", 64)
    schedule._schedule.cache_clear()
    found = schedule.schedule(Strided(stride).alternatives(), Geometry(0, length, 0, length, (length,)))
    position = torch.arange(length)
    behind = position[:, None] - position
    visible = (behind >= 0) & ((behind < stride) | (behind % stride == 0))
    assert found.visible == int(visible.sum())
    assert 0 < asked < length * 64 * 7  # a few chunks of keys for each query, however far it sees


def test_work_grows_with_the_visible_pairs():
    at = torch.empty(1, 1, 65536, 16, device="meta")
    for pattern, widest in (
        (Longformer(256, (0, 1)), 256 + 64 + 4),
        (Strided(256), 2 * 256 + 64),
        (Blocks(128, 1, 0) & Causal(), 256),
        (Window(64, 0, dilation=8), 128 + 2),
    ):
        pairs = plan(at, at, at, structure=pattern).flops / (2 * 32)
        assert pairs < widest * 65536 * 1.1


patterns = st.recursive(
    st.one_of(
        st.builds(Window, st.integers(0, 9), st.integers(0, 9), st.integers(1, 4)),
        st.builds(Window, st.none(), st.integers(0, 2), st.integers(1, 5)),
        st.builds(Blocks, st.integers(1, 9), st.integers(0, 2), st.integers(0, 2)),
        st.builds(Global, st.lists(st.integers(0, 40), min_size=1, max_size=4), see=st.booleans()),
        st.builds(RandomBlocks, st.integers(1, 6), st.integers(1, 3), st.integers(0, 3), causal=st.booleans()),
        st.builds(EndBlocks, st.integers(1, 6), st.booleans()),
        st.builds(Strided, st.integers(1, 8)),
        st.builds(PrefixLM, st.integers(0, 30)),
        st.just(Causal()),
    ),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda two: two[0] | two[1]),
        st.tuples(inner, inner).map(lambda two: two[0] & two[1]),
    ),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None)
@given(patterns, st.integers(1, 40), st.integers(0, 12), st.booleans(), st.randoms(use_true_random=False))
def test_any_composition_equals_the_dense_form(pattern, keys, missing, padded, random):
    query, key, value = inputs(max(1, keys - missing), keys=keys)
    if padded:
        valid = torch.tensor([[random.random() > 0.3 for _ in range(keys)] for _ in range(BATCH)])
        pattern = pattern & Padding(mask=valid)
    dense = attention(query, key, value, structure=pattern, form="dense")
    close(attention(query, key, value, structure=pattern, form="chunked"), dense)


@pytest.mark.parametrize("structure", [Fixed(4, 1), Strided(4), Window(2, 2) | Global((0, 5))], ids=str)
def test_documents_are_counted_apart_in_every_form(structure):
    """What a query sees of its own document is what ``Length`` divides by."""
    query, key, value = torch.randn(3, 1, 2, LENGTH, DIM, dtype=torch.float64)
    packed = structure & Documents(torch.tensor([0, 6, 14, LENGTH]))
    expected = reference_attention(query, key, value, kernel=Exp(), normalizer=Length(), structure=packed)
    for form in ("dense", "chunked"):
        close(attention(query, key, value, normalizer=Length(), structure=packed, form=form), expected)
