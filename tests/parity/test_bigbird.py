"""BigBird(hf_compat=True) against the block-sparse attention of `transformers`, and where the two patterns differ."""

import pytest
import torch

from mercer import BigBird, Padding, attention
from mercer.core.bigbird import RandomBlocks

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.peers

DIM, HEADS, BLOCK, LENGTH = 24, 3, 4, 40


def layer(random, dtype=torch.float64, length=LENGTH):
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

    config = transformers.BigBirdConfig(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        block_size=BLOCK,
        num_random_blocks=random,
        max_position_embeddings=length,
    )
    theirs = BigBirdBlockSparseAttention(config, seed=0).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return theirs


def their_rows(theirs, x, there):
    from transformers.models.big_bird.modeling_big_bird import BigBirdModel

    blocked, band, rows, keys = BigBirdModel.create_masks_for_block_sparse_attn(there.to(x.dtype), BLOCK)
    return theirs(x, band_mask=band, from_mask=rows, to_mask=keys, from_blocked_mask=blocked, to_blocked_mask=blocked)[
        0
    ]


def our_rows(theirs, x, structure):
    heads = [getattr(theirs, name)(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for name in ("query", "key", "value")]
    return attention(*heads, structure=structure).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("random", [1, 3])
@pytest.mark.parametrize("length", [LENGTH, 5 * BLOCK])
def test_evaluation_equals_theirs_forward_and_backward(random, length):
    theirs = layer(random, length=length).eval()
    x = torch.randn(2, length, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    upstream = torch.randn(2, length, DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    there = torch.ones(2, length, dtype=torch.bool)
    leaves = [x.requires_grad_(), *theirs.parameters()]
    expected = their_rows(theirs, x, there)
    actual = our_rows(theirs, x, BigBird(BLOCK, random=random, hf_compat=True))
    slopes = [torch.autograd.grad((out * upstream).sum(), leaves) for out in (expected, actual)]
    for one, other in ((expected, actual), *zip(*slopes, strict=True)):
        assert (one - other).abs().max() < 1e-5 * one.abs().max().clamp(min=1)


def test_padding_equals_theirs_where_their_last_block_is_real():
    """They hide the keys of padding but not its positions: their last block is that of the padded length."""
    theirs = layer(2).eval()
    x = torch.randn(2, LENGTH, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    there = torch.ones(2, LENGTH, dtype=torch.bool)
    there[1, LENGTH - 2 :] = False  # some of the last block
    expected = their_rows(theirs, x, there)
    actual = our_rows(theirs, x, BigBird(BLOCK, random=2, hf_compat=True) & Padding(there))
    error = (expected - actual)[there].abs().max() / expected.abs().max()
    assert error < 1e-5, f"{error:.1e}"
    x = x.detach().requires_grad_()
    upstream = torch.randn(2, LENGTH, DIM, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    upstream = upstream * there.unsqueeze(-1)
    structure = BigBird(BLOCK, random=2, hf_compat=True) & Padding(there)
    one, other = (
        torch.autograd.grad((out * upstream).sum(), x)[0]
        for out in (their_rows(theirs, x, there), our_rows(theirs, x, structure))
    )
    assert (one - other).abs().max() < 1e-5 * one.abs().max()


@pytest.mark.parametrize("random", [1, 2])
def test_training_draws_as_many_blocks_from_where_ours_do(random):
    """Their lists (lengths other than 1,024, 3,072 and 4,096, and blocks enough) and ours: no block twice, none that is
    at an end or next to the query's own.
    """
    theirs = layer(random).train()
    blocks = LENGTH // BLOCK
    plan = theirs._get_rand_attn_plan(LENGTH, BLOCK, random)
    lists = theirs._bigbird_block_rand_mask_with_head(LENGTH, LENGTH, BLOCK, BLOCK, HEADS, *plan)
    table = RandomBlocks(BLOCK, random, heads=HEADS, apart=True).table(LENGTH)
    for head in range(HEADS):
        for block in range(1, blocks - 1):
            for drawn in (lists[head][block - 1], table[head, block]):
                assert len(set(drawn)) == len(drawn) == random
                assert all(0 < b < blocks - 1 and abs(b - block) > 1 for b in drawn)


def test_training_equals_ours_with_their_draw(monkeypatch):
    """With the blocks that they drew in place of ours the rows are the same: window, ends and the rest agree."""
    theirs = layer(2).train()
    plan = theirs._get_rand_attn_plan(LENGTH, BLOCK, 2)
    drawn = theirs._bigbird_block_rand_mask_with_head(LENGTH, LENGTH, BLOCK, BLOCK, HEADS, *plan)
    monkeypatch.setattr(theirs, "_bigbird_block_rand_mask_with_head", lambda **_: drawn)
    inner = torch.nn.functional.pad(torch.tensor([list(map(list, d)) for d in drawn]), (0, 0, 1, 1), value=-1)
    monkeypatch.setattr(RandomBlocks, "table", lambda self, total: inner.numpy())
    x = torch.randn(2, LENGTH, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = their_rows(theirs, x, torch.ones(2, LENGTH, dtype=torch.bool))
    actual = our_rows(theirs, x, BigBird(BLOCK, random=2, seed=987654, heads=HEADS))
    assert (expected - actual).abs().max() < 1e-5 * expected.abs().max()
