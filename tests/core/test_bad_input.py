"""Bad input is one plain sentence that says what, where, and what is allowed."""

from typing import Any

import pytest
import torch

from mercer.core.denominators import SigmoidGate
from mercer.core.feature_variance import feature_variance
from mercer.core.kernels import Elu, Exp, Taylor
from mercer.core.learned_maps import Hedgehog, matching_loss
from mercer.core.log_weights import Alibi, Decay
from mercer.core.merged import merge
from mercer.core.mixed import Mixed
from mercer.core.normalizers import L2, RMS, Identity, Standardize
from mercer.core.random_features import PositiveRandomFeatures
from mercer.core.state import CacheState, FeatureState, State
from mercer.core.structures import Causal, Documents, Full, Padding, Structure, Window
from mercer.errors import InvalidArgument, NonFinite, Unsupported
from mercer.nn import Attention
from mercer.ops import attention, plan


def x(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(size, dtype=dtype)


GOOD = (x(2, 4, 5, 3), x(2, 2, 5, 3), x(2, 2, 5, 6))


def refused(match: str, *tensors: torch.Tensor, error: type[Exception] = InvalidArgument, **options: Any) -> None:
    """Both faces refuse with the same sentence, if the plan can know."""
    with pytest.raises(error, match=match) as caught:
        attention(*(tensors or GOOD), **options)
    assert str(caught.value).rstrip().endswith(".")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_tensors_of_wrong_rank_or_dtype(name: str):
    place = ["query", "key", "value"].index(name)
    for wrong, match in (
        (x(4, 5, 3), rf"{name} must be \[B, H., L., Dv?\], four dimensions, not \[4, 5, 3\]"),
        (GOOD[place].long(), f"{name} must be float64, float32, bfloat16 or float16, not torch.int64"),
        (GOOD[place].to(torch.complex64), f"{name} must be float64"),
    ):
        tensors = list(GOOD)
        tensors[place] = wrong
        refused(match, *tensors)
        with pytest.raises(InvalidArgument, match=match):
            plan(*tensors)


def test_tensors_that_do_not_fit():
    q, k, v = GOOD
    refused("key is torch.float64 on cpu, but query is torch.float32", q, k.double(), v.double())
    refused("value is torch.bfloat16", q, k, v.bfloat16())
    for bad in (x(3, 2, 5, 3), x(2, 2, 4, 3), x(2, 2, 5, 4), x(2, 1, 5, 3)):
        refused(r"do not fit: expected \[B, Hq, Lq, D\]", q, bad, v)
    refused("do not fit", q, k, x(2, 2, 4, 6))
    refused("do not fit", x(3, 4, 5, 3), k, v)
    refused("4 query heads cannot share 3 key heads: Hk must divide Hq", q, x(2, 3, 5, 3), x(2, 3, 5, 6))
    refused("cannot share 0 key heads", q, x(2, 0, 5, 3), x(2, 0, 5, 6))
    refused("head dimensions must be 1 or more", x(2, 4, 5, 0), x(2, 2, 5, 0), v)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), "1", torch.tensor(1.0)])
def test_scales(scale: Any):
    refused("scale must be a finite number or None", scale=scale)


def test_options():
    refused("form must be 'auto' or one of 'dense', 'chunked', 'recurrent', not 'fast'", form="fast")
    refused("path must be 'auto' or one of 'pairs', 'features', not 'pair'", path="pair")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Window(-1, 0), "Window: left must be an integer of 0 or more, or None"),
        (lambda: Window(0, -2), "Window: right must be an integer of 0 or more"),
        (lambda: Window.last(0), "width must be 1 or more"),
        (lambda: Padding(), "exactly one of mask and lengths"),
        (lambda: Padding(mask=torch.ones(2, 5, dtype=torch.bool), lengths=torch.tensor([1, 2])), "exactly one"),
        (lambda: Padding(mask=x(2, 5)), r"mask must be a boolean \[batch, length\]"),
        (lambda: Padding(mask=torch.ones(5, dtype=torch.bool)), "mask must be a boolean"),
        (lambda: Padding(lengths=torch.tensor([1.0, 2.0])), r"lengths must be integers \[batch\]"),
        (lambda: Documents(torch.tensor([0])), r"offsets must be integers \[N \+ 1\]"),
        (lambda: Documents(torch.tensor([0.0, 5.0])), "offsets must be integers"),
        (lambda: Alibi(x(2, 2)), r"slopes must be \[heads\]"),
        (lambda: Alibi(torch.tensor([0.5, -0.1])), "every slope must be finite and 0 or more"),
        (lambda: Alibi(torch.tensor([0.5, float("inf")])), "every slope must be finite"),
        (lambda: Decay(), "exactly one of rate and log_rate"),
        (lambda: Decay(rate=torch.tensor([0.5, 0.0])), r"every rate must be in \(0, 1\]"),
        (lambda: Decay(rate=torch.tensor([1.5])), "every rate must be"),
        (lambda: Decay(log_rate=torch.tensor([0.1])), "every log_rate must be finite and 0 or less"),
        (lambda: Decay(log_rate=torch.tensor([-float("inf")])), "every log_rate must be finite"),
        (lambda: Decay(log_rate=torch.tensor([float("nan")])), "every log_rate must be"),
        (lambda: Decay(rate=torch.ones(2, 2)), r"rates must be \[heads\] or \[batch, heads, length\]"),
    ],
)
def test_structures(make: Any, match: str):
    with pytest.raises(InvalidArgument, match=match):
        make()


@pytest.mark.parametrize(
    ("structure", "match"),
    [
        (Padding(torch.ones(2, 4, dtype=torch.bool)), r"mask must be \[batch, key length\] = \[2, 5\], not \[2, 4\]"),
        (Padding(torch.ones(3, 5, dtype=torch.bool)), "mask must be"),
        (Padding(lengths=torch.tensor([1, 2, 3])), r"one entry per batch row, \[2\], not \[3\]"),
        (Padding(lengths=torch.tensor([1, 6])), "between 0 and the key length 5"),
        (Padding(lengths=torch.tensor([-1, 5])), "between 0 and the key length 5"),
        (Padding(torch.ones(2, 5, dtype=torch.bool), queries=torch.ones(2, 4, dtype=torch.bool)), "queries must be"),
        (Documents(torch.tensor([0, 3])), "offsets must rise from 0 to the packed length 5"),
        (Documents(torch.tensor([1, 5])), "offsets must rise"),
        (Documents(torch.tensor([0, 4, 3, 5])), "offsets must rise"),
        (Alibi(torch.ones(2)), r"slopes must be \[4\], one per query head, not \[2\]"),
        (Causal() & Decay(torch.ones(3)), "3 heads given; allowed are 1, 2"),
        (Causal() & Decay(torch.ones(2, 2, 4)), r"per-token rates must be \[2, heads, 5\]"),
    ],
)
@pytest.mark.parametrize("form", ["dense", "chunked", "recurrent"])
def test_structures_that_do_not_fit(structure: Structure, match: str, form: str):
    refused(match, structure=structure, form=form)


def test_documents_need_equal_lengths():
    q, k, v = GOOD
    for form in ("dense", "chunked", "recurrent"):
        refused(
            "queries and keys must be the same tokens, but there are 3 and 5",
            q[:, :, :3],
            k,
            v,
            structure=Documents(torch.tensor([0, 5])),
            form=form,
        )


@pytest.mark.parametrize(
    ("structure", "match"),
    [
        (Decay(torch.ones(1)), r"Decay needs a causal structure: write Causal\(\) & Decay"),
        (Full() & Decay(torch.ones(1)), "Decay needs a causal structure"),
        (Alibi(torch.ones(4)) & Alibi(torch.ones(4)), "Two Alibi in one structure"),
        (Padding(lengths=torch.tensor([1, 2])) & Documents(torch.tensor([0, 5])), "Padding together with Documents"),
        (Structure(), "is not a structure that the forms know"),
    ],
)
def test_structures_that_exclude_each_other(structure: Structure, match: str):
    refused(match, structure=structure, error=Unsupported)
    with pytest.raises(Unsupported, match=match):
        merge(structure)


def state_of(kernel: Any = None, path: str = "auto", structure: Structure | None = None, **options: Any) -> State:
    return attention(*GOOD, kernel=kernel, structure=structure or Causal(), path=path, return_state=True, **options)[1]


def test_states_that_do_not_fit():
    q, k, v = GOOD
    features, cache = state_of(Taylor(2), "features"), state_of()
    causal: dict[str, Any] = {"structure": Causal()}
    refused("made by Taylor.*order=2.*, but this call uses Elu", kernel=Elu(), state=features, **causal)
    refused("The state has 2 batch entries, but this call has 1", q[:1], k[:1], v[:1], state=cache, **causal)
    refused(r"this call needs \[2, 2, 10, 2\]", q, k, v[..., :2], kernel=Taylor(2), state=features, **causal)
    refused(
        "The state is torch.float32, but this call accumulates in torch.float64",
        q.double(),
        k.double(),
        v.double(),
        kernel=Taylor(2),
        state=features,
        **causal,
    )
    refused(
        "The cache holds keys .* batch, heads, dimension and dtype must agree",
        x(2, 4, 5, 2),
        x(2, 2, 5, 2),
        v,
        state=cache,
        **causal,
    )
    refused("The cache holds values", q, k, v[..., :2], state=cache, **causal)
    refused("The cache holds keys", q.bfloat16(), k.bfloat16(), v.bfloat16(), state=cache, **causal)
    refused("The cache was made without Decay", state=cache, structure=Causal() & Decay(torch.ones(1)))
    decayed = state_of(structure=Causal() & Decay(torch.ones(1)))
    refused("The cache was made with Decay", state=decayed, **causal)
    refused(
        "5 causal queries against 2 new keys",
        q,
        k[:, :, :2],
        v[:, :, :2],
        kernel=Taylor(2),
        state=features,
        error=Unsupported,
        **causal,
    )
    refused(
        "cannot serve a window that looks 1 tokens ahead", structure=Window(2, 1), return_state=True, error=Unsupported
    )
    refused("no finite feature map", state=features, error=Unsupported, **causal)


def test_states_from_tensors():
    for state in (state_of(), state_of(Elu(), "features"), state_of(Elu(), "features", normalizer=L2())):
        again = State.from_tensors(state.tensors())
        assert type(again) is type(state)
        assert again.tensors().keys() == state.tensors().keys()
        with pytest.raises(InvalidArgument, match=r"has no tensors \['more'\]"):
            State.from_tensors(state.tensors() | {"more": x(1)})
        with pytest.raises(InvalidArgument, match=r"needs the tensors \['length'\]"):
            State.from_tensors({n: t for n, t in state.tensors().items() if n != "length"})
    with pytest.raises(InvalidArgument, match=r"No state has the tensors \['weight'\]"):
        State.from_tensors({"weight": x(1)})


def test_states_that_do_not_merge():
    one, two, bare = (
        state_of(k, "features", normalizer=n) for k, n in ((Elu(), None), (Taylor(1, True), None), (Elu(), L2()))
    )
    assert isinstance(one, FeatureState)
    assert isinstance(two, FeatureState)
    assert isinstance(bare, FeatureState)
    assert not isinstance(state_of(), FeatureState | type(None))
    assert isinstance(state_of(), CacheState)
    with pytest.raises(InvalidArgument, match="Cannot merge a state of Elu"):
        one.merge(two)
    with pytest.raises(InvalidArgument, match="has a mass"):
        one.merge(bare)


def test_gains_that_do_not_fit():
    for make in (L2, RMS):
        for shape in ((3,), (4, 5), (2, 6), (1, 4, 6)):
            refused(r"gain must have shape \[4\] or \[4, 6\]", normalizer=make(torch.ones(shape)))


@pytest.mark.parametrize("form", ["dense", "chunked", "recurrent"])
def test_an_exponential_that_leaves_the_range(form: str):
    q = torch.full((1, 1, 3, 1), 100.0)
    refused(
        "left the range of torch.float32.*all inputs are finite.*smaller scale.*scale-invariant normaliser",
        q,
        q,
        q,
        kernel=Exp(),
        normalizer=Identity(),
        form=form,
        error=NonFinite,
    )
    assert bool(torch.isfinite(attention(q, q, q, normalizer=L2(), form=form)).all())


def test_messages_name_tensors_without_printing_them():
    gain = torch.ones(4, 6)
    for norm in (L2(gain), RMS(gain)):
        assert str(norm) in ("L2(gain)", "RMS(gain)")
        refused("The sdpa backend does not compute", normalizer=norm, form="dense", backend="sdpa", error=Unsupported)
    assert str(Causal() & Alibi(torch.ones(4)) & Decay(torch.ones(4))) == "Causal() & Alibi(slopes) & Decay(per head)"
    assert str(Padding(lengths=torch.tensor([1])) & Window(2, None)) == "Padding(lengths) & Window(left=2, right=None)"


def test_numbers_where_tensors_are_meant():
    """Each says that a tensor is wanted, when the part is made or at the latest in the call."""
    taken: list[tuple[Any, str]] = [
        (lambda: Mixed(Exp(), Elu(), log_ratio=2.0), "log_ratio must be a tensor"),
        (lambda: SigmoidGate(0.5), "gate must be a tensor"),
        (lambda: SigmoidGate(inner=None), "inner must be a normaliser"),
        (lambda: attention(*GOOD, normalizer=L2(2.0)), "gain must be a tensor"),
        (lambda: attention(*GOOD, normalizer=Standardize(bias=2.0)), "bias must be a tensor"),
        (lambda: PositiveRandomFeatures(2, directions=torch.ones(2, 3, dtype=torch.int64)), "of floats"),
        (lambda: attention(*GOOD, kernel=Hedgehog(weights={"query_weight": 3.0})), "query_weight must be"),
    ]
    for make, match in taken:
        with pytest.raises(InvalidArgument, match=match):
            make()


def test_tensors_of_a_kernel_by_wrong_names():
    kernel = Mixed(Exp(), PositiveRandomFeatures(4).bind(3, 1, 1))
    for names in ({}, {"directions": x(4, 3)}, {"far_directions": x(4, 3), "other": x(1)}):
        with pytest.raises(InvalidArgument, match="has the tensors"):
            kernel.with_tensors(names)
    assert kernel.with_tensors({"far_directions": x(4, 3), "log_ratio": x(1)}).log_ratio is not None
    half = Mixed(Exp(), Hedgehog(), log_ratio=x(1))
    assert half.with_tensors({"log_ratio": x(1) + 1}).far == Hedgehog()


def test_shapes_beside_attention():
    with pytest.raises(InvalidArgument, match="3 query heads cannot share 2 key heads"):
        matching_loss(Hedgehog().bind(4, 3, 2), x(1, 3, 5, 4), x(1, 2, 5, 4))
    for query, key in ((x(3, 4), x(2, 4)), (x(3, 4), x(3, 5)), (x(3, 0), x(3, 0)), (x(), x(3))):
        with pytest.raises(InvalidArgument, match="with the same D of 1 or more"):
            feature_variance(PositiveRandomFeatures(8), query, key)
    assert feature_variance(PositiveRandomFeatures(8), x(3, 1, 4), x(2, 4)).shape == (3, 2)


def test_a_state_whose_name_is_no_text():
    wrong = {"features": x(1, 1, 3, 2), "length": x(1).long(), "log_decay": x(1, 1).double()}
    for name in (torch.tensor([255, 254], dtype=torch.uint8), torch.ones(3), torch.tensor([300])):
        with pytest.raises(InvalidArgument, match="the bytes of a name in UTF-8"):
            State.from_tensors(wrong | {"kernel": name})


def test_likely_slips_get_a_short_answer():
    q = torch.randn(1, 2, 5, 4)
    pair = attention(q, q, q, kernel=Elu(), structure=Causal(), return_state=True)
    with pytest.raises(InvalidArgument, match="pass its second half") as caught:
        attention(q, q, q, kernel=Elu(), structure=Causal(), state=pair)
    assert len(str(caught.value)) < 200
    with pytest.raises(InvalidArgument, match=r"not 'elu'; mercer\.parse_attention"):
        attention(q, q, q, kernel="elu")
    with pytest.raises(InvalidArgument, match="not a Tensor"):
        attention(q, q, q, structure=torch.ones(100, 100))
    with pytest.raises(InvalidArgument, match="kernel must be a kernel object such as Elu"):
        Attention(16, 2, kernel="elu")
