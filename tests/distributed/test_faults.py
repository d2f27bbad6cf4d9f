"""A process that is stuck, dead or was asked something else ends in one sentence on the others, and in no hang."""

import os
import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.distributed.pool import Place, Pool

from mercer import Causal, Exp, Global, Taylor, Window
from mercer.distributed import Sharding, attention
from mercer.distributed.blocks import Tiled
from mercer.distributed.journey import Journey
from mercer.errors import InvalidArgument, PeerError, Unsupported

SHARDING = Sharding(24, 3)


def own(rank: int) -> list[torch.Tensor]:
    return [torch.randn(1, 2, SHARDING.size(rank), 4, requires_grad=True) for _ in range(3)]


def until(file: Path) -> None:
    """Wait for a file, a minute at most."""
    for _ in range(600):
        if file.exists():
            return
        time.sleep(0.1)


class Stuck:
    """In place of ``Tiled.forward`` or ``backward``: does nothing until others have given up."""

    def __init__(self, name: str, folder: str) -> None:
        self.name, self.usual, self.file = name, getattr(Tiled, name), Path(folder) / "given up"

    def __enter__(self) -> None:
        def wait(*arguments: object) -> None:
            until(self.file)
            self.usual(*arguments)

        setattr(Tiled, self.name, wait)

    def __exit__(self, *_: object) -> None:
        setattr(Tiled, self.name, self.usual)


def _stuck(place: Place, folder: str, name: str) -> str:
    """Three of four processes, the second of which is stuck: what each of them says."""
    group = dist.new_group([0, 1, 2])
    if place.rank == 3:
        return ""
    query, key, value = own(place.rank)

    def run() -> None:
        out = attention(query, key, value, sharding=SHARDING, structure=Causal(), group=group, timeout=2.0)
        out.sum().backward()

    try:
        if place.rank == 1:
            with Stuck(name, folder):
                run()
        else:
            run()
    except PeerError as error:
        (Path(folder) / "given up").touch()
        return str(error)
    return "nothing"


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_a_stuck_process(pool: Pool, tmp_path: Path, name: str):
    answers = pool.run(4, _stuck, str(tmp_path), name)
    # Its neighbours name it and what they waited for; whoever waited for these names one of them.
    wanted = re.compile(r"Process 1 of 3 did not (send|take) the keys of step \d (to|from) process [02] within 2 s: ")
    assert any(wanted.match(answer) for answer in (answers[0], answers[2])), answers
    assert all(answer.startswith("Process ") for answer in answers[:3]), answers


def _dying(rank: int, folder: str) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    sharding = Sharding(24, 2)
    q, k, v = (torch.randn(1, 2, sharding.size(rank), 4) for _ in range(3))
    if rank == 1:
        Journey.pass_keys = lambda *_: os._exit(9)  # before anything of the first step is sent
    try:
        attention(q, k, v, sharding=sharding, structure=Causal(), timeout=30.0)
    except PeerError as error:
        (Path(folder) / "said").write_text(str(error))
    os._exit(0)


def test_a_dead_process(tmp_path: Path):
    context = mp.get_context("spawn")
    processes = [context.Process(target=_dying, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 9]
    said = (tmp_path / "said").read_text()
    assert said.startswith(
        "Process 1 of 2 was lost while process 0 exchanged the keys of step 0 with it, before the time"
    )


def _different(place: Place, what: str) -> str:
    odd = place.rank == 1
    query, key, value = own(place.rank)
    asked = {"sharding": SHARDING, "structure": Causal(), "group": place.group, "timeout": 60.0}
    if what == "kernel":
        asked["kernel"] = Taylor(2) if odd else Exp()
        asked["exchange"] = "ring"
    elif what == "dtype" and odd:
        query, key, value = (x.double() for x in (query, key, value))
    elif what == "heads" and odd:
        query = query.repeat(1, 2, 1, 1)
    elif what == "scale" and odd:
        asked["scale"] = 0.3
    elif what == "gradient" and odd:
        query, key, value = (x.detach() for x in (query, key, value))
    elif what == "marks":
        marked = torch.arange(24).unsqueeze(0) == (7 if odd else 3)
        asked["structure"] = Window(2, 2) | Global(mask=marked)
    elif what == "order" and odd:
        asked["sharding"] = Sharding(24, 3, "contiguous")
    elif what == "tokens" and odd:
        query, key, value = (x[:, :, 1:] for x in (query, key, value))
    elif what == "support" and odd:
        asked["exchange"] = "state"
    try:
        attention(query, key, value, **asked)
    except (InvalidArgument, Unsupported) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("kernel", "kernel is Exp() on process 0 and Taylor(order=2, signed=False) on process 1"),
        ("dtype", "query is [1, 2, tokens, 4] torch.float32 on cpu on process 0"),
        ("heads", "query is [1, 2, tokens, 4]"),
        ("scale", "scale is None on process 0 and 0.3 on process 1"),
        ("gradient", "a gradient is wanted on process 0 and not wanted on process 1"),
        ("marks", "structure is Window(None, None) & Window(left=2, right=2) | Global(mask) ("),
        ("order", "sharding is Sharding(length=24, processes=3, order='zigzag') on process 0"),
    ],
)
def test_processes_that_were_asked_different_things(pool: Pool, what: str, told: str):
    answers = pool.run(3, _different, what)
    assert all(told in answer for answer in answers), answers
    assert len(set(answers)) == 1


@pytest.mark.parametrize(
    ("what", "told"),
    [("tokens", "query has 7 tokens, but process 1 holds 8"), ("support", "Exp() has no finite feature map")],
)
def test_a_process_that_refuses_tells_the_others(pool: Pool, what: str, told: str):
    answers = pool.run(3, _different, what)
    assert all(told in answer for answer in answers), answers
    assert all("Process 1 of 3 refused its arguments" in answers[rank] for rank in (0, 2))
    assert "refused its arguments" not in answers[1]


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), True, "long"])
def test_time_limits_are_checked(timeout: object):
    q = torch.zeros(1, 1, 2, 2)
    with pytest.raises(InvalidArgument, match="timeout must be a positive number of seconds"):
        attention(q, q, q, sharding=Sharding(2, 1), timeout=timeout)
