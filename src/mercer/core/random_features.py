"""Random features: kernels that estimate exp(scale q.k) from random directions w, with a state of constant size.

With x' = sqrt(scale) x, so that q'.k' = scale q.k, and w ~ N(0, I),

    E exp(w.q' - |q'|^2/2) exp(w.k' - |k'|^2/2)  =  exp(q'.k')  =  E exp(|q'|^2/2) exp(|k'|^2/2) cos(w.(q' - k'))

The first is :class:`PositiveRandomFeatures`, the second :class:`TrigonometricRandomFeatures`. How far an estimate lies
from its mean is known in closed form: ``mercer.core.feature_variance``.

The directions are drawn in float64 on the CPU from (seed, draw, D, their number) and from nothing else, so the same
kernel has the same features in every form, call and process. ``bind`` makes them a tensor, which a module saves.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mercer.core.carrying import CarryingKernel
from mercer.core.constant_result import constant_result
from mercer.core.normalizers import unit
from mercer.errors import InvalidArgument

NORMS = ("chi", "sqrt")


@lru_cache(maxsize=64)
def draw_directions(
    count: int, dim: int, seed: int, draw: int = 0, orthogonal: bool = True, norms: str = "chi"
) -> Tensor:
    """Random directions ``[count, dim]``, float64 on the CPU; the same for the same arguments. Do not change them.

    ``orthogonal``: every ``dim`` rows (and the remainder) are rows of a random rotation, uniform over all of them;
    otherwise rows are independent Gaussians. ``norms="chi"``: row norms are distributed as a Gaussian's, independent of
    one another, so every row alone is N(0, I). ``norms="sqrt"``: every norm is sqrt(dim).
    """
    text = f"mercer random directions {seed} {draw} {dim} {count}"
    start = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
    with torch.inference_mode(False), torch.no_grad():  # kept for later calls, which may record gradients
        generator = torch.Generator("cpu").manual_seed(start)

        def normal(rows: int) -> Tensor:
            return torch.randn(rows, dim, generator=generator, dtype=torch.float64, device="cpu")

        rows = normal(count)
        sizes = rows.norm(dim=-1, keepdim=True) if norms == "chi" else rows.new_full((count, 1), math.sqrt(dim))
        if not orthogonal:
            return rows / rows.norm(dim=-1, keepdim=True) * sizes
        blocks = -(-count // dim)
        return _rotations(normal(blocks * dim).view(blocks, dim, dim)).flatten(0, 1)[:count] * sizes


def _rotations(normal: Tensor) -> Tensor:
    """Orthogonal matrices, uniform (Haar) if ``normal`` is Gaussian: QR with the diagonal of R made positive."""
    q, r = torch.linalg.qr(normal)
    return q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).unsqueeze(-2)


@lru_cache(maxsize=64)
def _converted(arguments: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return draw_directions(*arguments).to(device, dtype)


@constant_result  # torch.compile cannot trace how they are drawn
def _constant(arguments: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return _converted(arguments, dtype, device)


@dataclass(frozen=True, eq=False, repr=False)
class RandomFeatures(CarryingKernel):
    """What the two kinds share: the directions, how they are drawn, bound and drawn again."""

    count: int = 256
    seed: int = field(default=0, kw_only=True)
    draw: int = field(default=0, kw_only=True)
    orthogonal: bool = field(default=True, kw_only=True)
    norms: str = field(default="chi", kw_only=True)
    directions: Tensor | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        name = type(self).__name__
        for what, value, least in (("count", self.count, 1), ("seed", self.seed, 0), ("draw", self.draw, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidArgument(f"{name}: {what} must be an integer of {least} or more, not {value!r}.")
        if self.count % self.features_per_direction:
            raise InvalidArgument(
                f"{name}: count must be even here, since every direction gives two features, not {self.count}."
            )
        if self.norms not in NORMS:
            raise InvalidArgument(f"{name}: norms must be 'chi' or 'sqrt', not {self.norms!r}.")
        if self.directions is not None and (
            not isinstance(self.directions, Tensor)  # pyright: ignore[reportUnnecessaryIsInstance]
            or not self.directions.is_floating_point()
            or self.directions.dim() != 2
            or self.directions.shape[0] != self.direction_count
        ):
            given = list(self.directions.shape) if isinstance(self.directions, Tensor) else self.directions  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(
                f"{name}: directions must be a tensor [{self.direction_count}, D] of floats, one row per direction, "
                f"not {given}."
            )

    @property
    @abstractmethod
    def features_per_direction(self) -> int:
        """How many features a direction gives: 1, or 2."""

    @property
    def direction_count(self) -> int:
        """m, the number of directions: ``count`` over the features of each."""
        return self.count // self.features_per_direction

    def settings(self) -> dict[str, Any]:
        drawn = ("seed", "draw")  # which say nothing more once the numbers themselves are there
        return {n: v for n, v in super().settings().items() if self.directions is None or n not in drawn}

    def state_tag(self, scale: float) -> str:
        return f"{self} at scale {scale!r}"

    def default_scale(self, dim: int) -> float:
        return dim**-0.5

    def profile(self, score: Tensor) -> Tensor:
        return score

    def derivative(self, score: Tensor) -> Tensor:
        return torch.ones_like(score)

    def profile_and_derivative(self, score: Tensor) -> tuple[Tensor, Tensor | None]:
        return score, None

    def mapped_dim(self, dim: int) -> int:
        return self.count

    def feature_dim(self, dim: int) -> int:
        return self.count

    def features(self, mapped: Tensor) -> Tensor:
        return mapped

    def polynomial(self) -> tuple[float, ...]:
        return (0.0, 1.0)

    def bind(self, dim: int, query_heads: int, key_heads: int, generator: torch.Generator | None = None) -> Self:
        """With its directions as a tensor: those this kernel draws anyway, or, from a generator, those of a new seed
        that the generator gives, so that every layer of a model has its own. A bound kernel stays as it is.
        """
        if self.directions is not None:
            self.check(dim, query_heads, key_heads)
            return self
        seed = self.seed
        if generator is not None:
            seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        drawn = replace(self, seed=seed)
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)  # rounded further they would be others
        return replace(drawn, directions=drawn.directions_for(dim).to(dtype, copy=True))

    def redraw(self, seed: int | None = None) -> Self:
        """The same kernel with new directions: the next draw of its seed, or the first of ``seed``. Bound stays bound.

        States made before are refused afterwards: their features are others.
        """
        draw = self.draw + 1 if seed is None else 0
        new = replace(self, seed=self.seed if seed is None else seed, draw=draw, directions=None)
        if self.directions is None:
            return new
        return replace(new, directions=new.directions_for(self.directions.shape[1]).to(self.directions))

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.directions is None else {"directions": self.directions}

    def with_tensors(self, tensors: dict[str, Tensor]) -> Self:
        if set(tensors) != {"directions"}:
            raise InvalidArgument(f"{type(self).__name__} has the tensor 'directions', not {sorted(tensors)}.")
        return replace(self, directions=tensors["directions"])

    def check(self, dim: int, query_heads: int, key_heads: int) -> None:
        if self.directions is not None and self.directions.shape[1] != dim:
            raise InvalidArgument(
                f"{self} is bound to head dimension {self.directions.shape[1]}, but queries and keys have {dim}: "
                "bind a kernel for each head dimension."
            )

    def directions_for(self, dim: int, like: Tensor | None = None) -> Tensor:
        """The directions ``[m, dim]`` for this head dimension, bound or drawn; of the dtype and device of ``like``,
        float64 on the CPU by default.
        """
        dtype, device = (torch.float64, torch.device("cpu")) if like is None else (like.dtype, like.device)
        if self.directions is not None:
            return self.directions.to(device, dtype)
        arguments = (self.direction_count, dim, self.seed, self.draw, self.orthogonal, self.norms)
        return _constant(arguments, dtype, device)

    def shrunk(self, x: Tensor, scale: float) -> Tensor:
        """x' = sqrt(scale) x, on either side, so that q'.k' = scale q.k."""
        if scale < 0:
            raise InvalidArgument(
                f"{self} needs a scale of 0 or more, whose root goes to queries and keys, not {scale}: negate the "
                "queries instead."
            )
        return x * math.sqrt(scale)


@dataclass(frozen=True, eq=False, repr=False)
class PositiveRandomFeatures(RandomFeatures):
    """FAVOR+: an unbiased, positive estimate of exp(scale q.k), with x' = sqrt(scale) x and m random directions w,

        phi_w(x) = exp(w.x' - |x'|^2/2) / sqrt(m)
        K(q, k)  = sum_w phi_w(q) phi_w(k),        E K = exp(scale q.k)

    Scale D^(-1/2), that is x' = x / D^(1/4); positive; ``count`` features. They are kept as logarithms, so they neither
    overflow nor vanish. The estimate has a heavy tail: for independent directions its relative variance is
    (exp(|q' + k'|^2) - 1) / m, so it needs many features where keys are long and like the query, just where attention
    is large. :func:`mercer.core.feature_variance.feature_variance` gives the variance of every setting.

    Args:
        count: how many features, 1 or more (even if hyperbolic).
        seed: which directions; 0 or more.
        draw: which of the draws of that seed; :meth:`redraw` counts it up.
        orthogonal: directions orthogonal in blocks of D, which lowers the variance, or independent.
        norms: ``"chi"``, norms distributed as a Gaussian's; or ``"sqrt"``, all sqrt(D). With ``"sqrt"`` the mean is no
            longer exp(scale q.k), but exp(-(|q'|^2 + |k'|^2)/2) 0F1(; D/2; D |q' + k'|^2 / 4), a little less.
        hyperbolic: both exp(w.x') and exp(-w.x') of count/2 directions, divided by sqrt(2 m) instead.
        plain: leave -|x'|^2/2 out. The mean is then exp(|q' + k'|^2 / 2), another kernel: under a normaliser long keys
            weigh more, by exp(|k'|^2 / 2).
        directions: ``[m, D]``; set by :meth:`bind`.

    Source: Choromanski et al. 2021 (Performer), arXiv 2009.14794.
    """

    hyperbolic: bool = field(default=False, kw_only=True)
    plain: bool = field(default=False, kw_only=True)

    log_features: ClassVar[bool] = True

    @property
    def positive(self) -> bool:
        return True

    @property
    def features_per_direction(self) -> int:
        return 2 if self.hyperbolic else 1

    def scaled_query(self, query: Tensor, scale: float) -> Tensor:
        return self._log_phi(query, scale)

    def scaled_key(self, key: Tensor, scale: float) -> Tensor:
        return self._log_phi(key, scale)

    def _log_phi(self, x: Tensor, scale: float) -> Tensor:
        x = self.shrunk(x, scale)
        along = x @ self.directions_for(x.shape[-1], x).mT
        if self.hyperbolic:
            along = torch.cat((along, -along), -1)
        constant = math.log(self.count) / 2  # 2 m = count features if hyperbolic, m otherwise
        return along - constant if self.plain else along - (x.square().sum(-1, keepdim=True) / 2 + constant)


@dataclass(frozen=True, eq=False, repr=False)
class TrigonometricRandomFeatures(RandomFeatures):
    """Random Fourier features of exp(scale q.k), with x' = sqrt(scale) x and m = count / 2 random directions w,

        phi(x)  = exp(|x'|^2/2) / sqrt(m) [sin(w.x'), cos(w.x')]
        K(q, k) = exp((|q'|^2 + |k'|^2)/2) mean_w cos(w.(q' - k')),        E K = exp(scale q.k)

    Scale D^(-1/2); signed, and with :class:`~mercer.Sum` it raises unless ``signed=True``. Exact for q = k, best for
    pairs that are near each other, worst for those that are far apart, whose K is small.

    Args:
        count: how many features, even: a sine and a cosine per direction.
        seed, draw, orthogonal, directions: as of :class:`PositiveRandomFeatures`.
        norms: ``"chi"`` or ``"sqrt"``; the latter is biased, as there.
        unit: first divide queries and keys by their norms (RFA), so that K estimates exp(scale cos(q, k)) and the
            factor in front is the constant exp(scale), which is kept. The scale (1 by default then) is the paper's
            1 / sigma^2.
        signed: accept denominators of either sign.

    Source: Rahimi and Recht 2007; Peng et al. 2021 (random feature attention), arXiv 2103.02143. RFA's gate is a
    structure, not a part of this kernel.
    """

    unit: bool = field(default=False, kw_only=True)
    signed: bool = field(default=False, kw_only=True)

    def map_work(self, dim: int) -> tuple[int, int]:
        return 8, 2 * dim * self.direction_count  # a product, sines, cosines, an exponential; on either side

    @property
    def positive(self) -> bool:
        return False

    @property
    def allows_negative_denominator(self) -> bool:
        return self.signed

    @property
    def features_per_direction(self) -> int:
        return 2

    def default_scale(self, dim: int) -> float:
        return 1.0 if self.unit else dim**-0.5

    def scaled_query(self, query: Tensor, scale: float) -> Tensor:
        return self._phi(query, scale)

    def scaled_key(self, key: Tensor, scale: float) -> Tensor:
        return self._phi(key, scale)

    def _phi(self, x: Tensor, scale: float) -> Tensor:
        x = self.shrunk(unit(x) if self.unit else x, scale)
        angle = x @ self.directions_for(x.shape[-1], x).mT
        size = (x.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(self.direction_count)
        return torch.cat((angle.sin(), angle.cos()), -1) * size
