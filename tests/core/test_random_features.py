"""Random features: what they estimate, how far off they are, and that their numbers never change unasked.

Statistical tests have fixed seeds, so they do not flicker. Each states how often a correct implementation would fail it
under other seeds: a z-score of ``LIMIT`` is exceeded with probability 1e-6 (two-sided, normal).
"""

import math

import pytest
import torch
from safetensors.torch import load, save
from tests.tolerance import assert_close
from torch import Tensor

from mercer.core.feature_variance import feature_mean, feature_variance
from mercer.core.normalizers import Identity
from mercer.core.random_features import (
    PositiveRandomFeatures,
    RandomFeatures,
    TrigonometricRandomFeatures,
    draw_directions,
)
from mercer.core.structures import Causal
from mercer.errors import InvalidArgument
from mercer.ops import attention, plan

LIMIT = 4.892
BLOCKS = 20_000
SLOPE_BAND = 0.05
"""3.5 times the spread of the slope over sets of 40 seeds, which is 0.014: one set in 2,000 would fail."""

KINDS = {
    "positive": (PositiveRandomFeatures, {}),
    "plain": (PositiveRandomFeatures, {"plain": True}),
    "hyperbolic": (PositiveRandomFeatures, {"hyperbolic": True}),
    "trigonometric": (TrigonometricRandomFeatures, {}),
    "unit": (TrigonometricRandomFeatures, {"unit": True}),
}


def make(kind: str, directions: int, **options: object) -> RandomFeatures:
    cls, chosen = KINDS[kind]
    per = 2 if kind not in ("positive", "plain") else 1
    return cls(directions * per, **chosen, **options)  # pyright: ignore[reportArgumentType]


def pair(dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Short vectors with an acute angle: so that tails are light enough for the sample's variance to be near normal."""
    q, k = (torch.randn(dim, generator=generator, dtype=torch.float64).abs() for _ in range(2))
    return 0.45 * q / q.norm(), 0.45 * k / k.norm()


def estimates(kernel: RandomFeatures, query: Tensor, key: Tensor, parts: int) -> Tensor:
    """K(q, k) of ``parts`` equal parts of the directions, each scaled to be an estimate of its own."""
    scale = kernel.default_scale(query.shape[-1])
    a, b = kernel.scaled_query(query, scale), kernel.scaled_key(key, scale)
    terms = (a + b).exp() if isinstance(kernel, PositiveRandomFeatures) else a * b
    return terms.unflatten(-1, (kernel.features_per_direction, parts, -1)).sum((-3, -1)) * parts


def test_orthogonal_directions_are_orthogonal_and_each_gaussian():
    rows = draw_directions(5 * 16 + 3, 16, seed=3)
    for block in rows.split(16):
        inner = block @ block.T
        assert float((inner - inner.diagonal().diag()).abs().max()) < 1e-12
    many = draw_directions(16 * BLOCKS, 16, seed=0)
    # Squared norms have mean D and variance 2 D; every coordinate has mean 0 and variance 1.
    square = many.square().sum(-1)
    assert abs(float((square.mean() - 16) / math.sqrt(32 / len(square)))) < LIMIT
    assert abs(float(square.var() - 32)) < LIMIT * math.sqrt((12 * 16 * 20 - 32**2) / len(square))
    first = many[::16]  # one row of each block: independent
    assert float((first.mean(0) * math.sqrt(BLOCKS)).abs().max()) < LIMIT + 1
    assert float(((first.square().mean(0) - 1) * math.sqrt(BLOCKS / 2)).abs().max()) < LIMIT + 1
    # A QR without the sign fix is not uniform: its diagonal has one sign.
    signs = many.view(BLOCKS, 16, 16).diagonal(dim1=1, dim2=2).sign().mean(0) * math.sqrt(BLOCKS)
    assert float(signs.abs().max()) < LIMIT + 1
    fixed = draw_directions(40, 16, seed=0, norms="sqrt")
    assert_close(fixed.norm(dim=-1), torch.full((40,), 4.0, dtype=torch.float64), 16)


@pytest.mark.parametrize("orthogonal", [True, False])
@pytest.mark.parametrize("norms", ["chi", "sqrt"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [2, 3, 5])
def test_mean_and_variance_are_those_of_theory(
    dim: int, kind: str, norms: str, orthogonal: bool, generator: torch.Generator
):
    """z-tests over 20,000 independent blocks of D directions: the mean at 1e-6, the variance at 1e-6 with the standard
    error of a sample variance from the sample's own fourth moment.
    """
    q, k = pair(dim, generator)
    kernel = make(kind, dim * BLOCKS, norms=norms, orthogonal=orthogonal)
    found = estimates(kernel, q, k, BLOCKS)
    one = make(kind, dim, norms=norms, orthogonal=orthogonal)
    mean, variance = feature_mean(one, q, k), feature_variance(one, q, k)
    assert abs(float((found.mean() - mean) / (variance / BLOCKS).sqrt())) < LIMIT
    centred = (found - mean).square()
    assert abs(float((centred.mean() - variance) / (centred.std() / math.sqrt(BLOCKS)))) < LIMIT
    if norms == "chi":
        scale = kernel.default_scale(dim)
        a, b = (x / x.norm() if kind == "unit" else x for x in (q, k))
        exact = (scale * (a * b).sum()).exp()
        if kind == "plain":
            exact = (scale * (q + k).square().sum() / 2).exp()
        assert_close(mean, exact, dim, "what is estimated")


def test_the_variances_of_the_papers():
    """The general formulas at independent directions, written out for one pair."""
    q, k = torch.tensor([0.3, -1.2, 0.4]).double(), torch.tensor([0.5, 0.2, -0.7]).double()
    scale, m = 0.7, 12
    dot, plus = scale * (q * k).sum(), scale * (q + k).square().sum()
    minus, sizes = scale * (q - k).square().sum(), scale * (q.square().sum() + k.square().sum())
    written = {
        "positive": (plus.exp() * (2 * dot).exp() - (2 * dot).exp()) / m,
        "hyperbolic": (2 * dot).exp() * (plus.exp() - 1) * (1 - (-plus).exp()) / (2 * m),
        "plain": (plus.exp() * plus.exp() - plus.exp()) / m,
        "trigonometric": sizes.exp() * (1 - (-minus).exp()).square() / (2 * m),
    }
    for kind, value in written.items():
        assert_close(feature_variance(make(kind, m, orthogonal=False), q, k, scale), value, m, kind)


@pytest.mark.parametrize("kind", ["positive", "plain", "hyperbolic"])
@pytest.mark.parametrize("norms", ["chi", "sqrt"])
def test_orthogonal_directions_never_raise_the_variance_of_positive_features(
    kind: str, norms: str, generator: torch.Generator
):
    for dim in (2, 3, 16, 64):
        q, k = (0.5 * torch.randn(200, dim, generator=generator, dtype=torch.float64) for _ in range(2))
        lower, upper = (feature_variance(make(kind, 3 * dim, norms=norms, orthogonal=o), q, k) for o in (True, False))
        assert bool((lower <= upper * (1 + 1e-9)).all())
        assert bool((lower < 0.99 * upper).any())


def test_variances_at_the_ends():
    zero = torch.zeros(4)
    assert float(feature_variance(make("positive", 8), zero, zero)) == 0
    assert float(feature_variance(make("trigonometric", 8), torch.ones(4), torch.ones(4))) == pytest.approx(
        0, abs=1e-12
    )
    far = torch.full((4,), 40.0)
    assert float(feature_variance(make("positive", 8), far, far)) == math.inf
    batch = feature_variance(make("positive", 8), torch.randn(2, 1, 5, 4), torch.randn(3, 1, 4))
    assert batch.shape == (2, 3, 5)
    assert batch.dtype == torch.float64
    # One dimension: directions of norm sqrt(1) are signs, and a cosine has no variance.
    assert float(feature_variance(make("trigonometric", 8, norms="sqrt"), torch.ones(1), -torch.ones(1))) < 1e-12
    with pytest.raises(InvalidArgument, match="Only random features"):
        feature_variance(Identity(), zero, zero)  # pyright: ignore[reportArgumentType]


def test_the_error_falls_as_the_root_of_the_number_of_features(generator: torch.Generator):
    """Relative mean square error of K over 300 pairs and 40 seeds; the slope of its root against m, on logarithmic
    axes, is -1/2, within SLOPE_BAND.
    """
    q, k = (0.3 * torch.randn(300, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    counts = [16, 32, 64, 128, 256, 512]
    errors: list[float] = []
    for count in counts:
        square = torch.zeros(())
        for seed in range(40):
            kernel = PositiveRandomFeatures(count, seed=seed)
            a, b = kernel.scaled_query(q, 8**-0.5), kernel.scaled_key(k, 8**-0.5)
            ratio = (a + b).exp().sum(-1) / (8**-0.5 * (q * k).sum(-1)).exp()
            square = square + (ratio - 1).square().mean() / 40
        errors.append(float(square.sqrt()))
    x = torch.tensor(counts).log()
    y = torch.tensor(errors).log()
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
    assert slope == pytest.approx(-0.5, abs=SLOPE_BAND)


def test_a_heavy_tail_in_numbers():
    """At D=16 a value of 2.95 can have a standard deviation of 57 per direction, and 40 with both signs."""
    length = math.sqrt(math.log((57 / 2.95) ** 2 + 1))  # |q' + k'|
    # q' and k' at equal lengths, |q' + k'| as found, and q'.k' = log 2.95
    cosine_part = math.log(2.95)
    along = length / 2
    across = math.sqrt(along**2 - cosine_part)
    q, k = torch.zeros(2, 16, dtype=torch.float64)
    q[0], q[1], k[0], k[1] = along, across, along, -across
    one = make("positive", 1, orthogonal=False)
    assert float(feature_mean(one, q, k, 1.0)) == pytest.approx(2.95)
    assert float(feature_variance(one, q, k, 1.0).sqrt()) == pytest.approx(57)
    assert float(feature_variance(make("hyperbolic", 1), q, k, 1.0).sqrt()) == pytest.approx(40.2, abs=0.1)
    # A sample does not show it, since most of it comes from draws that are rarely seen: the deviation that 1,000
    # directions show is less than half of the true one more often than not.
    shown = [
        estimates(make("positive", 1000, orthogonal=False, seed=s), q / 16**-0.25, k / 16**-0.25, 1000).std()
        for s in range(101)
    ]
    assert float(torch.stack(shown).median()) < 57 / 2


def test_the_same_numbers_everywhere():
    """In every call, after saving and loading, in inference mode, and with another default dtype or random state."""
    kernel = PositiveRandomFeatures(24, seed=7)
    before = kernel.directions_for(6).clone()
    torch.manual_seed(1)
    with torch.inference_mode():
        inside = PositiveRandomFeatures(25, seed=7).directions_for(6, torch.ones(1))
    assert not inside.is_inference()
    assert torch.equal(PositiveRandomFeatures(24, seed=7).directions_for(6), before)
    bound = kernel.bind(6, 4, 2)
    again = PositiveRandomFeatures(24).with_tensors(load(save(bound.tensors())))
    assert again == bound
    assert hash(again) == hash(bound)
    assert str(again) == str(bound)
    assert again.state_tag(0.5) == bound.state_tag(0.5) != bound.state_tag(0.25)
    assert kernel.bind(6, 1, 1) == bound == bound.bind(6, 8, 8)
    assert bound.directions is not None
    assert bound.directions.dtype == torch.float32
    assert_close(bound.directions, before.float(), 1)
    drawn = [PositiveRandomFeatures(24).bind(6, 1, 1, torch.Generator().manual_seed(s)) for s in (1, 2, 1)]
    assert drawn[0] == drawn[2] != drawn[1]


def test_the_numbers_of_a_seed():
    """They are part of the interface: a kernel without saved directions is the same next year."""
    orthogonal = [[0.0149179790, 0.0348820461], [-1.7895714323, 0.7653447003], [-1.4744632543, 0.6174207655]]
    independent = [[1.3005172794, 0.5555671030], [-1.4128868967, 0.0612422815], [-1.3241366322, -0.4966509633]]
    for rows, found in (
        (orthogonal, draw_directions(3, 2, seed=0)),
        (independent, draw_directions(3, 2, seed=5, draw=1, orthogonal=False, norms="sqrt")),
    ):
        torch.testing.assert_close(found, torch.tensor(rows, dtype=torch.float64), rtol=0, atol=1e-9)


def test_other_settings_give_other_numbers_and_tags():
    base = PositiveRandomFeatures(24)
    others = [
        PositiveRandomFeatures(24, seed=1),
        base.redraw(),
        base.redraw().redraw(),
        base.redraw(3),
        PositiveRandomFeatures(24, norms="sqrt"),
        PositiveRandomFeatures(24, orthogonal=False),
        PositiveRandomFeatures(24, plain=True),
        PositiveRandomFeatures(24, hyperbolic=True),
        TrigonometricRandomFeatures(24),
        base.bind(6, 1, 1),
        base.bind(6, 1, 1).redraw(),
    ]
    kernels = [base, *others]
    assert len({k.state_tag(0.5) for k in kernels}) == len(kernels)
    assert all(a != b for i, a in enumerate(kernels) for b in kernels[:i])
    assert base.redraw(0) == base
    assert base.redraw().bind(6, 1, 1) == base.bind(6, 1, 1).redraw()
    changed = base.bind(6, 1, 1)
    assert changed.directions is not None
    tag = changed.state_tag(0.5)
    changed.directions.add_(1)  # as loading a checkpoint does
    assert changed.state_tag(0.5) != tag


def test_features_in_eval_are_the_same_at_once_and_step_by_step(generator: torch.Generator):
    """Case 13."""
    kernel = PositiveRandomFeatures(32)
    q, k, v = (torch.randn(2, 2, 6, 4, generator=generator) for _ in range(3))
    first = attention(q, k, v, kernel=kernel, structure=Causal())
    assert torch.equal(first, attention(q, k, v, kernel=PositiveRandomFeatures(32), structure=Causal()))
    for row in range(2):
        alone = attention(*(x[row : row + 1] for x in (q, k, v)), kernel=kernel, structure=Causal())
        assert_close(alone, first[row : row + 1], 6, "a row alone")
    state, steps = None, []
    for t in range(6):
        out, state = attention(
            *(x[:, :, t : t + 1] for x in (q, k, v)), kernel=kernel, structure=Causal(), state=state, return_state=True
        )
        steps.append(out)
    assert_close(torch.cat(steps, 2), first, 6, "step by step")
    with pytest.raises(InvalidArgument, match="The state was made by"):
        attention(*(x[:, :, :1] for x in (q, k, v)), kernel=kernel.redraw(), structure=Causal(), state=state)


@pytest.mark.parametrize("form", ["dense", "chunked", "recurrent"])
@pytest.mark.parametrize("kind", ["positive", "plain", "hyperbolic"])
def test_the_last_key_does_not_move_earlier_outputs(kind: str, form: str, generator: torch.Generator):
    """Case 5: bit for bit, although the last key is ten times as long."""
    q, k, v = (torch.randn(1, 2, 9, 8, generator=generator) for _ in range(3))
    longer = k.clone()
    longer[:, :, -1] *= 10
    for path in ("pairs", "features"):
        if (form, path) == ("dense", "features"):
            continue
        outs = [
            attention(q, x, v, kernel=make(kind, 16), structure=Causal(), form=form, path=path) for x in (k, longer)
        ]
        assert torch.equal(outs[0][:, :, :-1], outs[1][:, :, :-1]), path
        assert bool(torch.isfinite(outs[1]).all())
        assert not torch.equal(outs[0][:, :, -1], outs[1][:, :, -1])


def test_the_last_key_does_not_move_earlier_outputs_of_the_fused_scan(generator: torch.Generator):
    """Case 5 at a length that it chooses by itself."""
    pytest.importorskip("numba")
    q, k, v = (torch.randn(1, 2, 600, 8, generator=generator) for _ in range(3))
    kernel = PositiveRandomFeatures(32)
    assert plan(q, k, v, kernel=kernel, structure=Causal()).backend == "numba"
    longer = k.clone()
    longer[:, :, -1] *= 10
    first, second = (attention(q, x, v, kernel=kernel, structure=Causal()) for x in (k, longer))
    assert torch.equal(first[:, :, :-1], second[:, :, :-1])
    assert not torch.equal(first[:, :, -1], second[:, :, -1])
    exact = attention(*(x.double() for x in (q, k, v)), kernel=kernel, structure=Causal(), path="pairs")
    assert_close(first, exact, 600)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"count": 0}, "count must be an integer of 1 or more"),
        ({"count": True}, "count must be"),
        ({"seed": -1}, "seed must be an integer of 0 or more"),
        ({"draw": 1.5}, "draw must be"),
        ({"norms": "one"}, "norms must be 'chi' or 'sqrt'"),
        ({"count": 7, "hyperbolic": True}, "must be even"),
        ({"directions": torch.zeros(3)}, r"directions must be a tensor \[256, D\]"),
        ({"directions": torch.zeros(4, 4)}, r"directions must be a tensor \[256, D\]"),
    ],
    ids=str,
)
def test_settings_that_are_refused(bad: dict[str, object], words: str):
    with pytest.raises(InvalidArgument, match=words):
        PositiveRandomFeatures(**bad)  # pyright: ignore[reportArgumentType]


def test_calls_that_are_refused():
    q = torch.ones(1, 1, 2, 4)
    with pytest.raises(InvalidArgument, match="bound to head dimension 6, but queries and keys have 4"):
        attention(q, q, q, kernel=PositiveRandomFeatures(8).bind(6, 1, 1))
    with pytest.raises(InvalidArgument, match="scale of 0 or more"):
        attention(q, q, q, kernel=PositiveRandomFeatures(8), scale=-1.0)
    with pytest.raises(InvalidArgument, match="even"):
        TrigonometricRandomFeatures(7)
    with pytest.raises(InvalidArgument, match="has the tensor 'directions'"):
        PositiveRandomFeatures(8).with_tensors({"weight": q})


@pytest.mark.parametrize("norms", ["chi", "sqrt"])
def test_trigonometric_moments_of_long_vectors(norms: str):
    """Their factor leaves the range of floats long before the mean and the variance do."""
    kernel = TrigonometricRandomFeatures(8, norms=norms)
    x = torch.tensor([1000.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    assert feature_variance(kernel, x, x) == 0
    for key in (-x, x, x + 1):
        assert not feature_mean(kernel, x, key).isnan()
        assert not feature_variance(kernel, x, key).isnan()
    at_right_angles = feature_mean(kernel, x, x.roll(1))
    if norms == "chi":
        assert at_right_angles == 1
        assert feature_mean(kernel, x, -x) == 0


def test_directions_are_bound_in_float32_at_least():
    before = torch.get_default_dtype()
    try:
        for dtype, wanted in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
            torch.set_default_dtype(dtype)
            bound = PositiveRandomFeatures(8).bind(4, 1, 1).directions
            assert bound is not None
            assert bound.dtype == wanted
    finally:
        torch.set_default_dtype(before)
