"""What a plan says beforehand is what is sent and looked at."""

import pytest
import torch
from tests.distributed.pool import Place, Pool

from mercer import L2, Causal, Decay, Documents, Elu, Exp, Full, Gaussian, Kernel, Structure, Taylor, Window
from mercer.distributed import Sharding, attention, plan, planning, traffic
from mercer.errors import InvalidArgument, Unsupported

LENGTH = 37


def parts(sharding: Sharding, rank: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    size = sharding.size(rank)
    return tuple(torch.randn(2, heads, size, 4, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))


def _counted(place: Place, kernel: Kernel, structure: Structure, order: str, exchange: str, dtype: torch.dtype) -> None:
    sharding = Sharding(LENGTH, place.size, order)
    own = parts(sharding, place.rank, dtype)
    asked = {"kernel": kernel, "structure": structure, "sharding": sharding, "exchange": exchange}
    told = plan(*own, rank=place.rank, **asked)
    with traffic() as forward:
        out = attention(*own, group=place.group, timeout=60.0, **asked)
    with traffic() as backward:
        out.sum().backward()
    kinds = ("keys", "gradients", "state", "state gradients")
    assert sum(forward.sent.get(kind, 0) for kind in kinds) == told.forward_bytes[place.rank]
    assert sum(backward.sent.get(kind, 0) for kind in kinds) == told.backward_bytes[place.rank]
    if exchange == "ring":
        assert forward.pairs == told.pairs[place.rank]


def _counted_in_slabs(place: Place, structure: Structure) -> None:
    """With every key head a slab of its own."""
    usual, planning.SLAB = planning.SLAB, 1
    try:
        sharding = Sharding(LENGTH, place.size)
        own = parts(sharding, place.rank)
        asked = {"structure": structure, "sharding": sharding, "exchange": "ring"}
        told = plan(*own, rank=place.rank, **asked)
        with traffic() as sent:
            attention(*own, group=place.group, timeout=60.0, **asked)
        assert sent.sent["keys"] == told.forward_bytes[place.rank]
        assert sent.messages["keys"] == 2 * (place.size - 1)
        assert sent.pairs == 2 * told.pairs[place.rank]
    finally:
        planning.SLAB = usual


def test_bytes_of_heads_one_after_the_other(pool: Pool):
    for rates in (torch.tensor([0.9]), torch.tensor([0.9, 0.8, 0.7, 0.6])):
        pool.run(3, _counted_in_slabs, Causal() & Decay(rates))


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_and_pairs(pool: Pool, size: int):
    documents = Documents(torch.tensor([0, 5, 20, 30, LENGTH]))
    for structure in (Causal(), Full(), Window.last(4), Causal() & documents):
        for order in ("zigzag", "contiguous"):
            pool.run(size, _counted, Exp(), structure, order, "ring", torch.float32)
            if not isinstance(structure, Window):
                pool.run(size, _counted, Taylor(2), structure, order, "state", torch.float64)
    pool.run(size, _counted, Exp(), Causal(), "zigzag", "ring", torch.bfloat16)  # keys go in their own dtype
    pool.run(size, _counted, Gaussian(), Causal(), "zigzag", "ring", torch.float32)  # and mapped ones as they are


def test_the_zigzag_order_balances_causal_work():
    shares = {}
    for order in ("zigzag", "contiguous"):
        sharding = Sharding(4097, 4, order)
        made = plan(*parts(sharding, 0), sharding=sharding, structure=Causal(), exchange="ring")
        shares[order] = max(made.pairs) / (sum(made.pairs) / 4)
        assert sum(made.pairs) == 4097 * 4098 // 2
    assert shares["zigzag"] < 1.01
    assert shares["contiguous"] > 1.7


def test_keys_go_no_further_than_they_are_needed():
    near, far = Sharding(4096, 8, "contiguous"), Sharding(4096, 8, "zigzag")
    asked = {"structure": Window.last(128), "exchange": "ring"}
    few = plan(*parts(near, 0), sharding=near, **asked)
    many = plan(*parts(far, 0), sharding=far, **asked)
    per_token = 2 * 2 * (4 + 4) * 4
    assert few.forward_bytes == (512 * per_token,) * 7 + (0,)
    assert sum(many.forward_bytes) > 5 * sum(few.forward_bytes)


def test_an_exchange_is_chosen_and_explained():
    long = Sharding(2**16, 4)
    shapes = [torch.empty(1, 8, long.size(0), 16, device="meta") for _ in range(3)]
    chosen = plan(*shapes, sharding=long, kernel=Elu(), structure=Causal())
    assert chosen.exchange == "state"
    assert "ring about" in chosen.reason
    assert "state exchange" in str(chosen)
    only = plan(*shapes, sharding=long, structure=Causal())
    assert only.exchange == "ring"
    assert "Exp() has no finite feature map: use exchange='ring'" in only.reason
    windowed = plan(*shapes, sharding=long, kernel=Taylor(2), normalizer=L2(), structure=Window.last(8))
    assert windowed.exchange == "ring"


@pytest.mark.parametrize(
    ("asked", "error", "told"),
    [
        ({"exchange": "tree"}, InvalidArgument, "exchange must be 'auto' or one of"),
        ({"exchange": "state"}, Unsupported, "no finite feature map"),
        ({"backend": "cuda"}, InvalidArgument, "backend must be"),
        ({"rank": 4}, InvalidArgument, "rank must lie between 0 and 3"),
        ({"rank": 1, "sharding": Sharding(9, 4)}, InvalidArgument, "query has 3 tokens, but process 1 holds 2"),
        ({"kernel": "exp"}, InvalidArgument, "kernel must be a kernel object"),
        ({"sharding": 4}, InvalidArgument, "sharding must be a Sharding"),
        ({"structure": Causal() & Documents(torch.tensor([0, 3]))}, InvalidArgument, "packed length 9"),
    ],
)
def test_what_is_refused(asked: dict[str, object], error: type[Exception], told: str):
    sharding = Sharding(9, 4)
    tensors = [torch.zeros(1, 1, 3, 2) for _ in range(3)]
    with pytest.raises(error, match=told):
        plan(*tensors, **({"sharding": sharding, "rank": 0} | asked))
