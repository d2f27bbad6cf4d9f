"""Measuring the numbers of a :class:`~mercer.Machine`: some seconds of small calls, each way by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mercer.backends.sharing import installed
from mercer.core.kernels import Elu, Exp, Kernel, Taylor
from mercer.core.machine import Cost, Machine
from mercer.core.machine_default import DEFAULT
from mercer.core.merged import merge
from mercer.core.state import State
from mercer.core.structures import Causal
from mercer.core.support import Sizes
from mercer.core.work import FEW, FUSED, Work, parts
from mercer.errors import InvalidArgument
from mercer.ops import attention
from mercer.runtime.environment import processor

DTYPES = {"float32": torch.float32, "float64": torch.float64, "half": torch.bfloat16}
LEAST_REPEATS, MOST_REPEATS, BUDGET = 3, 40, 0.04
"""A call is timed this often at least and at most, and no further once it took this many seconds together. The least
time counts: what else a machine does only ever adds."""
COPIED = 2**26
"""Bytes that are copied to measure the bandwidth: more than caches hold."""


@dataclass(frozen=True)
class Trial:
    """A call that is timed for one way: 8 heads, or 1 if it is tiny; a step if it has a past."""

    kernel: Kernel
    length: int
    dim: int
    heads: int = 8
    past: int = 0


_TINY = Trial(Exp(), 8, 16, 1)
_STEP = (
    Trial(Elu(), 1, 16, 1, past=8),
    Trial(Elu(), 1, 16, 32, past=8),
    Trial(Taylor(2), 1, 16, past=8),
    Trial(Taylor(2), 1, 64, past=8),
)
TRIALS: dict[str, tuple[tuple[str, str, str], tuple[Trial, ...]]] = {
    "dense": (("dense", "pairs", "torch"), (_TINY, Trial(Exp(), 64, 16), Trial(Exp(), 64, 64))),
    "tiles": (
        ("chunked", "pairs", "torch"),
        (Trial(Taylor(2), 8, 16, 1), Trial(Taylor(2), 512, 16), Trial(Taylor(2), 512, 64), Trial(Taylor(2), 1024, 64)),
    ),
    "exp_tiles": (
        ("chunked", "pairs", "torch"),
        (_TINY, Trial(Exp(), 512, 16), Trial(Exp(), 512, 64), Trial(Exp(), 1024, 64)),
    ),
    "sdpa": (("chunked", "pairs", "sdpa"), (_TINY, Trial(Exp(), 1024, 16), Trial(Exp(), 1024, 64))),
    "fused_softmax": (  # more queries than a step of decoding has: 8 would be counted as one
        ("chunked", "pairs", "numba"),
        (Trial(Exp(), 2 * FEW, 16, 1), Trial(Exp(), 1024, 16), Trial(Exp(), 1024, 64)),
    ),
    "fused_decode": (
        ("chunked", "pairs", "numba"),
        (Trial(Exp(), 1, 16, 1, past=8), Trial(Exp(), 1, 64, past=4096), Trial(Exp(), 8, 64, past=2048)),
    ),
    "cache": (("chunked", "pairs", "sdpa"), (Trial(Exp(), 1, 16, 1, past=8), Trial(Exp(), 1, 64, past=64))),
    "scan": (
        ("chunked", "features", "torch"),
        (Trial(Elu(), 8, 16, 1), Trial(Elu(), 512, 64), Trial(Taylor(2), 256, 16), Trial(Taylor(2), 128, 64)),
    ),
    "fused_scan": (
        ("chunked", "features", "numba"),
        (Trial(Elu(), 8, 16, 1), Trial(Elu(), 1024, 16), Trial(Elu(), 1024, 64), Trial(Taylor(2), 256, 64)),
    ),
    "step": (("recurrent", "features", "torch"), _STEP),
    "fused_step": (("recurrent", "features", "numba"), _STEP),
}
"""For each way how it is asked for, and what is timed; the second trial is also timed with its backward pass."""


def measure_machine(device: str | torch.device = "cpu") -> Machine:
    """Measure this machine, with the number of threads that torch has now.

    Takes about ten seconds, and the first time some more, while the fused kernels are compiled; nothing else should be
    running. Ways that do not exist here (fused kernels without Numba, or away from the CPU) keep the default numbers:
    nobody chooses them here.

    Args:
        device: ``"cpu"``, or another device of torch's.

    Raises:
        InvalidArgument: torch has no such device here.
    """
    try:
        where = torch.device(device)
        torch.zeros(1, device=where)
    except (RuntimeError, AssertionError) as error:  # the latter from a torch built without CUDA
        raise InvalidArgument(f"device must be one that torch has here, such as 'cpu', not {device!r}.") from error
    with torch.random.fork_rng(devices=[]):
        return _Session(where).machine()


class _Session:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        source = torch.ones(COPIED // 4, device=device)
        target = torch.empty_like(source)
        bandwidth = 2 * COPIED / self.best(lambda: target.copy_(source))
        rows = torch.randn(8, 1024, 64, device=device)
        elu = Elu()
        name = processor() if device.type == "cpu" else torch.cuda.get_device_name(device)
        self.basis = replace(
            DEFAULT,
            name=name or str(device),
            device=device.type,
            threads=torch.get_num_threads(),
            bandwidth=bandwidth,
            entry=self.best(lambda: elu.map_query(rows)) / rows.numel(),
        )

    def machine(self) -> Machine:
        costs: dict[str, dict[str, Cost]] = {}
        for name, dtype in DTYPES.items():
            with torch.no_grad():
                a = torch.randn(1024, 1024, device=self.device).to(dtype if name == "float64" else torch.float32)
                peak = 2 * 1024**3 / self.best(lambda a=a: torch.mm(a, a))
            costs[name] = {}
            for way in TRIALS:
                costs[name][way] = self.cost(way, dtype, peak, costs[name])
        return replace(self.basis, costs=costs)

    def cost(self, way: str, dtype: torch.dtype, peak: float, done: dict[str, Cost]) -> Cost:
        if way in FUSED and (not installed() or self.device.type != "cpu" or dtype == torch.float64):
            return DEFAULT.costs["float32"][way]
        choice, trials = TRIALS[way]
        with torch.no_grad():
            times = [self.best(self.run(trial, choice, dtype)) for trial in trials]
        if way == "cache":  # what a step with a cache takes beyond its row of pairs and beyond moving the bytes
            moved = [sum(self.work(t, choice, dtype, w).bytes for w in ("sdpa", way)) for t in trials]
            rest = [t - done["sdpa"].call - b / self.basis.bandwidth for t, b in zip(times, moved, strict=True)]
            return Cost(max(sum(rest) / len(rest), 0.0), 0.0, peak, 1.0)
        works = [self.work(trial, choice, dtype, way) for trial in trials]
        call, item, rate = fit(times, works, self.basis, peak)
        training = 1.0
        if way not in ("fused_step", "fused_decode"):
            run = self.run(trials[1], choice, dtype, trained=True)
            training = max(1.0, self.best(run) / times[1])
        return Cost(call, item, rate, training)

    def work(self, trial: Trial, choice: tuple[str, str, str], dtype: torch.dtype, way: str) -> Work:
        """The counts of a trial, and how a fused kernel's are shared by threads."""
        size = dtype.itemsize
        sizes = Sizes(
            1, trial.heads, trial.heads, trial.length, trial.length, trial.dim, trial.dim,
            trial.past if choice[1] == "pairs" else 0, max(size, 4), size, bfloat16=dtype == torch.bfloat16,
        )  # fmt: skip
        form, path, backend = choice
        found = parts(trial.kernel, merge(Causal()), sizes, form, path, backend, True, trial.past > 0)
        part = next(part for part in found if part.way == way)
        idle = self.basis.threads / min(self.basis.threads, part.heads) if part.way in FUSED else 1
        return replace(part.work, items=int(part.work.items * idle), flops=int(part.work.flops * idle))

    def run(
        self, trial: Trial, choice: tuple[str, str, str], dtype: torch.dtype, trained: bool = False
    ) -> Callable[[], object]:
        form, path, backend = choice

        def inputs(length: int) -> tuple[Tensor, Tensor, Tensor]:
            shape = (1, trial.heads, length, trial.dim)
            q, k, v = (torch.randn(shape, device=self.device).to(dtype).requires_grad_(trained) for _ in range(3))
            return q, k, v

        def call(tokens: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            out = attention(
                *tokens, kernel=trial.kernel, structure=Causal(), form=form, path=path, backend=backend, state=past[0],
                return_state=past[0] is not None and (path, backend) != ("pairs", "numba"),
            )  # fmt: skip
            if not isinstance(out, tuple):
                return out
            if path == "pairs":
                past[0] = out[1]  # who goes on from an older cache copies it
            return out[0]

        tokens = inputs(trial.length)
        past: list[State | None] = [None]
        if trial.past:
            with torch.no_grad():
                _, past[0] = attention(
                    *inputs(trial.past), kernel=trial.kernel, structure=Causal(), path=path, return_state=True
                )
        if not trained:
            return lambda: call(tokens)
        upstream = torch.ones_like(tokens[2])
        return lambda: call(tokens).backward(upstream)

    def best(self, run: Callable[[], object]) -> float:
        """Seconds of the quickest of several calls, after one that is not timed."""
        run()
        times: list[float] = []
        while len(times) < LEAST_REPEATS or (len(times) < MOST_REPEATS and sum(times) < BUDGET):
            self.wait()
            began = time.perf_counter()
            run()
            self.wait()
            times.append(time.perf_counter() - began)
        return min(times)

    def wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def fit(times: list[float], works: list[Work], basis: Machine, peak: float) -> tuple[float, float, float]:
    """call, item and rate that explain the times best, in relative error: least squares, none below 0.

    What the basis knows, entries and bytes, is explained first. Where no rate can be told from the times, products are
    so few that it hardly counts, and it is ``peak``.
    """
    known = np.array([w.entries * basis.entry + w.bytes / basis.bandwidth for w in works])
    columns = np.array([[w.calls, w.items, w.flops] for w in works], dtype=float)
    seconds = np.array(times)
    best, chosen = np.inf, (min(times), 0.0, 1 / peak)
    for used in ([0, 1, 2], [0, 1], [0, 2], [0]):
        values = np.array([0.0, 0.0, 1 / peak])
        left = seconds - known - (0 if 2 in used else columns[:, 2] / peak)
        values[used] = np.linalg.lstsq(columns[:, used] / seconds[:, None], left / seconds, rcond=None)[0]
        error = float((((columns @ values + known) / seconds - 1) ** 2).sum())
        if (values >= 0).all() and values[2] > 0 and error < best:
            best, chosen = error, (float(values[0]), float(values[1]), float(values[2]))
    return chosen[0], chosen[1], 1 / chosen[2]
