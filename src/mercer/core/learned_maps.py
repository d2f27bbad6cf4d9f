"""Kernels whose feature map is learned, with weights of their own for every head: Hedgehog and small networks.

They begin unbound, as settings alone. :meth:`~mercer.Kernel.bind` gives them weights for a head dimension and numbers
of heads; ``mercer.nn.Attention`` does that and trains them. :func:`matching_loss` fits them to softmax's weights.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from mercer.core.carrying import CarryingKernel
from mercer.core.kernels import Kernel, LinearKernel
from mercer.errors import InvalidArgument


@dataclass(frozen=True, eq=False, repr=False)
class LearnedMap(CarryingKernel, LinearKernel):
    """What learned maps share. Every weight is a tensor ``[H, ...]``, H the query heads or the key heads."""

    weights: Mapping[str, Tensor] | None = field(default=None, kw_only=True, repr=False)

    learned: ClassVar[bool] = True

    @property
    def positive(self) -> bool:
        return True

    @abstractmethod
    def shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of one side's weights, without the heads in front."""

    @abstractmethod
    def initial(self, shape: tuple[int, ...], name: str, generator: torch.Generator | None) -> Tensor:
        """A weight ``[H, ...]`` to begin with."""

    @abstractmethod
    def map_with(self, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """phi(x) ``[B, H, L, F]`` of x ``[B, H, L, D]`` with one side's weights."""

    def _expected(self, dim: int, query_heads: int, key_heads: int) -> dict[str, tuple[int, ...]]:
        sides = (("query", query_heads), ("key", key_heads))
        return {f"{side}_{name}": (heads, *shape) for side, heads in sides for name, shape in self.shapes(dim).items()}

    def bind(self, dim: int, query_heads: int, key_heads: int, generator: torch.Generator | None = None) -> Self:
        """With weights to train, ``[Hq, ...]`` for queries and ``[Hk, ...]`` for keys. A bound one stays as it is."""
        if self.weights is not None:
            self.check(dim, query_heads, key_heads)
            return self
        expected = self._expected(dim, query_heads, key_heads)
        return replace(
            self, weights={n: self.initial(shape, n.partition("_")[2], generator) for n, shape in expected.items()}
        )

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.weights or {})

    def with_tensors(self, tensors: dict[str, Tensor]) -> Self:
        wanted = set(self._expected(1, 1, 1))
        if set(tensors) != wanted:
            raise InvalidArgument(f"{type(self).__name__} has the tensors {sorted(wanted)}, not {sorted(tensors)}.")
        return replace(self, weights=tensors)

    def check(self, dim: int, query_heads: int, key_heads: int) -> None:
        if self.weights is None:
            raise InvalidArgument(
                f"{self} has no weights yet: use kernel.bind({dim}, {query_heads}, {key_heads}), the head dimension "
                "and the numbers of query and key heads."
            )
        for name, shape in self._expected(dim, query_heads, key_heads).items():
            found: object = self.weights.get(name)
            if not isinstance(found, Tensor) or tuple(found.shape) != shape:
                given = list(found.shape) if isinstance(found, Tensor) else found
                raise InvalidArgument(
                    f"{type(self).__name__}: {name} must be {list(shape)} for head dimension {dim}, {query_heads} "
                    f"query and {key_heads} key heads, not {given}; bind a kernel for these heads."
                )

    def map_query(self, query: Tensor) -> Tensor:
        return self.map_with(query, self._side("query", query))

    def map_key(self, key: Tensor) -> Tensor:
        return self.map_with(key, self._side("key", key))

    def _side(self, side: str, x: Tensor) -> dict[str, Tensor]:
        """The weights of queries or keys for x ``[B, H, L, D]``. Keys may come repeated, once for each query head."""
        if self.weights is None:
            raise InvalidArgument(f"{self} has no weights yet: use kernel.bind(dim, query_heads, key_heads).")
        found = {n.partition("_")[2]: w.to(x) for n, w in self.weights.items() if n.partition("_")[0] == side}
        repeats = {n: x.shape[1] // w.shape[0] for n, w in found.items()}
        return {n: w if repeats[n] == 1 else w.repeat_interleave(repeats[n], 0) for n, w in found.items()}


@dataclass(frozen=True, eq=False, repr=False)
class Hedgehog(LearnedMap):
    """phi(x) = [softmax(x W), softmax(-x W)], two separate softmaxes over the columns of a learned W for every head.

    Scale 1, on the product of features; positive; 2 D' features. W is ``[D, D']``, of queries and of keys apart, and
    begins as the identity, as the paper's does.

    Args:
        width: D', the columns of W; None for the head dimension.
        weights: ``query_weight`` ``[Hq, D, D']`` and ``key_weight`` ``[Hk, D, D']``; set by :meth:`bind`.

    Source: Zhang et al. 2024, arXiv 2402.04347.
    """

    width: int | None = None

    def __post_init__(self) -> None:
        if self.width is not None:
            _positive_integer(self, "width", self.width)

    def shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (dim, self.width or dim)}

    def initial(self, shape: tuple[int, ...], name: str, generator: torch.Generator | None) -> Tensor:
        return torch.eye(*shape[1:], device=_device(generator)).repeat(shape[0], 1, 1)

    def feature_dim(self, dim: int) -> int:
        return 2 * (self.width or dim)

    def map_work(self, dim: int) -> tuple[int, int]:
        return 10, 2 * dim * (self.width or dim)  # a product, a sign, two softmaxes, joining them; on either side

    def map_with(self, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        along = x @ weights["weight"]
        return torch.cat((along.softmax(-1), (-along).softmax(-1)), -1)


@dataclass(frozen=True, eq=False, repr=False)
class MlpFeatures(LearnedMap):
    """A small network for every head, for queries and for keys apart:

        phi(x) = softplus(gelu(x W1 + b1) W2 + b2),     or, without hidden units,     phi(x) = relu(x W2 + b2)

    Scale 1, on the product of features; positive (not negative without hidden units, where a row whose every weight is
    0 gives zeros); ``count`` features. Weights begin uniform in +-1/sqrt(inputs), biases at 0.

    Args:
        count: how many features.
        hidden: how many hidden units, or None for none.
        weights: ``query_`` and ``key_`` each with ``w1`` ``[H, D, hidden]``, ``b1`` ``[H, hidden]`` (both only with
            hidden units), ``w2`` ``[H, hidden or D, count]`` and ``b2`` ``[H, count]``; set by :meth:`bind`.

    Source: without hidden units Kasai et al. 2021 (T2R), arXiv 2103.13076.
    """

    count: int = 64
    hidden: int | None = None

    def __post_init__(self) -> None:
        _positive_integer(self, "count", self.count)
        if self.hidden is not None:
            _positive_integer(self, "hidden", self.hidden)

    def shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        out = {"w2": (self.hidden or dim, self.count), "b2": (self.count,)}
        return out if self.hidden is None else {"w1": (dim, self.hidden), "b1": (self.hidden,)} | out

    def initial(self, shape: tuple[int, ...], name: str, generator: torch.Generator | None) -> Tensor:
        if name.startswith("b"):
            return torch.zeros(shape, device=_device(generator))
        return (2 * torch.rand(shape, generator=generator, device=_device(generator)) - 1) / math.sqrt(shape[1])

    def feature_dim(self, dim: int) -> int:
        return self.count

    def map_work(self, dim: int) -> tuple[int, int]:
        if self.hidden is None:
            return 6, 2 * dim * self.count  # a product, its bias, a relu; on either side
        return 12, 2 * self.hidden * (dim + self.count)

    def map_with(self, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        if self.hidden is None:
            return (x @ weights["w2"] + weights["b2"].unsqueeze(1)).relu()
        inner = F.gelu(x @ weights["w1"] + weights["b1"].unsqueeze(1))
        return F.softplus(inner @ weights["w2"] + weights["b2"].unsqueeze(1))


def matching_loss(
    kernel: Kernel, query: Tensor, key: Tensor, *, causal: bool = True, scale: float | None = None
) -> Tensor:
    """How far the weights of a kernel are from softmax's: the mean over rows of -sum_j a_ij log b_ij, with a the
    weights of softmax(q.k / sqrt(D)) and b those of ``kernel`` divided by their sum. At least the
    entropy of a, which it has for b = a.

    Minimising it over a learned map is how Hedgehog is fitted to an attention that exists.

    Args:
        kernel: a positive kernel with finitely many features; bound if it has weights.
        query: ``[B, Hq, L, D]``. Every pair is looked at, so pass a sample of a long sequence.
        key: ``[B, Hk, L, D]``, Hk a divisor of Hq.
        causal: whether a query sees no later key; then as many queries as keys.
        scale: of the kernel; softmax has D^(-1/2).

    Source: Zhang et al. 2024, arXiv 2402.04347.
    """
    dim, groups = query.shape[-1], query.shape[1] // max(key.shape[1], 1)
    if query.shape[1] != groups * key.shape[1]:
        raise InvalidArgument(
            f"matching_loss: {query.shape[1]} query heads cannot share {key.shape[1]} key heads: Hk must divide Hq."
        )
    if not kernel.positive or kernel.feature_dim(dim) is None:
        raise InvalidArgument(f"matching_loss needs a positive kernel with finitely many features, not {kernel}.")
    if causal and query.shape[2] != key.shape[2]:
        raise InvalidArgument(
            f"matching_loss: {query.shape[2]} causal queries need as many keys, not {key.shape[2]}; or causal=False."
        )
    kernel.check(dim, query.shape[1], key.shape[1])
    factor = kernel.default_scale(dim) if scale is None else scale
    phi_query, phi_key = kernel.scaled_query(query, factor), kernel.scaled_key(key, factor)
    phi_key, key = phi_key.repeat_interleave(groups, 1), key.repeat_interleave(groups, 1)
    hidden = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).triu(1)
    hidden = hidden & causal
    if kernel.log_features:
        log_kernel = torch.logsumexp(phi_query.unsqueeze(3) + phi_key.unsqueeze(2), -1)
    else:
        tiny = torch.finfo(query.dtype).tiny  # a weight of 0 costs much, not infinitely much
        log_kernel = kernel.profile(phi_query @ phi_key.mT).clamp(min=tiny).log()
    target = (query @ key.mT / math.sqrt(dim)).masked_fill(hidden, -torch.inf).softmax(-1)
    log_weight = log_kernel.masked_fill(hidden, -torch.inf).log_softmax(-1).masked_fill(hidden, 0)
    return -(target * log_weight).sum(-1).mean()


def _device(generator: torch.Generator | None) -> torch.device | None:
    """Where weights begin: where they are drawn, or on the default device."""
    return None if generator is None else generator.device


def _positive_integer(kernel: Kernel, what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(f"{type(kernel).__name__}: {what} must be an integer of 1 or more, not {value!r}.")
