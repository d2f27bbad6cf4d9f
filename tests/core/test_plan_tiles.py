"""Which backend computes bfloat16, by what multiplies it: units for tiles, in torch's products and in ours, or none."""

from collections.abc import Callable

import pytest
import torch
from tests.tolerance import assert_close

from mercer import Alibi, Bias, Causal, Padding, Window
from mercer.backends import sdpa_tiles, softmax
from mercer.core.machine import Machine, use_machine
from mercer.core.machine_default import DEFAULT
from mercer.core.machine_tiles import DEFAULTS
from mercer.core.merged import merge
from mercer.core.normalizers import L2, Sum
from mercer.ops import attention, plan

HALF = torch.bfloat16
needs_numba = pytest.mark.skipif(not softmax.installed(), reason="of the kernels of the extra cpu")


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool, bool], None]:
    """Says of the processor whether torch, and whether our kernels, multiply bfloat16 in tiles."""

    def be(theirs: bool, ours: bool) -> None:
        monkeypatch.setattr(sdpa_tiles, "TILES", theirs)
        monkeypatch.setattr(softmax, "tiled", lambda: ours)
        monkeypatch.setattr(softmax, "narrow", lambda *dtypes: all(d == HALF for d in dtypes))

    return be


def planned(length: int = 2048, dtype: torch.dtype = HALF, trained: bool = False, key_heads: int = 8, **options):
    query, key = (torch.empty(2, h, length, 64, dtype=dtype, requires_grad=trained) for h in (8, key_heads))
    return plan(query, key, key, **{"structure": Causal(), **options})


@needs_numba
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("length", [512, 2048, 8192])
def test_plain_attention_goes_to_whoever_has_tiles(processor, length, trained):
    for kind, backend in (
        ((False, False), "numba"), ((True, False), "sdpa"), ((False, True), "numba"), ((True, True), "numba"),
    ):  # fmt: skip
        processor(*kind)
        for options in ({}, {"key_heads": 2}):
            found = planned(length, trained=trained, **options)
            assert found.backend == backend, kind
            assert ("in tiles" in found.reason) is any(kind), kind
        assert planned(length, dtype=torch.float32, trained=trained).backend == "numba"


@needs_numba
@pytest.mark.parametrize(
    "structure",
    [Window.last(512), Causal() & Padding(lengths=torch.tensor([2048, 900])), Causal() & Alibi(torch.ones(8))],
)
@pytest.mark.parametrize("kind", sorted(DEFAULTS))
def test_what_torch_needs_a_mask_for_stays_here(processor, kind, structure):
    processor(*kind)
    found = planned(structure=structure)
    assert found.backend == "numba"
    assert ("in tiles" in found.reason) is kind[1]
    assert planned(return_lse=True).backend == "numba"


@needs_numba
def test_patterns_have_no_tiles(processor):
    processor(True, True)
    found = planned(structure=Window(64, 64, dilation=2))
    assert (found.backend, "in tiles" in found.reason) == ("numba", False)
    processor(True, False)
    assert found.seconds == planned(structure=Window(64, 64, dilation=2)).seconds


@needs_numba
def test_what_is_quicker_takes_less_time_in_the_plan(processor):
    """The order measured on such a processor: our tiles, torch's, our pairs; and torch in float32 last."""
    seconds = []
    for kind, backend in (
        ((True, True), "numba"), ((True, False), "sdpa"), ((True, False), "numba"), ((False, False), "sdpa"),
    ):  # fmt: skip
        processor(*kind)
        seconds.append(planned(backend=backend).seconds)
    assert seconds == sorted(seconds)


def test_a_machine_of_ones_own_is_not_mixed_with_the_default_numbers(processor):
    own = Machine.from_json(DEFAULT.to_json())
    found = []
    for kind in DEFAULTS:
        processor(*kind)
        with use_machine(own):
            found.append(planned(backend="sdpa").seconds)
    assert len(set(found)) == 1


@pytest.mark.parametrize("key_heads", [4, 2])
def test_torch_in_bfloat16_computes_the_same(processor, key_heads):
    """As it is chosen where there are tiles; against the dense form in float64, with gradients."""
    processor(True, False)
    inputs = [torch.randn(2, h, 70, 16).to(HALF).requires_grad_() for h in (4, key_heads, key_heads)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out = attention(*inputs, structure=Causal(), scale=0.3, form="chunked", backend="sdpa")
    exact = attention(*wide, structure=Causal(), scale=0.3, form="dense")
    assert out.dtype == HALF
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, upstream)
    wanted = torch.autograd.grad(exact, wide, upstream.double())
    for name, ours, theirs in zip(("out", "q", "k", "v"), (out, *got), (exact, *wanted), strict=True):
        assert_close(ours, theirs, 70, name, roundings=2 if name == "out" else 4)


def test_torch_is_given_float32_where_rows_are_rounded_later(processor):
    processor(True, False)
    assert not sdpa_tiles.serves(L2(), merge(Causal()), "cpu", HALF)
    assert not sdpa_tiles.serves(Sum(), merge(Causal() & Bias(torch.zeros(1, 1, 4, 4))), "cpu", HALF)
    assert not sdpa_tiles.serves(Sum(), merge(Causal()), "cuda", HALF)
    assert not sdpa_tiles.serves(Sum(), merge(Causal()), "cpu", HALF, torch.float32)
    assert sdpa_tiles.serves(Sum(), merge(Causal()), "cpu", HALF, HALF)
