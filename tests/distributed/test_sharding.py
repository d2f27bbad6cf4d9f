"""Cutting a sequence and putting it together again."""

import pytest
import torch
from tests.distributed.pool import Place, Pool

from mercer import Alibi, Causal, Decay, Padding, Taylor
from mercer import attention as alone
from mercer.distributed import Sharding, attention, gather, shard_structure
from mercer.errors import InvalidArgument


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("length", [0, 1, 5, 16, 23])
@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_every_token_is_held_once(order: str, length: int, processes: int):
    sharding = Sharding(length, processes, order)
    held = torch.cat([sharding.positions(rank) for rank in range(processes)])
    assert sorted(held.tolist()) == list(range(length))
    sizes = [sharding.size(rank) for rank in range(processes)]
    assert max(sizes) - min(sizes) <= (2 if order == "zigzag" else 1)
    x = torch.randn(2, length, 3)
    parts = [sharding.shard(x, rank, 1) for rank in range(processes)]
    assert torch.equal(sharding.unshard(parts, 1), x)
    for rank, part in enumerate(parts):
        assert torch.equal(part, x[:, sharding.positions(rank)])


def test_the_zigzag_order():
    sharding = Sharding(16, 4)
    assert [sharding.positions(rank).tolist() for rank in range(4)] == [
        [0, 1, 14, 15],
        [2, 3, 12, 13],
        [4, 5, 10, 11],
        [6, 7, 8, 9],
    ]


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda: Sharding(-1, 2), "length must be an integer of 0 or more"),
        (lambda: Sharding(4, 0), "processes must be an integer of 1 or more"),
        (lambda: Sharding(4, 2, "spiral"), "order must be 'zigzag' or 'contiguous'"),
        (lambda: Sharding(4, 2).positions(2), "rank must lie between 0 and 1"),
        (lambda: Sharding(4, 2).shard(torch.zeros(1, 1, 5, 2), 0), "dimension 2 has 5 entries"),
        (lambda: Sharding(5, 2).unshard([torch.zeros(3), torch.zeros(3)], 0), "must have"),
    ],
)
def test_what_is_refused(made, told: str):
    with pytest.raises(InvalidArgument, match=told):
        made()


def test_structures_are_cut():
    sharding = Sharding(6, 3, "contiguous")
    mask, rate = torch.tensor([[True, False, True, True, True, False]]), torch.rand(1, 1, 6)
    whole = Causal() & Padding(mask) & Decay(rate, complement=True) & Alibi(torch.ones(2))
    causal, padding, decay, alibi = shard_structure(whole, sharding, 1).parts
    assert causal == Causal()
    assert padding.mask.tolist() == [[True, True]]
    assert torch.equal(decay.rate, rate[..., 2:4])
    assert decay.complement
    assert alibi is whole.parts[3]


def test_one_process_needs_no_group():
    sharding = Sharding(9, 1)
    q, k, v = torch.randn(3, 1, 2, 9, 4, dtype=torch.float64)
    wanted = alone(q, k, v, kernel=Taylor(2), structure=Causal())
    for exchange in ("ring", "state"):
        out = attention(q, k, v, sharding=sharding, kernel=Taylor(2), structure=Causal(), exchange=exchange)
        assert torch.allclose(out, wanted, rtol=1e-12)
    assert torch.equal(gather(wanted, sharding), wanted)


def _gathered(place: Place) -> None:
    whole = torch.arange(2 * 11 * 3.0).view(2, 11, 3)
    for order in ("zigzag", "contiguous"):
        sharding = Sharding(11, place.size, order)
        part = sharding.shard(whole, place.rank, 1)
        assert torch.equal(gather(part, sharding, dim=1, group=place.group), whole)


def test_a_whole_is_gathered(pool: Pool):
    pool.run(4, _gathered)
