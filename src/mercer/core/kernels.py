"""Kernels: the similarity K(q, k) of a query and a key.

Every kernel here is a scalar *profile* of the inner product of two mapped vectors,

    K(q, k) = f(scale * <map_query(q), map_key(k)>),

and a kernel with a finite number of features also knows a phi with f(<a, b>) = <phi(a), phi(b)>. The first line is
what the forms that look at pairs compute; the second is what a fixed-size state accumulates.

Writing one's own: subclass :class:`Kernel`, give ``profile`` and ``default_scale``, say whether it is ``positive``,
and, where they exist, ``derivative`` (otherwise found by automatic differentiation), ``map_query``/``map_key`` and
``features``/``feature_dim``. Every form and every contract test then takes it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mercer.core.features import monomial_count, monomials
from mercer.core.normalizers import unit
from mercer.core.truncated_exp import PLAIN_HORNER, truncated_exp
from mercer.errors import InvalidArgument


class Kernel(ABC):
    """Similarity of a query and a key, K(q, k) = f(scale * <map_query(q), map_key(k)>)."""

    exponential: ClassVar[bool] = False
    """True if f is exp: weights are then computed in the log domain with the row maximum taken out."""
    log_features: ClassVar[bool] = False
    """True if ``scaled_query`` and ``scaled_key`` give log phi: K = sum_f exp(log phi_f(q) + log phi_f(k)). The forms
    exponentiate them with each query's own maximum and the keys' running maximum taken out, so that neither overflows
    and the past never sees the future; f is then the identity."""

    @property
    @abstractmethod
    def positive(self) -> bool:
        """Whether K >= 0 for every pair of vectors."""

    @property
    def allows_negative_denominator(self) -> bool:
        """Whether the user accepted (``signed=True``) that ``Sum`` may divide by a denominator of either sign."""
        return False

    @abstractmethod
    def default_scale(self, dim: int) -> float:
        """The scale used for ``scale=None`` with head dimension ``dim``."""

    @abstractmethod
    def profile(self, score: Tensor) -> Tensor:
        """f(score), elementwise; never changes ``score``."""

    def derivative(self, score: Tensor) -> Tensor:
        """f'(score), elementwise."""
        twice = torch.is_grad_enabled() and score.requires_grad
        with torch.enable_grad():
            at = score if twice else score.detach().requires_grad_()
            value = self.profile(at)
            if not value.requires_grad:  # a constant profile
                return torch.zeros_like(score)
            (slope,) = torch.autograd.grad(value.sum(), at, create_graph=twice)
        return slope

    def profile_and_derivative(self, score: Tensor) -> tuple[Tensor, Tensor | None]:
        """f(score) and f'(score), for kernels that get one from the other; None for a derivative of 1."""
        return self.profile(score), self.derivative(score)

    def map_query(self, query: Tensor) -> Tensor:
        """What is done to a query before the inner product; ``[B, Hq, L, D] -> [B, Hq, L, D']``."""
        return query

    def map_key(self, key: Tensor) -> Tensor:
        """What is done to a key before the inner product; ``[B, Hk, L, D] -> [B, Hk, L, D']``."""
        return key

    def scaled_query(self, query: Tensor, scale: float) -> Tensor:
        """The mapped query with the scale in it; ``f(<scaled_query(q), scaled_key(k)>) = K(q, k)``."""
        return self.map_query(query) * scale

    def scaled_key(self, key: Tensor, scale: float) -> Tensor:
        """The mapped key; a kernel whose features depend on the scale on both sides puts its root in here."""
        return self.map_key(key)

    def mapped_dim(self, dim: int) -> int:
        """D', the length of mapped queries and keys for head dimension ``dim``; costs are counted by it."""
        return dim

    def map_work(self, dim: int) -> tuple[int, int]:
        """Operators that ``map_query`` and ``map_key`` call together, each as long as a small product, and
        floating-point operations of their products for one token of one head; (0, 0) for maps that are no more than a
        pass over the numbers. Plans count it.
        """
        return 0, 0

    def feature_dim(self, dim: int) -> int | None:
        """Length of phi for head dimension ``dim``, or None if no finite phi is exact."""
        return None

    def features(self, mapped: Tensor) -> Tensor:
        """phi(mapped) with <phi(a), phi(b)> = f(<a, b>); ``[..., D'] -> [..., feature_dim]``."""
        raise InvalidArgument(f"{self} has no finite feature map; compute it from pairs (path='pairs').")

    def polynomial(self) -> tuple[float, ...] | None:
        """c_0, c_1, ... if f(s) = sum_n c_n s^n with none negative and ``features`` are those of
        :func:`~mercer.core.features.monomials`: every degree with c_n > 0 in turn, times sqrt(c_n n!). None otherwise.
        """
        return None

    fused_map: ClassVar[str | None] = None
    """The name of ``map_query`` and ``map_key`` if they are the same for each number alone and fused kernels know it:
    identity, elu or relu, where ``scaled_query`` and ``scaled_key`` are the defaults."""

    def state_tag(self, scale: float) -> str:
        """What a feature state must have been made by to be continued by this kernel at this scale."""
        return str(self)

    def __init_subclass__(cls, **options: Any) -> None:
        """What is said of a map or a profile is not inherited by a class that replaces the map or the profile."""
        super().__init_subclass__(**options)
        own = vars(cls)
        for replaced, said in _SAID_OF.items():
            if replaced in own:
                for name in said:
                    if name not in own:
                        setattr(cls, name, vars(Kernel)[name])

    learned: ClassVar[bool] = False
    """Whether :meth:`tensors` are parameters to train; otherwise they are buffers."""

    def bind(self, dim: int, query_heads: int, key_heads: int, generator: torch.Generator | None = None) -> Self:
        """This kernel with the tensors it needs for these heads, newly drawn or initialised where it has none."""
        return self

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are part of the kernel, to be registered and saved by a module; empty for most."""
        return {}

    def with_tensors(self, tensors: dict[str, Tensor]) -> Self:
        """The same kernel with other tensors of the same names."""
        return self

    def is_parameter(self, name: str) -> bool:
        """Whether the tensor ``name`` of :meth:`tensors` is to be trained."""
        return self.learned

    def check(self, dim: int, query_heads: int, key_heads: int) -> None:  # noqa: B027  (most kernels serve all)
        """Raise :class:`~mercer.InvalidArgument` if this kernel cannot serve such heads (unbound, other sizes)."""


_SAID_OF = {
    "profile": ("exponential", "derivative", "profile_and_derivative", "polynomial"),
    "features": ("polynomial",),
    "derivative": ("profile_and_derivative",),
    "map_query": ("fused_map", "map_work"),
    "map_key": ("fused_map", "map_work"),
    "scaled_query": ("fused_map",),
    "scaled_key": ("fused_map",),
}
"""What a kernel's other members say of each one that a class may define."""


@dataclass(frozen=True)
class Exp(Kernel):
    """The exponential kernel K = exp(scale q.k), softmax's. Scale D^(-1/2); positive; infinitely many features.

    Source: Vaswani et al. 2017, arXiv 1706.03762, with :class:`~mercer.Sum`.
    """

    exponential: ClassVar[bool] = True

    @property
    def positive(self) -> bool:
        return True

    def default_scale(self, dim: int) -> float:
        return dim**-0.5

    def profile(self, score: Tensor) -> Tensor:
        return score.exp()

    def derivative(self, score: Tensor) -> Tensor:
        return score.exp()


@dataclass(frozen=True)
class Gaussian(Kernel):
    """The Gaussian (RBF) kernel K = exp(-scale |q - k|^2 / 2). Scale 1; positive; infinitely many features.

    Written as exp(scale (q.k - |q|^2/2 - |k|^2/2)), so it runs through the same exact attention as :class:`Exp`. The
    difference of squares cancels for vectors far from the origin: centre them first
    (:func:`~mercer.kernel_regression` does).
    """

    exponential: ClassVar[bool] = True

    @property
    def positive(self) -> bool:
        return True

    def default_scale(self, dim: int) -> float:
        return 1.0

    def profile(self, score: Tensor) -> Tensor:
        return score.exp()

    def derivative(self, score: Tensor) -> Tensor:
        return score.exp()

    def mapped_dim(self, dim: int) -> int:
        return dim + 2

    def map_query(self, query: Tensor) -> Tensor:
        half = query.square().sum(-1, keepdim=True) / 2
        return torch.cat((query, -half, torch.ones_like(half)), -1)

    def map_key(self, key: Tensor) -> Tensor:
        half = key.square().sum(-1, keepdim=True) / 2
        return torch.cat((key, torch.ones_like(half), -half), -1)


class _Polynomial(Kernel):
    """A polynomial of the scaled inner product: finitely many features, symmetric monomials of the key."""

    signed: bool

    fused_map: ClassVar[str | None] = "identity"

    def default_scale(self, dim: int) -> float:
        return dim**-0.5

    @property
    def allows_negative_denominator(self) -> bool:
        return self.signed


@dataclass(frozen=True)
class Taylor(_Polynomial):
    """The exponential's Taylor polynomial K = sum_{n=0..order} (scale q.k)^n / n!. Scale D^(-1/2).

    Even orders are strictly positive. Odd orders are not: with :class:`~mercer.Sum` they raise unless
    ``signed=True``. Features: all symmetric monomials of degree 0..order, sum_n C(D+n-1, n) = C(D+order, order) of
    them.

    Args:
        order: highest degree, 0 or more. Order p means degrees 0..p.
        signed: accept denominators of either sign.

    Source: Mongaras and Larson 2025, arXiv 2507.23632.
    """

    order: int
    signed: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.order, bool) or not isinstance(self.order, int) or self.order < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"Taylor: order must be an integer of 0 or more, not {self.order!r}.")

    @property
    def positive(self) -> bool:
        return self.order % 2 == 0

    def profile(self, score: Tensor) -> Tensor:
        return truncated_exp(score, self.order)

    def derivative(self, score: Tensor) -> Tensor:
        return truncated_exp(score, self.order - 1) if self.order else torch.zeros_like(score)

    def profile_and_derivative(self, score: Tensor) -> tuple[Tensor, Tensor | None]:
        if not 1 <= self.order <= PLAIN_HORNER:
            return self.profile(score), self.derivative(score)
        slope = self.derivative(score)  # f = f' + s^p / p!, one product instead of a second Horner scheme
        below = integer_power(score, self.order - 1)
        return torch.addcmul(slope, below, score, value=1 / math.factorial(self.order)), slope

    def feature_dim(self, dim: int) -> int:
        return sum(monomial_count(dim, n) for n in range(self.order + 1))

    def features(self, mapped: Tensor) -> Tensor:
        return torch.cat(monomials(mapped, self.order), -1)

    def polynomial(self) -> tuple[float, ...]:
        return tuple(1 / math.factorial(n) for n in range(self.order + 1))


@dataclass(frozen=True)
class Power(_Polynomial):
    """The symmetric power kernel K = (scale q.k)^degree. Scale D^(-1/2).

    Positive for even degrees; odd degrees with :class:`~mercer.Sum` raise unless ``signed=True``. Features: the
    C(D+degree-1, degree) symmetric monomials.

    Args:
        degree: 1 or more.
        signed: accept denominators of either sign.

    Source: Kacham et al. 2023 (PolySketchFormer), arXiv 2310.01655; Buckman et al. 2025 (power attention), arXiv
    2507.04239.
    """

    degree: int
    signed: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.degree, bool) or not isinstance(self.degree, int) or self.degree < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"Power: degree must be an integer of 1 or more, not {self.degree!r}.")

    @property
    def positive(self) -> bool:
        return self.degree % 2 == 0

    def profile(self, score: Tensor) -> Tensor:
        return integer_power(score, self.degree)

    def derivative(self, score: Tensor) -> Tensor:
        return integer_power(score, self.degree - 1) * self.degree

    def feature_dim(self, dim: int) -> int:
        return monomial_count(dim, self.degree)

    def features(self, mapped: Tensor) -> Tensor:
        if self.degree == 1:
            return mapped
        return monomials(mapped, self.degree)[-1] * math.sqrt(math.factorial(self.degree))

    def polynomial(self) -> tuple[float, ...]:
        return (*(0.0,) * self.degree, 1.0)


class LinearKernel(Kernel):
    """K = scale <map(q), map(k)>: the map is the feature map. A base for kernels that are defined by their features."""

    def default_scale(self, dim: int) -> float:
        return 1.0

    def profile(self, score: Tensor) -> Tensor:
        return score

    def derivative(self, score: Tensor) -> Tensor:
        return torch.ones_like(score)

    def profile_and_derivative(self, score: Tensor) -> tuple[Tensor, Tensor | None]:
        return score, None

    def mapped_dim(self, dim: int) -> int:
        return self.feature_dim(dim)

    def feature_dim(self, dim: int) -> int:
        return dim

    def features(self, mapped: Tensor) -> Tensor:
        return mapped

    def polynomial(self) -> tuple[float, ...]:
        return (0.0, 1.0)


@dataclass(frozen=True)
class Elu(LinearKernel):
    """Linear attention, K = scale <phi(q), phi(k)> with phi(x) = elu(x) + 1. Scale 1 (no D^(-1/2)); positive; D
    features.

    Below zero phi is exp(x) and computed so: the literal elu(x) + 1 is 0 in bfloat16 from x = -6 on.

    Source: Katharopoulos et al. 2020, arXiv 2006.16236.
    """

    fused_map: ClassVar[str | None] = "elu"

    @property
    def positive(self) -> bool:
        return True

    def map_query(self, query: Tensor) -> Tensor:
        return query.clamp(max=0).exp() + query.relu()

    def map_key(self, key: Tensor) -> Tensor:
        return self.map_query(key)


@dataclass(frozen=True)
class Relu(LinearKernel):
    """K = scale <relu(q), relu(k)>. Scale 1; not negative, and 0 for orthogonal or non-positive vectors; D features.

    A row whose every weight is 0 gives zeros. Source: Kasai et al. 2021 (T2R), arXiv 2103.13076.
    """

    fused_map: ClassVar[str | None] = "relu"

    @property
    def positive(self) -> bool:
        return True

    def map_query(self, query: Tensor) -> Tensor:
        return query.relu()

    def map_key(self, key: Tensor) -> Tensor:
        return key.relu()


@dataclass(frozen=True)
class Cosine(LinearKernel):
    """K = scale cos(q, k) = scale <q/|q|, k/|k|>. Scale 1; signed; D features. A zero vector has cosine 0 with all.

    With :class:`~mercer.Sum` it raises unless ``signed=True``: the weights do not form an average.

    Source: Mongaras et al. 2024 (Cottention), arXiv 2409.18747.
    """

    signed: bool = False

    @property
    def positive(self) -> bool:
        return False

    @property
    def allows_negative_denominator(self) -> bool:
        return self.signed

    def map_work(self, dim: int) -> tuple[int, int]:
        return 8, 0  # many small ones on either side, that take as long as four

    def map_query(self, query: Tensor) -> Tensor:
        return unit(query)

    def map_key(self, key: Tensor) -> Tensor:
        return self.map_query(key)


def integer_power(x: Tensor, exponent: int) -> Tensor:
    """x^exponent for an integer exponent of 0 or more, by repeated squaring."""
    if exponent == 0:
        return torch.ones_like(x)
    half = integer_power(x, exponent // 2) if exponent > 1 else None
    if half is None:
        return x
    return half * half * x if exponent & 1 else half * half
