"""Timing one attention in one form, and the machine it runs on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mercer.core.kernels import Kernel
from mercer.core.machine import Machine, use_machine
from mercer.core.merged import merge
from mercer.core.mixed import Mixed
from mercer.core.names import parse_attention
from mercer.core.normalizers import Normalizer
from mercer.core.state import State
from mercer.core.structures import Causal
from mercer.core.support import Sizes
from mercer.ops import attention, plan
from mercer.planning import Plan, choose
from mercer.studies.records.cost import MachineRates, Phase

Form = Literal["dense", "chunked", "recurrent", "auto"]
LEAST_SECONDS = 0.01
"""A timing repeats its call until it has taken this long, so that the clock's own cost does not show."""


@dataclass(frozen=True)
class Way:
    """An attention and how it is computed."""

    attention: str
    form: Form
    path: Literal["pairs", "features"]
    phase: Phase


@dataclass(frozen=True)
class Shape:
    """Sizes of every call."""

    batch: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def inputs(self, length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Standard normal query, key and value."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.batch, self.heads, length, self.head_dim)
        q, k, v = (torch.randn(shape, generator=generator).to(self.device, self.dtype) for _ in range(3))
        return q, k, v

    def without_data(self, length: int) -> Tensor:
        """A tensor of these sizes that holds nothing, for plans."""
        return torch.empty(self.batch, self.heads, length, self.head_dim, dtype=self.dtype, device="meta")


def planned(way: Way, shape: Shape, length: int) -> Plan:
    """The plan of the call that is timed: the whole context, or its last token after a state.

    Raises:
        Unsupported: this way does not exist, or its state is larger than the limit.
    """
    kernel, normalizer = _parts(way, shape)
    x = shape.without_data(length)
    return plan(
        x, x, x, kernel=kernel, normalizer=normalizer, structure=Causal(), form=way.form, path=way.path,
        return_state=way.phase == "decode",
    )  # fmt: skip


def _parts(way: Way, shape: Shape) -> tuple[Kernel, Normalizer]:
    """Kernel and normaliser of a way, with maps and directions for its heads: any will do, for the time is the same."""
    kernel, normalizer = parse_attention(way.attention)
    bound = kernel.bind(shape.head_dim, shape.heads, shape.heads, torch.Generator().manual_seed(0))
    return bound.with_tensors({name: x.to(shape.device) for name, x in bound.tensors().items()}), normalizer


def planned_seconds(way: Way, shape: Shape, length: int, machine: Machine) -> float:
    """What the model of the machine says of one token: of ``length`` that are read, or of the one written after them.

    Raises:
        Unsupported: as :func:`planned`.
    """
    with use_machine(machine):
        if way.phase == "prefill":
            return planned(way, shape, length).seconds / length
        kernel, normalizer = _parts(way, shape)
        past = length if way.path == "pairs" else min(length, kernel.window) if isinstance(kernel, Mixed) else 0
        item = shape.dtype.itemsize
        sizes = Sizes(
            shape.batch, shape.heads, shape.heads, 1, 1, shape.head_dim, shape.head_dim, past, max(item, 4), item,
            shape.device.type, bfloat16=shape.dtype == torch.bfloat16,
        )  # fmt: skip
        return choose(kernel, normalizer, merge(Causal()), sizes, way.form, way.path, stateful=True).seconds


def prepare(way: Way, shape: Shape, length: int, decode_steps: int) -> tuple[Callable[[], None], int, int | None]:
    """What is timed, the tokens it makes, and for decode the bytes of the state that the context left.

    Prefill reads ``length`` tokens. Decode writes ``decode_steps`` tokens, one call each, after a context of
    ``length``; the context is read beforehand.
    """
    kernel, normalizer = _parts(way, shape)

    def call(q: Tensor, k: Tensor, v: Tensor, form: str, state: State | None) -> State:
        _, after = attention(
            q, k, v, kernel=kernel, normalizer=normalizer, structure=Causal(), form=form, path=way.path, state=state,
            return_state=True,
        )  # fmt: skip
        return after

    if way.phase == "decode":
        context = call(*shape.inputs(length), "chunked", None)
        tokens = [shape.inputs(1, seed=1 + step) for step in range(decode_steps)]

        def decode() -> None:
            state = context
            for q, k, v in tokens:
                state = call(q, k, v, way.form, state)

        return decode, decode_steps, context.nbytes

    q, k, v = shape.inputs(length)

    def prefill() -> None:
        attention(
            q, k, v, kernel=kernel, normalizer=normalizer, structure=Causal(), form=way.form, path=way.path
        )  # fmt: skip

    return prefill, length, None


@torch.inference_mode()
def seconds(run: Callable[[], None], device: torch.device, repeats: int | None = None) -> tuple[float, int]:
    """Time of one ``run()`` and how often it was called for that; ``repeats`` None: as often as it needs."""
    count = repeats or 1
    while True:
        wait(device)
        began = time.perf_counter()
        for _ in range(count):
            run()
        wait(device)
        taken = time.perf_counter() - began
        if repeats is not None or taken >= LEAST_SECONDS:
            return taken / count, count
        count = max(count + 1, int(1.2 * count * LEAST_SECONDS / max(taken, 1e-9)))


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def machine_rates(shape: Shape, size: int = 1024, read_bytes: int = 2**28) -> MachineRates:
    """The best of five large products and of five reads of 256 MiB."""
    a = torch.randn(size, size, device=shape.device).to(shape.dtype)
    data = torch.ones(read_bytes // 4, device=shape.device)
    product = min(seconds(lambda: torch.mm(a, a), shape.device)[0] for _ in range(5))
    read = min(seconds(lambda: data.sum(), shape.device)[0] for _ in range(5))
    return MachineRates(flops_per_second=2 * size**3 / product, bytes_per_second=read_bytes / read)
