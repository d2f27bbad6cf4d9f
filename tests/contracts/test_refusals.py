"""Calls whose answer would be wrong in silence are refused with what would work."""

import numpy as np
import pytest
import torch
from torch import Tensor

import mercer
from mercer import L2, Alibi, Causal, Decay, Documents, Exp, Padding, Sum, Taylor, Window, attention, plan
from mercer.core.normalizers import Normalizer
from mercer.errors import InvalidArgument, Unsupported


def tokens(length: int, heads: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 1, heads, length, 4, dtype=dtype)
    return q, k, v


@pytest.mark.parametrize("order", [Causal(), Window(1, 1), Alibi(torch.ones(2)), Causal() & Decay(torch.ones(1))])
def test_padding_of_queries_under_an_order(order: mercer.Structure):
    q, k, v = tokens(4)
    mask = torch.tensor([[True, True, True, False]])
    with pytest.raises(Unsupported, match="cross-attention"):
        attention(q, k, v, structure=order & Padding(mask, queries=mask))


@pytest.mark.parametrize("wider", [Causal(), Window.last(4)])
def test_a_wider_window_on_a_cache_that_has_forgotten(wider: mercer.Structure):
    q, k, v = tokens(6)
    _, state = attention(q, k, v, structure=Window.last(2), return_state=True)
    with pytest.raises(InvalidArgument, match="made under a window"):
        attention(q, k, v, structure=wider, state=state)
    attention(q, k, v, structure=Window.last(2), state=state)
    _, short = attention(*(x[:, :, :2] for x in (q, k, v)), structure=Window.last(4), return_state=True)
    attention(q, k, v, structure=Causal(), state=short)  # it has not forgotten anything yet


def test_queries_on_cached_keys_under_decay():
    q, k, v = tokens(6)
    decay = Causal() & Decay(torch.full((1,), 0.5))
    _, state = attention(*(x[:, :, :4] for x in (q, k, v)), structure=decay, return_state=True)
    with pytest.raises(Unsupported, match="as many keys as queries"):
        attention(q[:, :, 2:], k[:, :, 4:], v[:, :, 4:], structure=decay, state=state)


@pytest.mark.parametrize(
    "changed",
    [
        {"kernel": "taylor2"},
        {"kernel": Exp},
        {"normalizer": L2},
        {"structure": "causal"},
        {"structure": Causal},
        {"state": 3},
        {"scale": True},
        {"scale": float("nan")},
    ],
    ids=str,
)
def test_parts_of_the_wrong_kind(changed: dict[str, object]):
    with pytest.raises(InvalidArgument, match=next(iter(changed))):
        attention(*tokens(4), **changed)  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_other_numbers_and_arrays():
    q, k, v = tokens(4)
    attention(q, k, v, scale=np.float32(0.5))  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidArgument, match="torch tensor, not ndarray"):
        attention(q.numpy(), k, v)  # pyright: ignore[reportArgumentType, reportCallIssue]
    for make in (
        lambda: Padding(lengths=[4]),  # pyright: ignore[reportArgumentType]
        lambda: Decay([0.5]),  # pyright: ignore[reportArgumentType]
        lambda: Documents([0, 4]),  # pyright: ignore[reportArgumentType]
        lambda: Alibi([1.0]),  # pyright: ignore[reportArgumentType]
    ):
        with pytest.raises(InvalidArgument, match="must be a tensor, not list"):
            make()
    with pytest.raises(InvalidArgument, match="composes with a structure"):
        Causal() & 3  # pyright: ignore[reportOperatorIssue]
    with pytest.raises(InvalidArgument, match="integer"):
        Window(1.5, 0)  # pyright: ignore[reportArgumentType]


def test_a_normaliser_that_changes_the_shape():
    class First(Normalizer):
        scale_invariant = True

        def apply(self, numerator: Tensor, denominator: Tensor | None) -> Tensor:
            return numerator[..., 0]

    with pytest.raises(InvalidArgument, match="keep the shape"):
        attention(*tokens(4), normalizer=First())


@pytest.mark.parametrize(
    "structure",
    [
        Causal() & Decay(torch.full((4,), 0.5)),
        Causal() & Decay(torch.full((2,), 0.5)),
        Causal() & Alibi(torch.ones(4)),
        Causal() & Documents(torch.tensor([0, 2, 6])),
    ],
    ids=str,
)
def test_the_plan_knows_the_size_of_the_state(structure: mercer.Structure):
    q = torch.randn(1, 4, 6, 4)
    k, v = torch.randn(2, 1, 2, 6, 4)
    parts = {"kernel": Taylor(2), "normalizer": Sum(), "structure": structure, "return_state": True}
    _, state = attention(q, k, v, **parts)  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert isinstance(state, mercer.FeatureState)
    assert state.mass is not None
    real = state.features.nbytes + state.mass.nbytes
    assert plan(q, k, v, **parts).state_bytes == real  # pyright: ignore[reportArgumentType]
