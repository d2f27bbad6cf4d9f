"""A process of its own for a measurement: the allocator is set before torch is imported, and threads wait quietly."""

from __future__ import annotations

import os
import subprocess
import sys

CHILD = "MERCER_BENCHMARK_CHILD"
VARIABLES = {"OMP_WAIT_POLICY": "passive"}
"""What a child gets unless the caller's environment says otherwise. Every contestant runs under the same."""


def in_child(module: str, arguments: list[str]) -> bool:
    """Whether this process is the measuring one; otherwise run it with the same arguments and return False."""
    if os.environ.get(CHILD) == "1":
        return True
    command = [sys.executable, "-m", module, *arguments]
    answer = subprocess.run(command, check=False, env=VARIABLES | os.environ | {CHILD: "1"})
    if answer.returncode:
        raise SystemExit(answer.returncode)
    return False


def prepare(threads: int | None) -> None:
    """Tune the allocator, then import torch with ``threads`` threads (default: torch's own choice)."""
    from mercer.runtime.allocator import tune

    tune()
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
