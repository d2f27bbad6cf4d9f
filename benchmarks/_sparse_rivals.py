"""Sparse patterns that other libraries compute too: by formula, by ours, and by theirs, on ``[B, H, L, D]``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mercer.core.structures import Structure

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
SIDE, BLOCK, BIRD, RANDOM = 256, 256, 64, 3
"""Tokens on either side of the window, in a block of local attention, in a block of BigBird; its random blocks."""


@dataclass(frozen=True)
class Rival:
    """One way to compute a pattern.

    Attributes:
        name: as printed.
        run: the call.
        backward: whether it has a backward pass here.
        note: what to know of it.
    """

    name: str
    run: Run
    backward: bool = True
    note: str = ""


@dataclass(frozen=True)
class Task:
    """A pattern in all its forms.

    Attributes:
        structure: ours.
        log_weights: from positions of queries and keys and the length to logarithms of weights, -inf where hidden.
        multiple: lengths must be a multiple of this.
    """

    structure: Structure
    log_weights: Callable[[Tensor, Tensor, int], Tensor]
    multiple: int


def tasks() -> dict[str, Task]:
    """The patterns by name."""
    import math

    from mercer import BigBird, Blocks, Causal, Longformer

    def shown(seen: Tensor) -> Tensor:
        return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)

    def window(query: Tensor, key: Tensor, _length: int) -> Tensor:
        return shown((query - key).abs() <= SIDE)

    def blocks(query: Tensor, key: Tensor, _length: int) -> Tensor:
        back = query // BLOCK - key // BLOCK
        return shown((key <= query) & (back <= 1))

    def bird(query: Tensor, key: Tensor, length: int) -> Tensor:
        last = length // BIRD - 1
        q, k = query // BIRD, key // BIRD
        ends = (q == 0) | (q == last) | (k == 0) | (k == last)
        again = (k == 0) & (q > 0) & (q < last)
        return shown(((q - k).abs() <= 1) | ends) + again * math.log(1 + RANDOM)

    return {
        "window": Task(Longformer(2 * SIDE), window, 2 * SIDE),
        "blocks": Task(Blocks(BLOCK, before=1) & Causal(), blocks, BLOCK),
        "bigbird": Task(BigBird(BIRD, random=RANDOM, hf_compat=True), bird, BIRD),
    }


def expected(task: Task, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The formula in float64."""
    at = torch.arange(query.shape[2])
    bias = task.log_weights(at.unsqueeze(1), at.unsqueeze(0), len(at))
    score = query.double() @ key.double().transpose(-1, -2) * query.shape[-1] ** -0.5 + bias
    return score.softmax(-1) @ value.double()


def rivals(name: str, heads: int, dim: int, length: int, compiled: bool) -> list[Rival]:
    """All ways to compute a pattern that are installed, ours first."""
    from mercer import attention

    task = tasks()[name]
    found = [Rival("ours", lambda q, k, v: attention(q, k, v, structure=task.structure, form="chunked"))]
    at = torch.arange(length)
    mask = task.log_weights(at.unsqueeze(1), at.unsqueeze(0), length).float()
    dense = torch.nn.functional.scaled_dot_product_attention
    found.append(Rival("torch SDPA, dense mask", lambda q, k, v: dense(q, k, v, attn_mask=mask)))
    if name == "window":
        found += [_longformer(heads, dim), _local(SIDE, exact_windowsize=True)]
    if name == "blocks":
        found.append(_local(BLOCK, causal=True))
    if name == "bigbird":
        found.append(_bigbird(heads, dim, length))
    if compiled and name != "bigbird":  # whose repeated block is not a matter of a mask
        found.append(_flex(task, length))
    return found


def _longformer(heads: int, dim: int) -> Rival:
    """Between the projections: products of sliding chunks, softmax, products again."""
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = LongformerConfig(hidden_size=heads * dim, num_attention_heads=heads, attention_window=[2 * SIDE])
    layer = LongformerSelfAttention(config, 0)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query * dim**-0.5, key, value))
        weights = layer._sliding_chunks_query_key_matmul(q, k, SIDE).softmax(-1)
        return layer._sliding_chunks_matmul_attn_probs_value(weights, v, SIDE).transpose(1, 2)

    return Rival("transformers Longformer", run, note="sliding chunks, without projections and masks of padding")


def _bigbird(heads: int, dim: int, length: int) -> Rival:
    """Between the projections, evaluated."""
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    config = BigBirdConfig(
        hidden_size=heads * dim,
        num_attention_heads=heads,
        block_size=BIRD,
        num_random_blocks=RANDOM,
        max_position_embeddings=length,
    )
    layer = BigBirdBlockSparseAttention(config).eval()

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch = query.shape[0]
        blocked, band, rows, keys = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(batch, length), BIRD)
        masks = (band, rows, keys, blocked, blocked)
        sizes = (heads, RANDOM, dim, BIRD, BIRD, batch, length, length)
        out, _ = layer.bigbird_block_sparse_attention(query, key, value, *masks, *sizes, None, None, None)
        return out.reshape(batch, length, heads, dim).transpose(1, 2)

    return Rival("transformers BigBird", run, note="it also fills a matrix of all probabilities")


def _local(width: int, **options: Any) -> Rival:
    from local_attention import LocalAttention

    layer = LocalAttention(width, use_rotary_pos_emb=False, **options)
    return Rival("local-attention", lambda q, k, v: layer(q, k, v))


def _flex(task: Task, length: int) -> Rival:
    """Compiled: without that it makes all scores. On a CPU it has no backward pass."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    at = torch.arange(length)
    seen = task.log_weights(at.unsqueeze(1), at.unsqueeze(0), length) > -torch.inf

    def function(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return seen[query, key]

    blocks = create_block_mask(function, None, None, length, length, device="cpu")
    traced = torch.compile(flex_attention)
    return Rival("torch flex_attention", lambda q, k, v: traced(q, k, v, block_mask=blocks), backward=False)
