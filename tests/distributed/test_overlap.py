"""The next keys travel while the present ones are computed with."""

import time

import torch
from tests.distributed.pool import Place, Pool

from mercer import Causal
from mercer.distributed import Sharding, attention, traffic
from mercer.distributed.blocks import Tiled
from mercer.distributed.journey import Journey

LENGTH, DIM = 8192, 64
"""4 MiB of keys and values a process of 4: far more than a socket takes on its own."""


def _waiting_for_keys(place: Place) -> list[tuple[str, str, int]]:
    """Compute nothing at any step but the last until the keys of the next one are here."""
    sharding = Sharding(LENGTH, place.size)
    q, k, v = (torch.ones(1, 2, sharding.size(place.rank), DIM) for _ in range(3))
    coming: list[torch.Tensor] = []
    usual, look = Journey.pass_keys, Tiled.forward

    def remember(self: Journey, step: int, buffer: torch.Tensor) -> object:
        pending, arriving = usual(self, step, buffer)
        coming[:] = [arriving]
        return pending, arriving

    def arrived() -> bool:
        return bool((coming[0].view(torch.float32)[-1024:] == 1).all())  # its last bytes

    def patient(*_: object) -> None:
        for _ in range(1200):
            if arrived():
                return
            time.sleep(0.05)
        raise AssertionError("the next keys did not come while this step computed")

    Journey.pass_keys, Tiled.forward = remember, patient
    try:
        with traffic() as seen:
            attention(q, k, v, sharding=sharding, structure=Causal(), group=place.group, backend="torch", timeout=60.0)
    finally:
        Journey.pass_keys, Tiled.forward = usual, look
    return seen.events


def test_keys_arrive_during_computation(pool: Pool):
    for events in pool.run(4, _waiting_for_keys):
        keys = [(what, step) for what, kind, step in events if kind == "keys"]
        assert keys == [(what, step) for step in range(3) for what in ("post", "compute", "wait")] + [("compute", 3)]


def _events(place: Place, overlap: bool) -> list[tuple[str, str, int]]:
    sharding = Sharding(12, place.size)
    q, k, v = (torch.randn(1, 2, sharding.size(place.rank), 4, requires_grad=True) for _ in range(3))
    out = attention(q, k, v, sharding=sharding, structure=Causal(), group=place.group, overlap=overlap)
    with traffic() as seen:
        out.sum().backward()
    return seen.events


def test_gradients_follow_one_step_behind(pool: Pool):
    for events in pool.run(3, _events, True):
        assert events == [
            ("post", "keys", 0),
            ("compute", "gradients", 0),
            ("wait", "keys", 0),
            ("post", "keys", 1),
            ("compute", "gradients", 1),
            ("post", "gradients", 1),
            ("wait", "keys", 1),
            ("compute", "gradients", 2),
            ("wait", "gradients", 1),
            ("post", "gradients", 2),
            ("wait", "gradients", 2),
        ]


def test_without_overlap_nothing_is_sent_before_it_is_computed_with(pool: Pool):
    for events in pool.run(3, _events, False):
        assert events[:3] == [("compute", "gradients", 0), ("post", "keys", 0), ("wait", "keys", 0)]
