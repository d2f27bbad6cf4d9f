"""The most memory that a call takes, by the kernel's own high-water mark. Linux only."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path


def high_water() -> int:
    """Bytes of resident memory at the highest since the mark was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def peak_above(call: Callable[[], object]) -> int:
    """Bytes at the highest during a call, what it returns included, above what the process held before it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)  # what earlier calls freed is given back, so that this one is seen to take it
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water()
    returned = call()
    peak = high_water() - before
    del returned
    return peak
