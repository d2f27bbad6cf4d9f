"""Each dtype: results are those of the same rounded numbers in float64, to the tolerance that the dtype gives."""

import pytest
import torch
from tests.contracts import cells
from tests.tolerance import accumulator, assert_close

from mercer.core.merged import merge
from mercer.core.reference import reference_attention
from mercer.core.support import unsupported
from mercer.ops import attention, plan

SHAPE = cells.Shape(heads=4, key_heads=2, queries=17, keys=17, dim=4, value_dim=4)
LAID = ("full", "causal", "padding-causal", "window", "documents-causal", "alibi-causal", "decay-token", "everything")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("kernel", "normalizer"), cells.WALKED)
def test_dtype(
    kernel: str, normalizer: str, dtype: torch.dtype, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
):
    chosen = cells.KERNELS[kernel]
    shape = SHAPE.under(normalizer)
    # Every structure under every kernel is the table's affair; here they take turns, all of them within each dtype.
    turn = cells.WALKED.index((kernel, normalizer))
    name = LAID[(turn + turn // len(LAID)) % len(LAID)]
    norm, leaves = cells.normalizer(normalizer, shape, generator)
    laid = cells.structures(shape, generator)[name]
    given = cells.inputs(shape, generator, dtype, chosen)
    exact = given.double()
    whole = laid.whole(shape)
    expected = reference_attention(*exact.qkv, chosen, norm, whole)
    shared = list((laid.leaves | leaves).values())
    wanted = cells.gradients(expected, exact.cotangent, [*exact.qkv, *shared])
    cells.small_tiles(monkeypatch, rows=5, columns=6, chunk=5)
    for form, path in cells.CELLS:
        if unsupported(chosen, norm, merge(whole), form, path) is not None:
            continue
        options = {"kernel": chosen, "normalizer": norm, "structure": whole, "form": form, "path": path}
        out, state = (
            attention(*given.qkv, **options, return_state=True)
            if merge(whole).right in (None, 0)
            else (attention(*given.qkv, **options), None)
        )
        assert out.dtype == dtype
        fused = dtype == torch.bfloat16 and plan(*given.qkv, **options).backend in ("numba", "sdpa")
        more, most = (2, 4) if fused else (1, 1)  # of what is multiplied as bfloat16: see tests/tolerance.py
        assert_close(out, expected, shape.keys, f"{name} {form} {path}: output", roundings=more)
        if path == "features" and state is not None:
            assert state.tensors()["features"].dtype == accumulator(dtype)
        got = cells.gradients(out, given.cotangent, [*given.qkv, *shared])
        for label, have, want in zip(("q", "k", "v", *laid.leaves, *leaves), got, wanted, strict=True):
            what = f"{name} {form} {path}: gradient of {label}"
            assert_close(have, want, shape.keys, what, dtype=dtype, roundings=most)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_sums_do_not_stall(dtype: torch.dtype):
    """A running sum kept in bfloat16 stops growing at 256; here 5,000 equal weights average their values exactly."""
    length = 5000
    q, k = torch.zeros(1, 1, 1, 2, dtype=dtype), torch.zeros(1, 1, length, 2, dtype=dtype)
    v = (torch.arange(length) % 2).to(dtype).view(1, 1, length, 1)
    for kernel in (cells.KERNELS["exp"], cells.KERNELS["elu"], cells.KERNELS["taylor2"]):
        for form, path in cells.CELLS:
            if unsupported(kernel, cells.Sum(), merge(cells.Full()), form, path) is None:
                out = attention(q, k, v, kernel=kernel, form=form, path=path)
                assert float(out) == 0.5, f"{kernel} {form} {path}"
