"""RelativeBias: what it takes and what it does not go with. Its numbers are in the contract tests."""

import pytest
import torch

from mercer import (
    Alibi,
    Causal,
    Elu,
    Exp,
    InvalidArgument,
    Mixed,
    Padding,
    RelativeBias,
    Taylor,
    Unsupported,
    attention,
    plan,
)

TABLE = torch.zeros(2, 5)
THERE = torch.ones(1, 9, dtype=torch.bool)
QKV = torch.randn(3, 1, 2, 9, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RelativeBias([0.0]), "table must be a tensor, not list"),
        (lambda: RelativeBias(torch.zeros(3)), r"\[heads, distances\], not \[3\]"),
        (lambda: RelativeBias(torch.zeros(3, 0)), r"\[heads, distances\], not \[3, 0\]"),
        (lambda: RelativeBias(torch.full((1, 2), -torch.inf)), "must be finite"),
        (lambda: RelativeBias(TABLE, left=5), "left must be below the table's 5 distances, not 5"),
        (lambda: RelativeBias(TABLE, left=-1), "left must be an integer of 0 or more, not -1"),
        (lambda: RelativeBias(TABLE, left=1.5), "left must be an integer"),
        (lambda: attention(*QKV, structure=RelativeBias(torch.zeros(3, 5))), r"table must be \[2, distances\]"),
    ],
)
def test_bad_tables_are_refused(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": Elu(), "path": "features"}, "cannot weigh pairs by their distance.*path='pairs'"),
        ({"kernel": Mixed(Exp(), Taylor(2), 4)}, r"Mixed.*RelativeBias.*cannot weigh: use Exp\(\) alone"),
        ({"structure": Causal() & RelativeBias(TABLE) & Alibi(torch.ones(2))}, "into the table"),
        ({"structure": RelativeBias(TABLE) & RelativeBias(TABLE)}, "Two RelativeBias"),
        ({"structure": RelativeBias(TABLE) & Padding(queries=THERE, lengths=torch.tensor([9]))}, "cross-attention"),
        ({"backend": "sdpa"}, "sdpa"),
        ({"backend": "numba"}, "numba"),
    ],
    ids=str,
)
def test_what_does_not_compose_is_refused(options, message):
    with pytest.raises(Unsupported, match=message):
        attention(*QKV, **{"structure": Causal() & RelativeBias(TABLE)} | options)


@pytest.mark.parametrize("kernel", [Exp(), Elu(), Taylor(2)], ids=str)
def test_the_plan_takes_pairs(kernel):
    chosen = plan(*QKV, kernel=kernel, structure=Causal() & RelativeBias(TABLE), return_state=True)
    assert (chosen.path, chosen.backend) == ("pairs", "torch")


def test_the_ends_of_a_table_reach_on():
    """Keys further away than the table reaches have the weight of its ends: here none of them counts but one."""
    table = torch.full((2, 3), -200.0)
    table[0, 0] = table[1, 2] = 0
    _, _, value = QKV
    zeros = torch.zeros_like(value)
    out = attention(zeros, zeros, value, structure=RelativeBias(table, left=1))
    for i in range(9):
        behind, ahead = value[0, 0, :i], value[0, 1, i + 1 :]
        for head, seen in ((0, behind), (1, ahead)):
            if len(seen):
                torch.testing.assert_close(out[0, head, i], seen.mean(0))


def test_a_table_in_half_precision_has_gradients_of_many_pairs():
    table = torch.zeros(2, 2, dtype=torch.bfloat16, requires_grad=True)
    wide = torch.zeros(2, 2, requires_grad=True)
    q, k, v = torch.randn(3, 1, 2, 700, 4, generator=torch.Generator().manual_seed(1))
    cotangent = torch.randn(v.shape, generator=torch.Generator().manual_seed(2))
    for form in ("chunked", "dense"):
        got, wanted = (
            torch.autograd.grad(attention(q, k, v, structure=Causal() & RelativeBias(t), form=form), t, cotangent)[0]
            for t in (table, wide)
        )
        torch.testing.assert_close(got.float(), wanted, rtol=2**-7, atol=1e-3)
