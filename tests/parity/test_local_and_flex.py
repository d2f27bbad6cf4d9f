"""Patterns against local-attention and torch's flex_attention: equal rows for the same pairs."""

import pytest
import torch

from mercer import Blocks, Causal, Padding, Visible, Window, attention

pytestmark = pytest.mark.peers

WIDTH, LENGTH, DIM = 8, 48, 16


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, LENGTH, DIM, generator=generator, dtype=torch.float64) for _ in range(3)]


LOCAL = {
    "causal": ({"causal": True}, Blocks(WIDTH, before=1) & Causal()),
    "two back": ({"causal": True, "look_backward": 2}, Blocks(WIDTH, before=2) & Causal()),
    "both sides": ({}, Blocks(WIDTH, before=1, after=1)),
    "back only": ({"look_forward": 0}, Blocks(WIDTH, before=1)),
    "exact causal": ({"causal": True, "exact_windowsize": True}, Window(WIDTH, 0)),
    "exact two back": ({"causal": True, "look_backward": 2, "exact_windowsize": True}, Window(2 * WIDTH, 0)),
    "exact both sides": ({"exact_windowsize": True}, Window(WIDTH, WIDTH)),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", LOCAL)
def test_local_attention(name, padded):
    peer = pytest.importorskip("local_attention")
    options, structure = LOCAL[name]
    theirs = peer.LocalAttention(WIDTH, use_rotary_pos_emb=False, **options)
    query, key, value = (x.requires_grad_() for x in inputs())
    there = torch.ones(2, LENGTH, dtype=torch.bool)
    if padded:
        there[1, LENGTH - 13 :] = False
        structure = structure & Padding(there)
    upstream = torch.randn(2, 3, LENGTH, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    upstream = upstream * there[:, None, :, None]
    found = []
    for out in (theirs(query, key, value, mask=there), attention(query, key, value, structure=structure)):
        seen = out * there[:, None, :, None]  # rows of padding are theirs to fill
        found.append((seen, *torch.autograd.grad((out * upstream).sum(), (query, key, value))))
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() < 1e-9


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "function",
    [
        lambda row, head, query, key: (key <= query) & (query - key < 11),
        lambda row, head, query, key: (query // 5 == key // 5) | (key % 7 == 0),
        lambda row, head, query, key: (key <= query + row) & ((query - key) % (head + 2) == 0),
    ],
    ids=["window", "blocks and columns", "rows and heads"],
)
def test_flex_attention_takes_the_same_functions(function):
    """Theirs without torch.compile, which on a CPU needs a C++ compiler; and forward, all that it has there."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value = (x.float() for x in inputs())
    block_mask = create_block_mask(function, 2, 3, LENGTH, LENGTH, device="cpu")
    expected = flex_attention(query, key, value, block_mask=block_mask)
    actual = attention(query, key, value, structure=Visible(function), form="chunked")
    assert (expected - actual).abs().max() < 1e-5
