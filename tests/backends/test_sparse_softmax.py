"""Exact attention under sparse patterns by the Numba kernels: what the contract tests do not meet."""

import pytest
import torch
from tests.tolerance import assert_close

pytest.importorskip("numba")

import mercer
from mercer import BigBird, Blocks, Causal, Fixed, Global, Longformer, Padding, Strided, Window, attention, plan
from mercer.backends import sparse_program
from mercer.backends.sparse_parts import TOGETHER
from mercer.core.merged import merge
from mercer.core.places import Geometry
from mercer.core.schedule import schedule
from mercer.core.structures import Pattern, intersection
from mercer.errors import Unsupported

SINGLE, HALF = torch.float32, torch.bfloat16
FUSED = {"form": "chunked", "backend": "numba"}
LONG = {
    "longformer": Longformer(100, (0, 350)),
    "strided": Strided(24),
    "bigbird": BigBird(32, random=2, seed=3),
    "bigbird of the hub": BigBird(32, random=2, hf_compat=True),
    "blocks": Blocks(48, before=1) & Causal(),
    "fixed": Fixed(40, 3),
    "dilated and near": Window(30, 30, dilation=7) | Window(20, 20),
}


def draw(heads, kv_heads, length, dim, dtype=SINGLE, batch=1, width=None):
    shapes = (length, heads, dim), (length, kv_heads, dim), (length, kv_heads, width or dim)
    return [torch.randn(batch, *s).to(dtype).transpose(1, 2).requires_grad_() for s in shapes]


def compare(inputs, structure, terms=None, options=None):
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = attention(*exact, structure=structure, form="dense")
    up = torch.randn(expected.shape, dtype=torch.float64)
    out = attention(*inputs, structure=structure, **(options or FUSED))
    narrow = inputs[0].dtype == HALF
    assert_close(out, expected, terms or inputs[1].shape[2], "out", roundings=2 if narrow else 1)
    got = torch.autograd.grad(out, inputs, up.to(out.dtype))
    wanted = torch.autograd.grad(expected, exact, up)
    for name, ours, theirs in zip("qkv", got, wanted, strict=True):
        assert_close(ours, theirs, terms or inputs[1].shape[2], name, roundings=6 if narrow else 1)


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize("name", LONG)
def test_several_tiles_blocks_and_passes(name, dtype):
    compare(draw(4, 2, 700, 16, dtype, width=24), LONG[name])


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "width"),
    [(1, 1, 16, 16), (TOGETHER + 3, 1, 16, 16), (6, 2, 1, 3), (3, 3, 80, 20), (2, 1, 256, 256)],
)
def test_groups_and_head_dimensions(heads, kv_heads, dim, width, dtype):
    structure = Longformer(24, (0, 90)) & Padding(lengths=torch.tensor([150, 61]))
    compare(draw(heads, kv_heads, 150, dim, dtype, 2, width), structure)


def test_rows_of_other_lengths_share_a_program(monkeypatch):
    """They differ in how many tokens are there, which the kernels look at; patterns of the length need one each."""
    made: list[object] = []
    builder = sparse_program._Builder.program
    monkeypatch.setattr(sparse_program._Builder, "program", lambda self: made.append(self) or builder(self))
    lengths = Padding(lengths=torch.tensor([130, 0, 77]))
    for structure, programs in ((Strided(11), 1), (BigBird(7, seed=9), 2)):
        made.clear()
        compare(draw(2, 2, 130, 16, batch=3), structure & lengths)
        assert len(made) == programs


def test_the_digits_do_not_depend_on_the_number_of_threads():
    before, results = torch.get_num_threads(), []
    inputs = draw(2, 1, 900, 16)
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out = attention(*inputs, structure=LONG["dilated and near"], **FUSED)
            results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_scores_of_minus_infinity_only_are_not_an_empty_row():
    inputs = [torch.ones(1, 1, 8, 16) for _ in range(3)]
    inputs[0][0, 0, 5, 5] = -torch.inf
    hidden = Blocks(2) & Padding(lengths=torch.tensor([7]))
    out, log_sum = attention(*inputs, structure=hidden, return_lse=True, **FUSED)
    assert out[0, 0, 5].isnan().all()
    assert log_sum[0, 0, 5].isnan()
    assert not out[0, 0, 7].any()
    assert log_sum[0, 0, 7] == -torch.inf
    assert out[0, 0, [0, 1, 2, 3, 4, 6]].isfinite().all()


def test_second_derivatives_are_refused():
    inputs = draw(1, 1, 40, 16)
    out = attention(*inputs, structure=Strided(4), **FUSED)
    with pytest.raises(Unsupported, match="Second derivatives"):
        torch.autograd.grad(out.sum(), inputs, create_graph=True)


@pytest.mark.parametrize(("batch", "length"), [(0, 30), (2, 1)])
def test_hardly_any_tokens(batch, length):
    inputs = draw(2, 2, length, 16, batch=batch)
    out = attention(*inputs, structure=Strided(4) & Padding(lengths=torch.zeros(batch, dtype=torch.int64)), **FUSED)
    assert not out.any()
    assert all(not g.any() for g in torch.autograd.grad(out.sum(), inputs))


def test_the_plan_takes_the_kernels_and_says_so():
    inputs = draw(8, 2, 600, 16)
    long = [torch.empty(1, heads, 8192, 16, device="meta") for heads in (4, 2, 2)]
    for structure in (*LONG.values(), Longformer(64, mask=torch.arange(8192).view(1, -1) % 2000 == 7)):
        found = plan(*long, structure=structure, form="chunked")
        assert found.backend == "numba"
        assert "takes the tiles of this pattern" in found.reason
    wide = Longformer(500, (0, 350))
    assert plan(*inputs, structure=wide).backend == "numba"
    compare(inputs, wide, options={})
    assert plan(*draw(4, 2, 64, 16), structure=Strided(8), form="chunked").backend == "torch"  # too little work
    for elsewhere in (mercer.Length(), mercer.Detached()):
        assert plan(*inputs, structure=wide, normalizer=elsewhere, form="chunked").backend == "torch"
    decayed = wide & Causal() & mercer.Decay(torch.full((8,), 0.9))
    assert plan(*inputs, structure=decayed, form="chunked").backend == "torch"


class Louder(Pattern):
    """Weighs pairs by their head, which no program of all heads can say."""

    weighs = True

    def alternatives(self):
        return Blocks(16).alternatives()

    def log_weight(self, at):
        return at.head.double().log1p().expand(-1, -1, at.query.shape[2], at.key.shape[3])


def test_log_weights_that_differ_by_head_stay_with_torch():
    inputs = draw(4, 2, 600, 16)
    assert plan(*inputs, structure=Louder(), form="chunked").backend == "torch"
    compare(inputs, Louder(), options={"form": "chunked"})


def made(pattern, length, rows=256):
    geometry = Geometry(0, length, 0, length, (length,))
    merged = merge(pattern)
    terms = intersection((*merged.patterns, Window(merged.left, merged.right)))
    tiles = schedule(terms, geometry, rows)
    return tiles, sparse_program.program(tiles, geometry, 0)


@pytest.mark.parametrize(
    ("pattern", "share"),
    [
        (Longformer(512), 0.93),
        (Strided(64), 0.65),
        (Strided(256), 0.85),
        (BigBird(64), 0.99),
        (Blocks(256, 1) & Causal(), 0.95),
    ],
    ids=str,
)
def test_few_pairs_are_computed_in_vain(pattern, share):
    """Tiles of 256 queries hide a third to a half of their pairs; what is left out 16 by 16 makes up for it."""
    tiles, program = made(pattern, 4096)
    assert tiles.visible >= share * program.work.sum()


def test_queries_that_take_turns_are_put_beside_those_that_see_the_same():
    """16 queries each of 16 strides in a tile: in their order every vector would see something of every key tile."""
    _, program = made(Window(None, 0, dilation=16), 256)
    assert len(program.tiles) == 1
    assert program.work.sum() == 16 * 256
    assert (program.queries[:, sparse_program.STEP] == 16).all()


def test_programs_take_little_memory_and_equal_masks_are_kept_once():
    for pattern in (Longformer(512, (0,)), BigBird(64), Strided(256), Global((5,)) | Window(300, 0, dilation=4)):
        _, program = made(pattern, 16384)
        arrays = program.tiles, program.queries, program.keys, program.codes, program.masks, program.weights
        assert sum(x.nbytes for x in arrays) < 80 * 16384
        assert len(program.masks) < 200
