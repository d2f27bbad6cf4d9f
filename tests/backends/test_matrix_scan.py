"""The fused matrix recurrence: outputs, final states and all gradients against the formula in float64."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mixers.matrix_cases import DECAYS, draw, formula, gradients
from tests.tolerance import assert_close

from mercer.backends import matrix_scan
from mercer.errors import InvalidArgument, Unsupported
from mercer.mixers.matrix_recurrence import matrix_recurrence

pytest.importorskip("numba")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def compare(case, terms, dtype=torch.float32):
    """Without and with gradients; dtype: the coarsest of the tensors, upstream gradients included."""
    case = case.leaves()
    with torch.no_grad():
        untrained = matrix_recurrence(**case.arguments(), form="numba")
    outputs = matrix_recurrence(**case.arguments(), form="numba")
    expected = formula(case)
    for what, found, again, right in zip(("out", "final state"), outputs, untrained, expected, strict=True):
        assert_close(found, right, terms, what, dtype)
        assert torch.equal(found, again)
    found = gradients(outputs, case, seeded(1))
    for name, right in gradients(expected, case, seeded(1)).items():
        assert found[name].dtype == case.tensors[name].dtype
        assert_close(found[name], right, 4 * terms, f"gradient of {name}", dtype)


# Channels in 1, 2, 3 (2 and 1) and 4 and more vectors, values likewise and in slices of 64, lengths around the 8 tokens
# up to which they go one by one, blocks of 16 and the 64 tokens between states that are kept.
SHAPES = {
    "one": {"batch": 1, "heads": 1, "length": 1, "dim": 1, "width": 1},
    "tiny": {"length": 7, "dim": 5, "width": 3},
    "vectors": {"length": 9, "dim": 16, "width": 32},
    "two and one": {"length": 65, "dim": 33, "width": 17, "heads": 1},
    "three": {"length": 64, "dim": 20, "width": 45, "batch": 1},
    "slices": {"length": 73, "dim": 64, "width": 130, "heads": 1},
    "wide keys": {"length": 20, "dim": 100, "width": 8, "heads": 1},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("decay", "remove", "bonus"),
    [("channel", False, False), ("channel", True, True), ("token", True, False), ("head", False, True),
     ("none", True, False), ("head-channel", False, False)],
)  # fmt: skip
def test_outputs_final_state_and_gradients_are_the_formulas(shape, decay, remove, bonus):
    case = draw(seeded(), **SHAPES[shape], decay=decay, remove=remove, bonus=bonus, extreme=decay != "head")
    compare(case.to(torch.float32), SHAPES[shape]["length"])


@settings(max_examples=12)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=2),
    dim=st.integers(1, 70),
    width=st.integers(1, 70),
    decay=st.sampled_from(list(DECAYS)),
    kind=st.sampled_from([{}, {"remove": True}, {"bonus": True}, {"remove": True, "bonus": True}, {"delta": True}]),
    state=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_sizes(lengths, dim, width, decay, kind, state, seed):
    sizes = {"batch": len(lengths), "length": max(lengths), "dim": dim, "width": width, "heads": 1}
    case = draw(seeded(seed), **sizes, **kind, decay=decay, state=state, extreme=True, lengths=lengths)
    compare(case.to(torch.float32), max(lengths) + 1)


@pytest.mark.parametrize("length", [5, 40])  # token by token, and in blocks
def test_decays_that_forget_everything_and_growth(length):
    for decay in ("token", "channel"):
        case = draw(seeded(), length=length, dim=20, width=17, decay=decay, remove=True).to(torch.float32)
        log = case.tensors["log_decay"]
        log[:, :, [2, length - 1]] = -torch.inf
        outputs = matrix_recurrence(**case.arguments(), form="numba")
        for found, right in zip(outputs, formula(case), strict=True):
            assert_close(found, right, length)
        log[:, :, -1] = 0.1
        with pytest.raises(InvalidArgument, match="log_decay must be 0 or less"):
            matrix_recurrence(**case.arguments(), form="numba")
        short = case.arguments() | {"lengths": torch.full((2,), length - 1)}  # what is not there is not looked at
        matrix_recurrence(**short, form="numba")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("decay", ["none", "token", "channel"])
def test_the_delta_rule_is_the_formula(shape, decay):
    case = draw(seeded(), **SHAPES[shape], decay=decay, delta=True, extreme=True)
    compare(case.to(torch.float32), SHAPES[shape]["length"])


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("width", [16, 70])
def test_rows_of_unequal_lengths(width, delta):
    case = draw(seeded(), batch=3, length=70, dim=6, width=width, remove=not delta, delta=delta, lengths=[70, 0, 9])
    for name in {"query", "key", "value", "log_decay", "a", "b", "delta"} & set(case.tensors):
        for row, count in enumerate([70, 0, 9]):
            case.tensors[name][row, :, count:] = torch.nan
    case = case.to(torch.float32)
    case.tensors["state"][1, 0, 0, 0] = -0.0
    leaves = case.leaves()
    out, final = matrix_recurrence(**leaves.arguments(), form="numba")
    assert torch.equal(final[1].view(torch.int32), case.tensors["state"][1].view(torch.int32))  # to the bit
    found = gradients((out, final), leaves, seeded(1))
    clean = type(case)({n: x.nan_to_num() for n, x in case.tensors.items()}, case.lengths, case.scale).leaves()
    expected = formula(clean)
    assert_close(out, expected[0], 70)
    assert_close(final, expected[1], 70)
    for name, right in gradients(expected, clean, seeded(1)).items():
        assert_close(found[name], right, 280, name)  # zeros where nothing is, too


def test_bfloat16_inputs():
    names = ("query", "key", "value", "a", "b", "log_decay")
    for width in (16, 70):
        case = draw(seeded(), length=70, dim=16, width=width, remove=True).to(torch.float32)
        compare(case.to(torch.bfloat16, *names), 70, torch.bfloat16)
    case = draw(seeded(), length=70, dim=20, width=70, delta=True).to(torch.float32)
    compare(case.to(torch.bfloat16, "query", "key", "value", "log_decay", "delta"), 70, torch.bfloat16)
    case = draw(seeded(), length=9, dim=5, width=3, bonus=True).to(torch.float32)
    compare(case.to(torch.float16, "query", "value").to(torch.bfloat16, "bonus"), 9, torch.bfloat16)


def test_expanded_and_turned_inputs():
    case = draw(seeded(), batch=2, heads=3, length=11, dim=8, width=16, decay="token", remove=True).to(torch.float32)
    one = draw(seeded(1), batch=1, heads=1, length=11, dim=8, width=16, remove=True).to(torch.float32)
    case.tensors["key"] = one.tensors["key"].expand(2, 3, -1, -1)
    case.tensors["b"] = case.tensors["b"].transpose(1, 2).contiguous().transpose(1, 2)
    case.tensors["value"] = case.tensors["value"].mT.contiguous().mT
    expected = formula(case)
    for found, right in zip(matrix_recurrence(**case.arguments(), form="numba"), expected, strict=True):
        assert_close(found, right, 11)


def test_inputs_that_are_negative_by_a_mark_on_them():
    case = draw(seeded(), length=11, dim=8, width=16, remove=True, bonus=True).to(torch.float32).leaves()
    marked = type(case)({n: torch._neg_view(-x) for n, x in case.tensors.items()}, None, case.scale)
    expected = formula(case)
    outputs = matrix_recurrence(**marked.arguments(), form="numba")
    for found, right in zip(outputs, expected, strict=True):
        assert_close(found, right, 11)
    upstream = [torch.randn(x.shape, generator=seeded(1)) for x in outputs]
    leaves = list(case.tensors.values())
    found = torch.autograd.grad(outputs, leaves, [torch._neg_view(-x) for x in upstream])
    right = torch.autograd.grad(expected, leaves, [x.double() for x in upstream])
    for one, other in zip(found, right, strict=True):
        assert_close(one, other, 44)


def test_transforms_of_torch_take_another_form():
    case = draw(seeded(), length=300, dim=32, width=32, delta=True).to(torch.float32)

    def total(query, form="auto"):
        return matrix_recurrence(**case.arguments() | {"query": query}, form=form)[0].sum()

    query = case.tensors["query"]
    assert matrix_scan.serves(*(case.tensors[name] for name in ("query", "key", "value")))
    leaf = query.clone().requires_grad_()
    assert_close(torch.func.grad(total)(query), torch.autograd.grad(total(leaf), leaf)[0], 300)
    sums = torch.func.vmap(total)(torch.stack([query, 2 * query]))
    assert_close(sums, torch.stack([total(query), total(2 * query)]), 300)
    with pytest.raises(Unsupported, match=r"torch\.func"):
        torch.func.grad(lambda x: total(x, "numba"))(query)


def test_no_argument_is_changed_and_a_state_goes_on():
    # read straight from the old state into the new one, and not
    for width, kind in (
        (64, {"remove": True, "bonus": True}),
        (20, {"remove": True, "bonus": True}),
        (64, {"delta": True}),
    ):
        case = draw(seeded(), length=3, dim=8, width=width, **kind).to(torch.float32)
        whole, final = matrix_recurrence(**case.arguments(), form="numba")
        state, rows = case.tensors["state"], []
        for t in range(3):
            one = {n: x[:, :, t : t + 1] if n not in ("bonus", "state") else x for n, x in case.tensors.items()}
            before = state.clone()
            given = type(case)(one | {"state": state}, None, case.scale).arguments()
            row, after = matrix_recurrence(**given, form="numba")
            assert torch.equal(state, before)
            rows.append(row)
            state = after
        assert_close(torch.cat(rows, 2), whole, 8)
        assert_close(state, final, 8)


def test_digits_do_not_depend_on_threads():
    case = draw(seeded(), batch=1, heads=1, length=70, dim=16, width=200, remove=True).to(torch.float32)

    def run(threads):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            leaves = case.leaves()
            outputs = matrix_recurrence(**leaves.arguments(), form="numba")
            return [*outputs, *gradients(outputs, leaves, seeded(1)).values()]
        finally:
            torch.set_num_threads(before)

    for one, many in zip(run(1), run(4), strict=True):
        assert torch.equal(one, many)


def test_what_auto_takes():
    seen = []
    real = matrix_scan._forward

    def spy(*given, **options):
        seen.append(threading.get_ident())
        return real(*given, **options)

    def took(**sizes):
        case = draw(seeded(), **sizes)
        for dtype, expected in ((torch.float32, True), (torch.float64, False)):
            seen.clear()
            matrix_recurrence(**case.to(dtype).arguments())
            assert bool(seen) == (expected and sizes["dim"] > 4), (sizes, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix_scan, "_forward", spy)
        took(length=1, dim=64, width=64)
        took(length=64, dim=64, width=64)
        took(length=1, dim=4, width=4)
        took(length=64, dim=4, width=4)


def test_what_it_does_not_serve():
    case = draw(seeded())
    with pytest.raises(Unsupported, match="form='chunked'"):
        matrix_recurrence(**case.arguments(), form="numba")
    leaves = case.to(torch.float32).leaves()
    out, _ = matrix_recurrence(**leaves.arguments(), form="numba")
    with pytest.raises(Unsupported, match="Second derivatives"):
        torch.autograd.grad(out.sum(), leaves.tensors["key"], create_graph=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix_scan, "installed", lambda: False)
        with pytest.raises(Unsupported, match=r"mercer\[cpu\]"):
            matrix_recurrence(**leaves.arguments(), form="numba")
