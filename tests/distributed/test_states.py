"""One state along the sequence: equal to one process, forward and in every gradient."""

from functools import partial

import pytest
import torch
from tests.contracts import cells
from tests.distributed.compare import Case, compare
from tests.distributed.pool import Pool

from mercer.distributed import attention

state = partial(attention, exchange="state")
SIZES = (2, 3, 4)
ORDERS = ("contiguous", "zigzag")
STRUCTURES = tuple(
    name
    for name in cells.STRUCTURES
    if not any(part in name for part in ("window", "relative", "everything")) and name not in ("alibi", "alibi-padding")
)
"""Those that a state can serve."""


@pytest.mark.parametrize("size", SIZES)
def test_every_structure(pool: Pool, size: int):
    cases = [Case("taylor2", structure=name, order=ORDERS[(i + size) % 2]) for i, name in enumerate(STRUCTURES)]
    assert pool.run(size, compare, cases, state) == [len(cases)] * size


@pytest.mark.parametrize("size", SIZES)
def test_kernels_normalisers_and_dtypes(pool: Pool, size: int):
    parts = [
        ("elu", "sum"),
        ("elu", "length"),
        ("taylor3-signed", "l2-head"),
        ("taylor2", "gate-sum"),
        ("power2", "identity"),
        ("expfeatures", "sum"),
        ("expfeatures-negation", "rms-channel"),
        ("hedgehog", "sum"),
        ("elu", "layernorm-channel"),
    ]
    structures = ("causal", "decay-token-query-heads", "documents-causal", "documents", "padding", "recency-documents")
    cases = [
        Case(kernel, normalizer, structures[(i + j) % len(structures)], ORDERS[(i + j) % 2])
        for i, (kernel, normalizer) in enumerate(parts)
        for j in range(2)
    ]
    cases += [Case(kernel, dtype=torch.float32, order=order) for kernel in ("elu", "taylor2") for order in ORDERS]
    cases += [Case("taylor2", dtype=torch.bfloat16), Case("elu", value_dim=5)]
    assert pool.run(size, compare, cases, state) == [len(cases)] * size


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 16])
def test_lengths_that_do_not_divide(pool: Pool, length: int):
    """Some processes hold fewer tokens than others, or none."""
    cases = [
        Case(kernel, structure=structure, order=order, length=length)
        for kernel in ("taylor2", "expfeatures")
        for structure in ("full", "causal", "decay-token", "documents-causal")
        for order in ORDERS
    ]
    assert pool.run(4, compare, cases, state) == [len(cases)] * 4
