"""Kernels that give their features as logarithms: every form, at sizes whose exponentials no float can hold."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from tests.contracts import cells
from tests.tolerance import assert_close
from torch import Tensor

from mercer.core.kernels import Elu, Kernel
from mercer.core.log_weights import Alibi, Decay
from mercer.core.merged import merge
from mercer.core.mixed import Mixed
from mercer.core.normalizers import L2, Identity, Normalizer, Sum
from mercer.core.reference import reference_attention
from mercer.core.state import FeatureState
from mercer.core.structures import Causal, Documents, Full, Padding, Structure, Window
from mercer.core.support import unsupported
from mercer.errors import InvalidArgument, NonFinite
from mercer.ops import attention


@dataclass(frozen=True)
class Logs(Kernel):
    """K = sum_f exp(scale q_f) exp(k_f)."""

    log_features: ClassVar[bool] = True

    @property
    def positive(self) -> bool:
        return True

    def default_scale(self, dim: int) -> float:
        return 1.0

    def profile(self, score: Tensor) -> Tensor:
        return score

    def feature_dim(self, dim: int) -> int:
        return dim

    def features(self, mapped: Tensor) -> Tensor:
        return mapped


@dataclass(frozen=True)
class Plain(Logs):
    """The same kernel, its exponentials taken at once: what the others must equal where they are finite."""

    log_features: ClassVar[bool] = False

    def scaled_query(self, query: Tensor, scale: float) -> Tensor:
        return (query * scale).exp()

    def scaled_key(self, key: Tensor, scale: float) -> Tensor:
        return key.exp()

    def map_query(self, query: Tensor) -> Tensor:
        return query.exp()

    def map_key(self, key: Tensor) -> Tensor:
        return key.exp()


SHAPE = cells.Shape()


@pytest.mark.parametrize("normalizer", [Sum(), L2(), Identity()], ids=str)
@pytest.mark.parametrize("structure", cells.STRUCTURES)
def test_every_form(
    structure: str, normalizer: Sum | L2 | Identity, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
):
    cells.small_tiles(monkeypatch)
    laid = cells.structures(SHAPE, generator)[structure]
    given, whole = cells.inputs(SHAPE, generator), laid.whole(SHAPE)
    named = dict(zip("qkv", given.qkv, strict=True)) | laid.leaves
    expected = reference_attention(*given.qkv, Plain(), normalizer, whole)
    wanted = cells.gradients(expected, given.cotangent, list(named.values()))
    ran = 0
    for form, path in cells.CELLS:
        if unsupported(Logs(), normalizer, merge(whole), form, path) is not None:
            continue
        out = attention(*given.qkv, kernel=Logs(), normalizer=normalizer, structure=whole, form=form, path=path)
        assert_close(out, expected, SHAPE.keys, f"{form} {path}")
        got = cells.gradients(out, given.cotangent, list(named.values()))
        for name, have, want in zip(named, got, wanted, strict=True):
            assert_close(have, want, SHAPE.keys, f"{form} {path}: gradient of {name}")
        ran += 1
    assert ran


def parts(structure: str, generator: torch.Generator) -> tuple[cells.Laid, cells.Inputs]:
    shape = cells.Shape(queries=9, keys=9)
    return cells.structures(shape, generator)[structure], cells.inputs(shape, generator)


@pytest.mark.parametrize("path", ["pairs", "features"])
@pytest.mark.parametrize("cut", [0, 1, 4, 9])
@pytest.mark.parametrize("structure", ["causal", "alibi-causal", "decay-token", "padding-causal", "full"])
def test_split(structure: str, cut: int, path: str, generator: torch.Generator):
    """Two calls with a state between them equal one, and so does the merge of two states."""
    laid, given = parts(structure, generator)
    if structure == "full" and path == "pairs":
        pytest.skip("earlier queries of a full structure would have to see later keys")
    q, k, v = given.qkv
    wide = k * 100

    def run(a: int, b: int, **more: object) -> tuple[Tensor, FeatureState]:
        return attention(  # pyright: ignore[reportReturnType, reportCallIssue]
            q[:, :, a:b], wide[:, :, a:b], v[:, :, a:b], kernel=Logs(), structure=laid.make(a, b), path=path,
            return_state=True, **more,
        )  # fmt: skip

    whole, end = run(0, 9)
    first, middle = run(0, cut)
    second, last = run(cut, 9, state=middle)
    if structure != "full":
        assert_close(torch.cat((first, second), 2), whole, 9)
    else:
        assert_close(second, whole[:, :, cut:], 9)
    if path == "pairs":
        return
    assert end.peak is not None
    assert last.peak is not None
    assert_close(last.features, end.features, 9)
    assert_close(last.peak, end.peak, 9)
    merged = middle.merge(run(cut, 9)[1])
    assert merged.peak is not None
    assert merged.mass is not None
    assert_close(merged.features, end.features, 9)
    assert_close(merged.peak, end.peak, 9)


@pytest.mark.parametrize("structure", [Causal(), Full(), Window(3, 0), Window(2, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_exponents_that_no_float_holds(structure: Structure, dtype: torch.dtype, generator: torch.Generator):
    """Every weight times exp(1000): the average is the same, in every form, and its gradients are finite."""
    given = cells.inputs(cells.Shape(queries=9, keys=9), generator, dtype)
    q, k, v = given.qkv
    shift = torch.linspace(-1000, 1000, 9).view(1, 1, 9, 1).to(dtype)
    expected = reference_attention(q, k, v, Plain(), L2(), structure)
    for form, path in cells.CELLS:
        if unsupported(Logs(), L2(), merge(structure), form, path) is None:
            high = attention(
                q.double() + 1000, k.double() + 5000, v.double(), kernel=Logs(), normalizer=L2(), structure=structure,
                form=form, path=path,
            )  # fmt: skip
            assert_close(high, expected, 9, f"{form} {path}")
            rising = attention(q, k + shift, v, kernel=Logs(), structure=structure, form=form, path=path)
            assert bool(torch.isfinite(rising).all())
            for g in cells.gradients(rising, given.cotangent, [q, k, v]):
                assert bool(torch.isfinite(g).all())
            if merge(structure).causal and merge(structure).left is None:  # the newest key outweighs all the others
                groups = v.repeat_interleave(2, 1)
                assert_close(rising, groups, 9, f"{form} {path}")


@pytest.mark.parametrize(("form", "path"), [c for c in cells.CELLS if c != ("dense", "features")])
def test_the_last_key_does_not_reach_back(form: str, path: str, generator: torch.Generator):
    """Case 5: a last key ten times, or 300 nats, larger leaves every earlier output as it was, bit for bit."""
    q, k, v = (x.detach().float() for x in cells.inputs(cells.Shape(queries=9, keys=9), generator).qkv)
    before = attention(q, k, v, kernel=Logs(), structure=Causal(), form=form, path=path)
    for change in (lambda x: x * 10, lambda x: x + 300):
        moved = k.clone()
        moved[:, :, -1] = change(moved[:, :, -1])
        after = attention(q, moved, v, kernel=Logs(), structure=Causal(), form=form, path=path)
        assert torch.equal(after[:, :, :-1], before[:, :, :-1])


@pytest.mark.parametrize(("form", "path"), [c for c in cells.CELLS if c != ("dense", "features")])
def test_identity_says_when_it_leaves_the_range(form: str, path: str, generator: torch.Generator):
    q, k, v = (x.detach().float() for x in cells.inputs(SHAPE, generator).qkv)
    with pytest.raises(NonFinite):
        attention(q, k + 200, v, kernel=Logs(), normalizer=Identity(), structure=Causal(), form=form, path=path)


def test_a_state_says_what_it_is_relative_to(generator: torch.Generator):
    q, k, v = (x.detach().float() for x in cells.inputs(SHAPE, generator).qkv)
    _, state = attention(q, k + 200, v, kernel=Logs(), structure=Causal(), return_state=True)
    assert isinstance(state, FeatureState)
    assert state.peak is not None
    torch.testing.assert_close(state.peak, (k.double() + 200).amax((2, 3)), rtol=1e-6, atol=0)
    again = type(state).from_tensors(state.tensors())
    assert isinstance(again, FeatureState)
    assert again.peak is not None
    assert torch.equal(again.peak, state.peak)
    _, empty = attention(q[:, :, :0], k[:, :, :0], v[:, :, :0], kernel=Logs(), structure=Causal(), return_state=True)
    assert isinstance(empty, FeatureState)
    torch.testing.assert_close(empty.merge(state).features, state.features)
    with pytest.raises(InvalidArgument, match="peak"):
        state.merge(FeatureState(state.features, state.mass, state.length, state.log_decay, state.kernel))


def test_padding_counts_for_nothing(generator: torch.Generator):
    """A hidden key of any size takes no part in the running maximum."""
    q, k, v = (x.detach() for x in cells.inputs(SHAPE, generator).qkv)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[:, 2] = False
    huge = k.clone()
    huge[:, :, 2] = 1e4
    for form, path in cells.CELLS:
        structure = Causal() & Padding(mask)
        if unsupported(Logs(), Sum(), merge(structure), form, path) is None:
            a, b = (attention(q, x, v, kernel=Logs(), structure=structure, form=form, path=path) for x in (k, huge))
            assert torch.equal(a, b)


def test_alibi_and_decay_keep_the_maximum_of_what_is_left(generator: torch.Generator):
    """An old large key that has faded must not hold the maximum up: the reference is that of weights, not of keys."""
    q, k, v = (x.detach().float() for x in cells.inputs(cells.Shape(queries=9, keys=9), generator).qkv)
    k[:, :, 0] += 400
    for structure in (Causal() & Decay(log_rate=torch.full((2,), -100.0)), Causal() & Alibi(torch.full((4,), 100.0))):
        for form, path in cells.CELLS:
            if unsupported(Logs(), Sum(), merge(structure), form, path) is None:
                out = attention(q, k, v, kernel=Logs(), structure=structure, form=form, path=path)
                want = v.repeat_interleave(2, 1)[:, :, -1]
                assert_close(out[:, :, -1], want, 9, f"{form} {path} {structure}")


@pytest.mark.parametrize(
    "structure",
    [
        Window(2, 0),
        Window(2, None),
        Window(2, 0) & Padding(lengths=torch.tensor([9, 12])),
        Window(2, 1) & Padding(torch.tensor([[True] * 5 + [False] * 3 + [True] * 4, [False] * 4 + [True] * 8])),
        Window(2, 0) & Documents(torch.tensor([0, 4, 10, 12])),
        Window(2, 1) & Documents(torch.tensor([0, 4, 10, 12])),
        Causal() & Documents(torch.tensor([0, 4, 10, 12])),
        Documents(torch.tensor([0, 4, 10, 12])),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [200.0, 3e7, 1e18])
def test_a_large_key_out_of_sight_leaves_the_others_as_they_are(
    size: float, structure: Structure, generator: torch.Generator
):
    """Rows that do not see it are what they are without it, and those that see it see little else."""
    shape = cells.Shape(queries=12, keys=12)
    q, k, v = (x.detach().float() for x in cells.inputs(shape, generator).qkv)
    k[:, :, 4] = 0
    lifted = k.clone()
    lifted[:, :, 4] = size
    one = (torch.arange(12) == 4).float().view(1, 1, 12, 1).expand(2, 2, 12, 1)
    sees = reference_attention(q, k, one, Plain(), Sum(), structure)
    for form, path in cells.CELLS:
        if unsupported(Logs(), Sum(), merge(structure), form, path) is None:
            run = (attention(q, x, v, kernel=Logs(), structure=structure, form=form, path=path) for x in (k, lifted))
            without, out = run
            assert_close(out.masked_fill(sees > 0, 0), without.masked_fill(sees > 0, 0), 12, f"{form} {path}")
            alone = v[:, :, 4:5].repeat_interleave(2, 1).expand_as(out)
            assert_close(out.masked_fill(sees == 0, 0), alone.masked_fill(sees == 0, 0), 12, f"{form} {path}")


@pytest.mark.parametrize("normalizer", [Sum(), L2(), Identity()], ids=str)
@pytest.mark.parametrize(("form", "path"), [c for c in cells.CELLS if c != ("dense", "features")])
def test_features_too_far_apart_are_no_silent_answer(
    form: str, path: str, normalizer: Normalizer, generator: torch.Generator
):
    """Every large product of features lost below float32's range: an error that says so; right in float64."""
    k = 60 * torch.randn(1, 1, 9, 8, generator=generator, dtype=torch.float64)
    q = -k + torch.randn(1, 1, 9, 8, generator=generator, dtype=torch.float64)
    v = torch.randn(1, 1, 9, 4, generator=generator, dtype=torch.float64)
    options = {"kernel": Logs(), "structure": Causal(), "form": form, "path": path}
    exact = reference_attention(q, k, v, Plain(), normalizer, Causal())
    assert_close(attention(q, k, v, normalizer=normalizer, **options), exact, 9)
    with pytest.raises(NonFinite, match=r"lost the weights of .* rows below the range of torch\.float32"):
        attention(q.float(), k.float(), v.float(), normalizer=normalizer, **options)
    mixed = options | {"kernel": Mixed(Logs(), Elu(), window=3)}
    with pytest.raises(NonFinite, match="lost the weights"):
        attention(q.float(), k.float(), v.float(), normalizer=normalizer, **mixed)


def test_rows_that_weigh_nothing_are_no_error(generator: torch.Generator):
    """Keys whose complement is 0, and rows that are not there."""
    q, k, v = (x.detach().float() for x in cells.inputs(SHAPE, generator).qkv)
    rate = torch.full((2, 2, 7), 0.5)
    rate[:, :, :2] = 1
    mask = cells.masks(SHAPE)
    for form, path in cells.CELLS:
        structure = Causal() & Decay(rate, complement=True) & Padding(mask)
        if unsupported(Logs(), Sum(), merge(structure), form, path) is None:
            out = attention(q, k, v, kernel=Logs(), structure=structure, form=form, path=path)
            assert not out[1, :, :2].any()
