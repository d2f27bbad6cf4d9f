"""Every cell of the support table equals the specification, outputs and every gradient, or refuses with a sentence."""

import pytest
import torch
from tests.contracts import cells
from tests.tolerance import assert_close

from mercer.core.kernels import Exp, Kernel, Taylor
from mercer.core.merged import merge
from mercer.core.normalizers import L2, RMS, Normalizer, Sum
from mercer.core.reference import reference_attention
from mercer.core.structures import Causal
from mercer.core.support import table, unsupported
from mercer.errors import Unsupported
from mercer.ops import attention

SHAPE = cells.Shape()


@pytest.mark.parametrize("structure", cells.STRUCTURES)
@pytest.mark.parametrize("normalizer", cells.NORMALIZERS)
@pytest.mark.parametrize("kernel", cells.KERNELS)
def test_cell(
    kernel: str, normalizer: str, structure: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
):
    check_cell(kernel, normalizer, structure, generator, monkeypatch)


@pytest.mark.parametrize("structure", cells.STRUCTURES)
@pytest.mark.parametrize("normalizer", cells.OTHER_NORMALIZERS)
@pytest.mark.parametrize("kernel", cells.FEW_KERNELS)
def test_cell_of_another_normaliser(
    kernel: str, normalizer: str, structure: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
):
    check_cell(kernel, normalizer, structure, generator, monkeypatch)


@pytest.mark.parametrize("structure", cells.FEW_STRUCTURES)
@pytest.mark.parametrize("normalizer", ["sum", "l2-head"])
@pytest.mark.parametrize("kernel", cells.FEATURE_KERNELS)
def test_cell_of_a_kernel_of_features(
    kernel: str, normalizer: str, structure: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
):
    check_cell(kernel, normalizer, structure, generator, monkeypatch)


def check_cell(
    kernel: str, normalizer: str, structure: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SHAPE.under(normalizer)
    chosen, weights = cells.kernel(kernel, shape, generator)
    norm, leaves = cells.normalizer(normalizer, shape, generator)
    laid = cells.structures(shape, generator)[structure]
    given = cells.inputs(shape, generator, kernel=chosen)
    whole = laid.whole(shape)
    named = dict(zip("qkv", given.qkv, strict=True)) | laid.leaves | leaves | weights
    expected = reference_attention(*given.qkv, chosen, norm, whole)
    wanted = cells.gradients(expected, given.cotangent, list(named.values()))

    cells.small_tiles(monkeypatch)
    for form, path in cells.CELLS:
        reason = unsupported(chosen, norm, merge(whole), form, path)
        if reason is not None:
            with pytest.raises(Unsupported) as refusal:
                attention(*given.qkv, kernel=chosen, normalizer=norm, structure=whole, form=form, path=path)
            assert str(refusal.value) == reason
            assert len(reason.split()) >= 6
            assert reason.endswith(".")
            continue
        out = attention(*given.qkv, kernel=chosen, normalizer=norm, structure=whole, form=form, path=path)
        # By features each weight is itself a sum, over all of them.
        terms = SHAPE.keys + ((chosen.feature_dim(shape.dim) or 0) if path == "features" else 0)
        assert_close(out, expected, terms, f"{form} {path}: output")
        for (name, leaf), got, want in zip(
            named.items(), cells.gradients(out, given.cotangent, list(named.values())), wanted, strict=True
        ):
            assert got.dtype == leaf.dtype
            assert_close(got, want, terms, f"{form} {path}: gradient of {name}")


@pytest.mark.parametrize("form", ["auto", "dense", "chunked", "recurrent"])
@pytest.mark.parametrize("kernel", cells.UNSIGNED)
def test_denominators_of_either_sign_need_consent(kernel: str, form: str, generator: torch.Generator):
    chosen = cells.UNSIGNED[kernel]
    given = cells.inputs(SHAPE, generator)
    with pytest.raises(Unsupported, match=r"takes negative values.*signed=True") as refusal:
        attention(*given.qkv, kernel=chosen, normalizer=Sum(), form=form)
    assert str(chosen) in str(refusal.value)
    out = attention(*given.qkv, kernel=chosen, normalizer=L2(), form=form)
    assert_close(out, reference_attention(*given.qkv, chosen, L2()), SHAPE.keys)


@pytest.mark.parametrize(("kernel", "norm"), [(k, n) for k in (Exp(), Taylor(2)) for n in (L2(), RMS())])
def test_normalisers_without_a_gain(
    kernel: Kernel, norm: Normalizer, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
):
    cells.small_tiles(monkeypatch)
    given = cells.inputs(SHAPE, generator, kernel=kernel)
    expected = reference_attention(*given.qkv, kernel, norm, Causal())
    for form, path in cells.CELLS:
        if unsupported(kernel, norm, merge(Causal()), form, path) is None:
            out = attention(*given.qkv, kernel=kernel, normalizer=norm, structure=Causal(), form=form, path=path)
            assert_close(out, expected, SHAPE.keys, f"{form} {path}")
            size = out.norm(dim=-1) if isinstance(norm, L2) else out.square().mean(-1).sqrt()
            assert_close(size, torch.ones_like(size), SHAPE.keys, f"{form} {path}: size of the output")


def test_the_table_lists_every_cell_and_its_reason(generator: torch.Generator):
    kernels = cells.KERNELS | cells.UNSIGNED
    norms = {name: cells.normalizer(name, SHAPE, generator)[0] for name in cells.NORMALIZERS}
    laid = {name: merge(s.whole(SHAPE)) for name, s in cells.structures(SHAPE, generator).items()}
    listed = list(table(kernels, norms, laid))
    assert len(listed) == len(kernels) * len(norms) * len(laid) * len(cells.CELLS)
    assert len({cell[:5] for cell in listed}) == len(listed)
    ways: dict[tuple[str, ...], int] = {}
    for kernel, norm, structure, form, path, reason in listed:
        assert reason == unsupported(kernels[kernel], norms[norm], laid[structure], form, path)
        ways[kernel, norm, structure] = ways.get((kernel, norm, structure), 0) + (reason is None)
    # Everything can be computed in some way, but for denominators of unknown sign.
    assert {kernel for (kernel, norm, _), count in ways.items() if not count and norm == "sum"} == set(cells.UNSIGNED)
    assert all(count for (_, norm, _), count in ways.items() if norm != "sum")
