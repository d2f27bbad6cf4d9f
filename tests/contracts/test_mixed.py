"""One kernel near, another far, one normaliser: every form equals the double loop, states included."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given as draws
from hypothesis import strategies as st
from tests.contracts import cells
from tests.contracts.test_log_features import Logs, Plain
from tests.tolerance import assert_close
from torch import Tensor

from mercer.core.kernels import Elu, Exp, Kernel, Taylor
from mercer.core.merged import merge
from mercer.core.mixed import Mixed
from mercer.core.normalizers import L2, Identity, Normalizer, Sum
from mercer.core.reference import reference_attention
from mercer.core.state import MixedState, State
from mercer.core.structures import Causal, Full, Padding, Window
from mercer.core.support import unsupported
from mercer.errors import InvalidArgument, Unsupported
from mercer.ops import attention, plan

SHAPE = cells.Shape(queries=9, keys=9)
PARTS: dict[str, tuple[Kernel, Kernel]] = {
    "exp-taylor2": (Exp(), Taylor(2)),
    "exp-elu": (Exp(), Elu()),
    "elu-taylor2": (Elu(), Taylor(2)),
    "taylor2-exp": (Taylor(2), Exp()),
    "exp-logs": (Exp(), Logs()),
    "logs-elu": (Logs(), Elu()),
}
CAUSAL = [
    name
    for name, laid in cells.structures(SHAPE, torch.Generator().manual_seed(0)).items()
    for merged in [merge(laid.whole(SHAPE))]
    if merged.causal and merged.left is None and merged.relative is None
]


def literal(kernel: Mixed) -> Mixed:
    """The same kernel as the reference knows it."""
    near, far = (Plain() if isinstance(part, Logs) else part for part in (kernel.near, kernel.far))
    return replace(kernel, near=near, far=far)


def ratio(generator: torch.Generator) -> Tensor:
    return torch.randn(SHAPE.heads, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("normalizer", [Sum(), L2(), Identity()], ids=str)
@pytest.mark.parametrize("structure", CAUSAL)
@pytest.mark.parametrize("parts", PARTS)
def test_every_form(
    parts: str, structure: str, normalizer: Normalizer, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
):
    cells.small_tiles(monkeypatch)
    laid = cells.structures(SHAPE, generator)[structure]
    given, whole, log_ratio = cells.inputs(SHAPE, generator), laid.whole(SHAPE), ratio(generator)
    kernel = Mixed(*PARTS[parts], window=3, log_ratio=log_ratio if normalizer == Sum() else None)
    named = dict(zip("qkv", given.qkv, strict=True)) | laid.leaves
    if kernel.log_ratio is not None:
        named["log_ratio"] = log_ratio
    expected = reference_attention(*given.qkv, literal(kernel), normalizer, whole)
    wanted = cells.gradients(expected, given.cotangent, list(named.values()))
    ran = 0
    for form, path in cells.CELLS:
        if unsupported(kernel, normalizer, merge(whole), form, path) is not None:
            continue
        out = attention(*given.qkv, kernel=kernel, normalizer=normalizer, structure=whole, form=form, path=path)
        assert_close(out, expected, SHAPE.keys, f"{form} {path}")
        got = cells.gradients(out, given.cotangent, list(named.values()))
        for name, have, want in zip(named, got, wanted, strict=True):
            assert_close(have, want, SHAPE.keys, f"{form} {path}: gradient of {name}")
        ran += 1
    assert ran == (3 if PARTS[parts][1] == Exp() else 5)


@pytest.mark.parametrize("path", ["pairs", "features"])
@pytest.mark.parametrize("window", [1, 2, 3, 9, 20])
@pytest.mark.parametrize("structure", [s for s in CAUSAL if "documents" not in s])
def test_split_at_every_point(structure: str, window: int, path: str, generator: torch.Generator):
    """Two calls and the state between them equal one call; so do single steps."""
    laid, given = cells.structures(SHAPE, generator)[structure], cells.inputs(SHAPE, generator)
    kernel = Mixed(Exp(), Taylor(2), window=window)
    q, k, v = given.qkv

    def run(a: int, b: int, state: State | None = None) -> tuple[Tensor, State]:
        return attention(
            q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], kernel=kernel, structure=laid.make(a, b), path=path,
            state=state, return_state=True,
        )  # fmt: skip

    whole, end = run(0, 9)
    cotangent = given.cotangent
    wanted = cells.gradients(whole, cotangent, list(given.qkv))
    for cut in (0, 1, 4, 9):
        first, middle = run(0, cut)
        second, last = run(cut, 9, middle)
        joined = torch.cat((first, second), 2)
        assert_close(joined, whole, 9, f"cut at {cut}")
        assert torch.equal(last.length, end.length)
        for name, have, want in zip("qkv", cells.gradients(joined, cotangent, [q, k, v]), wanted, strict=True):
            assert_close(have, want, 9, f"cut at {cut}: gradient of {name}")
    state, rows = None, []
    for t in range(9):
        row, state = run(t, t + 1, state)
        rows.append(row)
    assert_close(torch.cat(rows, 2), whole, 9, "token by token")


@pytest.mark.parametrize("queries", [1, 4, 9, 12])
@pytest.mark.parametrize("structure", ["causal", "padding-causal", "alibi-causal", "decay-head"])
def test_other_numbers_of_queries(structure: str, queries: int, generator: torch.Generator):
    shape = cells.Shape(queries=queries, keys=9)
    laid, given = cells.structures(shape, generator)[structure], cells.inputs(shape, generator)
    kernel, whole = Mixed(Exp(), Taylor(2), window=3), laid.whole(shape)
    expected = reference_attention(*given.qkv, kernel, Sum(), whole)
    for form, path in cells.CELLS:
        if unsupported(kernel, Sum(), merge(whole), form, path) is None:
            out = attention(*given.qkv, kernel=kernel, structure=whole, form=form, path=path)
            assert_close(out, expected, 9, f"{form} {path}")


@draws(
    st.integers(1, 12), st.integers(1, 14), st.integers(0, 12), st.sampled_from(sorted(PARTS)), st.integers(0, 10**6)
)
def test_any_length_window_padding_and_split(length: int, window: int, cut: int, parts: str, seed: int):
    generator = torch.Generator().manual_seed(seed)
    shape = cells.Shape(queries=length, keys=length)
    q, k, v = (x.detach() for x in cells.inputs(shape, generator).qkv)
    mask = torch.rand(2, length, generator=generator) > 0.3
    kernel, cut = Mixed(*PARTS[parts], window=window), min(cut, length)
    expected = reference_attention(q, k, v, literal(kernel), Sum(), Causal() & Padding(mask))
    for path in ("pairs",) if PARTS[parts][1] == Exp() else ("pairs", "features"):
        first, state = attention(
            q[:, :, :cut], k[:, :, :cut], v[:, :, :cut], kernel=kernel, structure=Causal() & Padding(mask[:, :cut]),
            path=path, return_state=True,
        )  # fmt: skip
        second = attention(
            q[:, :, cut:], k[:, :, cut:], v[:, :, cut:], kernel=kernel, structure=Causal() & Padding(mask[:, cut:]),
            path=path, state=state,
        )  # fmt: skip
        assert_close(torch.cat((first, second), 2), expected, length, path)


@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_parts_of_very_different_size(shift: float, generator: torch.Generator):
    """Scores of -300 or 300 in the window: the joint average is that of the larger part, with no overflow."""
    q, k, v = (x.detach().float() for x in cells.inputs(SHAPE, generator).qkv)
    ratio = torch.full((4,), shift)
    kernel = Mixed(Exp(), Taylor(2), window=3, log_ratio=ratio)
    for form, path in cells.CELLS:
        if unsupported(kernel, Sum(), merge(Causal()), form, path) is None:
            out = attention(q, k, v, kernel=kernel, structure=Causal(), form=form, path=path)
            alone = attention(q, k, v, structure=Window.last(3))
            assert_close(out[:, :, :3], alone[:, :, :3], 9)
            if shift > 0:
                assert_close(out, alone, 9)
            else:
                assert float((out[:, :, 3:] - alone[:, :, 3:]).abs().max()) > 0.01


def test_the_state_is_small_and_complete(generator: torch.Generator):
    """The last `window` keys as a cache, everything before them in the sums; saved and loaded like any tensors."""
    q, k, v = (x.detach().float() for x in cells.inputs(SHAPE, generator).qkv)
    kernel = Mixed(Exp(), Taylor(2), window=3)
    _, state = attention(q, k, v, kernel=kernel, structure=Causal(), return_state=True)
    assert isinstance(state, MixedState)
    assert torch.equal(state.near.keys, k[:, :, -3:])
    assert state.far.length.tolist() == [6, 6]
    assert state.length.tolist() == [9, 9]
    _, alone = attention(k[:, :, :6], k[:, :, :6], v[:, :, :6], kernel=Taylor(2), structure=Causal(), return_state=True)
    assert_close(state.far.features, alone.features, 6)  # pyright: ignore[reportAttributeAccessIssue]
    again = State.from_tensors(state.tensors())
    assert isinstance(again, MixedState)
    step = [x[:, :, :1] for x in (q, k, v)]
    a, b = (attention(*step, kernel=kernel, structure=Causal(), state=s) for s in (state, again))
    assert torch.equal(a, b)
    picked = state.select(torch.tensor([1]))
    c = attention(*(x[1:] for x in step), kernel=kernel, structure=Causal(), state=picked)
    assert_close(c, a[1:], 9)


def test_the_plan_and_the_refusals(generator: torch.Generator):
    q, k, v = (x.detach().float() for x in cells.inputs(SHAPE, generator).qkv)
    kernel = Mixed(Exp(), Taylor(2), window=3)
    chosen = plan(q, k, v, kernel=kernel, structure=Causal())
    assert chosen.flops > 0
    with pytest.raises(Unsupported, match=r"add Causal\(\)"):
        attention(q, k, v, kernel=kernel, structure=Full())
    with pytest.raises(Unsupported, match="leave Window out"):
        attention(q, k, v, kernel=kernel, structure=Window.last(5))
    with pytest.raises(Unsupported, match="no finite feature map"):
        attention(q, k, v, kernel=Mixed(Exp(), Exp()), structure=Causal(), path="features")
    with pytest.raises(Unsupported, match="signed=True"):
        attention(q, k, v, kernel=Mixed(Exp(), Taylor(3)), structure=Causal())
    with pytest.raises(InvalidArgument, match="window"):
        Mixed(Exp(), Taylor(2), window=0)
    with pytest.raises(InvalidArgument, match="not itself Mixed"):
        Mixed(kernel, Taylor(2))
    with pytest.raises(InvalidArgument, match=r"log_ratio must be \[4\]"):
        attention(q, k, v, kernel=Mixed(Exp(), Elu(), log_ratio=torch.zeros(3)), structure=Causal())


@pytest.mark.parametrize("window", [1, 2, 4, 8, 20])
@pytest.mark.parametrize("padded", [False, True])
def test_a_state_is_continued_with_its_own_window(padded: bool, window: int, generator: torch.Generator):
    """One of another window keeps too few or too many keys beside its sums, unless neither window is full yet."""
    q, k, v = (x.detach() for x in cells.inputs(SHAPE, generator).qkv)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[:, 1] = not padded

    def run(a: int, b: int, window: int, state: State | None = None) -> tuple[Tensor, State]:
        return attention(
            q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], kernel=Mixed(Exp(), Taylor(2), window=window), path="features",
            structure=Causal() & Padding(mask[:, a:b]), state=state, return_state=True,
        )  # fmt: skip

    _, state = run(0, 6, 3)
    with pytest.raises(InvalidArgument, match=f"than the last {window}, this call's window: continue with"):
        run(6, 9, window, state)
    _, early = run(0, 2, 3)
    if window >= 2:
        whole, _ = run(0, 9, window)
        assert_close(run(2, 9, window, early)[0], whole[:, :, 2:], 9)


@pytest.mark.parametrize("kernel", [Mixed(Exp(), Taylor(2), window=3), Taylor(2), Exp()], ids=str)
def test_states_of_another_kind_are_refused(kernel: Kernel, generator: torch.Generator):
    q, k, v = (x.detach() for x in cells.inputs(SHAPE, generator).qkv)
    mixed, plain = (
        attention(q, k, v, kernel=k_, structure=Causal(), path="features", return_state=True)[1]
        for k_ in (Mixed(Exp(), Taylor(2), window=3), Taylor(2))
    )
    wrong = plain if isinstance(kernel, Mixed) else mixed
    with pytest.raises(InvalidArgument, match=f"CacheState, not a {type(wrong).__name__}"):
        attention(q, k, v, kernel=kernel, structure=Causal(), state=wrong)
