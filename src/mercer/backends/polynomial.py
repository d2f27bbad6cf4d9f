"""Causal attention by features on the CPU, for kernels that are polynomials of an inner product (extra `cpu`).

    out_i = sum_{j<=i} w_j exp(G_i - G_j) f(q_i . k_j) v_j + exp(G_i) phi(q_i) S_0,      f(s) = sum_n c_n s^n,  c_n >= 0

Linear attention of any feature map is c = (0, 1), Taylor's c_n = 1/n!, a power's one c_p. phi are the symmetric
monomials of `mercer.core.features` for every degree with c_n > 0, times sqrt(c_n n!), in the order that `Taylor` and
`Power` give them, so that states mean the same as those of `mercer.forms.scan`. Tokens go in blocks of 16: features and
pair weights of a block exist only in scratch that fits the nearest caches, and the state is carried from block to
block. All sums are float32. The backward pass sweeps twice and makes everything again from the inputs: beside them it
keeps the denominators, and from one sweep to the other the weights of the pairs inside blocks, 32 numbers a query.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mercer.backends import polynomial_table as at
from mercer.backends.sharing import installed, share, threads_for
from mercer.core.features import monomial_count, raising_table
from mercer.core.first_order import DENSE, first_order
from mercer.core.kernels import Kernel
from mercer.core.merged import Merged
from mercer.core.support import Sizes
from mercer.errors import InvalidArgument, Unsupported

BLOCK = 16
"""Tokens at a time."""
STATES = 1 << 18
"""Bytes of states that a thread carries along together: the heads of a token stand side by side in memory and are best
read at one time, and a quarter of a usual second cache holds them."""
MAPS = ("identity", "elu", "relu")
MOST_FEATURES = 1 << 16
"""Largest number of features: scratch of some 40 MB a thread."""
SLAB = 1 << 16
"""Numbers of the outputs that the gradient of a decay is made of at a time: their copies fit a second cache."""
LEAST_FLOPS = 1 << 22
"""Operations below which the forms in torch are used: nobody waits for a compiler because of a small call."""


def serves(kernel: Kernel, merged: Merged, sizes: Sizes) -> bool:
    """Whether the kernels compute this combination: causal, in float32 sums, on the CPU, not for a compiler."""
    coefficients = kernel.polynomial()
    return (
        coefficients is not None
        and not torch.compiler.is_compiling()  # which makes its own kernels of torch's form
        and merged.causal
        and sizes.device == "cpu"
        and sizes.itemsize == 4
        and sizes.dim > 0
        and sizes.value_dim > 0
        and (kernel.feature_dim(sizes.dim) or 0) <= MOST_FEATURES
        and installed()
    )


def feature_count(dim: int, coefficients: tuple[float, ...]) -> int:
    """Length of phi: the monomials of every degree whose coefficient is not 0."""
    return sum(monomial_count(dim, n) for n, c in enumerate(coefficients) if c)


def polynomial_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    coefficients: tuple[float, ...],
    map: str = "identity",  # noqa: A002  (the builtin is not used here)
    scale: float = 1.0,
    log: Tensor | None = None,
    weight: Tensor | None = None,
    state: Tensor | None = None,
    mass_state: Tensor | None = None,
    mass: bool,
    divide: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Outputs, denominators and the final state of causal attention by features; first derivatives.

    Args:
        query: ``[B, Hq, L, D]``, any float dtype but float64 and any strides; Hk divides Hq.
        key: ``[B, Hk, L, D]``.
        value: ``[B, Hk, L, Dv]``.
        coefficients: c_0, c_1, ... of the polynomial f, none negative and one positive.
        map: what is done to queries and keys first: ``identity``, ``elu`` (elu(x) + 1) or ``relu``.
        scale: put on the mapped queries.
        log: cumulative log-decay G after each token, ``[b, h, L]`` float64 with b and h 1 or B and Hk; never
            increasing. It has a gradient without ``mass``: ask for the denominators as a column of ones in the value.
        weight: w, the weight of each key, ``[b, h, L]``; what stands in a key or value of weight 0 is not looked at.
            No gradient.
        state: the state before the first token, S_0 ``[B, Hk, F, Dv]`` float32; default 0.
        mass_state: the sum of features before the first token, z_0 ``[B, Hk, F]`` float32; default 0.
        mass: also sum the weights of each row (the same with v = 1).
        divide: return outputs divided by these sums, 0 where the sum is 0; needs ``mass``.

    Returns:
        ``out [B, Hq, L, Dv]``, float32 or, divided, the dtype of ``value``; the denominators ``[B, Hq, L]`` float32 if
        asked for and not divided by; the final state ``[B, Hk, F, Dv]``; the final mass ``[B, Hk, F]`` if ``mass``.
    """
    _check(query, key, value, coefficients, map, log, weight, state, mass_state, mass, divide)
    top = max(n for n, c in enumerate(coefficients) if c)
    options = _Options(tuple(float(c) for c in coefficients[: top + 1]), MAPS.index(map), float(scale), mass, divide)
    q, k, v = (_rows(x) for x in (query, key, value))
    batch, heads, length = key.shape[:3]
    if log is not None:
        log = log.double().expand(batch, heads, length)
    if weight is not None:
        weight = weight.detach().float().expand(batch, heads, length)
    if state is not None:
        state = state.contiguous()
    if mass_state is not None:
        mass_state = mass_state.contiguous()
    out, denominator, final, final_mass = _Scan.apply(q, k, v, log, weight, state, mass_state, options)  # pyright: ignore[reportGeneralTypeIssues]
    return out.to(value.dtype) if divide else out, denominator, final, final_mass


@dataclass(frozen=True)
class _Options:
    coefficients: tuple[float, ...]
    map: int
    scale: float
    mass: bool
    divide: bool


class _Scan(torch.autograd.Function):
    """Saves the inputs as they came, and the denominators where outputs were divided by them."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log: Tensor | None,
        weight: Tensor | None,
        state: Tensor | None,
        mass_state: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        from mercer.backends import polynomial_kernels as kernels

        batch, heads = key.shape[:2]
        features = feature_count(query.shape[-1], options.coefficients)
        out = _laid_out(query, value.shape[-1], value.dtype if options.divide else torch.float32)
        denominator = torch.empty(query.shape[:3]) if options.mass else None
        final = torch.empty(batch, heads, features, value.shape[-1])
        final_mass = torch.empty(batch, heads, features) if options.mass else None
        table = _inputs(query, key, value, log, weight, state, mass_state)
        table |= {at.OUT: out, at.DENOMINATOR: denominator}
        table |= {at.FINAL: final, at.FINAL_MASS: final_mass}
        _run(kernels.compiled_forward(), table, query, key, value, options)
        ctx.set_materialize_grads(False)
        ctx.options = options
        read = (out, final) if ctx.needs_input_grad[3] else (None, None)
        ctx.save_for_backward(
            query, key, value, log, weight, state, mass_state, denominator if options.divide else None, *read
        )
        return out, None if options.divide else denominator, final, final_mass

    @staticmethod
    @first_order(instead=DENSE)
    def backward(
        ctx: Any,
        grad_out: Tensor | None,
        grad_denominator: Tensor | None,
        grad_final: Tensor | None,
        grad_final_mass: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        from mercer.backends import polynomial_kernels as kernels

        query, key, value, log, weight, state, mass_state, denominator, out, final = ctx.saved_tensors
        options: _Options = ctx.options
        if grad_out is None:
            grad_out = torch.zeros(1, dtype=torch.float32).expand(*query.shape[:3], value.shape[-1])
        slope = None
        if options.divide:
            slope = torch.empty(query.shape[:3])
        elif options.mass:
            slope = torch.zeros(query.shape[:3]) if grad_denominator is None else grad_denominator.contiguous()
        grads = [
            *(_laid_out(x, x.shape[-1], x.dtype) for x in (query, key, value)),
            *(None if x is None else torch.empty_like(x) for x in (state, mass_state)),
        ]
        table = _inputs(query, key, value, log, weight, state, mass_state)
        table |= {at.UPSTREAM: _rows(grad_out), at.SLOPE: slope, at.DENOMINATOR: denominator}
        blocks = -(-query.shape[2] // BLOCK)
        table[at.TILES] = torch.empty(*query.shape[:2], blocks, 2 * BLOCK * BLOCK)
        table[at.GRAD_FINAL] = None if grad_final is None else grad_final.contiguous()
        table[at.GRAD_FINAL_MASS] = None if grad_final_mass is None else grad_final_mass.contiguous()
        places = (at.GRAD_QUERY, at.GRAD_KEY, at.GRAD_VALUE, at.GRAD_STATE, at.GRAD_MASS)
        table |= dict(zip(places, grads, strict=True))
        _run(kernels.compiled_backward(), table, query, key, value, options)
        del table  # the pairs of blocks, before anything else is made
        grad_log, grad_value = None, grads[2]
        if out is not None and grad_value is not None:
            grad_log = _log_gradient(out, grad_out, value, grad_value, weight)
            if grad_final is not None and grad_log.shape[-1]:
                grad_log[..., -1] += (final.double() * grad_final).sum((-2, -1))
        return *grads[:3], grad_log, None, *grads[3:], None


def _log_gradient(out: Tensor, grad_out: Tensor, value: Tensor, grad_value: Tensor, weight: Tensor | None) -> Tensor:
    """The gradient of G: all that a query reads has its factor exp(G_i), all that a key wrote exp(-G_j), whatever the
    kernel; so it is do_i . o_i - v_i . dv_i, ``[B, Hk, L]`` float64. A token's own pair is in both.
    """
    batch, heads, length = value.shape[:3]
    found = torch.empty(batch, heads, length, dtype=torch.float64)
    size = max(SLAB * length // max(out.numel(), 1), 1)
    for start in range(0, length, size):  # sums in float64 make a copy of what is summed
        at = slice(start, start + size)
        read = (grad_out[:, :, at] * out[:, :, at]).sum(-1, dtype=torch.float64).unflatten(1, (heads, -1)).sum(2)
        written = (value[:, :, at] * grad_value[:, :, at]).sum(-1, dtype=torch.float64)
        if weight is not None:
            written = written.masked_fill(weight[:, :, at] == 0, 0)
        torch.sub(read, written, out=found[:, :, at])
    return found


def _inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log: Tensor | None,
    weight: Tensor | None,
    state: Tensor | None,
    mass_state: Tensor | None,
) -> dict[int, Tensor | None]:
    table: dict[int, Tensor | None] = {at.QUERY: query, at.KEY: key, at.VALUE: value}
    table |= {at.LOG: log, at.WEIGHT: weight, at.STATE: state, at.MASS: mass_state}
    return table


def _run(
    kernel: Any, table: dict[int, Tensor | None], query: Tensor, key: Tensor, value: Tensor, options: _Options
) -> None:
    """Run a kernel over all key heads, an equal run of them a thread, each with scratch of its own."""
    from mercer.backends import polynomial_kernels as kernels

    dim, width = query.shape[-1], value.shape[-1]
    plan = _plan(dim, options.coefficients)
    tensors = np.zeros((at.TENSORS, 5), np.int64)
    for row, x in table.items():
        if x is not None:
            strides = [n * x.element_size() for n in (*x.stride(), 0)[:3]]
            tensors[row] = x.data_ptr(), x.dtype == torch.bfloat16, *strides
    items, group = key.shape[0] * key.shape[1], query.shape[1] // key.shape[1]
    sizes = (key.shape[1], group, key.shape[2], dim, width, plan.features, plan.monomials)
    abreast = max(1, min(key.shape[1], STATES // (4 * plan.features * width)))
    switches = np.array((*sizes, options.map, options.mass, options.divide, abreast), np.int64)
    work = torch.empty(threads_for(items), kernels.workspace(dim, width, plan.features, plan.monomials, abreast) // 4)

    def part(thread: int, start: int, stop: int) -> None:
        kernel(tensors, switches, options.scale, *plan.arrays, work[thread].data_ptr(), start, stop)

    share(items, part)


@dataclass(frozen=True)
class _Plan:
    """How features are made; `arrays` in the order in which the kernels take them."""

    features: int
    monomials: int  # of degrees from 1 to one below the highest
    arrays: tuple[Any, ...]


@lru_cache(maxsize=64)
def _plan(dim: int, coefficients: tuple[float, ...]) -> _Plan:
    degrees = range(len(coefficients))
    counts = [monomial_count(dim, n) for n in degrees]
    begins = np.cumsum([0, 0, *counts[1:]])  # of degree 1 at 0
    before = np.cumsum([0, *(count if c else 0 for count, c in zip(counts, coefficients, strict=True))])
    places = np.where(np.array(coefficients) != 0, before[:-1], -1)
    starts, raised = np.zeros((len(coefficients), dim), np.int64), [np.zeros(0)]
    for n in degrees[2:]:
        first, weights = raising_table(dim, n)
        starts[n] = first
        raised.append(weights.numpy())
    factors = [math.sqrt(c * math.factorial(n)) for n, c in enumerate(coefficients)]
    arrays = (
        np.array(coefficients, np.float32),
        begins.astype(np.int64),
        places.astype(np.int64),
        starts,
        np.concatenate(raised).astype(np.float32),
        np.array(factors, np.float32),
    )
    return _Plan(int(before[-1]), sum(counts[1:-1]), arrays)


def _laid_out(like: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Empty `[B, H, L, width]`, in memory `[B, L, H, width]` as projections read it."""
    batch, heads, length = like.shape[:3]
    return torch.empty(batch, length, heads, width, dtype=dtype).transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """In float32 or bfloat16, the numbers of a row side by side."""
    x = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    coefficients: tuple[float, ...],
    map_name: str,
    log: Tensor | None,
    weight: Tensor | None,
    state: Tensor | None,
    mass_state: Tensor | None,
    mass: bool,
    divide: bool,
) -> None:
    """Raise InvalidArgument or Unsupported for what the kernels would misread: they check nothing."""
    batch, heads, length, dim = key.shape
    shapes = f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
    if (
        query.ndim != 4
        or query.shape[0] != batch
        or query.shape[2:] != key.shape[2:]
        or value.shape[:3] != key.shape[:3]
        or not heads
        or query.shape[1] % heads
        or not dim
        or not value.shape[3]
    ):
        raise InvalidArgument(
            "polynomial_scan: query, key and value must be [B, Hq, L, D], [B, Hk, L, D] and [B, Hk, L, Dv], where Hk "
            f"divides Hq and D and Dv are 1 or more; they are {shapes}."
        )
    if any(x.device.type != "cpu" or x.dtype == torch.float64 for x in (query, key, value)):
        raise Unsupported("polynomial_scan computes in float32 on the CPU: use backend='torch' for anything else.")
    if not any(coefficients) or any(c < 0 or not math.isfinite(c) for c in coefficients):
        raise InvalidArgument(
            f"polynomial_scan: coefficients must be 0 or more and one of them positive, not {coefficients}."
        )
    if map_name not in MAPS:
        raise InvalidArgument(f"polynomial_scan: map must be one of {', '.join(MAPS)}, not {map_name!r}.")
    if divide and not mass:
        raise InvalidArgument("polynomial_scan: divide=True divides by the denominators, so it needs mass=True.")
    if mass_state is not None and not mass:
        raise InvalidArgument("polynomial_scan: a mass_state is read by denominators only: say mass=True, or leave it.")
    for name, x in (("log", log), ("weight", weight)):
        if x is None:
            continue
        if x.ndim != 3 or x.shape[0] not in (1, batch) or x.shape[1] not in (1, heads) or x.shape[2] != length:
            raise InvalidArgument(
                f"polynomial_scan: {name} must be [1 or {batch}, 1 or {heads}, {length}], not {list(x.shape)}."
            )
        if x.requires_grad and torch.is_grad_enabled():
            if name == "weight":
                raise Unsupported("polynomial_scan has no gradient for weight: multiply the values by it.")
            if mass or value.dtype != torch.float32:
                raise Unsupported(
                    "polynomial_scan has a gradient for log with float32 values and mass=False only: put a column of "
                    "ones behind the values for the sums of the weights."
                )
    features = feature_count(dim, coefficients)
    for name, x, shape in (
        ("state", state, (batch, heads, features, value.shape[3])),
        ("mass_state", mass_state, (batch, heads, features)),
    ):
        if x is not None and (x.shape != shape or x.dtype != torch.float32):
            raise InvalidArgument(
                f"polynomial_scan: {name} must be float32 {list(shape)}, not {x.dtype} {list(x.shape)}."
            )
