"""Long rows over many tiles, at every tile and chunk size that could be off by one, and the library's own sizes."""

import pytest
import torch
from tests.contracts import cells
from tests.tolerance import assert_close

from mercer.core.kernels import Elu, Exp, Gaussian, Kernel, Taylor
from mercer.core.merged import merge
from mercer.core.normalizers import L2, Sum
from mercer.core.structures import Causal
from mercer.core.support import unsupported
from mercer.forms import scan, tiles
from mercer.ops import attention

SHAPE = cells.Shape(batch=3, heads=4, key_heads=2, queries=17, keys=17, dim=3, value_dim=2)
SIZES = [(1, 1, 1, 10**4), (2, 3, 2, 1), (4, 7, 4, 200), (7, 4, 7, 10**4), (17, 5, 17, 10**6), (64, 64, 16, 1)]


@pytest.mark.parametrize("structure", cells.STRUCTURES)
@pytest.mark.parametrize("kernel", [Exp(), Taylor(2)], ids=str)
def test_no_tile_size_shows(
    kernel: Kernel, structure: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
):
    """Outputs, gradients and states of the chunked form at all tile sizes are those of the dense form."""
    laid = cells.structures(SHAPE, generator)[structure]
    given, whole = cells.inputs(SHAPE, generator, kernel=kernel), laid.whole(SHAPE)
    leaves = [*given.qkv, *laid.leaves.values()]
    expected = attention(*given.qkv, kernel=kernel, structure=whole, form="dense", path="pairs")
    wanted = cells.gradients(expected, given.cotangent, leaves)
    for rows, columns, chunk, workspace in SIZES:
        cells.small_tiles(monkeypatch, rows, columns, chunk, workspace)
        for path in ("pairs", "features"):
            if unsupported(kernel, Sum(), merge(whole), "chunked", path) is not None:
                continue
            out = attention(*given.qkv, kernel=kernel, structure=whole, form="chunked", path=path)
            label = f"{path}, tiles {rows} x {columns}, chunks {chunk}, workspace {workspace}"
            assert_close(out, expected, SHAPE.keys, label)
            for name, g, w in zip(
                ("q", "k", "v", *laid.leaves), cells.gradients(out, given.cotangent, leaves), wanted, strict=True
            ):
                assert_close(g, w, SHAPE.keys, f"{label}: gradient of {name}")


@pytest.mark.parametrize("structure", ["causal", "window-last", "padding-causal", "decay-token", "documents-causal"])
@pytest.mark.parametrize("kernel", [Exp(), Gaussian(), Elu(), Taylor(3, signed=True)], ids=str)
def test_the_librarys_own_tile_sizes(kernel: Kernel, structure: str, generator: torch.Generator):
    """A few tiles of the real size, and one token more."""
    length = 2 * max(tiles.ROWS, scan.FEATURE_CHUNK) + 1
    shape = cells.Shape(batch=2, heads=2, key_heads=1, queries=length, keys=length, dim=3, value_dim=2)
    laid = cells.structures(shape, generator)[structure]
    given, whole = cells.inputs(shape, generator, kernel=kernel), laid.whole(shape)
    leaves = [*given.qkv, *laid.leaves.values()]
    expected = attention(*given.qkv, kernel=kernel, structure=whole, form="dense", path="pairs")
    wanted = cells.gradients(expected, given.cotangent, leaves)
    for path in ("pairs", "features"):
        if unsupported(kernel, Sum(), merge(whole), "chunked", path) is None:
            out = attention(*given.qkv, kernel=kernel, structure=whole, form="chunked", path=path)
            assert_close(out, expected, length, path)
            for g, w in zip(cells.gradients(out, given.cotangent, leaves), wanted, strict=True):
                assert_close(g, w, length, f"{path}: gradient")


@pytest.mark.parametrize(
    "structure", ["full", "causal", "padding-causal", "decay-token", "decay-shared", "decay-alibi"]
)
@pytest.mark.parametrize("workspace", [1, 1000, 2000, 10_000, 30_000])
def test_no_slab_size_shows(
    workspace: int, structure: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
):
    """With little workspace the feature path takes heads singly and chunks of one token; the answer is the same."""
    laid = cells.structures(SHAPE, generator)[structure]
    given, whole = cells.inputs(SHAPE, generator), laid.whole(SHAPE)
    leaves = [*given.qkv, *laid.leaves.values()]
    options = {"kernel": Taylor(3, signed=True), "normalizer": L2(), "structure": whole}
    monkeypatch.setattr(scan, "WORKSPACE", workspace)
    results = []
    for form in ("recurrent", "chunked"):
        out, state = attention(*given.qkv, form=form, path="features", return_state=True, **options)
        into_state = torch.linspace(-1, 1, state.features.numel(), dtype=torch.float64).view_as(state.features)
        loss = (out * given.cotangent).sum() + (state.features * into_state).sum()
        results.append([out, state.features, *torch.autograd.grad(loss, leaves)])
    for name, want, got in zip(("output", "S", "q", "k", "v", *laid.leaves), *results, strict=True):
        assert_close(got, want, SHAPE.keys * 8, name)


@pytest.mark.parametrize("kernel", [Exp(), Elu(), Taylor(2)], ids=str)
def test_the_past_never_sees_the_future(kernel: Kernel, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch):
    """Whatever comes later, even a thousand times larger, no earlier output moves by a bit."""
    cells.small_tiles(monkeypatch, rows=4, columns=4, chunk=4)
    given = cells.inputs(SHAPE, generator)
    q, k, v = (x.detach() for x in given.qkv)
    for form, path in cells.CELLS:
        if unsupported(kernel, Sum(), merge(Causal()), form, path) is None:
            before = attention(q, k, v, kernel=kernel, structure=Causal(), form=form, path=path)
            for t in (1, 8, 16):
                later = [torch.cat((x[:, :, :t], 1000 * x[:, :, t:]), 2) for x in (q, k, v)]
                after = attention(*later, kernel=kernel, structure=Causal(), form=form, path=path)
                assert torch.equal(before[:, :, :t], after[:, :, :t]), f"{form} {path} at {t}"


@pytest.mark.parametrize("kernel", [Exp(), Gaussian()], ids=str)
@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_large_scores_do_not_overflow(
    kernel: Kernel, shift: float, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
):
    """The weights of a row depend on differences of scores; the running maximum takes the rest out, tile by tile."""
    cells.small_tiles(monkeypatch)
    q = torch.full((1, 1, 7, 1), shift, dtype=torch.float64)
    k = torch.linspace(0.9, 1.1, 7, dtype=torch.float64).view(1, 1, 7, 1)
    v = torch.arange(7.0, dtype=torch.float64).view(1, 1, 7, 1)
    score = q * k.transpose(-1, -2)
    if isinstance(kernel, Gaussian):
        score = -((q - k.transpose(-1, -2)) ** 2) / 2
    expected = torch.softmax(score.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf), -1) @ v
    for form in ("dense", "chunked", "recurrent"):
        out = attention(q, k, v, kernel=kernel, structure=Causal(), form=form)
        # Scores of size 1e8 round in float64 at 1e-8; the Gaussian's parts cancel from there.
        bound = 1e-6 if isinstance(kernel, Gaussian) else 1e-9
        assert float((out - expected).abs().max()) <= bound, form
