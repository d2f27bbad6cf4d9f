"""The contracts on a device: every kernel, normaliser, structure and form there against the specification here.

The specification is `mercer.core.reference`, the double loop in float64 on the CPU, on the same numbers, which bfloat16
can hold. Compared are the output and every gradient, of what the builders of tests/contracts lay out, to
the tolerances of tests/tolerance.py. Cells come in an order in which the first ones show every pair of kernel and
normaliser, kernel and structure, and normaliser and structure; the rest follow as far as the time allows.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
from tests.contracts import cells
from tests.tolerance import relative_error, tolerance
from torch import Tensor

from mercer.core.kernels import Elu, Exp, Kernel, Taylor
from mercer.core.merged import merge
from mercer.core.mixed import Mixed
from mercer.core.normalizers import Normalizer
from mercer.core.reference import reference_attention
from mercer.core.structures import Structure
from mercer.core.support import unsupported
from mercer.ops import attention

DTYPES = (torch.float32, torch.bfloat16)
SHAPE = cells.Shape()
SEED = 20250701
MIXED: dict[str, Kernel] = {
    "mixed-exp-taylor2": Mixed(Exp(), Taylor(2), window=3),
    "mixed-elu-exp": Mixed(Elu(), Exp(), window=2),
}
"""Kernels of two parts, which need a causal structure."""
Cell = tuple[str, str, str]
Whole = TypeVar("Whole")


@dataclass
class Verdict:
    """What was compared and what came out.

    Attributes:
        cells, of: cells compared, and how many there are.
        pairs: whether all that show a new pair were among them.
        calls: forms run, forward and backward.
        failures: what was wrong, as sentences.
        bad: class of the kernel, form and path of the failures.
        worst: largest error divided by what is allowed, by dtype.
    """

    cells: int = 0
    of: int = 0
    pairs: bool = False
    calls: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    bad: set[tuple[str, str, str]] = field(default_factory=set)
    worst: dict[str, float] = field(default_factory=dict)


def every_cell() -> tuple[list[Cell], int]:
    """All cells in the order they are compared, and how many of the first ones show a new pair."""
    listed = [(k, n, s) for k, n in cells.WALKED for s in cells.STRUCTURES]
    listed += [(k, n, s) for k in cells.FEATURE_KERNELS for n in ("sum", "l2-head") for s in cells.FEW_STRUCTURES]
    generator = torch.Generator().manual_seed(SEED)
    merged = {name: merge(laid.whole(SHAPE)) for name, laid in cells.structures(SHAPE, generator).items()}
    causal = [name for name, one in merged.items() if one.causal and one.left is None]
    listed += [(k, n, s) for k in MIXED for n in cells.NORMALIZERS for s in causal]
    random.Random(SEED).shuffle(listed)
    seen: set[tuple[int, str, str]] = set()
    first: list[Cell] = []
    rest: list[Cell] = []
    for cell in listed:
        kernel, normalizer, structure = cell
        pairs = {(0, kernel, normalizer), (1, kernel, structure), (2, normalizer, structure)}
        (rest if pairs <= seen else first).append(cell)
        seen |= pairs
    return first + rest, len(first)


def compare(device: torch.device, limit: float, most: int | None = None) -> Verdict:
    """Compare cells until ``limit`` seconds have passed, or ``most`` cells are done."""
    order, first = every_cell()
    found = Verdict(of=len(order))
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        cells.small_tiles(patch, workspace=1 << 20)
        for cell in order[:most]:
            if time.monotonic() - began > limit:
                break
            _compare(cell, device, found)
            found.cells += 1
    found.pairs = found.cells >= first
    found.seconds = time.monotonic() - began
    return found


def _compare(cell: Cell, device: torch.device, found: Verdict) -> None:
    kernel_name, normalizer_name, structure_name = cell
    generator = torch.Generator().manual_seed(SEED)
    shape = SHAPE.under(normalizer_name)
    mixed = MIXED.get(kernel_name)
    kernel, weights = (mixed, {}) if mixed is not None else cells.kernel(kernel_name, shape, generator)
    normalizer, gains = cells.normalizer(normalizer_name, shape, generator)
    laid = cells.structures(shape, generator)[structure_name]
    given = cells.inputs(shape, generator, torch.bfloat16, kernel).double()
    whole = laid.whole(shape)
    shared = laid.leaves | gains | weights
    expected = reference_attention(*given.qkv, kernel, normalizer, whole)
    wanted = cells.gradients(expected, given.cotangent, [*given.qkv, *shared.values()])
    there: dict[str, Any] = {"kernel": kernel, "normalizer": normalizer, "structure": whole}
    for form, path, dtype in _ways(kernel, normalizer, whole):
        label = f"{kernel_name}, {normalizer_name}, {structure_name}, {form} by {path}, {str(dtype)[6:]}"
        qkv = [x.detach().to(device, dtype).requires_grad_() for x in given.qkv]
        try:
            parts = {name: moved(part, device) for name, part in there.items()}
            out = attention(*qkv, **parts, form=form, path=path)
            leaves = [*qkv, *shared.values()]
            got = cells.gradients(out, given.cotangent.to(device, dtype), leaves)
        except Exception as error:  # noqa: BLE001 - whatever a device cannot do is a finding of this cell
            found.failures.append(
                f"{label}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
            found.bad.add((type(kernel).__name__, form, path))
            continue
        found.calls += 1
        allowed = tolerance(dtype, shape.keys)
        for what, have, want in zip(("output", "q", "k", "v", *shared), (out, *got), (expected, *wanted), strict=True):
            error = relative_error(have.detach().cpu(), want.detach())
            name = str(dtype)[6:]
            found.worst[name] = max(found.worst.get(name, 0.0), error / allowed)
            if not error <= allowed:
                found.failures.append(f"{label}: {what} is off by {error:.1e}, allowed {allowed:.1e}")
                found.bad.add((type(kernel).__name__, form, path))


def _ways(kernel: Kernel, normalizer: Normalizer, structure: Structure) -> Iterator[tuple[str, str, torch.dtype]]:
    for form, path in cells.CELLS:
        if unsupported(kernel, normalizer, merge(structure), form, path) is None:
            for dtype in DTYPES:
                yield form, path, dtype


def moved(thing: Whole, device: torch.device) -> Whole:
    """A kernel, normaliser or structure with its tensors on the device; gradients flow back to where they were.

    A device without float64 gets float32.
    """
    if isinstance(thing, Tensor):
        narrow = device.type == "mps" and thing.dtype == torch.float64
        return thing.to(device, torch.float32 if narrow else thing.dtype)
    if isinstance(thing, dict):
        return {name: moved(part, device) for name, part in thing.items()}
    if isinstance(thing, tuple):
        return tuple(moved(part, device) for part in thing)
    if not type(thing).__module__.startswith("mercer."):
        return thing
    made = copy.copy(thing)
    for name, part in vars(thing).items():
        object.__setattr__(made, name, moved(part, device))
    return made
