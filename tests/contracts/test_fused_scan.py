"""The fused scan of finite kernels (Numba) is the specification, wherever the plan may choose it."""

import pytest
import torch
from tests.contracts import cells
from tests.tolerance import assert_close
from torch import Tensor

from mercer.core.kernels import Elu, Taylor
from mercer.core.log_weights import Decay
from mercer.core.merged import merge
from mercer.core.mixed import Mixed
from mercer.core.normalizers import L2, Identity, Normalizer, Sum
from mercer.core.reference import reference_attention
from mercer.core.state import State
from mercer.core.structures import Causal, Full
from mercer.core.support import Sizes, unsupported
from mercer.errors import Unsupported
from mercer.ops import attention, plan

pytest.importorskip("numba")

SHAPE = cells.Shape(queries=19, keys=19)
CAUSAL = [
    name
    for name, laid in cells.structures(SHAPE, torch.Generator().manual_seed(0)).items()
    for merged in [merge(laid.whole(SHAPE))]
    if merged.causal and merged.left is None and merged.relative is None
]
FUSED = {"form": "chunked", "path": "features", "backend": "numba"}


def finite(kernels: dict) -> list[str]:
    sizes = Sizes(2, 4, 2, 19, 19, 3, 2)
    return [
        name
        for name, kernel in kernels.items()
        if kernel.polynomial() is not None
        and unsupported(kernel, Sum(), merge(Causal()), "chunked", "features", sizes) is None
    ]


def compare(kernel: object, normalizer: Normalizer, structure: str, dtype: torch.dtype, generator: torch.Generator):
    """With rates that are trained, and where there are any also with fixed ones: another way through the scan."""
    laid = cells.structures(SHAPE, generator)[structure]
    given = cells.inputs(SHAPE, generator, dtype, kernel=kernel)
    exact, whole, leaves = given.double(), laid.whole(SHAPE), list(laid.leaves.values())
    options = FUSED | {"kernel": kernel, "normalizer": normalizer, "structure": whole}
    expected = reference_attention(*exact.qkv, kernel, normalizer, whole)
    wanted = cells.gradients(expected, exact.cotangent, [*exact.qkv, *leaves])
    for trained in (True, False) if leaves else (False,):
        for leaf in leaves:
            leaf.requires_grad_(trained)
        assert plan(*given.qkv, **options).backend == "numba"
        out = attention(*given.qkv, **options)
        assert out.dtype == dtype
        assert_close(out, expected, SHAPE.keys)
        names = ["query", "key", "value", *laid.leaves][: 3 + trained * len(leaves)]
        found = cells.gradients(out, given.cotangent, [*given.qkv, *leaves][: len(names)])
        for name, g, w in zip(names, found, wanted[: len(names)], strict=True):
            assert_close(g, w, SHAPE.keys, f"gradient of {name}, rates trained: {trained}", dtype=dtype)


@pytest.mark.parametrize("normalizer", [Sum(), L2(), Identity()], ids=str)
@pytest.mark.parametrize("structure", ["causal", "recency", "decay-documents"])
@pytest.mark.parametrize("kernel", finite(cells.KERNELS))
def test_kernels(kernel: str, structure: str, normalizer: Normalizer, generator: torch.Generator):
    compare(cells.KERNELS[kernel], normalizer, structure, torch.float32, generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("structure", CAUSAL)
@pytest.mark.parametrize("kernel", [Elu(), Taylor(2)], ids=str)
def test_structures(kernel: Elu | Taylor, structure: str, dtype: torch.dtype, generator: torch.Generator):
    compare(kernel, Sum(), structure, dtype, generator)


@pytest.mark.parametrize("structure", ["causal", "padding-causal", "alibi-causal", "decay-token", "recency"])
@pytest.mark.parametrize("cut", [0, 1, 7, 19])
@pytest.mark.parametrize("kernel", ["elu", "taylor2", "mixed"])
def test_states(kernel: str, cut: int, structure: str, generator: torch.Generator):
    """Its states are those of the other forms: each continues the other's, with the gradient through them."""
    chosen = {"elu": Elu(), "taylor2": Taylor(2), "mixed": Mixed(Elu(), Taylor(2), window=4)}[kernel]
    laid = cells.structures(SHAPE, generator)[structure]
    given = cells.inputs(SHAPE, generator, torch.float32)
    q, k, v = given.qkv
    names, leaves = [*"qkv", *laid.leaves], [q, k, v, *laid.leaves.values()]

    def run(a: int, b: int, backend: str, state: State | None = None) -> tuple[Tensor, State]:
        return attention(
            q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], kernel=chosen, structure=laid.make(a, b), form="chunked",
            path="features", backend=backend, state=state, return_state=True,
        )  # fmt: skip

    whole, end = run(0, 19, "torch")
    wanted = cells.gradients(whole, given.cotangent, leaves)
    for first, second in (("numba", "torch"), ("torch", "numba"), ("numba", "numba")):
        head, middle = run(0, cut, first)
        tail, last = run(cut, 19, second, middle)
        joined = torch.cat((head, tail), 2)
        assert_close(joined, whole, 19)
        for name, a, b in zip(end.tensors(), last.tensors().values(), end.tensors().values(), strict=True):
            if a.is_floating_point() and "near" not in name:  # a cache may hold what is no longer valid
                assert_close(a, b, 19, name)
        for name, g, w in zip(names, cells.gradients(joined, given.cotangent, leaves), wanted, strict=True):
            assert_close(g, w, 19, f"{first} then {second}: gradient of {name}", torch.float32)


@pytest.mark.parametrize("queries", [1, 5, 30])
def test_other_numbers_of_queries(queries: int, generator: torch.Generator):
    shape = cells.Shape(queries=queries, keys=19)
    given = cells.inputs(shape, generator, torch.float32)
    expected = reference_attention(*given.qkv, Elu(), Sum(), Causal())
    assert_close(attention(*given.qkv, kernel=Elu(), structure=Causal(), **FUSED), expected, 19)


def test_it_is_chosen_and_refused_where_it_says(generator: torch.Generator):
    big = [torch.empty(1, 8, 2048, 64, device="meta") for _ in range(3)]
    assert plan(*big, kernel=Elu(), structure=Causal(), path="features").backend == "numba"
    small = [torch.empty(1, 1, 16, 8, device="meta") for _ in range(3)]
    assert plan(*small, kernel=Elu(), structure=Causal(), path="features").backend == "torch"
    rates = torch.full((8,), 0.9, requires_grad=True)
    trained = Causal() & Decay(rates)
    assert plan(*big, kernel=Elu(), structure=trained, path="features").backend == "numba"
    with pytest.raises(Unsupported, match="numba backend does not compute"):
        plan(*big, kernel=Elu(), structure=Full(), **FUSED)
    with pytest.raises(Unsupported, match="numba backend does not compute"):
        plan(*(x.double() for x in big), kernel=Elu(), structure=Causal(), **FUSED)
