"""LongformerAttention with any kernel and normaliser equals the double loop over both sets of projections."""

import pytest
import torch
from tests.tolerance import assert_close

from mercer import L2, Elu, Exp, Full, InvalidArgument, Longformer, Padding, PositiveRandomFeatures, Sum, Taylor
from mercer.core.denominators import SigmoidGate
from mercer.core.reference import reference_attention
from mercer.nn import LongformerAttention

DIM, HEADS, LENGTH = 12, 3, 19


def marks(*rows):
    mask = torch.zeros(len(rows), LENGTH, dtype=torch.bool)
    for row, tokens in enumerate(rows):
        mask[row, list(tokens)] = True
    return mask


def layer_of(**parts):
    torch.manual_seed(0)
    return LongformerAttention(DIM, HEADS, window=4, **parts).double()


@pytest.mark.parametrize("form", ["dense", "chunked"])
@pytest.mark.parametrize("kernel", [Exp(), Taylor(2), Elu()], ids=str)
@pytest.mark.parametrize("normalizer", [Sum(), L2()], ids=str)
def test_rows_equal_the_double_loop(kernel, normalizer, form):
    layer = layer_of(kernel=kernel, normalizer=normalizer, form=form)
    x = torch.randn(2, LENGTH, DIM, dtype=torch.float64)
    chosen, there = marks((0, 9), (4,)), torch.rand(2, LENGTH) > 0.2
    there[0, 9] = False  # a global token that is not there is none

    def heads(name):
        return getattr(layer, name)(x).unflatten(2, (HEADS, -1)).transpose(1, 2)

    structure = Longformer(4, mask=chosen & there) & Padding(there)
    local = reference_attention(*map(heads, ("query", "key", "value")), kernel, normalizer, structure)
    every = reference_attention(
        *map(heads, ("query_global", "key_global", "value_global")), kernel, normalizer, Full() & Padding(there)
    )
    rows = torch.where((chosen & there)[:, None, :, None], every, local)
    expected = layer.output(rows.transpose(1, 2).flatten(2))
    assert_close(layer(x, global_mask=chosen, padding=there), expected, LENGTH * DIM)


def test_what_no_global_token_sees_stays_local():
    layer = layer_of()
    x = torch.randn(1, LENGTH, DIM, dtype=torch.float64)
    changed = x.clone()
    changed[0, 15] += 1
    assert torch.equal(layer(x)[0, :13], layer(changed)[0, :13])
    mask = marks((3,))
    assert not torch.equal(layer(x, global_mask=mask)[0, 3], layer(changed, global_mask=mask)[0, 3])
    assert torch.equal(layer(x, global_mask=marks(())), layer(x))


def test_a_padded_row_gives_what_it_gives_alone():
    layer = layer_of()
    x = torch.randn(2, LENGTH, DIM, dtype=torch.float64)
    there = torch.arange(LENGTH) < torch.tensor([[LENGTH], [11]])
    mask = marks((0, 5), (2,))
    alone = layer(x[1:, :11], global_mask=mask[1:, :11])
    assert_close(layer(x, global_mask=mask, padding=there)[1:, :11], alone, LENGTH * DIM)


def test_random_features_are_saved_and_shared():
    layer = layer_of(kernel=PositiveRandomFeatures(8), generator=torch.Generator().manual_seed(1))
    again = layer_of(kernel=PositiveRandomFeatures(8), generator=torch.Generator().manual_seed(2))
    x, mask = torch.randn(1, LENGTH, DIM, dtype=torch.float64), marks((1,))
    again.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x, global_mask=mask), again(x, global_mask=mask))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 5}, "heads a divisor of dim"),
        ({"window": 3}, "must be even"),
        ({"kernel": "elu"}, "kernel object"),
        ({"normalizer": SigmoidGate()}, "makes no gates"),
    ],
)
def test_what_does_not_fit_is_said(arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        LongformerAttention(DIM, **{"heads": HEADS, "window": 4, **arguments})


def test_masks_must_be_of_the_tokens():
    x = torch.randn(2, LENGTH, DIM, dtype=torch.float64)
    with pytest.raises(InvalidArgument, match=r"global_mask must be boolean \[B, L\] = \[2, 19\]"):
        layer_of()(x, global_mask=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(InvalidArgument, match="padding must be boolean"):
        layer_of()(x, padding=torch.ones(2, LENGTH))
