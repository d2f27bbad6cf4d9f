"""Backends of one cell, the tiles, torch's fused attention and the Numba kernels, agree with the specification."""

import pytest
import torch
from tests.contracts import cells
from tests.tolerance import assert_close

from mercer.backends import sdpa_tiles
from mercer.core.kernels import Elu, Exp, Taylor
from mercer.core.log_weights import Alibi, Decay
from mercer.core.merged import merge
from mercer.core.normalizers import Identity
from mercer.core.reference import reference_attention
from mercer.core.structures import Causal, Full, Padding, Structure, Window
from mercer.errors import InvalidArgument, Unsupported
from mercer.ops import attention, plan

SHAPE = cells.Shape(batch=2, heads=4, key_heads=2, queries=19, keys=19, dim=16, value_dim=16)
BACKENDS = ("torch", "sdpa", "numba")


def able(backend: str, dtype: torch.dtype) -> bool:
    """What the backends' documentation promises of Exp with Sum, L2, RMS or a gate around them, causal or not."""
    if backend == "numba":
        pytest.importorskip("numba")
        return dtype != torch.float64
    return True


@pytest.mark.parametrize("structure", [Full(), Causal()], ids=str)
@pytest.mark.parametrize("normalizer", ["sum", "l2-head", "rms-channel", "gate-sum"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_are_the_specification(
    backend: str,
    dtype: torch.dtype,
    normalizer: str,
    structure: Structure,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
):
    cells.small_tiles(monkeypatch, rows=4, columns=5)
    norm, leaves = cells.normalizer(normalizer, SHAPE, generator)
    given = cells.inputs(SHAPE, generator, dtype)
    exact = given.double()
    options = {"normalizer": norm, "structure": structure, "form": "chunked", "path": "pairs", "backend": backend}
    if not able(backend, dtype):
        with pytest.raises(Unsupported, match=f"The {backend} backend does not compute .* use backend=.*'torch'"):
            attention(*given.qkv, **options)
        return
    assert plan(*given.qkv, **options).backend == backend
    out = attention(*given.qkv, **options)
    expected = reference_attention(*exact.qkv, Exp(), norm, structure)
    assert out.dtype == dtype
    given_as_it_is = backend == "sdpa" and sdpa_tiles.serves(norm, merge(structure), "cpu", dtype)
    narrow = given_as_it_is or (backend == "numba" and dtype == torch.bfloat16)
    assert_close(out, expected, SHAPE.keys, roundings=2 if narrow else 1)
    wanted = cells.gradients(expected, exact.cotangent, [*exact.qkv, *leaves.values()])
    got = cells.gradients(out, given.cotangent, [*given.qkv, *leaves.values()])
    for name, g, w in zip(("q", "k", "v", *leaves), got, wanted, strict=True):
        assert_close(g, w, SHAPE.keys, f"gradient of {name}", dtype, 4 if narrow else 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_leave_and_take_states(backend: str, generator: torch.Generator):
    """A prefill by any backend is continued step by step, and a step from its state reads all of it."""
    if not able(backend, torch.float32):
        return
    given = cells.inputs(SHAPE, generator, torch.float32)
    q, k, v = (x.detach() for x in given.qkv)
    options = {"structure": Causal(), "path": "pairs", "return_state": True}
    out, state = attention(q[:, :, :11], k[:, :, :11], v[:, :, :11], form="chunked", backend=backend, **options)
    rows = [out]
    for t in range(11, 19):
        out, state = attention(*(x[:, :, t : t + 1] for x in (q, k, v)), state=state, **options)
        rows.append(out)
    expected = reference_attention(q, k, v, Exp(), None, Causal())
    assert_close(torch.cat(rows, 2), expected, 19)


BANDS = ("window", "window-ahead", "window-behind", "window-last")
PADDED = ("padding", "padding-causal", "padding-lengths", "padding-window", "padding-queries")
PACKED = ("documents", "documents-causal", "documents-window")
SLOPED = ("alibi", "alibi-padding", "alibi-causal", "alibi-causal-padding")


@pytest.mark.parametrize("structure", BANDS + PADDED + PACKED + SLOPED)
@pytest.mark.parametrize("normalizer", ["sum", "rms-channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fused_attention_under_every_structure_without_decay(
    dtype: torch.dtype, normalizer: str, structure: str, generator: torch.Generator
):
    pytest.importorskip("numba")
    norm, leaves = cells.normalizer(normalizer, SHAPE, generator)
    laid = cells.structures(SHAPE, generator)[structure]
    for leaf in laid.leaves.values():
        leaf.requires_grad_(False)
    where = laid.make(0, SHAPE.keys)
    given = cells.inputs(SHAPE, generator, dtype)
    exact = given.double()
    options = {"normalizer": norm, "structure": where, "form": "chunked", "path": "pairs", "backend": "numba"}
    out = attention(*given.qkv, **options)
    expected = reference_attention(*exact.qkv, Exp(), norm, where)
    narrow = dtype == torch.bfloat16
    assert_close(out, expected, SHAPE.keys, roundings=2 if narrow else 1)
    wanted = cells.gradients(expected, exact.cotangent, [*exact.qkv, *leaves.values()])
    got = cells.gradients(out, given.cotangent, [*given.qkv, *leaves.values()])
    for name, g, w in zip(("q", "k", "v", *leaves), got, wanted, strict=True):
        assert_close(g, w, SHAPE.keys, f"gradient of {name}", dtype, 4 if narrow else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("structure", ["causal", "window-last", "padding-causal", "padding-window", "alibi-causal"])
def test_fused_attention_continues_states(structure: str, dtype: torch.dtype, generator: torch.Generator):
    """In two parts, with what the first left behind, also where rows have different pasts."""
    pytest.importorskip("numba")
    given = cells.inputs(SHAPE, generator, dtype)
    laid = cells.structures(SHAPE, generator)[structure]
    for leaf in laid.leaves.values():
        leaf.requires_grad_(False)
    q, k, v = (x.detach() for x in given.qkv)
    options = {"form": "chunked", "path": "pairs", "backend": "numba", "return_state": True}
    rows, state = [], None
    for a, b in ((0, 8), (8, 19)):
        out, state = attention(*(x[:, :, a:b] for x in (q, k, v)), structure=laid.make(a, b), state=state, **options)
        rows.append(out)
    expected = reference_attention(q.double(), k.double(), v.double(), Exp(), None, laid.make(0, 19))
    assert_close(torch.cat(rows, 2), expected, 19, roundings=2 if dtype == torch.bfloat16 else 1)


@pytest.mark.parametrize("backend", ["sdpa", "numba"])
def test_backends_refuse_what_they_do_not_compute(backend: str, generator: torch.Generator):
    q, k, v = (x.detach().float() for x in cells.inputs(SHAPE, generator).qkv)
    mask = cells.masks(SHAPE)
    of_sdpa = (
        {"structure": Window.last(3)},
        {"structure": Causal() & Alibi(torch.ones(4))},
        {"structure": Causal() & Padding(mask)},
    )
    of_numba = (
        {"structure": Causal() & Alibi(torch.ones(4, requires_grad=True))},
        {"structure": Causal() & Decay(torch.full((4,), 0.9))},
    )
    for options in (
        *(of_sdpa if backend == "sdpa" else of_numba),
        {"structure": Causal(), "kernel": Elu(), "path": "pairs"},
        {"structure": Full(), "kernel": Taylor(2), "path": "features"},
        {"structure": Causal(), "normalizer": Identity()},
        {"structure": Causal(), "form": "dense"},
        {"structure": Causal(), "form": "recurrent"},
    ):
        with pytest.raises(Unsupported, match=f"The {backend} backend does not compute"):
            attention(q, k, v, backend=backend, **{"form": "chunked"} | options)
    with pytest.raises(InvalidArgument, match=r"backend must be 'auto' or one of 'torch', .*'numba', not 'cuda'"):
        attention(q, k, v, backend="cuda")
