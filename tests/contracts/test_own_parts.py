"""Kernels and normalisers written by a user, from what their modules' docstrings promise, pass through every form."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from tests.contracts import cells
from tests.tolerance import assert_close
from torch import Tensor

from mercer.core.kernels import Elu, Exp, Kernel, Taylor
from mercer.core.merged import merge
from mercer.core.normalizers import Normalizer, Sum
from mercer.core.reference import reference_attention, reference_state
from mercer.core.state import FeatureState
from mercer.core.structures import Causal
from mercer.core.support import unsupported
from mercer.errors import InvalidArgument, Unsupported
from mercer.ops import attention

SHAPE = cells.Shape()


@dataclass(frozen=True)
class Sigmoid(Kernel):
    """K = 1 / (1 + exp(-s)): no features, no derivative given."""

    @property
    def positive(self) -> bool:
        return True

    def default_scale(self, dim: int) -> float:
        return dim**-0.5

    def profile(self, score: Tensor) -> Tensor:
        return torch.sigmoid(score)


@dataclass(frozen=True)
class SquaredSoftplus(Kernel):
    """K = (scale <a, b>)^2 with a, b the softplus of q and k: a map, D^2 features and a derivative of its own."""

    @property
    def positive(self) -> bool:
        return True

    def default_scale(self, dim: int) -> float:
        return 0.5

    def profile(self, score: Tensor) -> Tensor:
        return score * score

    def derivative(self, score: Tensor) -> Tensor:
        return 2 * score

    def map_query(self, query: Tensor) -> Tensor:
        return torch.nn.functional.softplus(query)

    def map_key(self, key: Tensor) -> Tensor:
        return torch.nn.functional.softplus(key)

    def feature_dim(self, dim: int) -> int:
        return dim * dim

    def features(self, mapped: Tensor) -> Tensor:
        return (mapped.unsqueeze(-1) * mapped.unsqueeze(-2)).flatten(-2)


@dataclass(frozen=True)
class Widened(Kernel):
    """K = scale <[q, 1], [k, 2]>: the map changes the dimension, and differs between queries and keys."""

    @property
    def positive(self) -> bool:
        return False

    def default_scale(self, dim: int) -> float:
        return 1.0

    def profile(self, score: Tensor) -> Tensor:
        return score

    def map_query(self, query: Tensor) -> Tensor:
        return torch.cat((query, torch.ones_like(query[..., :1])), -1)

    def map_key(self, key: Tensor) -> Tensor:
        return torch.cat((key, torch.full_like(key[..., :1], 2.0)), -1)

    def feature_dim(self, dim: int) -> int:
        return dim + 1

    def features(self, mapped: Tensor) -> Tensor:
        return mapped


@dataclass(frozen=True)
class Softened(Normalizer):
    """o = u / (1 + d): needs the denominator, and is not scale invariant."""

    needs_denominator: ClassVar[bool] = True

    def apply(self, numerator: Tensor, denominator: Tensor | None) -> Tensor:
        assert denominator is not None
        return numerator / (1 + denominator).unsqueeze(-1)


@dataclass(frozen=True)
class Largest(Normalizer):
    """o = u / max |u|: scale invariant, without a denominator."""

    scale_invariant: ClassVar[bool] = True

    def apply(self, numerator: Tensor, denominator: Tensor | None) -> Tensor:
        largest = numerator.abs().amax(-1, keepdim=True)
        return torch.where(largest > 0, numerator / torch.where(largest > 0, largest, 1.0), 0.0)


@dataclass(frozen=True)
class RootLength(Normalizer):
    """o = u / sqrt(t): needs the number of keys seen."""

    needs_count: ClassVar[bool] = True

    def apply(self, numerator: Tensor, denominator: Tensor | None) -> Tensor:
        assert denominator is not None
        return numerator / denominator.clamp(min=1).sqrt().unsqueeze(-1)


PAIRS = [(k, n) for k in (Sigmoid(), SquaredSoftplus(), Widened()) for n in (Sum(), Softened(), Largest())]
PAIRS += [(k, n) for k in (Exp(), Taylor(2)) for n in (Softened(), Largest(), RootLength())]
PAIRS = [(k, n) for k, n in PAIRS if k.positive or not n.needs_denominator]
LAID = ["full", "causal", "window", "padding-causal", "alibi-causal", "decay-token", "documents-causal", "everything"]


@pytest.mark.parametrize("structure", LAID)
@pytest.mark.parametrize(("kernel", "norm"), PAIRS, ids=str)
def test_every_form_takes_them(
    kernel: Kernel, norm: Normalizer, structure: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
):
    cells.small_tiles(monkeypatch)
    laid = cells.structures(SHAPE, generator)[structure]
    given, whole = cells.inputs(SHAPE, generator, kernel=kernel), laid.whole(SHAPE)
    leaves = [*given.qkv, *laid.leaves.values()]
    expected = reference_attention(*given.qkv, kernel, norm, whole)
    wanted = cells.gradients(expected, given.cotangent, leaves)
    ran = 0
    for form, path in cells.CELLS:
        if unsupported(kernel, norm, merge(whole), form, path) is not None:
            continue
        ran += 1
        out = attention(*given.qkv, kernel=kernel, normalizer=norm, structure=whole, form=form, path=path)
        assert_close(out, expected, SHAPE.keys, f"{form} {path}")
        for g, w in zip(cells.gradients(out, given.cotangent, leaves), wanted, strict=True):
            assert_close(g, w, SHAPE.keys, f"{form} {path}: gradient")
    assert ran >= 2


def test_their_states_continue(generator: torch.Generator):
    kernel = SquaredSoftplus()
    given = cells.inputs(SHAPE, generator)
    q, k, v = given.qkv
    options = {"kernel": kernel, "structure": Causal(), "return_state": True, "path": "features"}
    first, state = attention(q[:, :, :4], k[:, :, :4], v[:, :, :4], **options)
    second, state = attention(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], state=state, **options)
    assert isinstance(state, FeatureState)
    assert_close(torch.cat((first, second), 2), reference_attention(q, k, v, kernel, Sum(), Causal()), SHAPE.keys)
    features, mass = reference_state(k, v, kernel)
    assert_close(state.features, features, SHAPE.keys)
    assert state.mass is not None
    assert_close(state.mass, mass, SHAPE.keys)


class Softer(Elu):
    """Elu's settings with another map."""

    def map_query(self, query: Tensor) -> Tensor:
        return torch.nn.functional.softplus(2 * query)


class OneAndSquare(Taylor):
    """K = 1 + s^2: another profile and other features than Taylor's."""

    def profile(self, score: Tensor) -> Tensor:
        return 1 + score * score

    def feature_dim(self, dim: int) -> int:
        return 1 + dim * dim

    def features(self, mapped: Tensor) -> Tensor:
        square = (mapped.unsqueeze(-1) * mapped.unsqueeze(-2)).flatten(-2)
        return torch.cat((torch.ones_like(mapped[..., :1]), square), -1)


class Cool(Exp):
    """K = exp(s / 2), said as another profile."""

    def profile(self, score: Tensor) -> Tensor:
        return (score / 2).exp()


class OverOneMore(Normalizer):
    """o = u / (d + 1)."""

    needs_denominator: ClassVar[bool] = True

    def apply(self, numerator: Tensor, denominator: Tensor | None) -> Tensor:
        assert denominator is not None
        return numerator / (denominator + 1).unsqueeze(-1)


class PlusOne(OverOneMore, Sum):
    """The same, as a change of Sum."""

    scale_invariant: ClassVar[bool] = False


@pytest.mark.parametrize("normalizer", [Sum(), PlusOne()], ids=["Sum", "PlusOne"])
@pytest.mark.parametrize("kernel", [Elu(), Exp(), Softer(), OneAndSquare(2), Cool()], ids=lambda k: type(k).__name__)
def test_a_subclass_is_not_taken_for_its_base(kernel: Kernel, normalizer: Normalizer, generator: torch.Generator):
    """Whatever backend serves it: a class that replaces a part of another is computed from what it says itself."""

    class Bare(Kernel):
        positive = True

        def default_scale(self, dim: int) -> float:
            return kernel.default_scale(dim)

        def profile(self, score: Tensor) -> Tensor:
            return kernel.profile(score)

        def map_query(self, query: Tensor) -> Tensor:
            return kernel.map_query(query)

        def map_key(self, key: Tensor) -> Tensor:
            return kernel.map_key(key)

    shape = cells.Shape(queries=20, keys=20, dim=16, value_dim=16)
    given = cells.inputs(shape, generator)
    literal = OverOneMore() if isinstance(normalizer, PlusOne) else normalizer
    expected = reference_attention(*given.qkv, Bare(), literal, Causal())
    wanted = cells.gradients(expected, given.cotangent, list(given.qkv))
    q, k, v = (x.detach().float().requires_grad_() for x in given.qkv)
    for form, path in cells.CELLS:
        for backend in ("torch", "numba", "sdpa"):
            options = {"kernel": kernel, "normalizer": normalizer, "structure": Causal(), "form": form, "path": path}
            try:
                out = attention(q, k, v, **options, backend=backend)
            except Unsupported:
                assert backend != "torch" or path == "features"
                continue
            assert_close(out, expected, shape.keys, f"{form} {path} {backend}")
            for name, have, want in zip(
                "qkv", cells.gradients(out, given.cotangent.float(), [q, k, v]), wanted, strict=True
            ):
                assert_close(have, want, 4 * shape.keys, f"{form} {path} {backend}: gradient of {name}")


def test_features_of_a_kernel_without_any():
    with pytest.raises(InvalidArgument, match="no finite feature map"):
        Sigmoid().features(torch.ones(3))
    q = torch.ones(1, 1, 2, 3)
    with pytest.raises(Unsupported, match="no finite feature map"):
        attention(q, q, q, kernel=Sigmoid(), path="features")
