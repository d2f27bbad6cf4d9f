"""Keeping freed memory in the process, so that a training step does not fault its pages in again.

glibc's malloc takes every block above a threshold (at most 32 MiB by itself) straight from the system and gives it
back when it is freed, and it trims the top of its heap. A training step frees and takes the same tensors again and
again, and each time the system zeroes every page anew; on a virtual machine that can cost more than the arithmetic.
`tune` raises the thresholds. The price is that the process keeps its peak until it ends. docs/lab.md has the numbers.
"""

import ctypes
import os
import platform
import sys
from dataclasses import dataclass, field

SWITCH = "MERCER_MALLOC"

# Names and numbers of <malloc.h>, with the values that removed the faults.
_PARAMETERS = {
    "M_MMAP_THRESHOLD": (-3, 1 << 30),  # blocks below 1 GiB come from the heap
    "M_TRIM_THRESHOLD": (-1, (1 << 31) - 1),  # keep up to 2 GiB free at the top of the heap: the largest C int
    "M_TOP_PAD": (-2, 16 << 20),  # grow the heap by 16 MiB more than was asked for
}
# A glibc that caps M_MMAP_THRESHOLD at half a thread's heap refuses 1 GiB; turning the mappings off does the same.
_WITHOUT_MAPPINGS = ("M_MMAP_MAX", -4, 0)


@dataclass(frozen=True)
class Allocator:
    """What `tune` found and did."""

    tuned: bool
    reason: str  # one sentence
    settings: dict[str, int] = field(default_factory=dict)  # the parameters that were accepted, in bytes or blocks


_done: Allocator | None = None


def tune() -> Allocator:
    """Raise glibc's thresholds for the whole process; a second call changes nothing and returns the first one's answer.

    Call it before torch is imported: what was taken earlier stays where it is. It does nothing, and says so, with
    MERCER_MALLOC=0, outside glibc, under a preloaded allocator, and where the user has set malloc's parameters already.
    """
    global _done
    if _done is None:
        obstacle = _obstacle()
        _done = Allocator(False, obstacle) if obstacle else _apply(ctypes.CDLL(None))
    return _done


def allocator() -> Allocator:
    """The state as it is, for reports: what `tune` did, or that it was not called."""
    return _done or Allocator(False, "mercer.runtime.allocator.tune was not called in this process")


def _obstacle() -> str:
    """Why the thresholds must be left alone; empty if nothing speaks against raising them."""
    if os.environ.get(SWITCH) == "0":
        return f"switched off by {SWITCH}=0"
    if not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc":
        return "the C library is not glibc, whose malloc alone has these thresholds"
    if os.environ.get("LD_PRELOAD"):
        return "LD_PRELOAD is set, so malloc may be another library's"
    own = sorted(name for name in os.environ if name.startswith("MALLOC_") and name.endswith("_"))
    if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        own.append("GLIBC_TUNABLES")
    if own:
        return f"malloc's parameters are already set by {', '.join(own)}"
    return ""


def _apply(libc: ctypes.CDLL) -> Allocator:
    accepted: dict[str, int] = {}
    refused: list[str] = []
    for name, (number, value) in _PARAMETERS.items():
        if libc.mallopt(number, value):
            accepted[name] = value
        elif name == "M_MMAP_THRESHOLD" and libc.mallopt(*_WITHOUT_MAPPINGS[1:]):
            accepted[_WITHOUT_MAPPINGS[0]] = _WITHOUT_MAPPINGS[2]
        else:
            refused.append(name)
    if refused:
        return Allocator(False, f"glibc refused {', '.join(refused)}", accepted)
    return Allocator(True, "freed memory stays in the process", accepted)
