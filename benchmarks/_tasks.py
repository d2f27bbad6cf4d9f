"""The tasks, causal all of them, and our ways to compute them; all by `mercer.attention`, as a user would call it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks._contestant import Contestant
from benchmarks._work import Shape, taylor_features
from mercer import Causal, Sum, attention, plan
from mercer.core.feature_maps import ExpFeatures
from mercer.core.kernels import Elu, Exp, Kernel, Taylor
from mercer.core.random_features import PositiveRandomFeatures, draw_directions

LONG = tuple(Shape(1, 8, n, 64) for n in (2048, 8192, 32_768, 131_072))
SHORT = tuple(Shape(16, 8, n, 16) for n in (256, 1024, 4096))
SHAPES = {"long": LONG, "short": SHORT}


@lru_cache(maxsize=4)
def directions(dim: int) -> Tensor:
    """One set of random directions for us and for the peer: D ln D of them, the peer's own default, rounded down."""
    return draw_directions(random_features(dim), dim, seed=0)


def random_features(dim: int) -> int:
    """D ln D, rounded down."""
    return int(dim * math.log(dim))


@dataclass(frozen=True)
class Task:
    """A kernel with Sum under Causal.

    Attributes:
        kernel: of the head dimension.
        features: F of the head dimension, None if there are infinitely many.
        shapes: names of the groups of shapes it runs on.
    """

    kernel: Callable[[int], Kernel]
    features: Callable[[int], int | None]
    shapes: tuple[str, ...]


TASKS = {
    "linear": Task(lambda _: Elu(), lambda dim: dim, ("long", "short")),
    "exp-features": Task(lambda _: ExpFeatures(), lambda dim: dim, ("long",)),
    "random-features": Task(
        lambda dim: PositiveRandomFeatures(random_features(dim), directions=directions(dim)), random_features, ("long",)
    ),
    "taylor2": Task(lambda _: Taylor(2), lambda dim: taylor_features(dim, 2), ("short",)),
    "taylor3": Task(lambda _: Taylor(3, signed=True), lambda dim: taylor_features(dim, 3), ("short",)),
    "taylor4": Task(lambda _: Taylor(4), lambda dim: taylor_features(dim, 4), ("short",)),
    "softmax": Task(lambda _: Exp(), lambda _: None, ("long", "short")),
}
OURS = "ours"


def ours(task: str, shape: Shape, dtype: str) -> list[Contestant]:
    """As the plan chooses first; then the other ways, each once."""
    kernel = TASKS[task].kernel(shape.dim)
    parts: dict[str, Any] = {"kernel": kernel, "normalizer": Sum(), "structure": Causal()}
    meta = torch.empty(shape.batch, shape.heads, shape.length, shape.dim, device="meta", dtype=getattr(torch, dtype))
    chunked = {"form": "chunked"}
    asked: list[dict[str, str]] = [{}, chunked | {"path": "pairs", "backend": "torch"}]
    if kernel.feature_dim(shape.dim) is not None:
        asked[1:1] = [chunked | {"path": "features"}, chunked | {"path": "features", "backend": "torch"}]
    made: dict[tuple[str, str, str], Contestant] = {}
    for options in asked:
        together: dict[str, Any] = {**parts, **options}
        chosen = plan(meta, meta, meta, **together)
        way = (chosen.form, chosen.path, chosen.backend)
        if way not in made:
            name = f"{OURS}, {chosen.path} ({chosen.backend})" if made else OURS
            run = partial(_attend, options=together)
            made[way] = Contestant(name, run, 1 if chosen.path == "features" else 2, plan=str(chosen))
    return list(made.values())


def _attend(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    return attention(query, key, value, **options)


def expected(task: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The task in float64 from its formula, all pairs at once: what every contestant is held against."""
    q, k, v = query.double(), key.double(), value.double()
    dim = q.shape[-1]
    score = q @ k.mT / math.sqrt(dim)
    if task == "linear":
        weights = literal_elu(q) @ literal_elu(k).mT
    elif task == "exp-features":
        weights = q.exp() @ k.exp().mT
    elif task == "random-features":
        drawn = directions(dim).to(q.device)
        a, b = (x / dim**0.25 for x in (q, k))
        phi_q, phi_k = ((x @ drawn.mT - x.square().sum(-1, keepdim=True) / 2).exp() for x in (a, b))
        weights = phi_q @ phi_k.mT
    elif task.startswith("taylor"):
        weights = torch.stack([score**n / math.factorial(n) for n in range(int(task[6:]) + 1)]).sum(0)
    else:
        weights = score.exp()
    weights = weights.tril()
    return weights @ v / weights.sum(-1, keepdim=True)


def literal_elu(x: Tensor) -> Tensor:
    """elu(x) + 1."""
    return functional.elu(x) + 1


def inputs(shape: Shape, dtype: str, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys of half a standard deviation (so that odd orders stay positive), values, and what flows back."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape.batch, shape.heads, shape.length, shape.dim)
    q, k, v, upstream = (
        torch.randn(size, generator=generator).mul(factor).to(device, getattr(torch, dtype))
        for factor in (0.5, 0.5, 1.0, 1.0)
    )
    return q, k, v, upstream
