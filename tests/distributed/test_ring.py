"""Keys and values round a ring: equal to one process, forward and in every gradient."""

from functools import partial

import pytest
import torch
from tests.contracts import cells
from tests.distributed.compare import Case, compare
from tests.distributed.pool import Pool

from mercer.distributed import attention

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
