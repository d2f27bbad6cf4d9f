"""The fused token of RWKV-7 against its operators in float64."""

import copy

import pytest
import torch

from mercer.backends import rwkv7_step
from mercer.mixers import rwkv7
from mercer.mixers.rwkv7 import FIRST, RWKV7

pytest.importorskip("numba")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("batch", "heads", "size"), [(1, 2, 64), (3, 5, 49), (2, 3, 40), (24, 8, 64), (1, 1, 100)])
@pytest.mark.parametrize("layer", [0, 1])
def test_equals_the_operators_in_float64(
    batch: int, heads: int, size: int, layer: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of heads that fill no whole vectors, from nothing and from a state; 24 rows are shared among threads."""
    torch.manual_seed(0)
    mixer = RWKV7(heads * size, heads, layer=layer, layers=2)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.5)
    mixer = mixer.to(dtype)
    wide = copy.deepcopy(mixer).double()
    tokens, first = torch.randn(2, batch, 1, heads * size).to(dtype), torch.randn(batch, 1, heads * size)
    calls: list[bool] = []

    def counted(*arguments: object) -> object:
        calls.append(True)
        return rwkv7_step.step(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(rwkv7, "one_token", counted)
    before = state = None
    with torch.no_grad():
        for x in tokens:
            carried = [{0: {FIRST: v}} if layer else None for v in (first, first.double())]
            y, state = mixer(x, state=before, carried=carried[0], return_state=True)
            known = None if before is None else before._map(lambda t: t.double() if t.is_floating_point() else t)
            expected, sums = wide(x.double(), state=known, carried=carried[1], return_state=True)
            within = 2e-6 if dtype == torch.float32 else 2e-2
            # The norm of what a state of one token answers may divide by almost nothing.
            assert (y - expected).abs().max() <= max(within, 5e-5) * expected.abs().max()
            off = (state.parts["sums"] - sums.parts["sums"]).abs().max()
            assert off <= within * sums.parts["sums"].abs().max()
            assert state.parts["sums"].dtype == torch.float32
            assert y.dtype == state.parts["last"].dtype == dtype
            before = state
    assert len(calls) == 2


def test_leaves_gradients_and_small_states_to_the_operators() -> None:
    x, bonus = torch.zeros(1, 1, 128), torch.zeros(2, 64)
    numbers = (torch.zeros(128), torch.zeros(128), bonus)
    assert not rwkv7_step.serves(x, *numbers)  # gradients are recorded here
    with torch.no_grad():
        assert rwkv7_step.serves(x, *numbers)
        assert not rwkv7_step.serves(x[..., :64], *numbers[:2], bonus[:1])
        assert not rwkv7_step.serves(x.double(), *numbers)
        assert not rwkv7_step.serves(x, *numbers[:2], bonus.double())
        with torch.autograd.forward_ad.dual_level():
            assert not rwkv7_step.serves(x, *numbers)
        answers: list[bool] = []

        def ask(row: torch.Tensor) -> torch.Tensor:
            answers.append(rwkv7_step.serves(row, *numbers))
            return row

        torch.func.vmap(ask)(x.unsqueeze(0))
        assert answers == [False]
