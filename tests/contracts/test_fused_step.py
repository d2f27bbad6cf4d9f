"""The fused step of the recurrent form (Numba) is the specification, wherever the plan may choose it."""

import pytest
import torch
from tests.contracts import cells
from tests.tolerance import assert_close
from torch import Tensor

from mercer.core.kernels import Elu, Taylor
from mercer.core.log_weights import Decay
from mercer.core.merged import merge
from mercer.core.mixed import Mixed
from mercer.core.normalizers import L2, Identity, Normalizer, Sum
from mercer.core.random_features import PositiveRandomFeatures
from mercer.core.reference import reference_attention
from mercer.core.state import State
from mercer.core.structures import Causal, Full, Structure
from mercer.core.support import Sizes, unsupported
from mercer.errors import Unsupported
from mercer.ops import attention, plan

pytest.importorskip("numba")

SHAPE = cells.Shape(queries=6, keys=6)
ALL = cells.KERNELS | cells.FEATURE_KERNELS
FUSED = {"form": "recurrent", "path": "features", "backend": "numba"}
CAUSAL = [
    name
    for name, laid in cells.structures(SHAPE, torch.Generator().manual_seed(0)).items()
    for merged in [merge(laid.whole(SHAPE))]
    if merged.causal and merged.left is None and merged.relative is None
]


def finite() -> list[str]:
    sizes = Sizes(2, 4, 2, 6, 6, 3, 2)
    merged = merge(Causal())
    return [n for n, k in ALL.items() if unsupported(k, Sum(), merged, "recurrent", "features", sizes) is None]


def compare(name: str, normalizer: Normalizer, structure: str, dtype: torch.dtype, generator: torch.Generator):
    laid = cells.structures(SHAPE, generator)[structure]
    kernel, leaves = cells.kernel(name, SHAPE, generator)
    given = cells.inputs(SHAPE, generator, dtype, kernel=kernel)
    whole = laid.whole(SHAPE)
    options = FUSED | {"kernel": kernel, "normalizer": normalizer, "structure": whole}
    with torch.no_grad():
        assert plan(*given.qkv, **options).backend == "numba"
        out = attention(*given.qkv, **options)
        expected = reference_attention(*given.double().qkv, kernel, normalizer, whole)
    assert out.dtype == dtype
    assert_close(out, expected, SHAPE.keys)
    assert leaves or not kernel.learned


@pytest.mark.parametrize("normalizer", [Sum(), L2(), Identity()], ids=str)
@pytest.mark.parametrize("structure", ["causal", "recency", "decay-documents"])
@pytest.mark.parametrize("kernel", finite())
def test_kernels(kernel: str, structure: str, normalizer: Normalizer, generator: torch.Generator):
    compare(kernel, normalizer, structure, torch.float32, generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("structure", CAUSAL)
@pytest.mark.parametrize("kernel", ["elu", "taylor2", "favor"])
def test_structures(kernel: str, structure: str, dtype: torch.dtype, generator: torch.Generator):
    compare(kernel, Sum(), structure, dtype, generator)


@pytest.mark.parametrize("structure", ["causal", "padding-causal", "alibi-causal", "decay-token", "recency"])
@pytest.mark.parametrize("kernel", ["elu", "taylor2", "favor", "hedgehog", "mixed"])
def test_states(kernel: str, structure: str, generator: torch.Generator):
    """A sequence token by token, each step by another backend than the one before, is the chunked form of it all."""
    chosen = Mixed(Elu(), Taylor(2), window=2) if kernel == "mixed" else cells.kernel(kernel, SHAPE, generator)[0]
    laid = cells.structures(SHAPE, generator)[structure]
    q, k, v = cells.inputs(SHAPE, generator, torch.float32).qkv

    def run(a: int, b: int, form: str, backend: str, state: State | None = None) -> tuple[Tensor, State]:
        with torch.no_grad():
            return attention(
                q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], kernel=chosen, structure=laid.make(a, b), form=form,
                path="features", backend=backend, state=state, return_state=True,
            )  # fmt: skip

    whole, end = run(0, 6, "chunked", "torch")
    for backends in (["numba"] * 6, ["torch", "numba"] * 3, ["numba", "torch"] * 3):
        outs, state = [], None
        for t, backend in enumerate(backends):
            kept = None if state is None else state.clone()
            out, after = run(t, t + 1, "recurrent", backend, state)
            if state is not None:
                assert kept is not None
                for name, old, now in zip(
                    kept.tensors(), kept.tensors().values(), state.tensors().values(), strict=True
                ):
                    assert torch.equal(old, now), f"step {t} by {backend} changed {name} of the state it was given"
            outs.append(out)
            state = after
        assert_close(torch.cat(outs, 2), whole, 6)
        assert state is not None
        for name, a, b in zip(end.tensors(), state.tensors().values(), end.tensors().values(), strict=True):
            if a.is_floating_point() and "near" not in name:  # a cache may hold what is no longer valid
                known = torch.isfinite(b)  # the peak of rows that saw nothing is minus infinity
                assert torch.equal(torch.isfinite(a), known), name
                # A peak is kept in float64, but it is the largest of products in float32.
                assert_close(a[known], b[known], 6, name, dtype=torch.float32 if "peak" in name else None)


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("kernel", [Elu(), Taylor(2), PositiveRandomFeatures(8)], ids=str)
def test_a_padding_step_leaves_the_state_to_the_bit(kernel, decay: bool, generator: torch.Generator):
    from mercer import Padding

    q, k, v = (torch.randn(2, 2, 1, 5, generator=generator) for _ in range(3))
    v[0, 0, 0, 0] = -0.0
    structure: Structure = Causal() & Decay(torch.tensor([0.5, 0.9])) if decay else Causal()
    _, state = attention(q, k, v, kernel=kernel, structure=structure, return_state=True, **FUSED)
    hidden = torch.tensor([[False], [True]])
    k[0] = v[0] = torch.nan
    out, after = attention(
        q, k, v, kernel=kernel, structure=structure & Padding(hidden), state=state, return_state=True, **FUSED
    )
    assert not out[0].any()
    assert torch.equal(after.features[0].view(torch.int32), state.features[0].view(torch.int32))
    assert torch.equal(after.mass[0].view(torch.int32), state.mass[0].view(torch.int32))
    assert not torch.equal(after.features[1], state.features[1])


@pytest.mark.parametrize("kernel", ["elu", "favor"])
@pytest.mark.parametrize("queries", [1, 4, 9])
def test_other_numbers_of_queries(queries: int, kernel: str, generator: torch.Generator):
    shape = cells.Shape(queries=queries, keys=6)
    q, k, v = (x.detach() for x in cells.inputs(shape, generator, torch.float32).qkv)
    expected = reference_attention(q.double(), k.double(), v.double(), ALL[kernel], Sum(), Causal())
    assert_close(attention(q, k, v, kernel=ALL[kernel], structure=Causal(), **FUSED), expected, 6)


def test_one_token_without_an_order(generator: torch.Generator):
    q, k, v = (torch.randn(2, 4, 1, 3, generator=generator) for _ in range(3))
    for kernel in (Elu(), Taylor(2), PositiveRandomFeatures(8)):
        first, state = attention(q, k, v, kernel=kernel, return_state=True, **FUSED)
        twice, _ = attention(q, k + 1, v - 2, kernel=kernel, state=state, return_state=True, **FUSED)
        both = [torch.cat((a, b), 2) for a, b in ((k, k + 1), (v, v - 2))]
        assert_close(first, v, 1)
        assert_close(twice, attention(q, *both, kernel=kernel, form="chunked", path="features"), 2)


def test_it_is_chosen_and_refused_where_it_says():
    big = [torch.empty(1, 8, 1, 64, device="meta") for _ in range(3)]
    given = {"kernel": Taylor(2), "structure": Causal(), "return_state": True}
    chosen = plan(*big, **given)
    assert (chosen.form, chosen.backend) == ("recurrent", "numba")
    assert "fused step" in chosen.reason
    assert plan(*big, **given | {"kernel": Mixed(Elu(), Taylor(2), window=4)}).backend == "numba"
    small = [torch.empty(1, 2, 1, 8, device="meta") for _ in range(3)]
    assert plan(*small, **given).backend == "torch"
    assert plan(*small, **given, backend="numba").backend == "numba"
    for why, parts, options in (
        ("several queries of a full structure", [torch.empty(1, 8, 2, 64) for _ in range(3)], {"structure": Full()}),
        ("float64", [x.double() for x in big], {}),
        ("a query that is trained", [torch.zeros(1, 8, 1, 64, requires_grad=True), *torch.zeros(2, 1, 8, 1, 64)], {}),
        ("a rate that is trained", big, {"structure": Causal() & Decay(torch.full((8,), 0.9, requires_grad=True))}),
    ):
        wanted = given | {"form": "recurrent", "path": "features"} | options
        assert plan(*parts, **wanted).backend == "torch", why
        with pytest.raises(Unsupported, match="numba backend does not compute"):
            plan(*parts, **wanted, backend="numba")


def test_no_gradient_is_lost(generator: torch.Generator):
    """Whatever wants a gradient gets it, from torch's form: a state, a learned map, and a gain behind the step."""
    q, k, v = (torch.randn(1, 2, 1, 64, generator=generator) for _ in range(3))
    given = {"kernel": Taylor(2), "structure": Causal(), "return_state": True}
    assert plan(q, k, v, **given).backend == "numba"
    _, state = attention(q, k, v, **given)
    state.features.requires_grad_()
    assert plan(q, k, v, **given, state=state).backend == "torch"
    out, _ = attention(q, k, v, **given, state=state)
    (grad,) = torch.autograd.grad(out.sum(), state.features)
    assert grad.abs().sum() > 0
    with torch.no_grad():
        assert plan(q, k, v, **given, state=state).backend == "numba"
    learned = cells.FEATURE_KERNELS["hedgehog"].bind(64, 2, 2)
    leaves = {n: t.detach().requires_grad_() for n, t in learned.tensors().items()}
    trained = learned.with_tensors(leaves)
    assert plan(q, k, v, kernel=learned, structure=Causal(), return_state=True).backend == "numba"
    assert plan(q, k, v, kernel=trained, structure=Causal(), return_state=True).backend == "torch"
    out, _ = attention(q, k, v, kernel=trained, structure=Causal(), state=None, return_state=True)
    assert out.requires_grad
    gain = torch.ones(2, requires_grad=True)
    out, _ = attention(q, k, v, kernel=Taylor(2), structure=Causal(), normalizer=L2(gain), return_state=True)
    assert torch.autograd.grad(out.sum(), gain)[0].abs().sum() > 0
