"""The recurrent step of finite kernels on the CPU: one pass over the states of all batch rows and heads (extra `cpu`).

    S' = g S + w phi(k) v^T,    z' = g z + w phi(k),    out = phi(q) S',    denominator = phi(q) . z'

Every entry of a state is read once, written once into a new state, and read out on the way. What a step costs is
moving the state, so features are made in the same call: the symmetric monomials of `mercer.core.features` for kernels
that are polynomials, in the order in which the other forms give them. Sums are float32. There is no gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from mercer.backends.sharing import installed, share, threads_for
from mercer.core.features import monomial_count, raising_table
from mercer.core.kernels import Kernel
from mercer.core.merged import Merged
from mercer.core.support import Sizes
from mercer.errors import InvalidArgument, Unsupported

MAPS = ("identity", "elu", "relu")
LEAST_ENTRIES = 1 << 13
"""Entries of the states of a call below which torch's operators are used: nobody waits for a compiler because of a
small state."""
ALONE = 1 << 19
"""Entries of the states of a call up to which one thread is quicker than waking others."""


def serves(kernel: Kernel, merged: Merged, sizes: Sizes) -> bool:
    """Whether the step computes this combination: a state in float32 on the CPU, and nothing that wants a gradient."""
    weights = [t for part in (merged.decay, merged.alibi) if part is not None for t in vars(part).values()]
    trained = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in weights)
    one = sizes.query_length == sizes.key_length == 1
    return (
        kernel.feature_dim(sizes.dim) is not None
        and (merged.causal or one)
        and not trained
        and not sizes.trained
        and sizes.device == "cpu"
        and sizes.itemsize == 4
        and not torch.compiler.is_compiling()  # a compiler makes its own kernels of torch's form
        and installed()
    )


def entries(kernel: Kernel, merged: Merged, sizes: Sizes) -> int:
    """Numbers in the feature states S of a call."""
    features = kernel.feature_dim(sizes.dim)
    assert features is not None
    heads = merged.weight_heads(sizes.query_heads, sizes.key_heads)
    return merged.entries(sizes.batch) * heads * features * sizes.value_dim


def recurrent_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    coefficients: tuple[float, ...] = (0.0, 1.0),
    map: str = "identity",  # noqa: A002  (the builtin is not used here)
    scale: float = 1.0,
    log: Tensor | None = None,
    weight: Tensor | None = None,
    state: Tensor | None = None,
    mass_state: Tensor | None = None,
    mass: bool,
    divide: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Outputs, denominators and the new state of one token, or of a few in turn. No argument is changed.

    Args:
        query: ``[B, Hq, L, D]``, any float dtype but float64 and any strides; Hk divides Hq.
        key: ``[B, Hk, L, D]``.
        value: ``[B, Hk, L, Dv]``.
        coefficients: c_0, c_1, ... of the polynomial f, none negative and one positive; (0, 1) where queries and keys
            are features already.
        map: what is done to queries and keys first: ``identity``, ``elu`` (elu(x) + 1) or ``relu``.
        scale: put on the mapped queries.
        log: cumulative log-decay after each token, ``[b, h, L]`` float64 with b and h 1 or B and Hk; g is the
            exponential of its differences.
        weight: w, the weight of each key, ``[b, h, L]``; what stands in a key or value of weight 0 is not looked at. A
            step of weight 0 without decay leaves the state as it is, to the bit.
        state: S before the first token, ``[B, Hk, F, Dv]`` float32; default 0.
        mass_state: z before the first token, ``[B, Hk, F]`` float32; default 0.
        mass: also keep z, which denominators are read from.
        divide: return outputs divided by their denominators, 0 where these are 0; needs ``mass``.

    Returns:
        ``out [B, Hq, L, Dv]`` float32; the denominators ``[B, Hq, L]`` if there is a mass and outputs were not divided;
        the new state ``[B, Hk, F, Dv]``; the new mass ``[B, Hk, F]`` if ``mass``.

    Raises:
        InvalidArgument: shapes or options that do not fit.
        Unsupported: float64, another device than the CPU, or a gradient that is wanted of any tensor.
    """
    plan = _plan(query.shape[-1], coefficients)
    _check(query, key, value, plan, map, log, weight, state, mass_state, mass, divide)
    from mercer.backends import step_kernels as kernels

    batch, heads, length, dim = key.shape
    query_heads, width, features = query.shape[1], value.shape[-1], plan.features
    group, slot = query_heads // heads, kernels.slot(dim, plan.monomials)
    query, key, value = _rows(query), _rows(key), _rows(value)
    out = torch.empty(batch, query_heads, length, width)
    denominator = torch.empty(batch, query_heads, length) if mass and not divide else None
    state, final = _succession(state, (batch, heads, features, width), length)
    final_mass = None
    if mass:
        mass_state, final_mass = _succession(mass_state, (batch, heads, features), length)
    if log is not None:
        log = log.double()
    if weight is not None:
        weight = weight.float()
    numbers: list[int] = []
    for x in (query, key, value):
        strides, size = x.stride(), 4 if x.dtype == torch.float32 else 2
        numbers += (x.data_ptr(), size == 2, strides[0] * size, strides[1] * size, strides[2] * size)
    for x, size in ((log, 8), (weight, 4)):
        if x is None:
            numbers += _ABSENT
        else:  # the same over what has one entry
            strides = [0 if n == 1 else size * step for n, step in zip(x.shape, x.stride(), strict=True)]
            numbers += (x.data_ptr(), 0, *strides)
    for x, block in (
        (state, features * width),
        (mass_state, features),
        (final, features * width),
        (final_mass, features),
    ):
        numbers += _ABSENT if x is None else (x.data_ptr(), 0, 4 * heads * block, 4 * block, 0)
    for x, block in ((out, width), (denominator, 1)):
        row = 4 * length * block
        numbers += _ABSENT if x is None else (x.data_ptr(), 0, query_heads * row, row, 4 * block)
    numbers += (heads, group, length, dim, width, features, slot, MAPS.index(map), divide)
    table = np.array(numbers, np.int64)
    items = batch * heads
    threads = 1 if items * features * width <= ALONE else threads_for(items)
    pitch = kernels.room(width, slot, group)
    work = torch.empty(threads * pitch)
    address, kernel = work.data_ptr(), kernels.compiled()

    def part(thread: int, start: int, stop: int) -> None:
        kernel(table, scale, *plan.arrays, address + 4 * thread * pitch, start, stop)

    if threads == 1:
        part(0, 0, items)
    else:
        share(items, part)
    return out, denominator, final, final_mass


_ABSENT = (0, 0, 0, 0, 0)


def _succession(state: Tensor | None, shape: tuple[int, ...], length: int) -> tuple[Tensor, Tensor]:
    """What to start from, and where to write what follows: the same where there was nothing."""
    if state is None:
        zeros = torch.zeros(shape)
        return zeros, zeros
    state = state.contiguous()
    return state, torch.empty(shape) if length else state.clone()


def _rows(x: Tensor) -> Tensor:
    """In float32 or bfloat16, the numbers of a row side by side."""
    x = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@dataclass(frozen=True)
class _Plan:
    """How features are made; `arrays` in the order in which the kernel takes them."""

    features: int
    monomials: int  # of degrees from 0 to the highest
    arrays: tuple[Any, ...]
    raised: Any  # lives as long as its address, which is one of the arrays


@lru_cache(maxsize=64)
def _plan(dim: int, coefficients: tuple[float, ...]) -> _Plan:
    if not coefficients or any(c < 0 or not math.isfinite(c) for c in coefficients) or not any(coefficients):
        raise InvalidArgument(
            f"recurrent_step: coefficients must be 0 or more and one of them positive, not {coefficients}."
        )
    top = max(n for n, c in enumerate(coefficients) if c)
    coefficients = coefficients[: top + 1]
    counts = [monomial_count(dim, n) for n in range(top + 1)]
    kept = [count if c else 0 for count, c in zip(counts, coefficients, strict=True)]
    begins = np.cumsum([0, *counts])
    places = np.where(np.array(coefficients) != 0, np.cumsum([0, *kept])[:-1], -1)
    starts, raised = np.zeros((top + 1, max(dim, 1)), np.int64), [np.zeros(0)]
    for n in range(2, top + 1):
        first, weights = raising_table(dim, n)
        starts[n] = first
        raised.append(weights.numpy())
    weights = np.concatenate([*raised, np.zeros(16)]).astype(np.float32)  # read in whole vectors
    factors = np.array([math.sqrt(c * math.factorial(n)) for n, c in enumerate(coefficients)], np.float32)
    arrays = (begins.astype(np.int64), places.astype(np.int64), starts, int(weights.ctypes.data), factors)
    return _Plan(sum(kept), sum(counts), arrays, weights)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: _Plan,
    map_name: str,
    log: Tensor | None,
    weight: Tensor | None,
    state: Tensor | None,
    mass_state: Tensor | None,
    mass: bool,
    divide: bool,
) -> None:
    """Raise InvalidArgument or Unsupported for what the kernel would misread or lose: it checks nothing."""
    if not query.ndim == key.ndim == value.ndim == 4 or not _fit(query.shape, key.shape, value.shape):
        raise InvalidArgument(
            "recurrent_step: query, key and value must be [B, Hq, L, D], [B, Hk, L, D] and [B, Hk, L, Dv], where Hk "
            f"divides Hq and D and Dv are 1 or more; they are {list(query.shape)}, {list(key.shape)} and "
            f"{list(value.shape)}."
        )
    if map_name not in MAPS:
        raise InvalidArgument(f"recurrent_step: map must be one of {', '.join(MAPS)}, not {map_name!r}.")
    if divide and not mass:
        raise InvalidArgument("recurrent_step: divide=True divides by the denominators, so it needs mass=True.")
    if mass_state is not None and not mass:
        raise InvalidArgument("recurrent_step: a mass_state is read by denominators only: say mass=True, or leave it.")
    batch, heads, length, _ = key.shape
    for name, x in (("log", log), ("weight", weight)):
        if x is not None and (
            x.ndim != 3 or x.shape[0] not in (1, batch) or x.shape[1] not in (1, heads) or x.shape[2] != length
        ):
            raise InvalidArgument(
                f"recurrent_step: {name} must be [1 or {batch}, 1 or {heads}, {length}], not {list(x.shape)}."
            )
    whole = (batch, heads, plan.features, value.shape[3])
    for name, x, shape in (("state", state, whole), ("mass_state", mass_state, whole[:3])):
        if x is not None and (x.shape != shape or x.dtype != torch.float32):
            raise InvalidArgument(
                f"recurrent_step: {name} must be float32 {list(shape)}, not {x.dtype} {list(x.shape)}."
            )
    recorded = torch.is_grad_enabled()
    for x in (query, key, value, log, weight, state, mass_state):
        if x is None:
            continue
        if not x.is_cpu or (x.dtype == torch.float64 and x is not log):
            raise Unsupported("recurrent_step computes in float32 on the CPU: use backend='torch' for anything else.")
        if (recorded and x.requires_grad) or forward_ad.unpack_dual(x).tangent is not None:
            raise Unsupported("recurrent_step has no gradient: use backend='torch', or torch.no_grad().")


def _fit(query: torch.Size, key: torch.Size, value: torch.Size) -> bool:
    batch, heads, length, dim = key
    return (
        query[0] == batch
        and query[2:] == (length, dim)
        and value[:3] == (batch, heads, length)
        and heads > 0
        and query[1] % heads == 0
        and dim > 0
        and value[3] > 0
    )
