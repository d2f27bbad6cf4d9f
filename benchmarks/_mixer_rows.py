"""The operators that `mixers` times: their inputs, who computes them, and the operations they cannot do without."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks._channel_rows import linear_recurrence, rg_lru, s4d
from benchmarks._mamba_rows import mamba, selective_scan
from benchmarks._rwkv_rows import PROMPTS
from benchmarks._ssd_rows import ssd

Run = Callable[..., Tensor | tuple[Tensor, ...]]
"""Takes a case's tensors in their order and returns outputs, of the same shapes for all of a case; several only where
no gradient is asked for."""
AGREES = 1e-3
"""Sums of float32 over thousands of tokens, in other orders."""


@dataclass(frozen=True)
class Case:
    """An operator at one length.

    Attributes:
        shape: in words.
        tensors: the inputs, each of which gets a gradient.
        ours: our forms by name; the first is what a user gets.
        peers: others by name.
        flops: operations of the formula, forward, and forward with backward; None where only forward is timed.
        slow: names of those that go token by token in Python, and are left out of lengths beyond ``SLOW``.
        moved: bytes that a call forward has to read and write at least; None: each of ``tensors`` and each output once.
        dtype: of its products.
        agrees: largest difference from ours, relative to the largest entry, of an answer or a gradient.
        beside: what stands in the table without answering: a plain pass over the same memory.
    """

    shape: str
    tensors: tuple[Tensor, ...]
    ours: dict[str, Run]
    peers: dict[str, Run]
    flops: tuple[float, float | None]
    slow: frozenset[str] = frozenset()
    moved: float | None = None
    dtype: str = "float32"
    agrees: float = AGREES
    beside: dict[str, Callable[[], object]] = field(default_factory=dict)


SLOW = 4096


@lru_cache
def fla(operator: str, file: str = "naive") -> ModuleType:
    """One file of fla without its package, which asks for triton wherever it is imported; the naive forms do not."""
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        raise ImportError("No module named 'fla'")
    path = Path(package.submodule_search_locations[0]) / "ops" / operator / f"{file}.py"
    found = importlib.util.spec_from_file_location(f"fla_{operator.replace('/', '_')}_{file}", path)
    if found is None or found.loader is None or not path.exists():
        raise ImportError(f"fla has no file {path.name} for {operator}")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def _normal(*size: int) -> Tensor:
    return torch.randn(size)


def _unit(*size: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(size), dim=-1)


def _decay(*size: int) -> Tensor:
    return torch.nn.functional.logsigmoid(torch.randn(size)) / 16


def _forms(arguments: Callable[..., dict[str, Any]], forms: Sequence[str] = ("auto", "chunked", "recurrent")) -> Any:
    from mercer.mixers.matrix_recurrence import matrix_recurrence

    def by(form: str) -> Run:
        return lambda *given: matrix_recurrence(**arguments(*given), form=form)[0]

    return {"ours" if form == "auto" else f"ours, {form}": by(form) for form in forms}


def _matrix(heads: int, length: int, dim: int, width: int, per: tuple[int, int]) -> tuple[str, tuple[float, float]]:
    """The shape in words, and operations: `per` entry of the state and token, forward and backward."""
    entries = heads * length * dim * width
    return f"B=1 H={heads} n={length:,} K={dim} V={width}", (per[0] * entries, sum(per) * entries)


PLAIN, REMOVING = (5, 11), (9, 19)
"""Forward: a decay, an outer product and a read; a removal reads and writes once more. Backward, from states that are
there: the gradient's own recurrence, and an entry's share in those of q, k, v, g (and a and b)."""
DELTA, GATED_DELTA = (6, 12), (7, 15)
"""The delta rule reads twice and writes once, along the key: of the difference between the value and what was there."""


def gla_parts(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> dict[str, Any]:
    return {"query": q, "key": k, "value": v, "log_decay": g, "scale": q.shape[-1] ** -0.5}


def gla(length: int, heads: int = 8, dim: int = 64, width: int = 64) -> Case:
    """Gated linear attention: a decay for every channel."""
    q, k, v = _normal(1, heads, length, dim), _normal(1, heads, length, dim), _normal(1, heads, length, width)
    shape, flops = _matrix(heads, length, dim, width, PLAIN)

    def peer(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        turned = (x.transpose(1, 2) for x in (q, k, v, g))
        return fla("gla").naive_recurrent_gla(*turned)[0].transpose(1, 2)

    name = "fla naive_recurrent_gla"
    tensors = (q, k, v, _decay(1, heads, length, dim))
    return Case(shape, tensors, _forms(gla_parts), {name: peer}, flops, frozenset({"ours, recurrent", name}))


def deltanet_parts(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> dict[str, Any]:
    return {"query": q, "key": k, "value": v, "delta": beta, "scale": q.shape[-1] ** -0.5}


def deltanet(length: int, heads: int = 8, dim: int = 64, width: int = 64) -> Case:
    """The delta rule: no decay, a removal along the key."""
    q, k, v = _unit(1, heads, length, dim), _unit(1, heads, length, dim), _normal(1, heads, length, width)
    shape, flops = _matrix(heads, length, dim, width, DELTA)
    names = ("fla delta_rule_recurrence", "fla delta_rule_chunkwise")
    peers: dict[str, Run] = {names[0]: lambda *given: fla("delta_rule").delta_rule_recurrence(*given)[0]}
    if length % 32 == 0:
        peers[names[1]] = lambda *given: fla("delta_rule").delta_rule_chunkwise(*given)[0]
    slow = frozenset({"ours, recurrent", names[0]})
    return Case(shape, (q, k, v, torch.rand(1, heads, length)), _forms(deltanet_parts), peers, flops, slow)


def gated_deltanet(length: int, heads: int = 8, dim: int = 64, width: int = 64) -> Case:
    """The gated delta rule: a decay for every token, and what is removed has faded already."""
    q, k, v = _unit(1, heads, length, dim), _unit(1, heads, length, dim), _normal(1, heads, length, width)
    shape, flops = _matrix(heads, length, dim, width, GATED_DELTA)

    def arguments(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> dict[str, Any]:
        return deltanet_parts(q, k, v, beta) | {"log_decay": g}

    def peer(*given: Tensor) -> Tensor:
        turned = (x.transpose(1, 2) for x in given)
        return fla("gated_delta_rule").naive_recurrent_gated_delta_rule(*turned)[0].transpose(1, 2)

    name = "fla naive_recurrent_gated_delta_rule"
    tensors = (q, k, v, torch.rand(1, heads, length), _decay(1, heads, length))
    return Case(shape, tensors, _forms(arguments), {name: peer}, flops, frozenset({"ours, recurrent", name}))


def rwkv6(length: int, heads: int = 8, dim: int = 64) -> Case:
    """RWKV-6: a decay for every channel, and a bonus for the own token."""
    shape, flops = _matrix(heads, length, dim, dim, PLAIN)

    def arguments(q: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> dict[str, Any]:
        return {"query": q, "key": k, "value": v, "log_decay": w, "bonus": u, "scale": dim**-0.5}

    name = "fla naive_recurrent_rwkv6"
    peers: dict[str, Run] = {name: lambda *given: fla("rwkv6", "recurrent_naive").naive_recurrent_rwkv6(*given)[0]}
    sizes = (1, heads, length, dim)
    tensors = (*(_normal(*sizes) for _ in range(3)), _decay(*sizes), _normal(heads, dim))
    return Case(shape, tensors, _forms(arguments), peers, flops, frozenset({"ours, recurrent", name}))


def rwkv7_parts(q: Tensor, k: Tensor, v: Tensor, b: Tensor, a: Tensor, w: Tensor) -> dict[str, Any]:
    return {"query": q, "key": k, "value": v, "log_decay": w, "remove": (a, b), "scale": q.shape[-1] ** -0.5}


def rwkv7(length: int, heads: int = 8, dim: int = 64) -> Case:
    """RWKV-7: a decay for every channel, and a removal along a direction of its own."""
    shape, flops = _matrix(heads, length, dim, dim, REMOVING)
    names = ("fla dplr_recurrence", "fla dplr_chunkwise")
    naive = "generalized_delta_rule/dplr"
    peers: dict[str, Run] = {names[0]: lambda *given: fla(naive).dplr_recurrence(*given)[0]}
    if length % 32 == 0:
        peers[names[1]] = lambda *given: fla(naive).dplr_chunkwise(*given)[0]
    sizes = (1, heads, length, dim)
    b = _unit(*sizes)
    tensors = (*(_normal(*sizes) for _ in range(3)), b, -torch.rand(1, heads, length, 1) * b, _decay(*sizes))
    return Case(shape, tensors, _forms(rwkv7_parts), peers, flops, frozenset({"ours, recurrent", names[0]}))


def rwkv4(length: int, channels: int = 512) -> Case:
    """RWKV-4's average of every channel alone. Of a token's channel forward: two exponentials, each counted as one
    operation, and a dozen others; backward makes them again. No product of matrices is in it, so that its limit is far:
    12 bytes a channel are read and written.
    """
    from mercer.mixers.wkv import wkv

    def by(form: str) -> Run:
        return lambda k, v, w, u: wkv(k, v, log_decay=-w.exp(), bonus=u, form=form)[0]  # pyright: ignore[reportArgumentType]

    def peer(k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
        from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention_cpu

        return rwkv_linear_attention_cpu(w, u, k, v)[0]

    ours = {"ours" if form == "auto" else f"ours, {form}": by(form) for form in ("auto", "chunked", "recurrent")}
    name = "transformers rwkv_linear_attention_cpu"
    entries = length * channels
    tensors = (_normal(1, length, channels), _normal(1, length, channels), 2 * _normal(channels) - 2, _normal(channels))
    slow = frozenset({"ours, recurrent", name})
    return Case(f"B=1 n={length:,} C={channels}", tensors, ours, {name: peer}, (14 * entries, 52 * entries), slow)


ROWS: dict[str, Callable[[int], Case]] = {
    "gla": gla,
    "deltanet": deltanet,
    "gated-deltanet": gated_deltanet,
    "rwkv4": rwkv4,
    "rwkv6": rwkv6,
    "rwkv7": rwkv7,
    "selective-scan": selective_scan,
    "mamba": mamba,
    "linear-recurrence": linear_recurrence,
    "rg-lru": rg_lru,
    "s4d": s4d,
    "ssd": ssd,
    **PROMPTS,
}
