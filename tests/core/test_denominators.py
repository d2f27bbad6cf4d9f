"""What stands in the denominator's place: counts, bounds, constants, gates and layer norms, by their formulas."""

import pytest
import torch
from tests.contracts import cells
from tests.tolerance import assert_close

from mercer.core.denominators import Clamped, Detached, Length, SigmoidGate
from mercer.core.kernels import Elu, Exp, Kernel, Power, Taylor
from mercer.core.merged import merge
from mercer.core.normalizers import L2, Identity, Normalizer, Standardize, Sum
from mercer.core.reference import reference_attention
from mercer.core.structures import Causal, Documents, Full, Padding, Structure, Window
from mercer.core.support import unsupported
from mercer.errors import InvalidArgument, Unsupported
from mercer.ops import attention, plan

SHAPE = cells.Shape(heads=4, key_heads=2, queries=9, keys=9, dim=2, value_dim=3)


def ways(kernel: Kernel, normalizer: Normalizer, structure: Structure, stateful: bool = False) -> list[tuple[str, str]]:
    merged = merge(structure)
    return [c for c in cells.CELLS if unsupported(kernel, normalizer, merged, *c, None, stateful) is None]


def test_a_causal_row_is_divided_by_its_position(generator: torch.Generator):
    given = cells.inputs(SHAPE, generator)
    summed = attention(*given.qkv, kernel=Elu(), normalizer=Identity(), structure=Causal())
    divided = attention(*given.qkv, kernel=Elu(), normalizer=Length(), structure=Causal())
    assert_close(divided, summed / torch.arange(1, 10).view(9, 1), 9)
    last = attention(*given.qkv, kernel=Elu(), normalizer=Length(), structure=Window.last(4))
    ones = torch.ones_like(given.query), torch.ones_like(given.key), torch.ones_like(given.value)
    assert_close(
        attention(*ones, kernel=Power(2), normalizer=Length(), structure=Window.last(4)),
        2 * ones[0][..., :1].expand_as(last),
        9,
    )


@pytest.mark.parametrize("structure", cells.STRUCTURES)
@pytest.mark.parametrize(("kernel", "path"), [(Exp(), "pairs"), (Taylor(2), "features")], ids=str)
def test_counts_go_on_from_a_state(kernel: Kernel, path: str, structure: str, generator: torch.Generator):
    """At any split; windows, padding, ALiBi and gates as they are."""
    laid = cells.structures(SHAPE, generator)[structure]
    whole = laid.whole(SHAPE)
    if "documents" in structure or merge(whole).right != 0:
        return
    forms = [f for f, p in ways(kernel, Length(), whole, stateful=True) if p == path]
    given = cells.inputs(SHAPE, generator)
    expected = reference_attention(*given.qkv, kernel, Length(), whole)
    for form in forms:
        for split in range(SHAPE.keys + 1):
            state, outs = None, []
            for a, b in ((0, split), (split, SHAPE.keys)):
                parts = [x[:, :, a:b] for x in given.qkv]
                out, state = attention(
                    *parts,
                    kernel=kernel,
                    normalizer=Length(),
                    structure=laid.make(a, b),
                    form=form,
                    path=path,
                    state=state,
                    return_state=True,
                )
                outs.append(out)
            assert_close(torch.cat(outs, 2), expected, SHAPE.keys, f"{form} split at {split}")


@pytest.mark.parametrize(("kernel", "path"), [(Exp(), "pairs"), (Taylor(2), "features")], ids=str)
def test_packed_documents_count_and_gate_their_own_tokens_and_states(
    kernel: Kernel, path: str, generator: torch.Generator
):
    first, second = [0, 2, 2, 6], [0, 3, 4, 5]  # document 1 begins empty
    halves = [cells.inputs(cells.Shape(queries=n, keys=n), generator) for n in (6, 5)]
    gates = [torch.randn(2, 4, n, 2, generator=generator, dtype=torch.float64) for n in (6, 5)]
    for kind in (lambda gate: SigmoidGate(gate, Length()), lambda gate: SigmoidGate(gate[..., 0])):
        state, packed = None, []
        for half, gate, offsets in zip(halves, gates, (first, second), strict=True):
            out, state = attention(
                *half.qkv,
                kernel=kernel,
                normalizer=kind(gate),
                structure=Causal() & Documents(torch.tensor(offsets)),
                path=path,
                state=state,
                return_state=True,
            )
            packed.append(out)
        for document in range(3):
            spans = [slice(*offsets[document : document + 2]) for offsets in (first, second)]
            q, k, v = (
                torch.cat([x[:, :, s] for x, s in zip(t, spans, strict=True)], 2)
                for t in zip(*(h.qkv for h in halves), strict=True)
            )
            gate = torch.cat([g[:, :, s] for g, s in zip(gates, spans, strict=True)], 2)
            alone = reference_attention(q, k, v, kernel, kind(gate), Causal())
            together = torch.cat([out[:, :, s] for out, s in zip(packed, spans, strict=True)], 2)
            assert_close(together, alone, 9, f"document {document}")


@pytest.mark.parametrize("laid", ["causal", "padding-causal", "documents-causal", "decay-token", "everything"])
@pytest.mark.parametrize("kernel", [Exp(), Taylor(2), Elu()], ids=str)
def test_detached_has_the_value_of_sum_and_the_gradient_of_a_constant(
    kernel: Kernel, laid: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
):
    """In every form: d of a float64 call is taken as numbers, and the gradient of u / d goes through u alone."""
    cells.small_tiles(monkeypatch)
    chosen = cells.structures(SHAPE, generator)[laid]
    whole = chosen.whole(SHAPE)
    given = cells.inputs(SHAPE, generator)
    leaves = [*given.qkv, *chosen.leaves.values()]
    ones = torch.ones_like(given.value[..., :1])
    denominator = reference_attention(given.query, given.key, ones, kernel, Identity(), whole).detach()
    numerator = reference_attention(*given.qkv, kernel, Identity(), whole)
    empty = denominator == 0
    expected = (numerator / denominator.masked_fill(empty, 1)).masked_fill(empty, 0)
    wanted = cells.gradients(expected, given.cotangent, leaves)
    summed = attention(*given.qkv, kernel=kernel, normalizer=Sum(), structure=whole, form="dense")
    others = cells.gradients(summed, given.cotangent, leaves)
    assert any(float((w - o).abs().max()) > 1e-3 for w, o in zip(wanted, others, strict=True))
    for form, path in ways(kernel, Detached(), whole):
        out = attention(*given.qkv, kernel=kernel, normalizer=Detached(), structure=whole, form=form, path=path)
        assert_close(out, summed, SHAPE.keys, f"{form} {path}")
        for got, want in zip(cells.gradients(out, given.cotangent, leaves), wanted, strict=True):
            assert_close(got, want, SHAPE.keys, f"{form} {path}: gradient")


def test_no_fused_operator_divides_under_detached():
    q = torch.randn(1, 8, 512, 16)
    assert plan(q, q, q, structure=Causal(), form="chunked").backend != "torch"
    assert plan(q, q, q, normalizer=Detached(), structure=Causal(), form="chunked").backend == "torch"
    for backend in ("sdpa", "numba"):
        with pytest.raises(Unsupported, match=f"The {backend} backend does not compute"):
            attention(q, q, q, normalizer=Detached(), structure=Causal(), form="chunked", backend=backend)


@pytest.mark.parametrize("inner", [Sum(), L2()], ids=str)
def test_a_gate_around_softmax_keeps_its_fused_operators(inner: Normalizer, generator: torch.Generator):
    shape = cells.Shape(dim=4, value_dim=4)
    given = cells.inputs(shape, generator)
    gate = torch.randn(2, 4, 7, generator=generator, dtype=torch.float64)
    norm = SigmoidGate(gate, inner)
    assert plan(*given.qkv, normalizer=norm, structure=Causal(), form="chunked").backend == "sdpa"
    out = attention(*given.qkv, normalizer=norm, structure=Causal(), form="chunked")
    assert_close(out, reference_attention(*given.qkv, Exp(), norm, Causal()), 7)


@pytest.mark.parametrize(("form", "path"), [("dense", "pairs"), ("chunked", "pairs"), ("recurrent", "pairs")])
@pytest.mark.parametrize("size", [-300.0, -1.0, 0.0, 1.0, 300.0])
def test_a_clamped_denominator_takes_scores_of_any_size(size: float, form: str, path: str):
    """exp(300) is no float32, but exp(300) v / max(exp(300) n, 1) = v / n; and exp(-300) is as good as 0."""
    q = torch.ones(1, 1, 3, 1)
    k, v = torch.full_like(q, size, requires_grad=True), torch.tensor([1.0, 2.0, 6.0]).view(1, 1, 3, 1)
    out = attention(q, k, v, normalizer=Clamped(), structure=Causal(), form=form, path=path, scale=1.0)
    weight = torch.tensor(size, dtype=torch.float64).exp()
    steps = torch.arange(1, 4)
    expected = v.view(3).double().cumsum(0) * weight / (steps * weight).clamp(min=1)
    assert_close(out.view(3), expected, 3)
    (grad,) = torch.autograd.grad(out.sum(), k)
    assert bool(torch.isfinite(grad).all())


def test_clamping_is_for_signed_kernels_too(generator: torch.Generator):
    given = cells.inputs(SHAPE, generator)
    for kernel in cells.UNSIGNED.values():
        out = attention(*given.qkv, kernel=kernel, normalizer=Clamped(0.5), structure=Causal())
        assert_close(out, reference_attention(*given.qkv, kernel, Clamped(0.5), Causal()), SHAPE.keys)
        for norm in (Sum(), Detached()):
            with pytest.raises(Unsupported, match=r"takes negative values.*signed=True"):
                attention(*given.qkv, kernel=kernel, normalizer=norm, structure=Causal())


@pytest.mark.parametrize("structure", [Full(), Window(2, 1), Padding(lengths=torch.tensor([0, 3]))], ids=str)
@pytest.mark.parametrize(
    "norm",
    [Length(), Clamped(), Detached(), Standardize(bias=torch.ones(4)), SigmoidGate(torch.zeros(2, 4, 9))],
    ids=str,
)
def test_rows_that_see_nothing_are_zero(norm: Normalizer, structure: Structure, generator: torch.Generator):
    """Nine queries in front of and behind three keys: those in front of a causal or windowed layout see none."""
    given = cells.inputs(cells.Shape(queries=9, keys=3), generator)
    for kernel in (Exp(), Elu()):
        for cut in (structure, structure & Causal()):
            expected = reference_attention(*given.qkv, kernel, norm, cut)
            for form, path in ways(kernel, norm, cut):
                out = attention(*given.qkv, kernel=kernel, normalizer=norm, structure=cut, form=form, path=path)
                assert_close(out, expected, 3, f"{kernel} {form} {path}")
                for grad in cells.gradients(out, given.cotangent, list(given.qkv)):
                    assert bool(torch.isfinite(grad).all())
    assert not expected[:, :, :6].any()


@pytest.mark.parametrize("path", ["pairs", "features"])
@pytest.mark.parametrize("width", [None, 2])
def test_gates_of_absent_tokens_do_not_matter(path: str, width: int | None, generator: torch.Generator):
    """Not even NaN, neither forwards nor in gradients; that of a real token comes out as NaN, without a wrong cause."""
    shape = cells.Shape()
    given, mask = cells.inputs(shape, generator), cells.masks(shape)
    size = (2, 4, 7) if width is None else (2, 4, 7, width)
    gate = torch.randn(size, generator=generator, dtype=torch.float64)
    spoilt = gate.transpose(1, 2).masked_fill(~mask.view(2, 7, *[1] * (len(size) - 2)), torch.nan).transpose(1, 2)
    outs, grads = [], []
    for x in (gate, spoilt):
        leaf = x.clone().requires_grad_()
        structure = Causal() & Padding(mask)
        out = attention(*given.qkv, kernel=Elu(), normalizer=SigmoidGate(leaf), structure=structure, path=path)
        outs.append(out)
        grads.append(cells.gradients(out, given.cotangent, [*given.qkv, leaf]))
    assert torch.equal(*outs)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert bool(torch.isnan(attention(*given.qkv, normalizer=SigmoidGate(spoilt))).any())


def test_bad_arguments_are_named():
    q = torch.ones(2, 4, 3, 2)
    for minimum in (0, -1.0, float("inf"), float("nan"), True, "1"):
        with pytest.raises(InvalidArgument, match="minimum must be a positive finite number"):
            Clamped(minimum)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        InvalidArgument, match=r"gate must be a tensor \[2, 4, 3\] or \[2, 4, 3, 2\].*not one of shape \[2, 4, 1\]"
    ):
        attention(q, q, q, normalizer=SigmoidGate(torch.ones(2, 4, 1)))
    with pytest.raises(InvalidArgument, match=r"gate must be a tensor .* not None"):
        attention(q, q, q, normalizer=SigmoidGate())
    with pytest.raises(InvalidArgument, match=r"bias must have shape \[4\] or \[4, 2\]"):
        attention(q, q, q, normalizer=Standardize(bias=torch.ones(3)))
    with pytest.raises(InvalidArgument, match=r"gain must have shape"):
        attention(q, q, q, normalizer=Standardize(gain=torch.ones(3)))

    class Both(Sum):
        needs_count = True

    with pytest.raises(InvalidArgument, match="asks for the count and for the denominator"):
        attention(q, q, q, normalizer=Both())
