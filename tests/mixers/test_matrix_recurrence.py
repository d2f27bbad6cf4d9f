"""The matrix recurrence: every form against the formula in numpy, gradients against autograd and finite differences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.mixers.matrix_cases import DECAYS, draw, formula, gradients, numpy_loop
from tests.tolerance import assert_close

from mercer.errors import InvalidArgument
from mercer.mixers import matrix_chunks
from mercer.mixers.matrix_recurrence import matrix_recurrence

FORMS = ("recurrent", "chunked")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    heads=st.integers(1, 2),
    dim=st.sampled_from([1, 3, 16]),
    width=st.sampled_from([1, 5, 16]),
    decay=st.sampled_from(list(DECAYS)),
    kind=st.sampled_from([{}, {"remove": True}, {"bonus": True}, {"remove": True, "bonus": True}, {"delta": True}]),
    state=st.booleans(),
    extreme=st.booleans(),
    form=st.sampled_from(FORMS),
)
def test_outputs_final_state_and_gradients_are_the_formulas(
    lengths, heads, dim, width, decay, kind, state, extreme, form
):
    sizes = {"batch": len(lengths), "heads": heads, "length": max(lengths), "dim": dim, "width": width}
    flags = {"decay": decay, "state": state, "extreme": extreme, **kind}
    case = draw(seeded(), **sizes, **flags, lengths=lengths).leaves()
    out, final = matrix_recurrence(**case.arguments(), form=form)
    expected_out, expected_final = numpy_loop(case)
    terms = dim * (max(lengths) + 1)
    assert_close(out, torch.from_numpy(expected_out), terms, "out")
    assert_close(final, torch.from_numpy(expected_final), terms, "final state")
    found = gradients((out, final), case, seeded(1))
    for name, expected in gradients(formula(case), case, seeded(1)).items():
        assert_close(found[name], expected, terms * heads * len(lengths), f"gradient of {name}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("decay", "remove", "bonus"), [("channel", True, False), ("channel", False, True),
    ("token", True, True), ("head", False, False), ("none", True, False)])  # fmt: skip
def test_chunks_and_segments(monkeypatch, dtype, decay, remove, bonus):
    monkeypatch.setattr(matrix_chunks, "WORKSPACE", 1)  # so that every chunk is a segment, made again for gradients
    shape = {"length": 150, "dim": 5, "width": 3, "heads": 1, "lengths": [150, 70]}
    case = draw(seeded(), decay=decay, remove=remove, bonus=bonus, extreme=True, **shape).to(dtype).leaves()
    outputs = matrix_recurrence(**case.arguments(), form="chunked")
    expected = formula(case)
    for found, right in zip(outputs, expected, strict=True):
        assert_close(found, right, 150)
    found = gradients(outputs, case, seeded(1))
    for name, right in gradients(expected, case, seeded(1)).items():
        assert_close(found[name], right, 300, f"gradient of {name}")


def test_forgetting_everything():
    case = draw(seeded(), length=70, dim=3)
    case.tensors["log_decay"][:, :, [20, 21, 65]] = -torch.inf
    expected_out, expected_final = numpy_loop(case)
    for form in FORMS:
        out, final = matrix_recurrence(**case.arguments(), form=form)
        assert_close(out, torch.from_numpy(expected_out), 200, form)
        assert_close(final, torch.from_numpy(expected_final), 200, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bonus", [False, True])
def test_gradients_are_those_of_finite_differences(form, bonus):
    case = draw(seeded(), heads=1, length=4, dim=2, width=2, remove=True, bonus=bonus, lengths=[4, 2]).leaves()
    names = list(case.tensors)

    def run(*tensors):
        case.tensors = dict(zip(names, tensors, strict=True))
        return matrix_recurrence(**case.arguments(), form=form)

    assert torch.autograd.gradcheck(run, tuple(case.tensors.values()))


@pytest.mark.parametrize("kind", ["remove", "delta"])
@pytest.mark.parametrize("form", FORMS)
def test_what_stands_behind_a_row_is_absent(form, kind):
    case = draw(seeded(), batch=3, length=9, lengths=[9, 4, 0], **{kind: True})
    over_tokens = {"query", "key", "value", "log_decay", "a", "b", "delta"} & set(case.tensors)
    case.tensors["log_decay"][:] = -0.3  # so that a step too many would show
    for name in over_tokens:
        for row, count in enumerate([9, 4, 0]):
            case.tensors[name][row, :, count:] = torch.nan
    case.tensors["state"][2, 0, 0, 0] = -0.0
    leaves = case.leaves()
    leaves.tensors["log_decay"].data.nan_to_num_(0)  # nan is not above 0, but keep the check's reading apart
    out, final = matrix_recurrence(**leaves.arguments(), form=form)
    assert torch.equal(final[2].view(torch.int64), case.tensors["state"][2].view(torch.int64))  # to the bit
    found = gradients((out, final), leaves, seeded(1))
    for row, count in enumerate([9, 4, 0]):
        assert not out[row, :, count:].any()
        assert torch.isfinite(out[row]).all()
        for name in over_tokens:
            assert not found[name][row, :, count:].any(), name
    short = {n: x[1:2] if n == "state" else x[1:2, :, :4] for n, x in case.tensors.items()}
    alone = type(case)(short, None, case.scale)
    expected_out, expected_final = numpy_loop(alone)
    assert_close(out[1:2, :, :4], torch.from_numpy(expected_out), 40)
    assert_close(final[1:2], torch.from_numpy(expected_final), 40)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cut", [0, 1, 4, 9])
def test_two_calls_are_one(form, cut):
    case = draw(seeded(), length=9, remove=True, bonus=True)
    whole, final = matrix_recurrence(**case.arguments(), form=form)
    over_tokens = {"query", "key", "value", "log_decay", "a", "b"}
    state, parts = case.tensors["state"], []
    for part in (slice(0, cut), slice(cut, None)):
        case_part = {n: x[:, :, part] if n in over_tokens else x for n, x in case.tensors.items()} | {"state": state}
        out, state = matrix_recurrence(**type(case)(case_part, None, case.scale).arguments(), form=form)
        parts.append(out)
    assert_close(torch.cat(parts, 2), whole, 40)
    assert_close(state, final, 40)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_a_compiler_gets_torchs_form():
    case = draw(seeded(), batch=1, length=16, dim=128, width=128, decay="token", remove=True).to(torch.float32)
    arguments = case.arguments()
    arguments["lengths"] = torch.tensor([13])
    compiled = torch.compile(matrix_recurrence, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        outputs = compiled(**arguments)
    for found, right in zip(outputs, matrix_recurrence(**arguments, form="recurrent"), strict=True):
        assert_close(found, right, 256)


def test_dtypes():
    case = draw(seeded(), remove=True).to(torch.bfloat16, "query", "key", "value", "a", "b").to(torch.float32, "state")
    out, final = matrix_recurrence(**case.arguments())
    assert (out.dtype, final.dtype) == (torch.bfloat16, torch.float32)


BAD = {
    "a form": {"form": "dense"},
    "a key": {"key": torch.zeros(1, 2, 3, 5)},
    "a value": {"value": torch.zeros(1, 2, 4, 4)},
    "whole numbers": {"value": torch.zeros(1, 2, 3, 4, dtype=torch.int64)},
    "a decay": {"log_decay": torch.zeros(1, 2, 3, 5)},
    "a growing decay": {"log_decay": torch.full((2,), 0.1)},
    "half of a removal": {"remove": (torch.zeros(1, 2, 3, 4),)},
    "a removal": {"remove": (torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 1))},
    "a bonus": {"bonus": torch.zeros(4)},
    "rates of the delta rule": {"delta": torch.zeros(1, 2, 3, 1)},
    "the delta rule and a bonus": {"delta": torch.zeros(1, 2, 3), "bonus": torch.zeros(2, 4)},
    "a state": {"state": torch.zeros(1, 2, 4, 5)},
    "a state's dtype": {"state": torch.zeros(1, 2, 4, 4, dtype=torch.float64)},
    "lengths": {"lengths": torch.tensor([4])},
    "lengths of another batch": {"lengths": torch.tensor([3, 3])},
    "lengths that are no integers": {"lengths": torch.tensor([3.0])},
}


@pytest.mark.parametrize("what", BAD)
def test_refusals(what):
    good = {name: torch.zeros(1, 2, 3, 4) for name in ("query", "key", "value")}
    matrix_recurrence(**good)
    with pytest.raises(InvalidArgument, match="matrix_recurrence: "):
        matrix_recurrence(**(good | BAD[what]))
