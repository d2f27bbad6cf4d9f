"""Patterns say which of their arguments is wrong, under their own name, and what is allowed."""

import pytest
import torch

from mercer import (
    BigBird,
    Columns,
    Fixed,
    Global,
    InvalidArgument,
    Longformer,
    Prefix,
    PrefixLM,
    RandomBlocks,
    Visible,
    attention,
)

ROWS = torch.tensor([3, 9])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Global(0), r"^Global: positions must be integers of 0 or more, such as \(0,\), not 0"),
        (lambda: Global((-1,)), r"^Global: positions .* not \(-1,\)"),
        (lambda: Global(torch.tensor([True, False])), "is given as mask="),
        (lambda: Global(mask=torch.ones(2, 5)), "^Global: mask must be a boolean"),
        (lambda: Longformer(8, 0), "^Longformer: positions .* not 0"),
        (lambda: Longformer(8, mask=torch.ones(5).bool()), "^Longformer: mask must be a boolean"),
        (lambda: PrefixLM([3, 9]), r"^PrefixLM: .* a tensor of one for each batch row, not \[3, 9\]"),
        (lambda: PrefixLM(ROWS.float()), "^PrefixLM: length"),
        (lambda: PrefixLM(ROWS > 4), "^PrefixLM: length must be an integer of 0 or more, or a tensor of one for each"),
        (lambda: Prefix(ROWS.to(torch.complex64)), "^Prefix: length"),
        (lambda: PrefixLM(-1), "^PrefixLM: length .* not -1"),
        (lambda: Prefix(-ROWS), "^Prefix: length"),
        (lambda: Fixed(4, 5), r"^Fixed: columns must be 4 \(the block's size\) or less, not 5"),
        (lambda: Fixed(0), "^Fixed: size must be an integer of 1 or more"),
        (lambda: Columns(4, 5), "^Columns: columns must be 4"),
        (lambda: Visible(torch.ones(3, 3)), "not Tensor; a tensor over all pairs is a Mask"),
    ],
)
def test_what_is_wrong_is_said(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


@pytest.mark.parametrize("form", ["dense", "chunked"])
@pytest.mark.parametrize("causal", [False, True])
def test_too_few_random_blocks_are_those_of_who_drew_them(form, causal):
    q = torch.zeros(1, 4, 40, 2)
    for made, name in ((BigBird(4, heads=3, causal=causal), "BigBird"), (RandomBlocks(4, heads=3), "RandomBlocks")):
        with pytest.raises(InvalidArgument, match=f"^{name}: heads=3, but the call has 4 query heads"):
            attention(q, q, q, structure=made, form=form)


def test_positions_may_be_any_sequence():
    assert Global([3, 0]).positions == Global(torch.tensor([3, 0])).positions == (3, 0)
    assert Longformer(8, [1]).positions == (1,)
