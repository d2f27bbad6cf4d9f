"""Sparse patterns round a ring."""

import pytest
import torch
from tests.distributed.pool import Place, Pool
from tests.tolerance import assert_close

from mercer import (
    L2,
    BigBird,
    Blocks,
    Causal,
    Documents,
    Exp,
    Fixed,
    Global,
    Length,
    Longformer,
    Padding,
    PrefixLM,
    Strided,
    Structure,
    Sum,
    Taylor,
    Visible,
    Window,
)
from mercer import attention as alone
from mercer.distributed import Sharding, attention, plan
from mercer.errors import Unsupported

LENGTH = 23
MARKS = torch.zeros(2, LENGTH, dtype=torch.bool)
MARKS[0, [3, 15]] = True
MARKS[1, 7] = True
DOCUMENTS = Documents(torch.tensor([0, 6, 14, LENGTH]))


def every_other(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (key <= query) & ((query + key + head) % 3 != 0)


STRUCTURES: dict[str, Structure] = {
    "dilated": Window(3, 2, dilation=3),
    "strided": Strided(5),
    "fixed in documents": Fixed(4, 1) & DOCUMENTS,
    "blocks": Blocks(7, before=1),
    "global": Window(2, 2) | Global((0, 11, 20)),
    "longformer": Longformer(6, mask=MARKS),
    "bigbird of the hub": BigBird(4, random=3, hf_compat=True),
    "bigbird by head": BigBird(3, random=2, heads=4),
    "prefix by row": PrefixLM(torch.tensor([3, 14])),
    "a function": Visible(every_other),
    "mixture in documents": (Blocks(8) | Window(None, 0, dilation=3)) & Causal() & DOCUMENTS,
}


def _compare(place: Place, order: str) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = (4, LENGTH, 4), (2, LENGTH, 4), (2, LENGTH, 3), (4, LENGTH, 3)
    query, key, value, grad = (torch.randn(2, *s, generator=generator, dtype=torch.float64) for s in shapes)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    sharding = Sharding(LENGTH, place.size, order)
    for name, structure in STRUCTURES.items():
        for kernel, normalizer in ((Exp(), Sum()), (Taylor(2), L2()), (Exp(), Length())):
            asked = {"kernel": kernel, "normalizer": normalizer, "structure": structure}
            wanted = alone(*leaves, **asked)
            own = [sharding.shard(x, place.rank) for x in leaves]
            out = attention(*own, sharding=sharding, group=place.group, exchange="ring", timeout=60.0, **asked)
            what = f"{name}, {kernel}, {normalizer}"
            assert_close(out, sharding.shard(wanted, place.rank), LENGTH * 4, what)
            grads = torch.autograd.grad(out, leaves, sharding.shard(grad, place.rank))
            for found, expected in zip(grads, torch.autograd.grad(wanted, leaves, grad), strict=True):
                assert_close(place.total(found), expected, LENGTH * 4, f"gradient, {what}")


@pytest.mark.parametrize(("size", "order"), [(2, "zigzag"), (3, "contiguous"), (4, "zigzag")])
def test_every_pattern(pool: Pool, size: int, order: str):
    pool.run(size, _compare, order)


def test_blocks_that_no_pattern_shows_are_not_sent():
    sharding = Sharding(4096, 8, "contiguous")
    tensors = [torch.zeros(1, 1, 512, 4) for _ in range(3)]
    asked = {"sharding": sharding, "exchange": "ring"}
    near = plan(*tensors, structure=Causal() & Blocks(512, before=1), **asked)
    every = plan(*tensors, structure=Causal(), **asked)
    assert near.forward_bytes == (*(512 * 2 * 4 * 4,) * 7, 0)
    assert sum(every.forward_bytes) == sum(512 * 2 * 4 * 4 * (7 - source) for source in range(8))


def test_what_is_refused():
    sharding = Sharding(8, 2)
    tensors = [torch.zeros(1, 1, 4, 4) for _ in range(3)]
    with pytest.raises(Unsupported, match="use exchange='ring'"):
        plan(*tensors, sharding=sharding, kernel=Taylor(2), structure=Strided(3), exchange="state")
    padding = Padding(lengths=torch.tensor([5]))
    with pytest.raises(Unsupported, match="with Padding is not computed over several processes"):
        plan(*tensors, sharding=sharding, structure=Strided(3) & padding)
