"""Sharing independent items over torch's number of threads, for kernels that release the interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from importlib.util import find_spec

import torch


@lru_cache
def installed() -> bool:
    """Whether Numba is there."""
    return find_spec("numba") is not None


def transformed() -> bool:
    """Whether the call stands in a transform of `torch.func`: its tensors may have no memory of their own, and it takes
    no backward pass written for `torch.autograd` alone.
    """
    return torch._C._are_functorch_transforms_active()  # pyright: ignore[reportPrivateUsage]


def threads_for(items: int) -> int:
    """How many threads share some items: torch's number, at most one an item."""
    return max(1, min(torch.get_num_threads(), items))


def share(items: int, part: Callable[[int, int, int], None]) -> None:
    """Run part(thread, start, stop) on an equal run of the items in each thread; an error in one is raised here."""
    threads = threads_for(items)
    if threads == 1:
        part(0, 0, items)
        return
    cuts = [items * i // threads for i in range(threads + 1)]
    others = [_pool(os.getpid(), threads).submit(part, i, cuts[i], cuts[i + 1]) for i in range(1, threads)]
    try:
        part(0, cuts[0], cuts[1])
    finally:
        wait(others)
    for other in others:
        other.result()


def share_each(items: int, part: Callable[[int, int], None]) -> None:
    """Run part(thread, item) for every item; a thread that is done takes the next item, lowest numbers first."""
    waiting = iter(range(items))  # the interpreter hands each number to one thread only

    def work(thread: int, _start: int, _stop: int) -> None:
        for item in waiting:
            part(thread, item)

    share(threads_for(items), work)


def follow(threads: int, walk: Callable[[int], None]) -> None:
    """Run walk(0) here, and walk(i) in other threads beside it, which take from it what they find undone. One that has
    not begun when walk(0) is done is left out.
    """
    others = [_pool(os.getpid(), threads).submit(walk, i) for i in range(1, threads)]
    try:
        walk(0)
    finally:
        begun = [other for other in others if not other.cancel()]
        wait(begun)
    for other in begun:
        other.result()


@lru_cache
def _pool(_process: int, threads: int) -> ThreadPoolExecutor:
    """Threads that sleep between calls; a forked process makes its own."""
    return ThreadPoolExecutor(max(threads - 1, 1), thread_name_prefix="mercer")
