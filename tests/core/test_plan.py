"""The plan: arithmetic that agrees with counting, and promises that the call keeps."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mercer.core import cost
from mercer.core.feature_maps import Dpfp
from mercer.core.kernels import Elu, Exp, Kernel, Taylor
from mercer.core.layout import layout, tokens
from mercer.core.log_weights import Alibi
from mercer.core.merged import merge
from mercer.core.normalizers import L2, Normalizer, Sum
from mercer.core.random_features import PositiveRandomFeatures
from mercer.core.state import CacheState, FeatureState
from mercer.core.structures import Causal, Full, Padding, Structure, Window
from mercer.core.support import Sizes, unsupported
from mercer.errors import InvalidArgument, Unsupported
from mercer.ops import attention, plan


@settings(max_examples=200)
@given(
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(0, 6),
    st.none() | st.integers(0, 14),
    st.none() | st.integers(0, 14),
)
def test_visible_pairs_are_those_of_the_mask(queries: int, keys: int, past: int, left: int | None, right: int | None):
    merged = merge(Window(left, right))
    counted = 0
    for i, j in itertools.product(range(queries), range(keys + past)):
        ahead = j - (i + keys + past - queries)
        counted += (left is None or -ahead <= left) and (right is None or ahead <= right)
    assert cost.visible_pairs(merged, Sizes(1, 1, 1, queries, keys, 1, 1, past)) == counted
    if not past and queries and keys:  # and the forms mask the same
        own = tokens(merged, 1, 1, 1, queries, keys, torch.device("cpu"))
        mask = layout(merged, own).visible(slice(0, queries), slice(0, keys))
        assert counted == (queries * keys if mask is None else int(mask.sum()))


STRUCTURES: list[Structure] = [
    Full(),
    Causal(),
    Window.last(3),
    Causal() & Alibi(torch.tensor([1.0, 0.5, 0.25, 0.125])),
]


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("kernel", [Exp(), Elu(), Taylor(3)], ids=str)
@pytest.mark.parametrize("norm", [Sum(), L2()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_bytes_of_the_state_are_as_planned(kernel: Kernel, norm: Normalizer, structure: Structure, dtype: torch.dtype):
    q, k, v = (torch.zeros(2, h, 9, d, dtype=dtype) for h, d in ((4, 3), (2, 3), (2, 5)))
    for path in ("pairs", "features"):
        if unsupported(kernel, norm, merge(structure), "chunked", path, None, True) is not None:
            continue
        options = {"kernel": kernel, "normalizer": norm, "structure": structure, "path": path}
        promised = plan(q, k, v, return_state=True, **options).state_bytes
        _, state = attention(q, k, v, return_state=True, **options)
        if isinstance(state, FeatureState):
            held = [state.features] + ([state.mass] if state.mass is not None else [])
        else:
            assert isinstance(state, CacheState)
            held = [state.keys, state.values]
        assert sum(t.numel() * t.element_size() for t in held) == promised, path


def test_a_plan_reads_shapes_only():
    """Tensors far too large to exist, on the meta device."""
    q = torch.empty(8, 32, 10**6, 128, device="meta", dtype=torch.bfloat16)
    k = torch.empty(8, 8, 10**6, 128, device="meta", dtype=torch.bfloat16)
    chosen = plan(q, k, k, structure=Causal())
    assert (chosen.form, chosen.path) == ("chunked", "pairs")
    assert chosen.flops == 2 * 8 * 32 * (10**6 * (10**6 + 1) // 2) * 256
    assert chosen.bytes == 2 * 8 * 10**6 * 256 * (32 + 8)
    linear = plan(q, k, k, kernel=Elu(), structure=Causal())
    assert (linear.form, linear.path) == ("chunked", "features")
    assert linear.flops < chosen.flops / 1000
    assert linear.state_bytes == 4 * 8 * 8 * 128 * 129
    for part in ("chunked", "features", "FLOP", linear.reason):
        assert part in str(linear)


def test_what_auto_chooses():
    def chosen(length: int, **options: object) -> tuple[str, str]:
        x = torch.empty(1, 2, length, 16, device="meta")
        found = plan(x, x, x, **options)
        return found.form, found.path

    assert chosen(8, kernel=Taylor(2), structure=Window.last(4)) == ("dense", "pairs")
    assert chosen(8, structure=Causal()) == ("chunked", "pairs")  # torch's fused attention, at any length
    assert chosen(4096, structure=Causal()) == ("chunked", "pairs")
    assert chosen(1, kernel=Elu(), structure=Causal(), return_state=True) == ("recurrent", "features")
    assert chosen(4096, kernel=Taylor(2), structure=Causal()) == ("chunked", "features")
    assert chosen(64, kernel=Taylor(4), structure=Causal())[1] == "pairs"
    assert chosen(4096, kernel=Elu(), structure=Window.last(9)) == ("chunked", "pairs")
    assert chosen(4096, kernel=Elu(), form="dense") == ("dense", "pairs")
    assert chosen(4096, kernel=Elu(), path="pairs")[1] == "pairs"


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, in torch.func.jvp
def test_what_wants_derivatives_of_few_pairs_is_dense():
    """Fused attention has first derivatives in reverse mode only."""
    x = torch.randn(1, 2, 8, 16)
    assert plan(x, x, x, structure=Causal()).backend == "sdpa"
    assert plan(x.clone().requires_grad_(), x, x, structure=Causal()).form == "dense"

    def out(query: torch.Tensor) -> torch.Tensor:
        return attention(query, x, x, structure=Causal())

    _, slope = torch.func.jvp(out, (x,), (torch.ones_like(x),))
    step = 1e-3 * torch.ones_like(x)
    torch.testing.assert_close(slope, (out(x + step) - out(x - step)) / 2e-3, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("length", [6, 5000])
def test_a_cache_with_holes_is_not_for_fused_attention(length: int):
    """A padded context leaves keys that are not there in its cache; the next token must not see them."""
    x = torch.randn(2, 1, length, 4)
    lengths = torch.tensor([length, length - 3])
    _, state = attention(x, x, x, structure=Causal() & Padding(lengths=lengths), return_state=True)
    token = torch.randn(2, 1, 1, 4)
    assert plan(token, token, token, structure=Causal(), state=state).backend != "sdpa"
    with pytest.raises(Unsupported, match="sdpa backend does not compute"):
        plan(token, token, token, structure=Causal(), state=state, backend="sdpa")
    out = attention(token, token, token, structure=Causal(), state=state)
    _, alone = attention(*(x[1:, :, : length - 3],) * 3, structure=Causal(), return_state=True)
    torch.testing.assert_close(out[1:], attention(*(token[1:],) * 3, structure=Causal(), state=alone))


def test_an_asked_backend_decides_the_form():
    x = torch.empty(1, 2, 8, 16, device="meta")
    assert plan(x, x, x, structure=Causal(), backend="sdpa").form == "chunked"
    with pytest.raises(Unsupported, match="numba backend does not compute"):
        plan(x, x, x, kernel=Taylor(2), structure=Window.last(4), backend="numba")


def test_a_state_decides_the_path():
    x = torch.zeros(1, 2, 4, 3)
    for path in ("pairs", "features"):
        _, state = attention(x, x, x, kernel=Elu(), structure=Causal(), path=path, return_state=True)
        assert plan(x, x, x, kernel=Elu(), structure=Causal(), state=state).path == path
        other = {"pairs": "features", "features": "pairs"}[path]
        with pytest.raises(InvalidArgument, match=f"belongs to path='{path}'"):
            plan(x, x, x, kernel=Elu(), structure=Causal(), state=state, path=other)
    with pytest.raises(Unsupported, match="dense form looks at pairs"):
        plan(x, x, x, kernel=Elu(), structure=Causal(), state=state, form="dense")


@pytest.mark.parametrize(
    ("kernel", "mapped"), [(Elu(), 64), (PositiveRandomFeatures(256), 256), (Dpfp(3), 384)], ids=str
)
def test_pairs_are_counted_by_their_mapped_vectors(kernel: Kernel, mapped: int):
    """What is multiplied has as many entries as features, and is not expanded again."""
    q = torch.empty(1, 8, 1024, 64, device="meta")
    parts = {"kernel": kernel, "structure": Causal()}
    by_pairs = plan(q, q, q, path="pairs", **parts)
    assert by_pairs.flops == 2 * 8 * (1024 * 1025 // 2) * (mapped + 64)
    chosen = plan(q, q, q, **parts)
    assert chosen.path == "features"
    assert "expanded" not in chosen.reason
