"""Finite differences in float64: each kernel, normaliser and form, gains, slopes, rates and initial states included."""

import pytest
import torch
from tests.contracts import cells
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError

from mercer.core.kernels import Taylor
from mercer.core.log_weights import Alibi, Decay
from mercer.core.merged import merge
from mercer.core.normalizers import Sum
from mercer.core.state import CacheState, FeatureState
from mercer.core.structures import Causal
from mercer.core.support import unsupported
from mercer.errors import Unsupported
from mercer.ops import attention

SHAPE = cells.Shape(batch=1, heads=2, key_heads=1, queries=3, keys=3, dim=2, value_dim=2)


@pytest.mark.parametrize(
    "normalizer", [*cells.NORMALIZERS, *(n for n in cells.OTHER_NORMALIZERS if n != "detached")]
)  # the gradient of Detached is not its value's: tests/core/test_denominators.py
@pytest.mark.parametrize("kernel", [*cells.KERNELS, *cells.FEATURE_KERNELS])
def test_gradcheck(kernel: str, normalizer: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch):
    cells.small_tiles(monkeypatch, rows=2, columns=2, chunk=2)
    shape = SHAPE.under(normalizer)
    norm, leaves = cells.normalizer(normalizer, shape, generator)
    chosen, weights = cells.kernel(kernel, shape, generator)
    leaves = leaves | weights
    given = cells.inputs(shape, generator, kernel=chosen)
    for form, path in cells.CELLS:
        if unsupported(chosen, norm, merge(Causal()), form, path) is None:

            def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
                return attention(q, k, v, kernel=chosen, normalizer=norm, structure=Causal(), form=form, path=path)  # noqa: B023

            assert gradcheck(function, (*given.qkv, *leaves.values()), fast_mode=True)


@pytest.mark.parametrize("form", ["dense", "chunked", "recurrent"])
@pytest.mark.parametrize("path", ["pairs", "features"])
def test_gradcheck_of_slopes_rates_and_states(
    path: str, form: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
):
    """The new state too, as a function of the old one."""
    if (form, path) == ("dense", "features"):
        pytest.skip("the dense form looks at pairs")
    cells.small_tiles(monkeypatch, rows=2, columns=2, chunk=2)
    given = cells.inputs(SHAPE, generator)
    slopes = torch.rand(2, generator=generator, dtype=torch.float64).requires_grad_()
    rates = (torch.rand(1, 1, 3, generator=generator, dtype=torch.float64) * 0.5 + 0.4).requires_grad_()
    kernel = Taylor(2)
    start = attention(
        *given.qkv, kernel=kernel, structure=Causal() & Alibi(slopes) & Decay(rates), path=path, return_state=True
    )[1].detach()
    names = ["features", "mass"] if path == "features" else ["keys", "values"]
    held = [getattr(start, n).requires_grad_() for n in names]

    def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, s, r, *parts = inputs
        state = type(start)(**(start.__dict__ | dict(zip(names, parts, strict=True))))
        out, after = attention(
            q,
            k,
            v,
            kernel=kernel,
            normalizer=Sum(),
            structure=Causal() & Alibi(s) & Decay(r),
            form=form,
            path=path,
            state=state,
            return_state=True,
        )
        assert isinstance(after, FeatureState | CacheState)
        return (out, *(getattr(after, n) for n in names))

    assert gradcheck(function, (*given.qkv, slopes, rates, *held), fast_mode=True)


@pytest.mark.parametrize("normalizer", cells.NORMALIZERS)
@pytest.mark.parametrize("kernel", ["exp", "taylor2", "taylor6", "elu"])
def test_second_derivatives_are_right_or_refused(kernel: str, normalizer: str, generator: torch.Generator):
    """The dense form has them. Where they are missing that is said; none is wrong in silence."""
    chosen = cells.KERNELS[kernel]
    norm, _ = cells.normalizer(normalizer, SHAPE, generator)
    given = cells.inputs(SHAPE, generator)
    for form, path in cells.CELLS:
        if unsupported(chosen, norm, merge(Causal()), form, path) is not None:
            continue

        def function(*x: torch.Tensor) -> torch.Tensor:
            return attention(*x, kernel=chosen, normalizer=norm, structure=Causal(), form=form, path=path)  # noqa: B023

        if (form, chosen) in (("dense", cells.KERNELS["exp"]), ("dense", cells.KERNELS["elu"])):
            assert gradgradcheck(function, given.qkv)
            continue
        try:
            assert gradgradcheck(function, given.qkv)
        except GradcheckError as wrong:
            pytest.fail(f"{form} {path}: {wrong}")
        except (Unsupported, RuntimeError):
            pass  # this library's refusal, or torch's own for its fused attention
