"""Head counts, dimensions and lengths: every form at shapes with which layouts go wrong."""

from typing import Any

import pytest
import torch
from tests.contracts import cells
from tests.tolerance import assert_close

from mercer.core.kernels import Elu, Exp, Kernel, Taylor
from mercer.core.merged import merge
from mercer.core.mixed import Mixed
from mercer.core.normalizers import L2, Sum
from mercer.core.random_features import PositiveRandomFeatures
from mercer.core.reference import reference_attention
from mercer.core.state import State
from mercer.core.structures import Causal
from mercer.core.support import unsupported
from mercer.ops import attention, plan

SHAPES = {
    "one-token": cells.Shape(batch=1, heads=1, key_heads=1, queries=1, keys=1),
    "one-dimension": cells.Shape(heads=2, key_heads=1, queries=5, keys=5, dim=1, value_dim=1),
    "multi-head": cells.Shape(batch=3, heads=3, key_heads=3, queries=5, keys=5),
    "grouped": cells.Shape(heads=6, key_heads=2, queries=5, keys=5, dim=2, value_dim=5),
    "multi-query": cells.Shape(heads=4, key_heads=1, queries=6, keys=6, dim=4, value_dim=3),
    "fewer-queries": cells.Shape(queries=4, keys=9),
    "one-query": cells.Shape(queries=1, keys=8),
    "more-queries": cells.Shape(queries=9, keys=4),
    "queries-before-one-key": cells.Shape(queries=5, keys=1),
    "odd": cells.Shape(batch=1, heads=2, key_heads=1, queries=11, keys=13, dim=5, value_dim=7),
}
UNEQUAL = [name for name in cells.STRUCTURES if not name.endswith("documents") and not name.startswith("documents")]


def compare(kernel: Kernel, structure: str, shape: cells.Shape, generator: torch.Generator) -> None:
    laid = cells.structures(shape, generator)[structure]
    given, whole = cells.inputs(shape, generator, kernel=kernel), laid.whole(shape)
    named = dict(zip("qkv", given.qkv, strict=True)) | laid.leaves
    expected = reference_attention(*given.qkv, kernel, Sum(), whole)
    wanted = cells.gradients(expected, given.cotangent, list(named.values()))
    for form, path in cells.CELLS:
        if unsupported(kernel, Sum(), merge(whole), form, path) is not None:
            continue
        out = attention(*given.qkv, kernel=kernel, structure=whole, form=form, path=path)
        assert_close(out, expected, shape.keys, f"{form} {path}: output")
        got = cells.gradients(out, given.cotangent, list(named.values()))
        for name, have, want in zip(named, got, wanted, strict=True):
            assert_close(have, want, shape.keys, f"{form} {path}: gradient of {name}")


@pytest.mark.parametrize("structure", UNEQUAL)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", [Exp(), Taylor(2)], ids=str)
def test_shape(kernel: Kernel, shape: str, structure: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch):
    cells.small_tiles(monkeypatch, workspace=64)
    compare(kernel, structure, SHAPES[shape], generator)


@pytest.mark.parametrize("structure", [name for name in cells.STRUCTURES if name not in UNEQUAL])
@pytest.mark.parametrize("heads", [(3, 3), (4, 1)])
@pytest.mark.parametrize("kernel", [Exp(), Taylor(2)], ids=str)
def test_documents(kernel: Kernel, heads: tuple[int, int], structure: str, generator: torch.Generator):
    compare(kernel, structure, cells.Shape(3, *heads, queries=9, keys=9, dim=2, value_dim=3), generator)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 17])
@pytest.mark.parametrize("norm", [Sum(), L2()], ids=str)
def test_fused_attention_equals_the_reference(length: int, norm: Sum | L2, generator: torch.Generator):
    """Where torch's own operator runs, the plan says so and nothing differs."""
    shape = cells.Shape(heads=4, key_heads=2, queries=length, keys=length, dim=4, value_dim=4)
    for structure in ("full", "causal"):
        given = cells.inputs(shape, generator)
        whole = cells.structures(shape, generator)[structure].whole(shape)
        assert plan(*given.qkv, normalizer=norm, structure=whole, form="chunked", path="pairs").backend == "sdpa"
        out = attention(*given.qkv, normalizer=norm, structure=whole, form="chunked", path="pairs")
        expected = reference_attention(*given.qkv, Exp(), norm, whole)
        assert_close(out, expected, length, structure)
        got, want = (cells.gradients(x, given.cotangent, list(given.qkv)) for x in (out, expected))
        for name, g, w in zip("qkv", got, want, strict=True):
            assert_close(g, w, length, f"{structure}: gradient of {name}")


@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 5), (3, 0)])
@pytest.mark.parametrize("kernel", [Exp(), Elu(), Taylor(2)], ids=str)
@pytest.mark.parametrize("structure", ["full", "causal"])
def test_empty_lengths(kernel: Kernel, structure: str, queries: int, keys: int, generator: torch.Generator):
    shape = cells.Shape(queries=queries, keys=keys)
    given = cells.inputs(shape, generator)
    whole = cells.structures(shape, generator)[structure].whole(shape)
    for form, path in cells.CELLS:
        if unsupported(kernel, Sum(), merge(whole), form, path) is None:
            out = attention(*given.qkv, kernel=kernel, structure=whole, form=form, path=path)
            assert out.shape == (shape.batch, shape.heads, queries, shape.value_dim)
            assert not out.any(), "a query without keys gives zeros"
            for g in cells.gradients(out, given.cotangent, list(given.qkv)):
                assert not g.any()


@pytest.mark.parametrize("form", ["dense", "chunked", "recurrent"])
def test_an_empty_batch_gives_an_empty_result(form: str):
    q = torch.zeros(0, 2, 3, 4)
    assert attention(q, q, q, structure=Causal(), form=form).shape == (0, 2, 3, 4)


@pytest.mark.parametrize(("form", "path"), cells.CELLS)
def test_strides_do_not_matter(form: str, path: str, generator: torch.Generator):
    """Tensors come transposed from projections, expanded, or as views of a fused one."""
    kernel = Elu()
    if unsupported(kernel, Sum(), merge(Causal()), form, path) is not None:
        pytest.skip("not a supported cell")
    fused = torch.randn(2, 6, 4 + 2 + 2, 3, generator=generator, dtype=torch.float64)
    q, k, v = (x.transpose(1, 2) for x in fused.split((4, 2, 2), 2))
    shared = k[:, :1].expand(-1, 2, -1, -1)
    plain = attention(
        q.contiguous(),
        shared.contiguous(),
        v.contiguous(),
        kernel=kernel,
        structure=Causal(),
        form=form,
        path=path,
    )
    strided = attention(q, shared, v, kernel=kernel, structure=Causal(), form=form, path=path)
    assert_close(strided, plain, 6)


@pytest.mark.parametrize("structure", cells.STRUCTURES)
@pytest.mark.parametrize(
    "kernel", [Exp(), Taylor(2), PositiveRandomFeatures(5), Mixed(Exp(), Elu(), window=2)], ids=str
)
def test_no_batch_rows(kernel: Kernel, structure: str, generator: torch.Generator):
    """An empty batch gives empty rows, and an empty state that can be continued, wherever one of two rows works."""
    shape = cells.Shape(batch=0)
    given, laid = cells.inputs(shape, generator, kernel=kernel), cells.structures(shape, generator)[structure]
    for form, path in cells.CELLS:
        stateful = unsupported(kernel, Sum(), merge(laid.whole(shape)), form, path, None, True) is None
        if unsupported(kernel, Sum(), merge(laid.whole(shape)), form, path) is not None:
            continue
        options: dict[str, Any] = {"kernel": kernel, "structure": laid.whole(shape), "form": form, "path": path}
        out = attention(*given.qkv, **options)
        assert list(out.shape) == [0, 4, 7, 2]
        if out.requires_grad:
            out.sum().backward()
        if stateful:
            _, state = attention(*given.qkv, **options, return_state=True)
            assert state.batch == 0
            attention(*given.qkv, **options, state=State.from_tensors(state.tensors()))
