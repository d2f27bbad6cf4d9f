"""What stands where a mask says nothing stands must not matter, not even NaN; empty rows give zeros."""

import pytest
import torch
from tests.contracts import cells
from tests.tolerance import assert_close

from mercer.core.kernels import Elu, Exp, Kernel, Relu, Taylor
from mercer.core.merged import merge
from mercer.core.normalizers import Sum
from mercer.core.reference import reference_attention
from mercer.core.structures import Causal, Padding
from mercer.core.support import unsupported
from mercer.ops import attention

SHAPE = cells.Shape(batch=4)
KERNELS = [Exp(), Taylor(2), Elu(), Relu()]
PADDED = [n for n in cells.STRUCTURES if "padding" in n or n == "everything"]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("structure", PADDED)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_poison_in_the_padding_does_not_leak(
    kernel: Kernel, structure: str, poison: float, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
):
    """Outputs, gradients and states are bit-identical to those with zeros in the padding; gradients there are 0."""
    cells.small_tiles(monkeypatch)
    laid = cells.structures(SHAPE, generator)[structure]
    given, whole = cells.inputs(SHAPE, generator), laid.whole(SHAPE)
    padding = merge(whole).padding
    assert padding is not None
    hidden = torch.arange(SHAPE.keys) >= padding.lengths.unsqueeze(1) if padding.mask is None else ~padding.mask
    unasked = hidden if padding.queries is None else ~padding.queries
    if not merge(whole).ordered and padding.queries is None:
        unasked = torch.zeros_like(hidden)  # cross-attention: every query is real

    def filled(with_: float) -> list[torch.Tensor]:
        masks = (unasked, hidden, hidden)
        return [
            x.detach().masked_fill(m[:, None, :, None], with_).requires_grad_()
            for x, m in zip(given.qkv, masks, strict=True)
        ]

    for form, path in cells.CELLS:
        if unsupported(kernel, Sum(), merge(whole), form, path) is not None:
            continue
        stateful = merge(whole).right in (None, 0)
        results = []
        for tensors in (filled(0.0), filled(poison)):
            options = {"kernel": kernel, "structure": whole, "form": form, "path": path}
            out = attention(*tensors, **options)
            states = attention(*tensors, return_state=True, **options)[1].tensors() if stateful else {}
            grads = cells.gradients(out, given.cotangent, [*tensors, *laid.leaves.values()])
            results.append([out, *grads, *states.values()])
            for g, m in zip(grads[:3], (unasked, hidden, hidden), strict=True):
                assert not g[m[:, None, :, None].expand_as(g)].any(), f"{form} {path}: gradients at pads"
            assert not out[unasked[:, None, :, None].expand_as(out)].any()
        for clean, poisoned in zip(*results, strict=True):
            assert torch.equal(clean, poisoned), f"{form} {path}"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_one_sequence_alone_and_padded_everywhere(kernel: Kernel, causal: bool, generator: torch.Generator):
    """A sequence gives the same outputs and gradients alone and with pads left, right and inside."""
    shape = cells.Shape(batch=1)
    given = cells.inputs(shape, generator)
    base = Causal() if causal else cells.Full()
    places = {"left": range(3, 10), "right": range(7), "inside": [0, 1, 4, 5, 7, 8, 9], "around": range(1, 8)}
    alone = reference_attention(*given.qkv, kernel, Sum(), base)
    wanted = cells.gradients(alone, given.cotangent, list(given.qkv))
    for place, at in places.items():
        index = torch.tensor(list(at))
        mask = torch.zeros(1, 10, dtype=torch.bool).index_fill(1, index, True)
        laid = base & Padding(mask, queries=None if causal else mask)
        padded = [
            torch.randn(1, x.shape[1], 10, x.shape[3], generator=generator, dtype=torch.float64)
            .index_copy(2, index, x.detach())
            .requires_grad_()
            for x in given.qkv
        ]
        for form, path in cells.CELLS:
            if unsupported(kernel, Sum(), merge(laid), form, path) is not None:
                continue
            out = attention(*padded, kernel=kernel, structure=laid, form=form, path=path).index_select(2, index)
            assert_close(out, alone, 7, f"{place} {form} {path}")
            for g, w in zip(cells.gradients(out, given.cotangent, padded), wanted, strict=True):
                assert_close(g.index_select(2, index), w, 7, f"{place} {form} {path}: gradient")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("normalizer", cells.NORMALIZERS + cells.OTHER_NORMALIZERS)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_an_empty_row_gives_zeros_and_finite_gradients(
    kernel: Kernel, normalizer: str, dtype: torch.dtype, generator: torch.Generator
):
    shape = cells.Shape(batch=2)
    norm, _ = cells.normalizer(normalizer, shape, generator)
    given = cells.inputs(shape, generator, dtype)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0] = False
    for base in (cells.Full(), Causal(), cells.Window(1, 1)):
        laid = base & Padding(mask)
        for form, path in cells.CELLS:
            if unsupported(kernel, norm, merge(laid), form, path) is not None:
                continue
            out = attention(*given.qkv, kernel=kernel, normalizer=norm, structure=laid, form=form, path=path)
            assert not out[0].any()
            assert bool(torch.isfinite(out).all())
            for g in cells.gradients(out, given.cotangent, list(given.qkv)):
                assert bool(torch.isfinite(g).all())
                assert not g[0].any()
