"""A few processes that stay alive and run what tests send them, so that torch is imported once for many cases."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MEMBERS = {1: (2,), 2: (1, 3), 3: (0, 2, 3), 4: (0, 1, 2, 3)}
"""Which of the four processes make up a group of each size: ranks in a group are not those of the world."""


@dataclass
class Place:
    """Where a worker runs."""

    rank: int
    size: int
    group: Any

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the processes of the group."""
        total = x.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total


def _work(world_rank: int, path: str, calls: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=world_rank, world_size=4, timeout=timedelta(seconds=120)
    )
    groups = {size: dist.new_group(list(members)) for size, members in MEMBERS.items()}
    while True:
        task = calls.recv()
        if task is None:
            break
        size, function, arguments = task
        place = Place(MEMBERS[size].index(world_rank), size, groups[size])
        try:
            calls.send((True, function(place, *arguments)))
        except BaseException:  # noqa: BLE001 - whatever it is, the test that sent the task has to hear of it
            calls.send((False, traceback.format_exc()))
    dist.destroy_process_group()
    os._exit(0)  # at once: taking torch down takes longer than some tests


class Pool:
    """Four processes with groups of one to four of them."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        context = mp.get_context("spawn")
        self.calls: list[Connection] = []
        self.processes = []
        for rank in range(4):
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(rank, f"{self.folder.name}/store", there), daemon=True)
            process.start()
            self.calls.append(here)
            self.processes.append(process)

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``function(place, *arguments)`` gives on every process of the group of ``size``."""
        for member in MEMBERS[size]:
            self.calls[member].send((size, function, arguments))
        answers: list[tuple[bool, Any]] = []
        for member in MEMBERS[size]:
            assert self.calls[member].poll(150), f"process {member} gives no answer"
            answers.append(self.calls[member].recv())
        wrong = [f"process {rank} of {size}:\n{text}" for rank, (right, text) in enumerate(answers) if not right]
        if wrong:  # some still wait for others, and connections are closed: later tests get new processes
            self.close(0)
            self._start()
        assert not wrong, "\n".join(wrong)
        return [value for _, value in answers]

    def close(self, patience: float = 10) -> None:
        for call in self.calls:
            call.send(None)
        for process in self.processes:
            process.join(patience)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()
