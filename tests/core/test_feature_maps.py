"""Kernels defined by their features: fixed maps by hand, learned maps bound and fitted, and what they refuse."""

import math
from itertools import product

import pytest
import torch
from tests.contracts import cells
from tests.tolerance import assert_close
from torch import Tensor

from mercer.core.feature_maps import Dpfp, ExpFeatures
from mercer.core.kernels import Elu, Exp, Kernel, Power, Taylor
from mercer.core.learned_maps import Hedgehog, LearnedMap, MlpFeatures, matching_loss
from mercer.core.log_weights import Decay
from mercer.core.names import parse_attention
from mercer.core.normalizers import L2, Identity, Sum
from mercer.core.random_features import TrigonometricRandomFeatures
from mercer.core.reference import kernel_value, monomial_features
from mercer.core.state import FeatureState
from mercer.core.structures import Causal
from mercer.errors import InvalidArgument
from mercer.ops import attention

SHAPE = cells.Shape()


@pytest.mark.parametrize("name", ["favor", *cells.FEATURE_KERNELS])
def test_features_are_those_of_the_formula(name: str, generator: torch.Generator):
    kernel, _ = cells.kernel(name, SHAPE, generator)
    given = cells.inputs(SHAPE, generator)
    scale = kernel.default_scale(SHAPE.dim)
    key = given.key.repeat_interleave(SHAPE.heads // SHAPE.key_heads, 1)  # heads may come repeated
    a, b = kernel.scaled_query(given.query, scale), kernel.scaled_key(key, scale)
    phi_query, phi_key = (x.exp() if kernel.log_features else kernel.features(x) for x in (a, b))
    assert phi_query.shape[-1] == phi_key.shape[-1] == kernel.feature_dim(SHAPE.dim)
    for t in range(SHAPE.keys):
        value = kernel_value(kernel, given.query[:, :, t], key[:, :, t], scale)
        assert_close((phi_query * phi_key).sum(-1)[:, :, t], value, 64, "K")
        assert_close(phi_key[:, :, t], monomial_features(kernel, key[:, :, t]), 64, "phi")


def test_dpfp_by_hand():
    x = torch.tensor([2.0, -3.0])  # r = [2, 0, 0, 3]
    assert Dpfp(1).map_query(x).tolist() == [6, 0, 0, 0]
    assert Dpfp(3).map_query(x).tolist() == [6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 6]
    q = torch.ones(1, 1, 2, 2)
    attention(q, q, q, kernel=Dpfp(3))
    with pytest.raises(InvalidArgument, match="at most 2 D - 1 = 3"):
        attention(q, q, q, kernel=Dpfp(4))
    for bad in (0, True, 1.5):
        with pytest.raises(InvalidArgument, match="nu must be an integer of 1 or more"):
            Dpfp(bad)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("form", ["dense", "chunked", "recurrent"])
@pytest.mark.parametrize("negation", [False, True])
def test_exponential_features_of_any_size(negation: bool, form: str, generator: torch.Generator):
    """exp(300) is infinite in float32; the average that it weighs is not."""
    q, k, v = (torch.randn(1, 2, 9, 3, generator=generator) for _ in range(3))
    kernel = ExpFeatures(negation)
    path = "pairs" if form == "dense" else "features"
    options = {"kernel": kernel, "structure": Causal(), "form": form, "path": path}
    out = attention(q + 300, k + 300, v, **options)
    wide = attention((q + 300).double(), (k + 300).double(), v.double(), **options)
    assert_close(out.double(), wide, 9 * 300, "float32", dtype=torch.float32)  # what rounding of 300 + q does to exp
    for scale in (0.0, -1.0):
        with pytest.raises(InvalidArgument, match="needs a scale above 0"):
            attention(q, k, v, scale=scale, **options)


@pytest.mark.parametrize("kernel", [Hedgehog(), Hedgehog(width=5), MlpFeatures(6), MlpFeatures(6, hidden=7)], ids=str)
def test_learned_maps_are_bound_to_heads(kernel: LearnedMap, generator: torch.Generator):
    q, k, v = (torch.randn(1, h, 4, 3, generator=generator) for h in (4, 2, 2))
    with pytest.raises(InvalidArgument, match=r"has no weights yet: use kernel.bind\(3, 4, 2\)"):
        attention(q, k, v, kernel=kernel)
    with pytest.raises(InvalidArgument, match="has no weights yet"):
        kernel.map_query(q)
    bound = kernel.bind(3, 4, 2, generator)
    assert bound.learned
    assert {w.shape[0] for n, w in bound.tensors().items() if n.startswith("query_")} == {4}
    assert {w.shape[0] for n, w in bound.tensors().items() if n.startswith("key_")} == {2}
    out = attention(q, k, v, kernel=bound)
    assert torch.equal(out, attention(q, k, v, kernel=kernel.with_tensors(bound.tensors())))
    assert bound.bind(3, 4, 2) is bound
    with pytest.raises(InvalidArgument, match=r"must be \[2, .*for head dimension 3, 2 query and 2 key heads"):
        attention(q[:, :2], k, v, kernel=bound)
    with pytest.raises(InvalidArgument, match="has the tensors"):
        kernel.with_tensors({"weight": q})
    # A state made with other weights is refused.
    _, state = attention(q, k, v, kernel=bound, structure=Causal(), return_state=True, path="features")
    other = bound.with_tensors({n: w + 0.1 for n, w in bound.tensors().items()})
    with pytest.raises(InvalidArgument, match="The state was made by"):
        attention(q, k, v, kernel=other, structure=Causal(), state=state)
    attention(q, k, v, kernel=bound, structure=Causal(), state=state)


def test_hedgehog_begins_as_the_identity_and_keeps_two_softmaxes(generator: torch.Generator):
    x = torch.randn(2, 3, 5, 4, generator=generator)
    phi = Hedgehog().bind(4, 3, 3).map_query(x)
    assert_close(phi, torch.cat((x.softmax(-1), (-x).softmax(-1)), -1), 4)
    assert_close(phi.sum(-1), torch.full((2, 3, 5), 2.0), 8)  # one joint softmax would sum to 1


@pytest.mark.parametrize(
    "make",
    [lambda **o: Hedgehog(**o), lambda width: Hedgehog(width), lambda width: MlpFeatures(width),
     lambda width: MlpFeatures(4, hidden=width)],
)  # fmt: skip
@pytest.mark.parametrize("bad", [0, -1, True, 1.5])
def test_widths_are_positive_integers(make, bad: object):
    with pytest.raises(InvalidArgument, match="must be an integer of 1 or more"):
        make(width=bad)


@pytest.mark.parametrize("kernel", [Hedgehog(), MlpFeatures(16, hidden=16), MlpFeatures(16)], ids=str)
def test_matching_brings_the_output_nearer_to_softmax(kernel: LearnedMap, generator: torch.Generator):
    q, k, v = (1.5 * torch.randn(1, 2, 24, 4, generator=generator) for _ in range(3))
    exact = attention(q, k, v, structure=Causal())

    def error(with_: Kernel) -> float:
        return float((attention(q, k, v, kernel=with_, structure=Causal()) - exact).norm() / exact.norm())

    start = kernel.bind(4, 2, 2, generator)
    weights = {n: w.clone().requires_grad_() for n, w in start.tensors().items()}
    optimizer = torch.optim.Adam(weights.values(), lr=0.03)
    losses: list[float] = []
    for _ in range(150):
        loss = matching_loss(kernel.with_tensors(weights), q, k)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    entropy = float(matching_loss_of_softmax(q, k))
    assert entropy < losses[-1] < losses[0]
    assert losses[-1] - entropy < 0.6 * (losses[0] - entropy)
    fitted = kernel.with_tensors({n: w.detach() for n, w in weights.items()})
    assert error(fitted) < 0.9 * error(start)


def matching_loss_of_softmax(query: Tensor, key: Tensor) -> Tensor:
    """The least that the loss can be: the mean entropy of softmax's rows."""
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return torch.distributions.Categorical(logits=scores).entropy().mean()


def test_matching_loss_is_a_cross_entropy(generator: torch.Generator):
    q, k = (torch.randn(1, h, 5, 3, generator=generator, dtype=torch.float64) for h in (4, 2))
    for kernel, causal in product((Taylor(2), Elu(), ExpFeatures()), (True, False)):
        structure = Causal() if causal else None
        eye = torch.eye(5, dtype=torch.float64).expand(1, 2, 5, 5)
        a, b = attention(q, k, eye, structure=structure), attention(q, k, eye, kernel=kernel, structure=structure)
        direct = -torch.where(a > 0, a * torch.where(b > 0, b, 1.0).log(), 0.0).sum(-1).mean()
        assert_close(matching_loss(kernel, q, k, causal=causal), direct, 25, str(kernel))
    # A Taylor polynomial of high order is the exponential: what remains is softmax's entropy.
    twice = k.repeat_interleave(2, 1)
    assert_close(matching_loss(Taylor(8), q / 9, k), matching_loss_of_softmax(q / 9, twice), 200, dtype=torch.float32)
    for refused, words in ((Exp(), "finitely many features"), (Taylor(1), "positive kernel"), (Hedgehog(), "bind")):
        with pytest.raises(InvalidArgument, match=words):
            matching_loss(refused, q, k)
    with pytest.raises(InvalidArgument, match="5 causal queries need as many keys, not 4"):
        matching_loss(Elu(), q, k[:, :, 1:])


@pytest.mark.parametrize("normalizer", [Sum(), L2()], ids=str)
def test_rfa_with_its_recency_gate(normalizer: Sum | L2, generator: torch.Generator):
    """S = g S + (1 - g) phi(k) v^T and the same for z: a literal loop over time."""
    kernel = TrigonometricRandomFeatures(32, unit=True, signed=True)
    q, k, v = (torch.randn(2, 3, 8, 4, generator=generator, dtype=torch.float64) + 0.7 for _ in range(3))
    gate = (torch.rand(2, 3, 8, generator=generator, dtype=torch.float64) * 0.8 + 0.1).requires_grad_()
    directions = kernel.directions_for(4)

    def phi(x: Tensor) -> Tensor:
        angle = x / x.norm(dim=-1, keepdim=True) @ directions.T
        return math.exp(0.5) * torch.cat((angle.sin(), angle.cos()), -1) / 4  # 16 directions

    state = torch.zeros(2, 3, 32, 5, dtype=torch.float64)
    rows: list[Tensor] = []
    for t in range(8):
        g = gate[:, :, t, None, None]
        added = torch.cat((v[:, :, t], torch.ones(2, 3, 1)), -1)
        state = g * state + (1 - g) * phi(k[:, :, t]).unsqueeze(-1) * added.unsqueeze(-2)
        read = (phi(q[:, :, t]).unsqueeze(-2) @ state).squeeze(-2)
        top, bottom = read[..., :-1], read[..., -1:]
        rows.append(top / bottom if isinstance(normalizer, Sum) else top / top.norm(dim=-1, keepdim=True))
    expected = torch.stack(rows, 2)
    wanted = torch.autograd.grad(expected.square().sum(), gate)[0]
    structure = Causal() & Decay(gate, complement=True)
    for form, path in cells.CELLS:
        if (form, path) != ("dense", "features"):
            out = attention(q, k, v, kernel=kernel, normalizer=normalizer, structure=structure, form=form, path=path)
            assert_close(out, expected, 8 * 32, f"{form} {path}")
            assert_close(torch.autograd.grad(out.square().sum(), gate)[0], wanted, 8 * 32, f"{form} {path}: gate")


@pytest.mark.parametrize("degree", [2, 4])
def test_power_is_the_symmetric_power_kernel(degree: int, generator: torch.Generator):
    """(scale q.k)^p under a decay e^(G_i - G_j), with a state of C(d+p-1, p) rows: power attention as published."""
    kernel, _ = parse_attention(f"power{degree}-sum")
    assert kernel == Power(degree)
    dim, length = 3, 7
    q, k, v = (torch.randn(1, 1, length, dim, generator=generator, dtype=torch.float64) for _ in range(3))
    log_gate = -torch.rand(1, 1, length, generator=generator, dtype=torch.float64)
    total = log_gate.cumsum(-1)[0, 0]
    weight = (q[0, 0] @ k[0, 0].T / math.sqrt(dim)) ** degree * (total.unsqueeze(1) - total).exp().tril()
    for normalizer, expected in ((Sum(), weight / weight.sum(-1, keepdim=True)), (Identity(), weight)):
        out, state = attention(
            q, k, v, kernel=kernel, normalizer=normalizer, structure=Causal() & Decay(log_rate=log_gate),
            path="features", return_state=True,
        )  # fmt: skip
        assert_close(out[0, 0], expected @ v[0, 0], length)
        assert isinstance(state, FeatureState)
        assert state.features.shape[2] == math.comb(dim + degree - 1, degree)
