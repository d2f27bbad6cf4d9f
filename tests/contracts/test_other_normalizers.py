"""Normalisers without a plain denominator, over kernels whose rows have a factor of their own."""

import pytest
import torch
from tests.contracts import cells
from tests.tolerance import assert_close

from mercer.core.feature_maps import ExpFeatures
from mercer.core.kernels import Elu, Exp, Kernel, Taylor
from mercer.core.merged import merge
from mercer.core.mixed import Mixed
from mercer.core.normalizers import Normalizer
from mercer.core.random_features import PositiveRandomFeatures
from mercer.core.reference import reference_attention
from mercer.core.structures import Causal
from mercer.core.support import unsupported
from mercer.ops import attention

KERNELS = [
    ExpFeatures(),
    PositiveRandomFeatures(5),
    Mixed(Exp(), Taylor(2), 3),
    Mixed(Exp(), ExpFeatures(), 2),
    Mixed(Elu(), PositiveRandomFeatures(5), 3),
]
SHAPE = cells.Shape()


@pytest.mark.parametrize("structure", ["causal", "padding-causal", "documents-causal", "recency"])
@pytest.mark.parametrize("normalizer", cells.OTHER_NORMALIZERS)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_cell(
    kernel: Kernel, normalizer: str, structure: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
):
    cells.small_tiles(monkeypatch)
    shape = SHAPE.under(normalizer)
    norm, leaves = cells.normalizer(normalizer, shape, generator)
    laid = cells.structures(shape, generator)[structure]
    given, whole = cells.inputs(shape, generator), laid.whole(shape)
    expected = reference_attention(*given.qkv, kernel, norm, whole)
    named = dict(zip("qkv", given.qkv, strict=True)) | laid.leaves | leaves
    wanted = cells.gradients(expected, given.cotangent, list(named.values()))
    ran = 0
    for form, path in cells.CELLS:
        if unsupported(kernel, norm, merge(whole), form, path) is not None:
            continue
        ran += 1
        out = attention(*given.qkv, kernel=kernel, normalizer=norm, structure=whole, form=form, path=path)
        assert_close(out, expected, shape.keys, f"{form} {path}: output")
        for name, g, w in zip(named, cells.gradients(out, given.cotangent, list(named.values())), wanted, strict=True):
            assert_close(g, w, shape.keys, f"{form} {path}: gradient of {name}")
    assert ran >= 3


@pytest.mark.parametrize("normalizer", ["length", "clamped", "detached", "layernorm-channel"])
@pytest.mark.parametrize(("kernel", "path"), [(k, p) for k in KERNELS for p in ("pairs", "features")], ids=str)
def test_states_go_on(kernel: Kernel, path: str, normalizer: str, generator: torch.Generator):
    shape = SHAPE.under(normalizer)
    norm: Normalizer = cells.normalizer(normalizer, shape, generator)[0]
    given = cells.inputs(shape, generator)
    expected = reference_attention(*given.qkv, kernel, norm, Causal())
    if unsupported(kernel, norm, merge(Causal()), "chunked", path, None, True) is not None:
        pytest.skip("not a supported cell")
    for split in (1, 4):
        state, outs = None, []
        for a, b in ((0, split), (split, shape.keys)):
            q, k, v = (x[:, :, a:b] for x in given.qkv)
            out, state = attention(
                q, k, v, kernel=kernel, normalizer=norm, structure=Causal(), path=path, state=state, return_state=True
            )
            outs.append(out)
        assert_close(torch.cat(outs, 2), expected, shape.keys, f"split at {split}")
