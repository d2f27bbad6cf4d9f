"""Layouts and rules, both ways, and against the literal loops over heads and channels."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mercer.checkpoints.mapping import AS_IS, TRANSPOSED, Neighbours, PerHead, Rule
from mercer.errors import InvalidArgument

SIZES = st.integers(1, 4)


@given(heads=SIZES, parts=SIZES, size=SIZES, columns=st.sampled_from([(), (3,)]))
def test_rows_by_head_are_sorted_by_part(heads, parts, size, columns):
    stored = torch.randn(heads * parts * size, *columns)
    ours = PerHead(heads, parts).read(stored)
    for head in range(heads):
        for part in range(parts):
            for i in range(size):
                assert torch.equal(ours[(part * heads + head) * size + i], stored[(head * parts + part) * size + i])
    assert torch.equal(PerHead(heads, parts).write(ours), stored)


@given(heads=SIZES, half=SIZES, still=st.integers(0, 3), columns=st.sampled_from([(), (3,)]))
def test_neighbouring_pairs_become_halves(heads, half, still, columns):
    size = 2 * half + still
    stored = torch.randn(heads * size, *columns)
    layout = Neighbours(heads, 2 * half)
    ours = layout.read(stored)
    for head in range(heads):
        for i in range(half):
            assert torch.equal(ours[head * size + i], stored[head * size + 2 * i])
            assert torch.equal(ours[head * size + half + i], stored[head * size + 2 * i + 1])
        for i in range(2 * half, size):
            assert torch.equal(ours[head * size + i], stored[head * size + i])
    assert torch.equal(layout.write(ours), stored)


@given(rows=st.lists(SIZES, min_size=2, max_size=5))
def test_pieces_stand_one_under_the_other(rows):
    pieces = [torch.randn(n, 3) for n in rows]
    rule = Rule("ours", tuple(f"piece {i}" for i in range(len(rows))), rows=tuple(rows))
    assert rule.copies
    assert all(map(torch.equal, rule.write(rule.read(pieces)), pieces))


def test_a_piece_that_lies_as_it_is_needed_is_not_copied():
    stored = torch.randn(3, 4)
    rule = Rule("ours", ("theirs",))
    assert not rule.copies
    assert rule.read([stored]).data_ptr() == stored.data_ptr()
    assert Rule("ours", ("theirs",), (TRANSPOSED,)).copies


def test_pieces_of_experts_make_one_tensor_of_three_dimensions():
    pieces = [torch.randn(2, 3) for _ in range(8)]
    rule = Rule("ours", tuple(map(str, range(8))), rows=(2,) * 8, shape=(4, 4, 3))
    ours = rule.read(pieces)
    assert torch.equal(ours[1, 2:], pieces[3])
    assert all(map(torch.equal, rule.write(ours), pieces))


@pytest.mark.parametrize(
    "values", [{"layouts": (AS_IS, AS_IS)}, {"rows": (1, 2)}, {"theirs": ("a", "b")}, {"theirs": ()}]
)
def test_rules_that_do_not_fit_together_are_refused(values):
    with pytest.raises(InvalidArgument):
        Rule(**{"ours": "ours", "theirs": ("theirs",)} | values)
