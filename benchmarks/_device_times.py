"""Times of every kernel in every form, path and backend on a device, beside torch's SDPA and fla where it runs.

Causal, with Sum, forward and backward. Two shapes: wide heads for all kernels, and narrow heads for those whose
features must be expanded. A form that would take too long on the whole sequence runs on half, a quarter, ... of it;
every time has the length it belongs to, and is compared with SDPA's time on that length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks._clock import synchronise
from benchmarks._contestant import Run
from benchmarks._device_contracts import moved
from benchmarks._device_rivals import SDPA, rival_error, rivals, sdpa
from benchmarks._machine import Limits
from benchmarks._work import Shape, least_bytes, pair_flops, state_flops
from mercer import Causal, Sum, attention, plan
from mercer.core.feature_maps import Dpfp, ExpFeatures
from mercer.core.kernels import Cosine, Elu, Exp, Gaussian, Kernel, Power, Relu, Taylor
from mercer.core.learned_maps import Hedgehog, MlpFeatures
from mercer.core.mixed import Mixed
from mercer.core.random_features import PositiveRandomFeatures, TrigonometricRandomFeatures
from mercer.core.soft_cap import SoftCap
from mercer.core.support import FORMS, PATHS
from mercer.errors import MercerError
from mercer.planning import BACKENDS

KERNELS: dict[str, Kernel] = {
    "exp": Exp(),
    "elu": Elu(),
    "taylor2": Taylor(2),
    "favor": PositiveRandomFeatures(256),
    "hedgehog": Hedgehog(),
    "power2": Power(2),
    "taylor4": Taylor(4),
    "taylor3-signed": Taylor(3, signed=True),
    "gaussian": Gaussian(),
    "softcap": SoftCap(50),
    "relu": Relu(),
    "cosine-signed": Cosine(signed=True),
    "expfeatures": ExpFeatures(),
    "dpfp1": Dpfp(),
    "mlp": MlpFeatures(64),
    "trig-signed": TrigonometricRandomFeatures(256, signed=True),
    "mixed": Mixed(Exp(), Elu(), window=64),
}
"""One or more of every class, at sizes one would use; names of tests/contracts/cells.py where it has the same."""
Way = tuple[str, str, str]
"""Form, path and backend."""
Say = Callable[[str], None]
EXPANDED = ("taylor2", "power2", "taylor4", "taylor3-signed")
WIDE = {"cpu": Shape(1, 8, 2048, 64), "other": Shape(4, 8, 4096, 64)}
NARROW = {"cpu": Shape(4, 8, 1024, 16), "other": Shape(16, 8, 4096, 16)}
DENSE_PAIRS = 1 << 29
"""Weights that the dense form may hold: 2 GiB in float32."""
RIVAL_ERROR = {"float32": 1e-2, "bfloat16": 5e-2}
"""Largest error of a rival that is timed: a rival may use TensorFloat32 where we do not, which is told, not judged."""


@dataclass(frozen=True)
class Time:
    """Seconds of one call, and what they mean.

    Attributes:
        length: tokens it belongs to.
        product_fraction, copy_fraction: counted FLOP and bytes a second over the rates measured on the device.
        sdpa: SDPA's time on the same sizes and dtype over this one; above 1 this is faster.
    """

    kernel: str
    form: str
    path: str
    backend: str
    dtype: str
    batch: int
    heads: int
    length: int
    dim: int
    backward: bool
    seconds: float
    product_fraction: float
    copy_fraction: float
    sdpa: float


@dataclass
class Watch:
    """Times calls on one device and puts them beside its limits and SDPA."""

    device: torch.device
    limits: Limits
    each: float
    """Seconds that one call may take; longer ones run on a shorter sequence."""
    known: dict[tuple[Shape, str, bool], float] = field(default_factory=dict)

    def sdpa(self, shape: Shape, dtype: str, backward: bool) -> float:
        """SDPA's time, measured once for each size."""
        key = (shape, dtype, backward)
        if key not in self.known:
            self.known[key] = clock(sdpa, shape, dtype, backward, self.device)
        return self.known[key]

    def time(self, name: str, way: Way, run: Run, shape: Shape, dtype: str, features: int | None) -> Iterator[Time]:
        """Forward and, but for the recurrent form, with backward, on one length; ``features`` None counts pairs."""
        directions = (False,) if way[0] == "recurrent" else (False, True)
        shape, tried = self.fit(run, shape, way, dtype, directions[-1])
        for backward in directions:
            other = self.sdpa(shape, dtype, backward)
            slow = tried > self.each and backward == directions[-1]  # at the shortest length: one call has to do
            spent = other if name == SDPA else tried if slow else clock(run, shape, dtype, backward, self.device)
            flops = pair_flops(shape, backward) if features is None else state_flops(shape, features, backward)
            traffic = least_bytes(shape, getattr(torch, dtype).itemsize, backward)
            sizes = (shape.batch, shape.heads, shape.length, shape.dim)
            of_products, of_copy = flops / spent / self.limits.flops(dtype), traffic / spent / self.limits.copy
            yield Time(name, *way, dtype, *sizes, backward, spent, of_products, of_copy, other / spent)

    def fit(self, run: Run, shape: Shape, way: Way, dtype: str, backward: bool) -> tuple[Shape, float]:
        """The shape with a length that the form can hold and that one call should do in ``each`` seconds, and the time
        of a call on the shortest length, which is more than ``each`` only if that is the length.
        """
        form, path, _ = way
        while form == "dense" and shape.batch * shape.heads * shape.length**2 > DENSE_PAIRS:
            shape = replace(shape, length=shape.length // 2)
        short = replace(shape, length=min(shape.length, 64))
        growth = 1 if path == "features" else 2
        spent = clock(run, short, dtype, backward, self.device, batches=1)
        while shape.length > short.length and spent * (shape.length / short.length) ** growth > self.each:
            shape = replace(shape, length=shape.length // 2)
        return shape, spent


@dataclass(frozen=True)
class _Call:
    options: dict[str, Any]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, **self.options)


def ways(name: str, shape: Shape, dtype: str, device: torch.device) -> Iterator[tuple[Way, Run]]:
    """Every (form, path, backend) of a kernel that works for these sizes, and its call."""
    like = torch.empty(shape.batch, shape.heads, shape.length, shape.dim, dtype=getattr(torch, dtype), device=device)
    bound = KERNELS[name].bind(shape.dim, shape.heads, shape.heads, torch.Generator().manual_seed(0))
    parts: dict[str, Any] = {"kernel": moved(bound, device), "normalizer": Sum(), "structure": Causal()}
    for form in FORMS:
        for path in PATHS:
            for backend in BACKENDS:
                asked: dict[str, Any] = {**parts, "form": form, "path": path, "backend": backend}
                try:
                    plan(like, like, like, **asked)
                except MercerError:
                    continue
                yield (form, path, backend), _Call(asked)


def measure(
    watch: Watch, dtypes: tuple[str, ...], bad: set[tuple[str, str, str]], limit: float, scale: int, say: Say
) -> tuple[list[Time], int]:
    """Time everything, kernel after kernel, until ``limit`` seconds have passed; also how many ways were not reached.

    ``bad`` are classes of kernels, forms and paths that are wrong on this device and get no time; ``scale`` divides the
    lengths.
    """
    kind = "cpu" if watch.device.type == "cpu" else "other"
    wide, narrow = (replace(s[kind], length=s[kind].length // scale) for s in (WIDE, NARROW))
    began, left = time.monotonic(), 0
    times = [one for shape in (wide, narrow) for one in _rivals(watch, shape, dtypes, say if shape == wide else _quiet)]
    for name, kernel in KERNELS.items():
        for shape, dtype in product((wide, narrow) if name in EXPANDED else (wide,), dtypes):
            for way, run in ways(name, shape, dtype, watch.device):
                if (type(kernel).__name__, *way[:2]) in bad:
                    continue
                if time.monotonic() - began > limit:
                    left += 1
                    continue
                features = kernel.feature_dim(shape.dim) if way[1] == "features" else None
                times += watch.time(name, way, run, shape, dtype, features)
    return times, left


def _quiet(_: str) -> None:
    """What a rival cannot do was told for the first shape."""


def _rivals(watch: Watch, shape: Shape, dtypes: tuple[str, ...], say: Say) -> Iterator[Time]:
    found, reason = rivals(watch.device)
    if reason:
        say(f"  {reason}")
    for name, dtype in product(found, dtypes):
        run, features = found[name], None if name == SDPA else shape.dim
        try:
            error = rival_error(name, run, dtype, watch.device)
            if not error <= RIVAL_ERROR[dtype]:
                say(f"  {name} is off by {error:.1e} in {dtype}, so it is not timed")
                continue
            yield from watch.time(name, ("", "", ""), run, shape, dtype, features)
        except Exception as error:  # noqa: BLE001 - what another library cannot do here is told, not ours to mend
            say(f"  {name} does not run in {dtype}: {type(error).__name__}: {str(error)[:90]}")


def clock(
    run: Run, shape: Shape, dtype: str, backward: bool, device: torch.device, batches: int = 3, least: float = 0.05
) -> float:
    """Seconds of one call after one untimed call: the best batch of calls that follow one another without waiting.

    A batch takes about ``least`` seconds, one call or more. Queries and keys have half a standard deviation.
    """
    size = (shape.batch, shape.heads, shape.length, shape.dim)
    q, k, v, upstream = (torch.randn(size, device=device).to(getattr(torch, dtype)) for _ in range(4))
    q, k = q / 2, k / 2

    def once() -> None:
        if backward:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            torch.autograd.grad(run(*leaves), leaves, upstream)
        else:
            with torch.no_grad():
                run(q, k, v)

    def batch(calls: int) -> float:
        synchronise(device)
        began = time.perf_counter()
        for _ in range(calls):
            once()
        synchronise(device)
        return (time.perf_counter() - began) / calls

    once()
    first = batch(1)
    if batches == 1:
        return first
    calls = max(1, min(100, round(least / max(first, 1e-6))))
    return min(batch(calls) for _ in range(batches))
