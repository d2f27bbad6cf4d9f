"""Other libraries' ways to compute the tasks, as their users would call them, and why one of them cannot take part.

Every peer gets tensors in the layout it wants, by views, outside what is timed. Feature maps belong to what is timed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.nn import functional

from benchmarks._contestant import Contestant
from benchmarks._fast_transformers import causal_product
from benchmarks._sata import CHUNK, sata_attention
from benchmarks._tasks import directions, literal_elu, random_features
from benchmarks._work import Shape, taylor_features

HALF_SUMS = {"bfloat16": "keeps its running sums in bfloat16"}
PEERS = (
    "torch",
    "performer-pytorch",
    "x-transformers",
    "linear-attention-transformer",
    "fla",
    "fast-transformers",
    "sata",
)


def peers(task: str, dim: int, chosen: tuple[str, ...] = PEERS) -> tuple[list[Contestant], dict[str, str]]:
    """Who can compute a task at this head dimension, and the reason for each chosen library that is not there."""
    found: list[Contestant] = []
    missing: dict[str, str] = {}
    for name in chosen:
        try:
            found += MAKERS[name](task, dim)
        except ImportError as error:
            missing[name] = str(error)
    return found, missing


def _torch(task: str, _dim: int) -> list[Contestant]:
    differs = "" if task == "softmax" else "softmax: what one would use instead"
    return [Contestant("torch SDPA", _sdpa, 2, differs=differs)]


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _performer(task: str, dim: int) -> list[Contestant]:
    if task not in ("linear", "random-features"):
        return []
    package = importlib.import_module("performer_pytorch.performer_pytorch")
    product = package.causal_linear_attention_noncuda

    def memory(shape: Shape, backward: bool, features: int) -> float:
        # Outer products of every token and their running sum: of a 128th of the sequence, or of all where autograd
        # keeps them.
        rows = shape.batch * shape.heads * shape.length * features * shape.dim
        return rows * (3 if backward else 3 / 128)

    if task == "linear":
        return [
            Contestant(
                "performer-pytorch causal_linear_attention_noncuda",
                lambda q, k, v: product(literal_elu(q), literal_elu(k), v),
                memory=lambda shape, backward: memory(shape, backward, dim),
                differs=HALF_SUMS,
            )
        ]
    with contextlib.redirect_stdout(io.StringIO()):  # it says that it has no CUDA code
        attend = package.FastAttention(dim, nb_features=random_features(dim), causal=True)
    attend.projection_matrix.copy_(directions(dim))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend.to(q.device)(q, k, v)

    differs = "adds 1e-4 to every feature, and takes the keys' maximum over the whole sequence, future included"
    return [
        Contestant(
            "performer-pytorch FastAttention",
            run,
            memory=lambda shape, backward: memory(shape, backward, random_features(dim)),
            differs=differs,
        )
    ]


def _x_transformers(task: str, _dim: int) -> list[Contestant]:
    if task != "softmax":
        return []
    attend = importlib.import_module("x_transformers.attend").Attend(causal=True, flash=True)
    return [Contestant("x-transformers Attend(flash=True)", lambda q, k, v: attend(q, k, v)[0], 2)]


def _linear_attention_transformer(task: str, _dim: int) -> list[Contestant]:
    if task != "exp-features":
        return []
    product = importlib.import_module("linear_attention_transformer.linear_attention_transformer").causal_linear_attn

    def memory(shape: Shape, backward: bool, bucket: int) -> float:
        return shape.batch * shape.heads * shape.length * shape.dim**2 / bucket * (4 if backward else 3)

    def contestant(bucket: int, differs: dict[str, str] | str) -> Contestant:
        return Contestant(
            f"linear-attention-transformer, blindspot {bucket}",
            lambda q, k, v: product(q, k, v, bucket_size=bucket),
            memory=lambda shape, backward: memory(shape, backward, bucket),
            differs=differs,
            multiple=bucket,
        )

    return [contestant(1, HALF_SUMS), contestant(64, "a token sees none of its own bucket of 64")]


def _fla(task: str, _dim: int) -> list[Contestant]:
    if task == "linear":
        chunk, recurrent = (
            _naive("linear_attn", "naive_chunk_linear_attn"),
            _naive("linear_attn", "naive_recurrent_linear_attn"),
        )

        def by(product: Callable[..., Any]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
            def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                q, k, v = (x.transpose(1, 2) for x in (literal_elu(q), literal_elu(k), v))
                out = product(q, k, v, scale=1.0, normalize=True)
                return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

            return run

        def states(shape: Shape) -> int:
            return shape.batch * shape.heads * shape.length * shape.dim**2

        return [
            Contestant(
                "fla naive_chunk_linear_attn",
                by(chunk),
                multiple=64,
                differs=HALF_SUMS,
                memory=lambda shape, _: states(shape) / 64 * 6,
            ),
            Contestant(
                "fla naive_recurrent_linear_attn",
                by(recurrent),
                memory=lambda shape, backward: states(shape) * 3 if backward else 0.0,
            ),
        ]
    if task == "taylor2":
        whole, chunk = _naive("based", "naive_parallel_based"), _naive("based", "naive_chunk_based")
        return [
            Contestant(
                "fla naive_parallel_based",
                whole,
                2,
                differs=HALF_SUMS,
                memory=lambda shape, backward: shape.batch * shape.heads * shape.length**2 * (5 if backward else 4),
            ),
            Contestant(
                "fla naive_chunk_based",
                chunk,
                multiple=256,
                differs=HALF_SUMS,
                memory=lambda shape, backward: (
                    shape.batch * shape.heads * shape.length * shape.dim**2 * (8 if backward else 4)
                ),
            ),
        ]
    return []


@lru_cache
def _module(operator: str) -> ModuleType:
    """One file of fla without its package, which asks for triton wherever it is imported; the naive forms do not."""
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        raise ImportError("No module named 'fla'")
    file = Path(package.submodule_search_locations[0]) / "ops" / operator / "naive.py"
    found = importlib.util.spec_from_file_location(f"fla_naive_{operator}", file)
    if found is None or found.loader is None or not file.exists():
        raise ImportError(f"fla has no file {file.name} for {operator}")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def _naive(operator: str, name: str) -> Callable[..., Any]:
    return getattr(_module(operator), name)


def _fast_transformers(task: str, _dim: int) -> list[Contestant]:
    if task != "linear":
        return []
    product = causal_product()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = literal_elu(q), literal_elu(k)
        total = (q * k.cumsum(2)).sum(-1, keepdim=True) + 1e-6
        out = product(q, k, v)
        assert isinstance(out, Tensor)
        return out / total

    return [Contestant("fast-transformers causal_dot_product (C++)", run, dtypes=("float32",))]


def _sata(task: str, dim: int) -> list[Contestant]:
    if not task.startswith("taylor"):
        return []
    order = int(task[6:])

    def memory(shape: Shape, backward: bool) -> float:
        features = taylor_features(dim, order)
        kept = shape.length if backward else CHUNK
        # The gathered factors, their products, and a state a chunk.
        return shape.batch * shape.heads * features * (kept * (order + 2) + kept / CHUNK * (dim + 1)) * 2

    return [
        Contestant(
            "symmetry-aware Taylor features, from the paper",
            lambda q, k, v: sata_attention(q, k, v, order),
            memory=memory,
        )
    ]


MAKERS: dict[str, Callable[[str, int], list[Contestant]]] = {
    "torch": _torch,
    "performer-pytorch": _performer,
    "x-transformers": _x_transformers,
    "linear-attention-transformer": _linear_attention_transformer,
    "fla": _fla,
    "fast-transformers": _fast_transformers,
    "sata": _sata,
}
