"""Cases 1-4 and 6: what went wrong in published linear attention, each with the smallest input that shows it."""

import pytest
import torch
from tests.cases.builders import cells, filled, normal, positive
from tests.tolerance import assert_close

from mercer.core.kernels import Elu, Taylor
from mercer.core.normalizers import L2, Identity, Sum
from mercer.core.reference import reference_attention
from mercer.core.state import FeatureState
from mercer.core.structures import Causal, Padding
from mercer.errors import InvalidArgument
from mercer.ops import attention


@pytest.mark.parametrize("where", ["left", "right", "inside"])
@pytest.mark.parametrize(("form", "path"), cells(Elu(), Causal()))
def test_case_1_pads_are_as_if_absent(form: str, path: str, where: str):
    """fla#1263: with elu + 1 the feature of a zero is 1, so zeroed pads still entered S and z."""
    length, pads = 9, 4
    places = {"left": range(pads, 13), "right": range(length), "inside": [0, 1, 2, 5, 6, 7, 9, 10, 12]}
    index = torch.tensor(list(places[where]))
    mask = torch.zeros(1, 13, dtype=torch.bool).index_fill(1, index, True)
    alone = [normal(1, 2, length, 4, seed=s).requires_grad_() for s in range(3)]
    padded = [normal(1, 2, 13, 4, seed=9).index_copy(2, index, x.detach()).requires_grad_() for x in alone]
    options = {"kernel": Elu(), "form": form, "path": path, "return_state": True}
    expected, state = attention(*alone, structure=Causal(), **options)
    out, after = attention(*padded, structure=Causal() & Padding(mask), **options)
    assert_close(out.index_select(2, index), expected, length)
    cotangent = normal(1, 2, length, 4, seed=5)
    wanted = torch.autograd.grad(expected, alone, cotangent, retain_graph=True)
    got = torch.autograd.grad(out.index_select(2, index), padded, cotangent, retain_graph=True)
    for g, w in zip(got, wanted, strict=True):
        assert_close(g.index_select(2, index), w, length)
        assert not g[~mask[:, None, :, None].expand_as(g)].any()
    if path == "features":
        assert isinstance(state, FeatureState)
        for name in ("features", "mass"):
            assert_close(getattr(after, name), getattr(state, name), length, name)
    assert after.length.tolist() == state.length.tolist() == [length]
    token = [normal(1, 2, 1, 4, seed=s) for s in (6, 7, 8)]
    one = Padding(torch.ones(1, 1, dtype=torch.bool))
    assert_close(
        attention(*token, structure=Causal() & one, state=after, kernel=Elu(), form=form, path=path),
        attention(*token, structure=Causal(), state=state, kernel=Elu(), form=form, path=path),
        length,
    )


def test_case_2_elu_in_bfloat16():
    """fla#1261: elu(x) + 1 in bfloat16 is exactly 0 from about x = -6 on; it must be exp(x)."""
    x = filled(-8.0, 1, dtype=torch.bfloat16)
    phi = Elu().map_key(x)
    assert abs(float(phi) - 3.357e-4) <= 3.357e-4 * 2**-8
    assert float(torch.nn.functional.elu(x) + 1) == 0, "the literal form: why the other is needed"


@pytest.mark.parametrize(("form", "path"), cells(Elu(), Causal()))
def test_case_2_one_distant_token(form: str, path: str):
    """The same report: one token q = k = -8, v = 1 must average to 1, and its gradient is about 1e-7, not 0 or NaN."""
    q, k = (filled(-8.0, 1, 1, 1, 1, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    v = filled(1.0, 1, 1, 1, 1, dtype=torch.bfloat16)
    out = attention(q, k, v, kernel=Elu(), structure=Causal(), form=form, path=path)
    assert abs(float(out.detach()) - 1) <= 2**-8
    raw = attention(q, k, v, kernel=Elu(), normalizer=Identity(), structure=Causal(), form=form, path=path)
    (grad,) = torch.autograd.grad(raw.sum(), q)
    assert abs(float(grad) - 3.3546e-4**2) <= 1.2e-7 * 2**-7, "d/dq exp(q) exp(k) = exp(-16) = 1.1e-7"


@pytest.mark.parametrize("kernel", [Elu(), Taylor(2)], ids=str)
def test_case_3_gradients_through_the_denominator(kernel: Elu | Taylor):
    """fla PR 875: dk lacked the part through the denominator, most visible where q and k are positive."""
    tensors = [positive(1, 2, 64, 8, seed=s).requires_grad_() for s in range(3)]
    cotangent = normal(1, 2, 64, 8, seed=4)
    expected = reference_attention(*tensors, kernel, Sum(), Causal())
    wanted = torch.autograd.grad(expected, tensors, cotangent)
    for form, path in cells(kernel, Causal()):
        whole = attention(*tensors, kernel=kernel, structure=Causal(), form=form, path=path)
        # and through an initial state: the same sequence in two calls
        first, state = attention(
            *(x[:, :, :29] for x in tensors), kernel=kernel, structure=Causal(), form=form, path=path, return_state=True
        )
        second = attention(
            *(x[:, :, 29:] for x in tensors), kernel=kernel, structure=Causal(), form=form, path=path, state=state
        )
        for out in (whole, torch.cat((first, second), 2)):
            assert_close(out, expected, 64, f"{form} {path}")
            for name, g, w in zip("qkv", torch.autograd.grad(out, tensors, cotangent), wanted, strict=True):
                assert_close(g, w, 64, f"{form} {path}: d{name}")


@pytest.mark.parametrize(("form", "path"), cells(Elu(), Causal()))
def test_case_4_split_at_every_place(form: str, path: str):
    """fla PR 268: the normaliser z was not carried over, so a continued sequence divided by the wrong sum."""
    tensors = [normal(1, 2, 8, 4, seed=s) for s in range(3)]
    options = {"kernel": Elu(), "structure": Causal(), "form": form, "path": path}
    whole = attention(*tensors, **options)
    for split in range(9):
        first, state = attention(*(x[:, :, :split] for x in tensors), return_state=True, **options)
        rest = attention(*(x[:, :, split:] for x in tensors), state=state, **options)
        assert_close(torch.cat((first, rest), 2), whole, 8, f"split at {split}")
        steps = []
        for t in range(split, 8):
            out, state = attention(*(x[:, :, t : t + 1] for x in tensors), state=state, return_state=True, **options)
            steps.append(out)
        assert_close(torch.cat((first, *steps), 2), whole, 8, f"steps from {split}")


def test_case_4_a_state_without_denominators_is_refused():
    """The same report: continuing under Sum from a state that has no z must not run."""
    tensors = [normal(1, 2, 8, 4, seed=s) for s in range(3)]
    _, state = attention(
        *tensors, kernel=Elu(), normalizer=L2(), structure=Causal(), path="features", return_state=True
    )
    assert isinstance(state, FeatureState)
    assert state.mass is None
    for form in ("chunked", "recurrent"):
        with pytest.raises(InvalidArgument, match="no mass z"):
            attention(*tensors, kernel=Elu(), structure=Causal(), state=state, form=form)
    out = attention(*tensors, kernel=Elu(), normalizer=L2(), structure=Causal(), state=state)
    assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize("form", ["chunked", "recurrent"])
@pytest.mark.parametrize("steps", [1, 10, 1000])
def test_case_4_mass_does_not_saturate_in_bfloat16(form: str, steps: int):
    """The same report: 1,000 keys with phi = 1 sum to 1,000; a bfloat16 accumulator stops at 256."""
    k, v = filled(0.0, 1, 1, 1000, 2, dtype=torch.bfloat16), filled(1.0, 1, 1, 1000, 1, dtype=torch.bfloat16)
    state = None
    for start in range(0, 1000, 1000 // steps):
        at = slice(start, start + 1000 // steps)
        _, state = attention(
            k[:, :, at],
            k[:, :, at],
            v[:, :, at],
            kernel=Elu(),
            structure=Causal(),
            form=form,
            path="features",
            state=state,
            return_state=True,
        )
    assert isinstance(state, FeatureState)
    assert state.mass is not None
    assert state.mass.tolist() == [[[1000.0, 1000.0]]]
    assert state.features.tolist() == [[[[1000.0], [1000.0]]]]


@pytest.mark.parametrize("kernel", [Elu(), Taylor(2)], ids=str)
def test_case_6_long_half_precision_sums(kernel: Elu | Taylor):
    """fast-transformers#32: float16 sums over 70,000 tokens pass 65,504 and became infinite."""
    length, c = 70_000, 0.75
    q = filled(0.0, 1, 1, 8, 1, dtype=torch.float16)
    k, v = filled(0.0, 1, 1, length, 1, dtype=torch.float16), filled(c, 1, 1, length, 1, dtype=torch.float16)
    for form, path in cells(kernel, Causal()):
        if (form, path) == ("recurrent", "features"):
            continue  # its 70,000 steps: below, without the leading queries
        out = attention(q, k, v, kernel=kernel, structure=Causal(), form=form, path=path)
        assert out.flatten().tolist() == [c] * 8, f"{form} {path}"


def test_case_6_recurrent_steps():
    """The same sum, token by token from a state that already holds 69,900."""
    c = 0.75
    k, v = filled(0.0, 1, 1, 70_000, 1, dtype=torch.float16), filled(c, 1, 1, 70_000, 1, dtype=torch.float16)
    options = {"kernel": Elu(), "structure": Causal(), "path": "features", "return_state": True}
    _, state = attention(k[:, :, :0], k[:, :, :69_900], v[:, :, :69_900], **options)
    out, state = attention(
        k[:, :, 69_900:], k[:, :, 69_900:], v[:, :, 69_900:], state=state, form="recurrent", **options
    )
    assert out.flatten().tolist() == [c] * 100
    assert isinstance(state, FeatureState)
    assert state.mass is not None
    assert float(state.mass) == 70_000
