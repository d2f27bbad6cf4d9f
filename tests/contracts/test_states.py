"""States: what a call leaves, how a second call continues it, and that nothing changes in the caller's hands."""

import pytest
import torch
from safetensors.torch import load, save
from tests.contracts import cells
from tests.tolerance import assert_close

from mercer.core.growth import spare
from mercer.core.kernels import Elu, Exp, Kernel, Taylor
from mercer.core.merged import merge
from mercer.core.normalizers import Sum
from mercer.core.reference import reference_attention, reference_state
from mercer.core.state import CacheState, FeatureState, State
from mercer.core.structures import Causal, Structure
from mercer.core.support import unsupported
from mercer.ops import attention

SHAPE = cells.Shape(heads=4, key_heads=2, queries=9, keys=9, dim=2, value_dim=3)
TAKES_STATE = [
    name
    for name, s in cells.structures(SHAPE, torch.Generator()).items()
    if "documents" not in name and merge(s.whole(SHAPE)).right in (None, 0)
]
BY_STATE = [(Exp(), "pairs"), (Taylor(2), "pairs"), (Taylor(2), "features"), (Elu(), "features")]


def part(given: cells.Inputs, a: int, b: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens a .. b - 1."""
    q, k, v = given.qkv
    return q[:, :, a:b], k[:, :, a:b], v[:, :, a:b]


def forms_of(kernel: Kernel, structure: Structure, path: str) -> list[str]:
    return [
        f
        for f in ("dense", "chunked", "recurrent")
        if not unsupported(kernel, Sum(), merge(structure), f, path, None, True)
    ]


@pytest.mark.parametrize("structure", TAKES_STATE)
@pytest.mark.parametrize(("kernel", "path"), BY_STATE, ids=str)
def test_a_second_call_continues_the_first(
    kernel: Kernel, path: str, structure: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
):
    """At any split, forms mixed; outputs and gradients through the state equal the undivided specification's."""
    cells.small_tiles(monkeypatch)
    laid = cells.structures(SHAPE, generator)[structure]
    given, whole = cells.inputs(SHAPE, generator, kernel=kernel), laid.whole(SHAPE)
    forms = forms_of(kernel, whole, path)
    if not forms:
        assert unsupported(kernel, Sum(), merge(whole), "chunked", path, None, True)
        return
    leaves = [*given.qkv, *laid.leaves.values()]
    ordered = merge(whole).right == 0
    for split in range(SHAPE.keys + 1):
        form, then = forms[split % len(forms)], forms[(split + 1) % len(forms)]
        first, state = attention(
            *part(given, 0, split),
            kernel=kernel,
            structure=laid.make(0, split),
            form=form,
            path=path,
            return_state=True,
        )
        second, state = attention(
            *part(given, split, SHAPE.keys),
            kernel=kernel,
            structure=laid.make(split, SHAPE.keys),
            form=then,
            path=path,
            state=state,
            return_state=True,
        )
        if ordered:
            expected = reference_attention(*given.qkv, kernel, Sum(), whole)
        else:  # the first part sees itself alone, the second all keys
            q, k, v = given.qkv
            early = reference_attention(*part(given, 0, split), kernel, Sum(), laid.make(0, split))
            expected = torch.cat(
                (early, reference_attention(q[:, :, split:], k, v, kernel, Sum(), late(laid, split))), 2
            )
        out = torch.cat((first, second), 2)
        label = f"split at {split}, {form} then {then}"
        assert_close(out, expected, SHAPE.keys, label)
        got, want = (cells.gradients(x, given.cotangent, leaves) for x in (out, expected))
        for name, g, w in zip(("q", "k", "v", *laid.leaves), got, want, strict=True):
            assert_close(g, w, SHAPE.keys, f"{label}: gradient of {name}")
        real = merge(whole).padding
        count = torch.full((SHAPE.batch,), SHAPE.keys) if real is None else real_tokens(real)
        assert torch.equal(state.length, count)


def late(laid: cells.Laid, split: int) -> Structure:
    """The whole structure with only the queries from ``split`` on."""
    whole = laid.whole(SHAPE)
    padding = merge(whole).padding
    if padding is None or padding.queries is None:
        return whole
    return cells.Padding(padding.mask, queries=padding.queries[:, split:])


def real_tokens(padding: cells.Padding) -> torch.Tensor:
    return padding.mask.sum(1) if padding.mask is not None else padding.lengths


@pytest.mark.parametrize(
    "structure",
    [
        n
        for n in TAKES_STATE
        if n not in ("full", "window-behind", "padding", "padding-queries", "alibi", "alibi-padding", "relative")
    ],
)
@pytest.mark.parametrize(("kernel", "path"), [(Exp(), "pairs"), (Taylor(2), "features")], ids=str)
def test_one_token_at_a_time(kernel: Kernel, path: str, structure: str, generator: torch.Generator):
    laid = cells.structures(SHAPE, generator)[structure]
    given, whole = cells.inputs(SHAPE, generator, kernel=kernel), laid.whole(SHAPE)
    forms = forms_of(kernel, whole, path)
    expected = reference_attention(*given.qkv, kernel, Sum(), whole)
    for form in (*forms, "auto") if forms else ():
        state, outs = None, []
        for t in range(SHAPE.keys):
            out, state = attention(
                *part(given, t, t + 1),
                kernel=kernel,
                structure=laid.make(t, t + 1),
                form=form,
                path=path,
                state=state,
                return_state=True,
            )
            outs.append(out)
        assert_close(torch.cat(outs, 2), expected, SHAPE.keys, form)


@pytest.mark.parametrize("structure", TAKES_STATE)
@pytest.mark.parametrize("kernel", [k for k in cells.KERNELS.values() if k.feature_dim(1) is not None], ids=str)
def test_final_feature_state(
    kernel: Kernel, structure: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
):
    """S and z, and gradients into them from a loss on the state alone, against the specification's sums."""
    cells.small_tiles(monkeypatch)
    laid = cells.structures(SHAPE, generator)[structure]
    given, whole = cells.inputs(SHAPE, generator, kernel=kernel), laid.whole(SHAPE)
    leaves = [given.key, given.value, *laid.leaves.values()]
    for form in forms_of(kernel, whole, "features"):
        _, state = attention(*given.qkv, kernel=kernel, structure=whole, form=form, path="features", return_state=True)
        assert isinstance(state, FeatureState)
        assert state.mass is not None
        features, mass = reference_state(given.key, given.value, kernel, whole, state.features.shape[1])
        factor = torch.ones(1, 1, 1) if state.peak is None else state.peak.exp().unsqueeze(-1)  # which is kept apart
        found, weight = state.features * factor.unsqueeze(-1), state.mass * factor
        assert_close(found, features, SHAPE.keys, f"{form}: S")
        assert_close(weight, mass, SHAPE.keys, f"{form}: z")
        weights = (
            torch.randn(features.shape, generator=generator, dtype=torch.float64),
            torch.randn(mass.shape, generator=generator, dtype=torch.float64),
        )
        got = cells.gradients((found * weights[0]).sum() + (weight * weights[1]).sum(), None, leaves)
        want = cells.gradients((features * weights[0]).sum() + (mass * weights[1]).sum(), None, leaves)
        for name, g, w in zip(("k", "v", *laid.leaves), got, want, strict=True):
            assert_close(g, w, SHAPE.keys * 8, f"{form}: gradient of {name}")


@pytest.mark.parametrize(("kernel", "path"), BY_STATE, ids=str)
def test_empty_and_absorbing_calls(kernel: Kernel, path: str, generator: torch.Generator):
    """A call without tokens changes nothing, one without queries absorbs keys, one without keys only reads."""
    given = cells.inputs(SHAPE, generator)
    q, k, v = given.qkv
    for form in forms_of(kernel, Causal(), path):
        options = {"kernel": kernel, "structure": Causal(), "form": form, "path": path}
        out, state = attention(q, k, v, return_state=True, **options)
        nothing, same = attention(*part(given, 0, 0), state=state, return_state=True, **options)
        assert nothing.shape[2] == 0
        assert all(torch.equal(t, same.tensors()[n]) for n, t in state.tensors().items())
        _, absorbed = attention(q[:, :, :0], k, v, return_state=True, **options)
        for name, t in state.tensors().items():
            assert_close(absorbed.tensors()[name].double(), t.double(), SHAPE.keys, f"{form}: {name}")
        if path == "pairs":
            read = attention(q[:, :, -1:], k[:, :, :0], v[:, :, :0], state=state, **options)
            assert_close(read, out[:, :, -1:], SHAPE.keys, f"{form}: reading")


@pytest.mark.parametrize(("kernel", "path"), BY_STATE, ids=str)
def test_nothing_changes_in_the_callers_hands(kernel: Kernel, path: str, generator: torch.Generator):
    given = cells.inputs(SHAPE, generator)
    for form in forms_of(kernel, Causal(), path):
        options = {"kernel": kernel, "structure": Causal(), "form": form, "path": path, "return_state": True}
        _, state = attention(*part(given, 0, 4), **options)
        state = state.detach()
        before = {n: t.clone() for n, t in state.tensors().items()}, [x.detach().clone() for x in given.qkv]
        for _ in range(2):
            out, _ = attention(*part(given, 4, 9), state=state, **options)
            cells.gradients(out, given.cotangent[:, :, 4:], list(given.qkv))
        after, _ = attention(*part(given, 4, 9), state=state, **options)
        assert torch.equal(after, out), "two branches from one state"
        assert all(torch.equal(t, before[0][n]) for n, t in state.tensors().items())
        assert all(torch.equal(x, y) for x, y in zip(given.qkv, before[1], strict=True))


@pytest.mark.parametrize(("kernel", "path"), BY_STATE, ids=str)
def test_a_state_shares_no_memory_with_the_caller(kernel: Kernel, path: str, generator: torch.Generator):
    """Not with keys, values or a mask, and it does not keep alive what a window has dropped."""
    q, k, v = (x.detach() for x in cells.inputs(SHAPE, generator).qkv)
    mask = cells.masks(SHAPE)
    structures = [Causal(), Causal() & cells.Padding(mask)] + [cells.Window.last(3)] * (path == "pairs")
    for structure in structures:
        _, state = attention(q, k, v, kernel=kernel, structure=structure, path=path, return_state=True)
        before = {n: t.clone() for n, t in state.tensors().items()}
        for x in (k, v, mask):
            old = x.clone()
            x.zero_()
            assert all(torch.equal(t, before[n]) for n, t in state.tensors().items())
            x.copy_(old)
        if isinstance(state, CacheState):
            tokens = state.keys.shape[2]
            assert state.keys.untyped_storage().nbytes() * tokens == state.keys.numel() * 8 * (tokens + spare(tokens))


@pytest.mark.parametrize("structure", ["causal", "padding-window", "decay-padding", "decay-alibi"])
@pytest.mark.parametrize(("kernel", "path"), BY_STATE, ids=str)
def test_a_state_is_a_value(kernel: Kernel, path: str, structure: str, generator: torch.Generator):
    """Through safetensors and back, cloned, and with batch rows selected, it continues as the original does."""
    laid = cells.structures(SHAPE, generator)[structure]
    if not forms_of(kernel, laid.whole(SHAPE), path):
        return
    given = cells.inputs(SHAPE, generator)

    def step(state: State, rows: slice | list[int] = slice(None)) -> torch.Tensor:
        q, k, v = (x[rows] for x in part(given, 8, 9))
        parts = merge(laid.make(8, 9))
        structure = laid.make(8, 9)
        if rows != slice(None):  # the per-row parts follow the rows
            structure = cells.Window(parts.left, parts.right)
            if parts.padding is not None:
                structure = structure & cells.Padding(parts.padding.mask[rows])
            if parts.decay is not None:
                structure = structure & cells.Decay(log_rate=parts.decay.log_rate[rows])
            if parts.alibi is not None:
                structure = structure & parts.alibi
        return attention(q, k, v, kernel=kernel, structure=structure, state=state)

    _, state = attention(*part(given, 0, 8), kernel=kernel, structure=laid.make(0, 8), path=path, return_state=True)
    expected = step(state)
    state = state.detach()
    loaded = State.from_tensors(load(save(state.tensors())))
    assert type(loaded) is type(state)
    assert torch.equal(step(loaded), expected)
    copy = state.clone()
    assert torch.equal(step(copy), expected)
    shared = {t.data_ptr() for t in state.tensors().values() if t.numel()}
    assert not shared & {t.data_ptr() for t in copy.tensors().values()}
    assert_close(step(state.select(torch.tensor([1, 0, 1])), [1, 0, 1]), expected[[1, 0, 1]], 9)
    assert_close(step(state.select(torch.tensor([False, True])), [1]), expected[[1]], 9)
    assert torch.equal(step(state.to("cpu")), expected)
    assert state.nbytes == sum(t.numel() * t.element_size() for t in state.tensors().values())


@pytest.mark.parametrize("structure", ["causal", "padding-causal", "decay-token", "decay-alibi", "full"])
def test_merging_is_associative(structure: str, generator: torch.Generator):
    """Three parts absorbed apart and merged in either order of brackets are the state of the whole."""
    kernel = Taylor(2)
    laid = cells.structures(SHAPE, generator)[structure]
    given = cells.inputs(SHAPE, generator)

    def absorb(a: int, b: int) -> FeatureState:
        _, state = attention(
            *part(given, a, b), kernel=kernel, structure=laid.make(a, b), path="features", return_state=True
        )
        assert isinstance(state, FeatureState)
        return state

    whole = absorb(0, 9)
    one, two, three, none = absorb(0, 4), absorb(4, 5), absorb(5, 9), absorb(3, 3)
    for merged in (
        one.merge(two).merge(three),
        one.merge(two.merge(three)),
        none.merge(absorb(0, 9)),
        whole.merge(none),
    ):
        for name, t in whole.tensors().items():
            assert_close(merged.tensors()[name].double(), t.double(), 9, name)


def test_the_cache_keeps_only_what_a_window_can_see(generator: torch.Generator):
    given = cells.inputs(SHAPE, generator)
    _, state = attention(*given.qkv, structure=cells.Window.last(3), return_state=True)
    assert isinstance(state, CacheState)
    assert torch.equal(state.keys, given.key[:, :, -2:])
    assert torch.equal(state.values, given.value[:, :, -2:])
    assert state.length.tolist() == [9, 9]
    for _ in range(5):
        _, state = attention(*part(given, 0, 1), structure=cells.Window.last(3), state=state, return_state=True)
        assert state.keys.shape[2] == 2
