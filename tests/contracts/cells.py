"""What the contract tests walk: kernels, normalisers and structures by name, inputs for them, and small tiles.

A structure is built over a range of tokens, so that the same sequence can be run at once and in parts; its
differentiable tensors (slopes, rates) are leaves that every part shares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from mercer.core.denominators import Clamped, Detached, Length, SigmoidGate
from mercer.core.feature_maps import Dpfp, ExpFeatures
from mercer.core.kernels import Cosine, Elu, Exp, Gaussian, Kernel, Power, Relu, Taylor
from mercer.core.learned_maps import Hedgehog, MlpFeatures
from mercer.core.log_weights import Alibi, Decay, RelativeBias
from mercer.core.normalizers import L2, RMS, Identity, Normalizer, Standardize, Sum
from mercer.core.random_features import PositiveRandomFeatures, TrigonometricRandomFeatures
from mercer.core.soft_cap import SoftCap
from mercer.core.structures import Causal, Documents, Full, Padding, Structure, Window
from mercer.forms import scan, tiles

KERNELS: dict[str, Kernel] = {
    "exp": Exp(),
    "gaussian": Gaussian(),
    "taylor1-signed": Taylor(1, signed=True),
    "taylor2": Taylor(2),
    "taylor3-signed": Taylor(3, signed=True),
    "taylor6": Taylor(6),
    "power1-signed": Power(1, signed=True),
    "power2": Power(2),
    "power3-signed": Power(3, signed=True),
    "elu": Elu(),
    "relu": Relu(),
    "cosine-signed": Cosine(signed=True),
    "favor": PositiveRandomFeatures(5),
    "softcap": SoftCap(1.5),
}

FEATURE_KERNELS: dict[str, Kernel] = {
    "favor-sqrt": PositiveRandomFeatures(4, norms="sqrt", orthogonal=False),
    "favor-plain": PositiveRandomFeatures(4, plain=True),
    "favor-hyperbolic": PositiveRandomFeatures(6, hyperbolic=True),
    "trig-signed": TrigonometricRandomFeatures(32, signed=True),
    "rfa-signed": TrigonometricRandomFeatures(32, unit=True, signed=True),
    "dpfp1": Dpfp(),
    "dpfp3": Dpfp(3),
    "expfeatures": ExpFeatures(),
    "expfeatures-negation": ExpFeatures(negation=True),
    "hedgehog": Hedgehog(),
    "hedgehog-narrow": Hedgehog(width=2),
    "mlp": MlpFeatures(3, hidden=4),
    "learnedrelu": MlpFeatures(5),
}
"""Kernels that are defined by their features, walked under fewer structures than the others."""

UNSIGNED: dict[str, Kernel] = {
    "taylor1": Taylor(1),
    "taylor3": Taylor(3),
    "power1": Power(1),
    "power3": Power(3),
    "cosine": Cosine(),
}
"""Kernels that may not have a denominator: of either sign, without the caller's consent."""

NORMALIZERS = ("sum", "l2-head", "rms-channel", "identity")
OTHER_NORMALIZERS = (
    "length", "gate-token", "gate-channel", "gate-sum", "clamped", "detached", "layernorm", "layernorm-channel"
)  # fmt: skip
"""Walked under fewer kernels: they share the sums of the first four, and differ in what is done with them."""
FEW_KERNELS = ("exp", "taylor3-signed", "elu")
FEW_STRUCTURES = ("causal", "padding-causal", "documents-causal", "decay-token-query-heads", "everything")
WALKED = [(k, n) for k in KERNELS for n in NORMALIZERS] + [(k, n) for k in FEW_KERNELS for n in OTHER_NORMALIZERS]

CELLS = [(f, p) for f in ("dense", "chunked", "recurrent") for p in ("pairs", "features")]
"""Every form by every path."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a call; Lk keys, of which the last Lq (or more, in front) have queries."""

    batch: int = 2
    heads: int = 4
    key_heads: int = 2
    queries: int = 7
    keys: int = 7
    dim: int = 3
    value_dim: int = 2
    apart: bool = False
    """Whether the channels of values stand apart, for a norm that takes their mean out."""

    def under(self, normalizer: str) -> Shape:
        """These sizes with values for a normaliser: of two channels, a layer norm leaves the sign only."""
        return replace(self, value_dim=4, apart=True) if normalizer.startswith("layernorm") else self


@dataclass
class Inputs:
    """Queries, keys, values and the cotangent of the output, all leaves."""

    query: Tensor
    key: Tensor
    value: Tensor
    cotangent: Tensor

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def double(self) -> Inputs:
        """The same numbers as new float64 leaves."""
        q, k, v = (x.detach().double().requires_grad_() for x in self.qkv)
        return Inputs(q, k, v, self.cotangent.double())


def kernel(name: str, shape: Shape, generator: torch.Generator) -> tuple[Kernel, dict[str, Tensor]]:
    """A kernel by name, with weights for the shape's heads if it learns them, and those, its leaves."""
    made = (KERNELS | FEATURE_KERNELS)[name]
    if not made.learned:
        return made, {}
    bound = made.bind(shape.dim, shape.heads, shape.key_heads)
    leaves = {
        n: (0.7 * torch.randn(w.shape, generator=generator, dtype=torch.float64) + 0.2).requires_grad_()
        for n, w in bound.tensors().items()
    }
    return bound.with_tensors(leaves), leaves


def inputs(
    shape: Shape,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float64,
    kernel: Kernel | None = None,
    positive: bool | None = None,
) -> Inputs:
    """Inputs of moderate condition.

    Values stay away from 0, so that no norm divides by a small remainder of large terms. Queries and keys are positive
    for kernels that vanish or change sign with q.k, unless ``positive`` says otherwise.
    """

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    if positive is None:
        positive = kernel is not None and (not kernel.positive or isinstance(kernel, Power | Dpfp))
    q, k = (
        draw(shape.batch, shape.heads, shape.queries, shape.dim),
        draw(shape.batch, shape.key_heads, shape.keys, shape.dim),
    )
    if positive:
        q, k = q.abs() + 0.1, k.abs() + 0.1
    v = 0.7 * draw(shape.batch, shape.key_heads, shape.keys, shape.value_dim)
    v = v + (torch.linspace(-2, 2, shape.value_dim, dtype=torch.float64) if shape.apart else 1.5)
    cotangent = draw(shape.batch, shape.heads, shape.queries, shape.value_dim)
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    return Inputs(q, k, v, cotangent.to(dtype))


@dataclass
class Laid:
    """A structure over tokens start .. stop - 1 of a sequence, with the leaves that it is differentiable in."""

    make: Callable[[int, int], Structure]
    leaves: dict[str, Tensor] = field(default_factory=dict)

    def whole(self, shape: Shape) -> Structure:
        return self.make(0, shape.keys)


def normalizer(name: str, shape: Shape, generator: torch.Generator) -> tuple[Normalizer, dict[str, Tensor]]:
    """A normaliser by name, and its leaves."""
    kind, _, gain_kind = name.partition("-")
    if kind == "gate":
        size = (shape.batch, shape.heads, shape.queries, shape.value_dim)[: 3 if gain_kind == "token" else 4]
        gate = torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()
        return SigmoidGate(gate, Sum() if gain_kind == "sum" else Identity()), {"gate": gate}
    if kind in ("length", "clamped", "detached"):
        return {"length": Length, "clamped": Clamped, "detached": Detached}[kind](), {}
    if kind == "layernorm" and gain_kind:
        size = (shape.heads, shape.value_dim)
        leaves = {n: torch.rand(size, generator=generator, dtype=torch.float64) + 0.5 for n in ("gain", "bias")}
        leaves = {n: t.requires_grad_() for n, t in leaves.items()}
        return Standardize(**leaves), leaves
    gain = None
    if gain_kind:
        size = (shape.heads,) if gain_kind == "head" else (shape.heads, shape.value_dim)
        gain = (torch.rand(size, generator=generator, dtype=torch.float64) + 0.5).requires_grad_()
    made = (
        {"sum": Sum, "identity": Identity}[kind]()
        if kind in ("sum", "identity")
        else {"l2": L2, "rms": RMS, "layernorm": Standardize}[kind](gain)
    )
    return made, {} if gain is None else {"gain": gain}


def masks(shape: Shape) -> Tensor:
    """``[B, Lk]``: rows padded inside, at the left and at the right, in turn; no row is empty."""
    mask = torch.ones(shape.batch, shape.keys, dtype=torch.bool)
    if shape.keys > 1:
        for row in range(shape.batch):
            part = max(1, shape.keys // 3)
            start = {0: part, 1: 0, 2: shape.keys - part}[row % 3]
            mask[row, start : start + part] = False
    return mask


def documents(shape: Shape) -> Tensor:
    """Offsets with documents of lengths 0 and 1."""
    n = shape.keys
    return torch.tensor([0, 0, min(1, n), max(n - 3, min(1, n)), n])


def structures(shape: Shape, generator: torch.Generator, dtype: torch.dtype = torch.float64) -> dict[str, Laid]:
    """Every kind of structure and the combinations that differ in how they are computed."""
    batch, heads, key_heads, length = shape.batch, shape.heads, shape.key_heads, shape.keys
    mask, offsets = masks(shape), documents(shape)
    right = torch.arange(1, batch + 1).clamp(max=length).flip(0)
    queries = torch.rand(batch, shape.queries, generator=generator) > 0.3

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64)

    slopes = uniform(heads).to(dtype).requires_grad_()
    rate = (uniform(heads) * 0.5 + 0.4).to(dtype).requires_grad_()
    shared = (uniform(1) * 0.5 + 0.4).to(dtype).requires_grad_()
    own = torch.Generator().manual_seed(heads)  # which leaves the numbers of all other cells as they were
    table = (2 * torch.rand(heads, 5, generator=own, dtype=torch.float64) - 1).to(dtype).requires_grad_()
    by_key = (-uniform(batch, key_heads, length)).to(dtype).requires_grad_()
    by_query = (uniform(batch, heads, length) * 0.5 + 0.4).to(dtype).requires_grad_()

    def pad(a: int, b: int) -> Structure:
        return Padding(mask[:, a:b])

    def gates(a: int, b: int) -> Structure:
        return Causal() & Decay(log_rate=by_key[..., a:b])

    causal, alibi = Causal(), Alibi(slopes)
    return {
        "full": Laid(lambda a, b: Full()),
        "causal": Laid(lambda a, b: causal),
        "window": Laid(lambda a, b: Window(3, 2)),
        "window-ahead": Laid(lambda a, b: Window(None, 1)),
        "window-behind": Laid(lambda a, b: Window(2, None)),
        "window-last": Laid(lambda a, b: Window.last(3)),
        "padding": Laid(pad),
        "padding-causal": Laid(lambda a, b: causal & pad(a, b)),
        "padding-lengths": Laid(lambda a, b: causal & Padding(lengths=(right - a).clamp(min=0, max=b - a))),
        "padding-window": Laid(lambda a, b: Window.last(2) & pad(a, b)),
        "padding-queries": Laid(
            lambda a, b: Padding(mask[:, a:b], queries=queries if b - a == length else queries[:, a:b])
        ),
        "documents": Laid(lambda a, b: Documents(offsets)),
        "documents-causal": Laid(lambda a, b: causal & Documents(offsets)),
        "documents-window": Laid(lambda a, b: Window.last(2) & Documents(offsets)),
        "alibi": Laid(lambda a, b: alibi, {"slopes": slopes}),
        "alibi-padding": Laid(lambda a, b: alibi & pad(a, b), {"slopes": slopes}),
        "alibi-causal": Laid(lambda a, b: causal & alibi, {"slopes": slopes}),
        "alibi-causal-padding": Laid(lambda a, b: causal & alibi & pad(a, b), {"slopes": slopes}),
        "decay-head": Laid(lambda a, b: causal & Decay(rate), {"rate": rate}),
        "decay-shared": Laid(lambda a, b: causal & Decay(shared), {"rate": shared}),
        "decay-token": Laid(gates, {"log_rate": by_key}),
        "decay-token-query-heads": Laid(lambda a, b: causal & Decay(by_query[..., a:b]), {"rate": by_query}),
        "decay-padding": Laid(lambda a, b: gates(a, b) & pad(a, b), {"log_rate": by_key}),
        "decay-documents": Laid(lambda a, b: gates(a, b) & Documents(offsets), {"log_rate": by_key}),
        "decay-alibi": Laid(lambda a, b: gates(a, b) & alibi, {"log_rate": by_key, "slopes": slopes}),
        "relative": Laid(lambda a, b: RelativeBias(table, left=2) & pad(a, b), {"table": table}),
        "relative-causal": Laid(lambda a, b: causal & RelativeBias(table), {"table": table}),
        "relative-window": Laid(
            lambda a, b: Window.last(4) & RelativeBias(table, left=3) & pad(a, b) & Decay(rate),
            {"table": table, "rate": rate},
        ),
        "relative-documents": Laid(lambda a, b: causal & RelativeBias(table) & Documents(offsets), {"table": table}),
        "recency": Laid(
            lambda a, b: causal & Decay(by_query[..., a:b], complement=True) & pad(a, b), {"rate": by_query}
        ),
        "recency-documents": Laid(
            lambda a, b: causal & Decay(log_rate=by_key[..., a:b], complement=True) & Documents(offsets),
            {"log_rate": by_key},
        ),
        "recency-head": Laid(lambda a, b: causal & Decay(rate, complement=True), {"rate": rate}),
        "everything": Laid(
            lambda a, b: Window.last(4) & gates(a, b) & pad(a, b) & alibi, {"log_rate": by_key, "slopes": slopes}
        ),
    }


STRUCTURES = tuple(structures(Shape(), torch.Generator().manual_seed(0)))
"""The names of all structures."""


def small_tiles(patch: pytest.MonkeyPatch, rows: int = 3, columns: int = 2, chunk: int = 3, workspace: int = 1) -> None:
    """Make tiles and chunks so small that short sequences cross many borders; 1 byte of workspace: one head a time."""
    patch.setattr(tiles, "ROWS", rows)
    patch.setattr(tiles, "COLUMNS", columns)
    patch.setattr(tiles, "WORKSPACE", workspace)
    patch.setattr(scan, "FEATURE_CHUNK", chunk)


def gradients(out: Tensor, cotangent: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Gradients of <out, cotangent>, zeros for leaves without influence."""
    if not out.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    found = torch.autograd.grad(out, leaves, cotangent, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
