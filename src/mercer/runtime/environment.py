"""What a result depended on besides its inputs: versions, processor, threads, allocator. Goes into every report."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mercer.runtime.allocator import allocator

_PACKAGES = ("mercer", "torch", "numpy", "safetensors", "tokenizers", "numba", "transformers", "scikit-learn")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "KMP_BLOCKTIME", "MERCER_MALLOC")


def environment() -> dict[str, Any]:
    """A JSON-ready description of this process and its machine. Imports torch, whose thread count is part of it.

    Keys: `python`, `system`, `libc`, `processor`, `cores` (usable by this process), `memory_bytes` (None where the
    system does not tell), `threads` (torch's), `device` (the first CUDA device's name or None), `packages` (installed
    versions), `variables` (those set that steer threads and memory), `allocator` (`tuned`, `reason`, `settings`).
    """
    import torch

    state = allocator()
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()).strip(),
        "processor": processor(),
        "cores": cores(),
        "memory_bytes": memory_bytes(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "variables": {name: os.environ[name] for name in _THREAD_VARIABLES if name in os.environ},
        "allocator": {"tuned": state.tuned, "reason": state.reason, "settings": dict(state.settings)},
    }


def processor() -> str:
    """The processor's name as the system gives it; the architecture where it gives none."""
    if sys.platform == "darwin":
        answer = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        return answer.stdout.strip() or platform.machine()
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() in ("model name", "hardware", "cpu") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores this process may use, which in a container is fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Physical memory in bytes."""
    names: dict[str, int] = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
