"""What our forms are timed beside on a device: torch's SDPA, and fla's Triton forms of linear attention."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks._contestant import Run
from benchmarks._tasks import expected, inputs, literal_elu
from benchmarks._work import Shape

SDPA = "torch SDPA"
FLA = ("chunk_linear_attn", "fused_recurrent_linear_attn")


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def rivals(device: torch.device) -> tuple[dict[str, Run], str]:
    """By name, and why fla is not among them (empty if it is)."""
    found: dict[str, Run] = {SDPA: sdpa}
    if device.type == "cpu":
        return found, "fla's forms are Triton's, which the CPU does not run"
    try:
        package = importlib.import_module("fla.ops.linear_attn")
    except ImportError as error:
        return found, f"fla does not load: {error}"
    return found | {f"fla {name}": _fla(getattr(package, name)) for name in FLA}, ""


def _fla(product: Callable[..., Any]) -> Run:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (literal_elu(q), literal_elu(k), v))
        return product(q, k, v, scale=1.0, normalize=True)[0].transpose(1, 2)

    return run


def rival_error(name: str, run: Run, dtype: str, device: torch.device) -> float:
    """Largest error of a rival's answer against its formula in float64, relative to the largest entry."""
    q, k, v, _ = inputs(Shape(1, 2, 256, 64), dtype, device)
    exact = expected("softmax" if name == SDPA else "linear", *(x.cpu() for x in (q, k, v)))
    return float((run(q, k, v).double().cpu() - exact).abs().max() / exact.abs().max())
