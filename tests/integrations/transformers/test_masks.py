"""The mask that takes no memory: it says what transformers' own mask says, as a structure and entry by entry."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
from tests.integrations.transformers.zoo import padded  # noqa: E402
from transformers import masking_utils as hf  # noqa: E402

from mercer import attention  # noqa: E402
from mercer.integrations.hf.masks import Mask, mask_function  # noqa: E402

pytestmark = pytest.mark.peers


def shown(structure, rows, queries, keys):
    """Which keys a structure shows: those whose one-hot values come through."""
    zeros = torch.zeros(rows, 1, max(queries, keys), 2, dtype=torch.float64)
    out = attention(
        zeros[:, :, :queries],
        zeros[:, :, :keys],
        torch.eye(keys, dtype=torch.float64).expand(rows, 1, -1, -1),
        structure=structure,
    )
    return out > 0


PLAIN = {"batch_size": 2, "q_length": 9, "kv_length": 9}
CASES = {
    "causal": PLAIN,
    "bidirectional": PLAIN | {"mask_function": hf.bidirectional_mask_function},
    "window": PLAIN | {"mask_function": hf.sliding_window_causal_mask_function(4)},
    "window of both sides": PLAIN | {"mask_function": hf.sliding_window_bidirectional_mask_function(2)},
    "padded left": PLAIN | {"attention_mask": padded([9, 5], 9, "left").bool()},
    "padded right": PLAIN | {"attention_mask": padded([9, 5], 9, "right").bool()},
    "padded window": PLAIN
    | {"mask_function": hf.sliding_window_causal_mask_function(4), "attention_mask": padded([9, 5], 9, "left").bool()},
    "behind a cache": {"batch_size": 2, "q_length": 3, "kv_length": 9, "q_offset": 6},
    "in a static cache": {"batch_size": 2, "q_length": 3, "kv_length": 12, "q_offset": torch.tensor(6)},
    "padded in a static cache": {
        "batch_size": 2,
        "q_length": 3,
        "kv_length": 12,
        "q_offset": 6,
        "attention_mask": padded([9, 5], 9, "left").bool(),
    },
    "a window that has moved": {
        "batch_size": 2,
        "q_length": 3,
        "kv_length": 6,
        "q_offset": 6,
        "kv_offset": 3,
        "mask_function": hf.sliding_window_causal_mask_function(4),
        "attention_mask": padded([9, 5], 9, "left").bool(),
    },
    "packed": PLAIN
    | {
        "mask_function": hf.and_masks(
            hf.remap_positions_for_packed_sequence(
                hf.causal_mask_function, torch.tensor([0, 1, 2, 0, 1, 0, 1, 2, 3]).expand(2, -1)
            ),
            hf.packed_sequence_mask_function(torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2]).expand(2, -1)),
        )
    },
}


@pytest.mark.parametrize("case", CASES)
def test_the_structure_shows_what_the_mask_shows(case):
    arguments = CASES[case]
    mask = mask_function(**arguments)
    expected = hf.sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert mask.shape == expected.shape
    assert mask.dtype == torch.bool
    sight = mask.question.sight
    assert sight is not None, "this mask is one that takes no memory"
    rows, queries, keys = arguments["batch_size"], arguments["q_length"], sight.keys
    assert not expected[..., keys:].any()
    seen = shown(sight.structure, rows, queries, keys)
    visible = expected[..., :keys]
    if "attention_mask" in arguments and "bidirectional" not in case:  # rows of padding are zero here
        offset = int(arguments.get("q_offset", 0))
        visible = visible & arguments["attention_mask"][:, None, offset : offset + queries, None]
    assert torch.equal(seen, visible)


@pytest.mark.parametrize("case", CASES)
def test_an_operator_sees_the_entries(case):
    arguments = CASES[case]
    mask = mask_function(**arguments)
    expected = hf.sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert torch.equal(mask[:, :, 1:], expected[:, :, 1:])
    assert torch.equal(mask & mask, expected)
    assert torch.equal(mask.to(torch.float32), expected.float())
    assert torch.equal(torch.where(mask, 1.0, 0.0), expected.float())
    assert not isinstance(mask[..., :2], Mask)


@pytest.mark.parametrize(
    "function",
    [
        lambda batch, head, query, key: key <= query,
        hf.or_masks(hf.causal_mask_function, hf.sliding_window_overlay(3)),
        hf.and_masks(hf.causal_mask_function, lambda batch, head, query, key: key % 2 == 0),
        hf.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64)),
    ],
)
def test_a_function_of_other_making_is_evaluated(function):
    mask = mask_function(**PLAIN, mask_function=function)
    assert mask.question.sight is None
    assert torch.equal(mask.question.dense(), hf.sdpa_mask(**PLAIN, mask_function=function, allow_is_causal_skip=False))


def test_a_window_over_padding_between_tokens_is_evaluated():
    real = padded([9, 9], 9, "left").bool()
    real[1, 3:5] = False
    mask = mask_function(**PLAIN, mask_function=hf.sliding_window_causal_mask_function(4), attention_mask=real)
    assert mask.question.sight is None


def test_a_mask_of_many_tokens_takes_no_memory():
    mask = mask_function(batch_size=1, q_length=10**6, kv_length=10**6)
    assert mask.shape == (1, 1, 10**6, 10**6)
    assert mask.question.sight.keys == 10**6
