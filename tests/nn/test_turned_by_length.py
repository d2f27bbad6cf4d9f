"""Layers whose rotary rates depend on the length: cached and whole passes agree, under padding, windows and groups."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mercer.core.bigbird import BigBird
from mercer.core.kernels import Elu
from mercer.core.log_weights import RelativeBias
from mercer.core.normalizers import L2
from mercer.core.pairwise import Bias, Mask
from mercer.core.patterns import Strided
from mercer.core.state import CacheState, FeatureState
from mercer.core.structures import Causal, Documents, Full, Padding, Structure, Window
from mercer.errors import InvalidArgument, Unsupported
from mercer.nn import Attention, DynamicNTK, LongRoPE, Rotary
from mercer.ops import attention

TRAINED, DIM, HEADS = 6, 16, 4
DYNAMIC = DynamicNTK(3.0, TRAINED)
LONG = LongRoPE((1.0, 1.2), (2.0, 5.0), TRAINED, 3.0)
WHOLE = [DynamicNTK(3.0, TRAINED, per_token=False), LongRoPE((1.0, 1.2), (2.0, 5.0), TRAINED, 3.0, per_token=False)]
TOKENS = [DYNAMIC, DynamicNTK(3.0, TRAINED, every=3), LONG]


def layer(scaling, **more):
    torch.manual_seed(0)
    options = {"kv_heads": 2, "rotary": Rotary(4, scaling=scaling)} | more
    return Attention(DIM, HEADS, **options).double()


def tokens(length, batch=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, DIM, generator=generator, dtype=torch.float64)


def by_hand(attn: Attention, x, lengths, structure: Structure | None = None):
    """Row i of unpadded x, its query and the keys up to it turned by the rates of lengths[i]: one call a row."""
    rotary, (batch, length, _) = attn.rotary, x.shape
    q, k, v = attn.qkv(x).view(batch, length, -1, 4).split((HEADS, 2, 2), 2)
    at = torch.arange(length)[None]
    rows = []
    for i in range(length):
        own = torch.tensor([[lengths[i]]])
        turned = [rotary(part, where, own) for part, where in ((q[:, i : i + 1], at[:, i : i + 1]), (k, at))]
        seen = slice(0, i + 1)
        rows.append(
            attention(
                turned[0].transpose(1, 2), turned[1].transpose(1, 2)[:, :, seen], v.transpose(1, 2)[:, :, seen],
                structure=structure or Causal(), form="dense",
            )
        )  # fmt: skip
    return attn.output(torch.cat(rows, 2).transpose(1, 2).flatten(2))


def steps(attn, x, cuts, padding=None):
    state, outs = None, []
    for start, stop in pairwise([0, *cuts, x.shape[1]]):
        own = None if padding is None else padding[:, start:stop]
        out, state = attn(x[:, start:stop], padding=own, state=state, return_state=True)
        outs.append(out)
    return torch.cat(outs, 1), state


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scaling", WHOLE, ids=str)
@pytest.mark.parametrize("length", [TRAINED - 1, TRAINED, TRAINED + 1, 11])
def test_one_length_for_the_whole_sequence(scaling, length):
    attn, x = layer(scaling), tokens(length)
    same(attn(x), by_hand(attn, x, [length] * length))


@pytest.mark.parametrize("scaling", TOKENS, ids=str)
def test_a_length_for_each_token(scaling):
    attn, x = layer(scaling), tokens(11)
    same(attn(x), by_hand(attn, x, list(range(1, 12))))
    same(attn(x)[:, :7], attn(x[:, :7]))


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("cuts", [range(1, 11), (4, 9), (8,)], ids=str)
@pytest.mark.parametrize("scaling", [*WHOLE, *TOKENS], ids=str)
def test_case_21_a_cache_agrees_with_the_whole_pass(scaling, cuts, window):
    structure = Causal() if window is None else Causal() & Window.last(window)
    attn, x = layer(scaling, structure=structure), tokens(11)
    out, state = steps(attn, x, cuts)
    ends = [*cuts, 11]
    for start, stop in pairwise([0, *ends]):
        same(out[:, start:stop], attn(x[:, :stop])[:, start:])
    assert isinstance(state, CacheState)
    raw = attn.qkv(x).view(2, 11, -1, 4)[:, :, HEADS : HEADS + 2].transpose(1, 2)
    kept = state.keys.shape[2]
    assert kept == 11 if window is None else kept >= window - 1
    same(state.keys, raw[:, :, 11 - kept :])


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("scaling", [*WHOLE, *TOKENS], ids=str)
def test_padding_is_absence(scaling, window):
    structure = Causal() if window is None else Causal() & Window.last(window)
    attn, x = layer(scaling, structure=structure), tokens(13)
    padding = torch.ones(2, 13, dtype=torch.bool)
    padding[0, :4] = False  # 9 tokens
    padding[1, 10:] = False
    padding[1, 2] = False  # 9 tokens
    x[~padding] = torch.nan
    whole = attn(x, padding=padding)
    out, state = steps(attn, x, (5, 6, 12), padding)
    later = tokens(1, seed=3)
    step, _ = attn(later, state=state, return_state=True)
    for row in range(2):
        alone = x[row : row + 1, padding[row]]
        same(whole[row, padding[row]], attn(alone)[0])
        same(step[row], attn(torch.cat((alone, later[row : row + 1]), 1))[0, -1:])
        ends = [int(padding[row, :stop].sum()) for stop in (0, 5, 6, 12, 13)]
        pieces = [attn(alone[:, :stop])[0, start:stop] for start, stop in pairwise(ends)]
        same(out[row, padding[row]], torch.cat(pieces))


@pytest.mark.parametrize("scaling", WHOLE, ids=str)
def test_packed_documents_have_lengths_of_their_own(scaling):
    attn, x = layer(scaling), tokens(14)
    packed = attn(x, structure=Documents(torch.tensor([0, 4, 4, 14])))
    same(packed, torch.cat((attn(x[:, :4]), attn(x[:, 4:])), 1))
    with pytest.raises(Unsupported, match="pad the documents"):
        attn(x, structure=Documents(torch.tensor([0, 4, 14])), return_state=True)


@pytest.mark.parametrize("scaling", [*WHOLE, *TOKENS], ids=str)
def test_the_length_may_not_matter_to_a_full_structure(scaling):
    attn, x = layer(scaling, structure=Full()), tokens(8)
    if scaling.per_token:
        with pytest.raises(Unsupported, match="needs a causal structure"):
            attn(x)
    else:
        same(attn(x)[:, -1], by_hand(attn, x, [8] * 8)[:, -1])


@pytest.mark.parametrize("scaling", [WHOLE[0], DYNAMIC], ids=str)
def test_gradients_reach_queries_keys_and_the_past(scaling):
    attn = layer(scaling)
    x = tokens(8, batch=1).requires_grad_()

    def pieces(x):
        first, state = attn(x[:, :5], return_state=True)
        return torch.cat((first, attn(x[:, 5:], state=state)), 1)

    assert torch.autograd.gradcheck(attn, (x,), fast_mode=True)
    assert torch.autograd.gradcheck(pieces, (x,), fast_mode=True)


@pytest.mark.parametrize("scaling", [WHOLE[0], DYNAMIC], ids=str)
def test_other_kernels_keep_keys_too(scaling):
    attn, x = layer(scaling, kernel=Elu(), normalizer=L2(), gain="head", recency=True), tokens(11)
    out, state = steps(attn, x, range(1, 11))
    assert isinstance(state, CacheState)
    same(out[:, -1], attn(x)[:, -1])
    if scaling.per_token:
        same(out, attn(x))


def test_a_gate_goes_with_its_row():
    from mercer.core.denominators import SigmoidGate

    attn, x = layer(DYNAMIC, normalizer=SigmoidGate()), tokens(11)
    same(steps(attn, x, range(1, 11))[0], attn(x))


@pytest.mark.parametrize("scaling", [WHOLE[0], DYNAMIC], ids=str)
def test_patterns_and_biases_go_with_it(scaling):
    x, bias = tokens(14), RelativeBias(torch.randn(HEADS, 5, dtype=torch.float64))
    structure = Causal() & Strided(3) & bias
    attn = layer(scaling, structure=structure)
    lengths = list(range(1, 15)) if scaling.per_token else [14] * 14
    same(attn(x), by_hand(attn, x, lengths, structure))
    out, _ = steps(attn, x, (5, 6, 9))
    same(out[:, 9:], attn(x)[:, 9:])


@pytest.mark.parametrize("scaling", [WHOLE[0], *TOKENS], ids=str)
def test_what_is_said_pair_by_pair_is_cut_with_the_rows(scaling):
    """A mask and a bias that say what a window and a table of distances say."""
    x, attn = tokens(14), layer(scaling)
    ahead = torch.arange(14) - torch.arange(14).unsqueeze(1)
    table = torch.randn(HEADS, 5, dtype=torch.float64)
    mask, bias = Mask((ahead > -6)[None, None]), Bias(table[:, (ahead + 4).clamp(0, 4)][None])
    same(attn(x, structure=mask & bias), attn(x, structure=Window.last(6) & RelativeBias(table)))


@pytest.mark.parametrize("scaling", TOKENS + WHOLE, ids=str)
def test_a_call_without_tokens_leaves_the_state_as_it_is(scaling):
    attn, x = layer(scaling), tokens(11)
    out, state = steps(attn, x, (0, 4, 4, 9, 11))
    whole, expected = steps(attn, x, (4, 9))
    same(out, whole)
    same(state.keys, expected.keys)
    assert torch.equal(state.length, torch.tensor([11, 11]))


def test_patterns_that_depend_on_the_length_are_not_cut():
    attn, x = layer(DYNAMIC, structure=Causal() & BigBird(2, random=1)), tokens(14)
    with pytest.raises(Unsupported, match="depends on the length; use per_token=False"):
        attn(x)


def test_states_that_cannot_be_turned_anew_are_refused():
    x = tokens(4)
    attn = layer(DYNAMIC, kernel=Elu(), path="features")
    with pytest.raises(Unsupported, match=r"cannot be turned anew .*path='pairs'.*YaRN"):
        attn(x, return_state=True)
    _, state = layer(None, kernel=Elu(), rotary=Rotary(4), path="features")(x, return_state=True)
    assert isinstance(state, FeatureState)
    with pytest.raises(Unsupported, match="FeatureState cannot be turned anew"):
        layer(DYNAMIC, kernel=Elu())(x, state=state)
    with pytest.raises(Unsupported, match="pad the documents"):
        layer(DYNAMIC)(x, structure=Documents(torch.tensor([0, 4])))


def test_there_is_no_one_set_of_operands_beyond_the_trained_length():
    attn = layer(DYNAMIC)
    q, k, _ = attn.operands(tokens(TRAINED))
    plain = layer(None, rotary=Rotary(4))
    same(torch.cat((q, k), 1), torch.cat(plain.operands(tokens(TRAINED))[:2], 1))
    with pytest.raises(Unsupported, match="no one set"):
        attn.operands(tokens(TRAINED + 1))
    with pytest.raises(InvalidArgument, match="lengths="):
        attn.rotary.first_turns(4, heads=1, dtype=torch.float32, device=torch.device("cpu"))


def test_a_layer_refuses_what_its_rotary_was_not_trained_for():
    attn, x = layer(None, rotary=Rotary(4, max_length=TRAINED)), tokens(9)
    with pytest.raises(InvalidArgument, match=r"9 tokens .* the 6 .*YaRN"):
        attn(x)
    packed = Documents(torch.tensor([0, 5, 9]))
    _, state = attn(x, structure=packed, return_state=True)
    with pytest.raises(InvalidArgument, match="8 tokens"):
        attn(x[:, :4], structure=Documents(torch.tensor([0, 3, 4])), state=state)
    _, state = attn(x[:, :TRAINED], return_state=True)
    with pytest.raises(InvalidArgument, match="7 tokens"):
        attn(x[:, :1], state=state)
    same(attn(x, padding=torch.arange(9).expand(2, -1) >= 3)[:, 3:], attn(x[:, 3:]))


def test_bfloat16_keys_are_cached_as_they_were():
    attn = layer(DYNAMIC).bfloat16()
    x = tokens(9).bfloat16()
    out, state = steps(attn, x, range(1, 9))
    assert state.keys.dtype == torch.bfloat16
    assert torch.equal(out, torch.cat([attn(x[:, : t + 1])[:, -1:] for t in range(9)], 1))


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_padding_any_cuts_any_scaling(data):
    scaling = data.draw(st.sampled_from([*WHOLE, *TOKENS]))
    length = data.draw(st.integers(1, 12))
    rows = data.draw(st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=2, max_size=2))
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1)))) if length > 1 else []
    window = data.draw(st.none() | st.integers(1, 5))
    turned = data.draw(st.sampled_from([4, 8])) if not isinstance(scaling, LongRoPE) else 4
    pairing = data.draw(st.sampled_from(["half", "interleaved"]))
    structure = Causal() if window is None else Causal() & Window.last(window)
    attn = layer(
        scaling, head_dim=8, structure=structure, rotary=Rotary(8, turned=turned, pairing=pairing, scaling=scaling)
    )
    x, padding = tokens(length), torch.tensor(rows)
    with torch.no_grad():
        out, _ = steps(attn, x, cuts, padding)
        for row in range(2):
            alone = x[row : row + 1, padding[row]]
            ends = [int(padding[row, :stop].sum()) for stop in (0, *cuts, length)]
            for start, stop in pairwise(ends):
                if start < stop:
                    got = out[row, padding[row]][start:stop]
                    same(got, attn(alone[:, :stop])[0, start:])
    assert not out[~padding].abs().any()


def test_padding_given_as_a_structure_is_cut_with_the_rows():
    attn, x = layer(DYNAMIC), tokens(11)
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[:, 10:] = False
    for padding in (Padding(mask), Padding(lengths=torch.tensor([10, 10]))):
        same(attn(x, structure=padding)[:, :10], attn(x[:, :10]))
