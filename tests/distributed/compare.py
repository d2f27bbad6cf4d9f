"""What several processes compute against what one computes: the output and the gradient of every leaf."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tests.contracts import cells
from tests.distributed.pool import Place
from tests.tolerance import assert_close

from mercer import attention
from mercer.distributed import Sharding, shard_structure

SHAPE = cells.Shape(batch=2, heads=4, key_heads=2, queries=23, keys=23, dim=3, value_dim=2)


@dataclass(frozen=True)
class Case:
    """One call; names are those of tests/contracts/cells.py."""

    kernel: str = "exp"
    normalizer: str = "sum"
    structure: str = "causal"
    order: str = "zigzag"
    length: int = 23
    dtype: torch.dtype = torch.float64
    value_dim: int = 2

    @property
    def shape(self) -> cells.Shape:
        shape = cells.Shape(2, 4, 2, self.length, self.length, 3, self.value_dim)
        return shape.under(self.normalizer)


def compare(place: Place, cases: list[Case], attend: Callable[..., torch.Tensor]) -> int:
    """Run every case by ``attend`` and by :func:`mercer.attention`; the number of cases."""
    for case in cases:
        _compare(place, case, attend)
    return len(cases)


def _compare(place: Place, case: Case, attend: Callable[..., torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = case.shape
    kernel, kernel_leaves = cells.kernel(case.kernel, shape, generator)
    inputs = cells.inputs(shape, generator, case.dtype, kernel)
    normalizer, normalizer_leaves = cells.normalizer(case.normalizer, shape, generator)
    laid = cells.structures(shape, generator, case.dtype)[case.structure]
    structure = laid.whole(shape)
    leaves = {
        "query": inputs.query,
        "key": inputs.key,
        "value": inputs.value,
        **kernel_leaves,
        **normalizer_leaves,
        **laid.leaves,
    }
    expected = attention(*inputs.qkv, kernel=kernel, normalizer=normalizer, structure=structure)
    expected_grads = cells.gradients(expected, inputs.cotangent, list(leaves.values()))

    sharding = Sharding(case.length, place.size, case.order)
    own = [sharding.shard(x, place.rank) for x in inputs.qkv]
    out = attend(
        *own,
        sharding=sharding,
        kernel=kernel,
        normalizer=normalizer.map_tokens(lambda x: sharding.shard(x, place.rank)),
        structure=shard_structure(structure, sharding, place.rank),
        group=place.group,
        timeout=60.0,
    )
    what = f"{case} on process {place.rank} of {place.size}"
    assert_close(out, sharding.shard(expected, place.rank), case.length, what, dtype=case.dtype)
    grads = cells.gradients(out, sharding.shard(inputs.cotangent, place.rank), list(leaves.values()))
    for name, grad, wanted in zip(leaves, grads, expected_grads, strict=True):
        assert_close(place.total(grad), wanted, 4 * case.length, f"gradient of {name}, {what}", dtype=case.dtype)
