"""Keys and values round a ring: equal to one process, forward and in every gradient."""

from functools import partial
from importlib.util import find_spec

import pytest
import torch
from tests.contracts import cells
from tests.distributed.compare import Case, compare
from tests.distributed.pool import Place, Pool

from mercer.distributed import attention, planning

ring = partial(attention, exchange="ring")
SIZES = (2, 3, 4)
ORDERS = ("zigzag", "contiguous")


@pytest.mark.parametrize("size", SIZES)
def test_every_structure(pool: Pool, size: int):
    cases = [Case(structure=name, order=ORDERS[(i + size) % 2]) for i, name in enumerate(cells.STRUCTURES)]
    assert pool.run(size, compare, cases, ring) == [len(cases)] * size


@pytest.mark.parametrize("size", SIZES)
def test_kernels_normalisers_and_dtypes(pool: Pool, size: int):
    parts = [
        ("exp", "l2-head"),
        ("exp", "identity"),
        ("exp", "length"),
        ("exp", "gate-sum"),
        ("exp", "layernorm-channel"),
        ("exp", "clamped"),
        ("gaussian", "sum"),
        ("taylor2", "sum"),
        ("taylor3-signed", "detached"),
        ("elu", "rms-channel"),
        ("hedgehog", "sum"),
    ]
    cases = [
        Case(kernel, normalizer, structure, order)
        for i, (kernel, normalizer) in enumerate(parts)
        for structure, order in (
            ("causal", "zigzag"),
            ("everything" if i % 2 else "documents-causal", ORDERS[i % 2]),
        )
    ]
    cases += [Case(kernel, dtype=torch.float32, order=order) for kernel in ("exp", "taylor2") for order in ORDERS]
    cases += [Case("exp", dtype=torch.bfloat16), Case("exp", value_dim=5)]
    assert pool.run(size, compare, cases, ring) == [len(cases)] * size


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 16])
def test_lengths_that_do_not_divide(pool: Pool, length: int):
    """Some processes hold fewer tokens than others, or none."""
    cases = [
        Case(kernel, structure=structure, order=order, length=length)
        for kernel in ("exp", "taylor2")
        for structure in ("full", "causal", "window-last")
        for order in ORDERS
    ]
    assert pool.run(4, compare, cases, ring) == [len(cases)] * 4


@pytest.mark.parametrize("size", SIZES)
def test_the_fused_kernels(pool: Pool, size: int):
    pytest.importorskip("numba")
    names = ("full", "causal", "window", "padding-causal", "padding-window", "documents-causal")
    cases = [
        Case(structure=name, normalizer=normalizer, order=ORDERS[(i + size) % 2], dtype=dtype)
        for i, name in enumerate(names)
        for normalizer, dtype in (("sum", torch.float32), ("l2-head", torch.float32), ("sum", torch.bfloat16))
    ]
    assert pool.run(size, compare, cases, partial(ring, backend="numba")) == [len(cases)] * size


def _in_slabs(place: Place, cases: list[Case], backend: str) -> int:
    usual, planning.SLAB = planning.SLAB, 1
    try:
        return compare(place, cases, partial(ring, backend=backend))
    finally:
        planning.SLAB = usual


@pytest.mark.parametrize("size", [2, 3])
def test_heads_that_travel_one_after_the_other(pool: Pool, size: int):
    names = ("causal", "documents", "alibi-padding", "decay-shared", "recency", "decay-token", "relative-window")
    cases = [Case(structure=name, order=ORDERS[(i + size) % 2]) for i, name in enumerate(names)]
    cases += [Case("taylor2", structure="decay-shared"), Case("hedgehog")]
    assert pool.run(size, _in_slabs, cases, "torch") == [len(cases)] * size
    fused = [Case(dtype=torch.float32), Case(dtype=torch.bfloat16, structure="padding")]
    if find_spec("numba"):
        assert pool.run(size, _in_slabs, fused, "numba") == [len(fused)] * size
